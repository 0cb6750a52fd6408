//! One step of gradient descent with momentum on one element, and how far off a device may be.

use crate::{adamw::Rounding, storage::Storage};

/// What a step is asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// What is kept of the velocity.
    pub momentum: f64,
    /// What of the gradient is kept out of it, after the first step.
    pub dampening: f64,
    /// Whether the step looks ahead by the new velocity.
    pub nesterov: bool,
    /// What of the parameter is added to its gradient.
    pub weight_decay: f64,
    /// The learning rate.
    pub rate: f64,
    /// Whether no step was taken before this one.
    pub is_first: bool,
}

/// A parameter's element with its velocity.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Element {
    /// p.
    pub parameter: f64,
    /// v.
    pub velocity: f64,
}

/// The element after `step`, whose gradient is `g`.
pub fn update(step: &Step, old: Element, g: f64) -> Element {
    let g = g + step.weight_decay * old.parameter;
    let velocity = match step.is_first {
        true => g,
        false => step.momentum * old.velocity + (1.0 - step.dampening) * g,
    };
    let direction = if step.nesterov { g + step.momentum * velocity } else { velocity };
    Element { parameter: old.parameter - step.rate * direction, velocity }
}

/// How far off each number of [`update`] may be, computed in f32 from the same old element: every
/// operation's rounding, and each factor's, carried through the formula.
pub fn bound(step: &Step, old: Element, g: f64, stored: Storage, rounding: Rounding) -> Element {
    let u = Storage::F32.unit_roundoff();
    let tiny = Storage::F32.underflow();
    let new = update(step, old, g);

    let decayed = step.weight_decay * old.parameter;
    let g = g + decayed;
    let g_error = 2.0 * u * decayed.abs() + u * g.abs() + tiny;

    let velocity = if step.is_first {
        g_error
    } else {
        let [kept, added] = [step.momentum * old.velocity, (1.0 - step.dampening) * g];
        (1.0 - step.dampening).abs() * g_error
            + 2.0 * u * (kept.abs() + added.abs())
            + u * new.velocity.abs()
            + 2.0 * tiny
    };

    let (direction, direction_error) = if step.nesterov {
        let ahead = step.momentum * new.velocity;
        let direction = g + ahead;
        let error = g_error
            + step.momentum.abs() * velocity
            + 2.0 * u * ahead.abs()
            + u * direction.abs()
            + tiny;
        (direction, error)
    } else {
        (new.velocity, velocity)
    };

    let moved = step.rate * direction;
    let p = new.parameter.abs();
    let parameter = step.rate.abs() * direction_error + 2.0 * u * moved.abs() + tiny + u * p;
    let parameter = parameter + rounding.error(stored, p + parameter);
    // Of second order: products of the errors above.
    let second_order = 1.0 + 64.0 * u;
    Element { parameter: parameter * second_order, velocity: velocity * second_order }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Step = Step {
        momentum: 0.9,
        dampening: 0.25,
        nesterov: false,
        weight_decay: 0.5,
        rate: 0.125,
        is_first: false,
    };
    const OLD: Element = Element { parameter: 2.0, velocity: 10.0 };

    #[test]
    fn steps_are_those_that_one_computes_by_hand() {
        // g = -3 + 0.5 * 2 = -2
        let new = update(&STEP, OLD, -3.0);
        assert_eq!(new, Element { parameter: 2.0 - 0.125 * 7.5, velocity: 9.0 - 1.5 });
        let ahead = update(&Step { nesterov: true, ..STEP }, OLD, -3.0);
        assert_eq!(ahead, Element { parameter: 2.0 - 0.125 * (-2.0 + 0.9 * 7.5), velocity: 7.5 });
        let first = update(&Step { is_first: true, ..STEP }, OLD, -3.0);
        assert_eq!(first, Element { parameter: 2.25, velocity: -2.0 });
    }

    #[test]
    fn the_bound_tells_faults_apart() {
        // A large parameter's own rounding hides more.
        let old = Element { parameter: 0.01, velocity: 0.2 };
        let new = update(&STEP, old, 0.3);
        let bound = bound(&STEP, old, 0.3, Storage::F32, Rounding::Nearest);
        for wrong in [
            Step { momentum: 0.9001, ..STEP },
            Step { dampening: 0.0, ..STEP },
            Step { weight_decay: 0.0, ..STEP },
            Step { nesterov: true, ..STEP },
            Step { is_first: true, ..STEP },
        ] {
            let error = (update(&wrong, old, 0.3).parameter - new.parameter).abs();
            assert!(error > 4.0 * bound.parameter, "{wrong:?}: {error:e}, {bound:?}");
        }
    }
}
