//! What becomes of a parameter and its velocity.

use crate::step::Rule;
use cubecl::prelude::*;

/// What an update multiplies by.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Factors {
    pub momentum: f32,
    /// `1 - dampening`.
    pub of_gradient: f32,
    pub decay: f32,
    pub rate: f32,
    /// Steps with this one, less those that were not taken. 1, or less, is the first.
    pub time: f32,
}

/// Gradient descent with momentum.
pub struct SgdRule;

/// Whether the step looks ahead by the new velocity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    pub nesterov: bool,
}

#[cube]
impl Rule for SgdRule {
    type Factors = Factors;
    type Form = Form;

    fn counted(factors: &Factors, skipped: f32, #[comptime] gated: bool) -> Factors {
        let mut time = factors.time;
        if comptime!(gated) {
            time -= skipped;
        }
        Factors {
            momentum: factors.momentum,
            of_gradient: factors.of_gradient,
            decay: factors.decay,
            rate: factors.rate,
            time,
        }
    }

    fn gradient<N: Size>(
        p: Vector<f32, N>,
        g: Vector<f32, N>,
        factors: &Factors,
    ) -> Vector<f32, N> {
        let mut decayed = g;
        // Zero times an infinite parameter would be no number.
        if factors.decay != 0.0f32 {
            decayed += Vector::new(factors.decay) * p;
        }
        decayed
    }

    fn states<N: Size>(
        g: Vector<f32, N>,
        velocities: &Sequence<Vector<f32, N>>,
        factors: &Factors,
    ) -> Sequence<Vector<f32, N>> {
        let mut velocity = g;
        if factors.time > 1.0f32 {
            velocity = Vector::new(factors.momentum) * velocities[0]
                + Vector::new(factors.of_gradient) * g;
        }
        let mut new = Sequence::<Vector<f32, N>>::new();
        new.push(velocity);
        new
    }

    fn parameter<N: Size>(
        p: Vector<f32, N>,
        g: Vector<f32, N>,
        velocities: &Sequence<Vector<f32, N>>,
        factors: &Factors,
        #[comptime] form: Form,
    ) -> Vector<f32, N> {
        let mut direction = velocities[0];
        if comptime!(form.nesterov) {
            direction = g + Vector::new(factors.momentum) * velocities[0];
        }
        p - Vector::new(factors.rate) * direction
    }
}
