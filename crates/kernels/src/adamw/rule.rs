//! What becomes of a parameter and its moments.

#[cfg(feature = "cuda")]
use crate::ptx::math::{approximate_quotient, approximate_sqrt};
use crate::step::Rule;
use cubecl::prelude::*;

/// What an update multiplies by.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Factors {
    /// `1 - beta_1`.
    pub one_minus_beta_1: f32,
    /// `1 - beta_2`.
    pub one_minus_beta_2: f32,
    /// Rate times decay.
    pub decay: f32,
    /// The rate, over `1 - beta_1^t` unless gated.
    pub rate: f32,
    /// `1 / (1 - beta_2^t)`, 1 if gated.
    pub correction: f32,
    pub epsilon: f32,
    /// The rest is read by gated updates only.
    pub log_beta_1: f32,
    pub log_beta_2: f32,
    pub time: f32,
}

/// AdamW, of which a form by PTX is for NVIDIA GPUs alone: root and quotient are approximations there.
/// Rounded correctly, each is a branch, and one waits for the other.
pub struct AdamwRule;

#[cube]
impl Rule for AdamwRule {
    type Factors = Factors;
    type Form = Form;

    /// At the least this step was taken, which keeps the divisions finite.
    fn counted(factors: &Factors, skipped: f32, #[comptime] gated: bool) -> Factors {
        let mut rate = factors.rate;
        let mut correction = factors.correction;
        if comptime!(gated) {
            let steps = max(factors.time - skipped, 1.0f32);
            rate /= complement_of_power(factors.log_beta_1, steps);
            correction = 1.0f32 / complement_of_power(factors.log_beta_2, steps);
        }
        Factors {
            one_minus_beta_1: factors.one_minus_beta_1,
            one_minus_beta_2: factors.one_minus_beta_2,
            decay: factors.decay,
            rate,
            correction,
            epsilon: factors.epsilon,
            log_beta_1: factors.log_beta_1,
            log_beta_2: factors.log_beta_2,
            time: factors.time,
        }
    }

    /// The decay is decoupled from it.
    fn gradient<N: Size>(
        _p: Vector<f32, N>,
        g: Vector<f32, N>,
        _factors: &Factors,
    ) -> Vector<f32, N> {
        g
    }

    fn states<N: Size>(
        g: Vector<f32, N>,
        moments: &Sequence<Vector<f32, N>>,
        factors: &Factors,
    ) -> Sequence<Vector<f32, N>> {
        let (first, second) = (moments[0], moments[1]);
        let mut new = Sequence::<Vector<f32, N>>::new();
        new.push(first + Vector::new(factors.one_minus_beta_1) * (g - first));
        new.push(second + Vector::new(factors.one_minus_beta_2) * (g * g - second));
        new
    }

    fn parameter<N: Size>(
        p: Vector<f32, N>,
        _g: Vector<f32, N>,
        moments: &Sequence<Vector<f32, N>>,
        factors: &Factors,
        #[comptime] form: Form,
    ) -> Vector<f32, N> {
        let by_ptx = comptime!(form.by_ptx);
        let deviation = root::<N>(Vector::new(factors.correction) * moments[1], by_ptx);
        let divisor = deviation + Vector::new(factors.epsilon);
        let direction = quotient::<N>(moments[0], divisor, by_ptx);
        let mut change = Vector::new(factors.rate) * direction;
        // Zero times an infinite parameter would be no number.
        if factors.decay != 0.0f32 {
            change += Vector::new(factors.decay) * p;
        }
        p - change
    }
}

/// Whether root and quotient are PTX's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    pub by_ptx: bool,
}

/// Up to here a power's complement is summed, since `1 - exp` would lose digits.
const SMALL: f32 = -0.5;
/// Terms of the sum: the next one is below 2^-30 of it.
const TERMS: u32 = 9;

/// `1 - beta^steps`, of the logarithm of beta.
#[cube]
fn complement_of_power(log_beta: f32, steps: f32) -> f32 {
    let exponent = log_beta * steps;
    // 1 + x/2 (1 + x/3 (1 + ...))
    let mut sum = 1.0f32;
    #[unroll]
    for term in 1..TERMS {
        sum = 1.0f32 + exponent * comptime!(1.0 / (TERMS + 1 - term) as f32) * sum;
    }
    select(exponent > SMALL, -exponent * sum, 1.0f32 - exponent.exp())
}

/// The root of each element.
#[cube]
fn root<N: Size>(x: Vector<f32, N>, #[comptime] by_ptx: bool) -> Vector<f32, N> {
    if comptime!(by_ptx) {
        let mut roots = Vector::<f32, N>::empty();
        #[unroll]
        for lane in 0..N::value().comptime() {
            roots.insert(lane, approximate_sqrt(x.extract(lane)));
        }
        roots
    } else {
        x.sqrt()
    }
}

/// `a / b`, element by element.
#[cube]
fn quotient<N: Size>(
    a: Vector<f32, N>,
    b: Vector<f32, N>,
    #[comptime] by_ptx: bool,
) -> Vector<f32, N> {
    if comptime!(by_ptx) {
        let mut quotients = Vector::<f32, N>::empty();
        #[unroll]
        for lane in 0..N::value().comptime() {
            quotients.insert(lane, approximate_quotient(a.extract(lane), b.extract(lane)));
        }
        quotients
    } else {
        a / b
    }
}

/// Builds without CUDA never ask for it.
#[cfg(not(feature = "cuda"))]
#[cube]
fn approximate_sqrt(x: f32) -> f32 {
    x.sqrt()
}

/// Builds without CUDA never ask for it.
#[cfg(not(feature = "cuda"))]
#[cube]
fn approximate_quotient(a: f32, b: f32) -> f32 {
    a / b
}
