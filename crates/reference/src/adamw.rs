//! One step of AdamW on one element, and how far off a device may be.

use crate::{attention::dropout::philox4x32, gelu::exp_relative_error, storage::Storage};

/// What a step is asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Decay of the first moment.
    pub beta_1: f64,
    /// Decay of the second moment.
    pub beta_2: f64,
    /// Keeps the division finite.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// The learning rate.
    pub rate: f64,
    /// Steps that were taken, this one among them.
    pub taken: u32,
}

/// A parameter's element with its moments.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Element {
    /// p.
    pub parameter: f64,
    /// m.
    pub first: f64,
    /// v.
    pub second: f64,
}

/// How a parameter is stored after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// As the nearest value.
    Nearest,
    /// As one of the two values around it.
    Chance,
}

impl Rounding {
    /// How far a number of that magnitude, computed in f32, is from what is stored of it.
    pub fn error(self, stored: Storage, magnitude: f64) -> f64 {
        let distances = match (stored, self) {
            (Storage::F32, _) => 0.0,
            (_, Self::Nearest) => 1.0,
            (_, Self::Chance) => 2.0,
        };
        distances * (stored.unit_roundoff() * magnitude + stored.underflow())
    }
}

/// Where the corrections `1 - beta^t` are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Corrections {
    /// In double precision, and rounded to f32.
    Host,
    /// In f32, from the logarithm of beta.
    Device,
}

/// Units in the last place by which a device's f32 square root and quotient are off: 2.5 for WGSL's
/// quotient and as much again for its square root, which is 1 over an inverse square root of 2; CUDA's
/// fast ones are off by 1 and 2.
const ROOT_ULP: f64 = 4.5;
const QUOTIENT_ULP: f64 = 2.5;

/// The element after `step`, whose gradient is `g`.
pub fn update(step: &Step, old: Element, g: f64) -> Element {
    let first = old.first + (1.0 - step.beta_1) * (g - old.first);
    let second = old.second + (1.0 - step.beta_2) * (g * g - old.second);
    let [missing_1, missing_2] = corrections(step);
    let direction = first / ((second / missing_2).sqrt() + step.epsilon);
    let change = step.rate / missing_1 * direction + step.rate * step.weight_decay * old.parameter;
    Element { parameter: old.parameter - change, first, second }
}

/// How far off each number of [`update`] may be, computed in f32 from the same old element: every
/// operation's rounding, carried through the formula.
pub fn bound(
    step: &Step,
    old: Element,
    g: f64,
    stored: Storage,
    rounding: Rounding,
    corrections_by: Corrections,
) -> Element {
    let u = Storage::F32.unit_roundoff();
    let tiny = Storage::F32.underflow();
    let new = update(step, old, g);
    let Element { parameter: p, first: m, second: v } = new;
    let [one_minus_beta_1, one_minus_beta_2] = [1.0 - step.beta_1, 1.0 - step.beta_2];

    // The factor, the difference and their product are rounded, then the sum.
    let first = 3.0 * u * one_minus_beta_1 * (g - old.first).abs() + u * m.abs() + 2.0 * tiny;
    let second =
        one_minus_beta_2 * (u * g * g + 3.0 * u * (g * g - old.second).abs()) + u * v + 3.0 * tiny;

    let [missing_1, missing_2] = corrections(step);
    let [relative_1, relative_2] =
        [step.beta_1, step.beta_2].map(|beta| correction_error(beta, step.taken, corrections_by));
    let radicand = v / missing_2;
    let radicand_error = second / missing_2 + (relative_2 + u) * radicand + tiny;
    // The slope of the root is steepest below.
    let root = radicand.sqrt();
    let root_error = (root - (radicand - radicand_error).max(0.0).sqrt())
        .max((radicand + radicand_error).sqrt() - root)
        + 2.0 * ROOT_ULP * u * (radicand + radicand_error).sqrt()
        + tiny;
    let divisor = root + step.epsilon;
    let divisor_error = root_error + u * step.epsilon + u * divisor;
    let least = (divisor - divisor_error).max(0.0);
    let direction = m / divisor;
    let direction_error = (first + direction.abs() * divisor_error) / least;
    let direction_error =
        direction_error + 2.0 * QUOTIENT_ULP * u * (direction.abs() + direction_error) + tiny;

    let rate = step.rate / missing_1;
    let decayed = step.rate * step.weight_decay * old.parameter.abs();
    let moved = rate.abs() * direction.abs();
    let change_error = rate.abs() * direction_error
        + (relative_1 + 2.0 * u) * (moved + rate.abs() * direction_error)
        + 2.0 * u * decayed
        + u * (moved + decayed)
        + 2.0 * tiny;
    let parameter = change_error + u * p.abs();
    let parameter = parameter + rounding.error(stored, p.abs() + parameter);
    // Of second order: products of the errors above.
    let second_order = 1.0 + 64.0 * u;
    Element {
        parameter: parameter * second_order,
        first: first * second_order,
        second: second * second_order,
    }
}

/// `1 - beta^t` of both moments.
fn corrections(step: &Step) -> [f64; 2] {
    [step.beta_1, step.beta_2].map(|beta| -(f64::from(step.taken) * beta.ln()).exp_m1())
}

/// Relative error of `1 - beta^t`, and of a quotient with it.
fn correction_error(beta: f64, taken: u32, by: Corrections) -> f64 {
    let u = Storage::F32.unit_roundoff();
    if by == Corrections::Host {
        return u;
    }
    // The logarithm and its product with t are rounded: twice u of the exponent, whose effect on
    // 1 - exp(x) is x exp(x) / (1 - exp(x)), at most 1.
    let exponent = f64::from(taken) * beta.ln();
    let missing = -exponent.exp_m1();
    let of_exponent = 2.0 * u * (exponent * exponent.exp() / missing).abs();
    let of_function = if exponent > -0.5 {
        // Each level of the series adds one rounding, and a third at most of the next level's error and
        // of three roundings: below 3 u in all. The product adds one; what is cut off is less than
        // that.
        5.0 * u
    } else {
        exponent.exp() / missing * exp_relative_error(exponent) + u
    };
    // The quotient.
    of_exponent + of_function + 2.0 * QUOTIENT_ULP * u
}

/// `value` as a number of `stored`, one of the two around it as `word` decides: what devices do, bit
/// for bit. A number of f32 is not rounded.
pub fn round_by_chance(value: f32, word: u32, stored: Storage) -> f64 {
    if stored == Storage::F32 || !value.is_finite() {
        return f64::from(value);
    }
    let magnitude = f64::from(value).abs();
    // The distance of values below and above, a power of two.
    let (fraction_bits, least_exponent) = match stored {
        Storage::F16 => (10, -14),
        _ => (7, -126),
    };
    let exponent = (magnitude.log2().floor() as i32).max(least_exponent);
    let distance = 2f64.powi(exponent - fraction_bits);
    let below = (magnitude / distance).floor();
    let rest = magnitude / distance - below;
    let goes_up = if stored == Storage::F16 && magnitude < 2f64.powi(least_exponent) {
        f64::from(word >> 8) / f64::from(1 << 24) < rest
    } else {
        let lacking = if stored == Storage::F16 { 13 } else { 16 };
        let uniform = f64::from(word & ((1 << lacking) - 1)) / 2f64.powi(lacking);
        uniform + rest >= 1.0
    };
    (below + f64::from(u8::from(goes_up))) * distance * f64::from(value.signum())
}

/// The word that decides about element `index`.
pub fn word_of(index: u32, draw: u32, seed: [u32; 2]) -> u32 {
    philox4x32([index / 4, draw, 0, 0], seed)[index as usize % 4]
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Step =
        Step { beta_1: 0.9, beta_2: 0.95, epsilon: 1e-8, weight_decay: 0.1, rate: 1e-3, taken: 1 };
    const OLD: Element = Element { parameter: 0.5, first: 0.0, second: 0.0 };

    #[test]
    fn the_first_step_is_the_rate_against_the_gradient() {
        let new = update(&STEP, OLD, -3.0);
        // Corrected, the moments are the gradient and its square.
        assert!((new.parameter - (0.5 - 0.5e-4 + 1e-3)).abs() < 1e-11, "{new:?}");
        assert!((new.first + 0.3).abs() < 1e-15 && (new.second - 0.45).abs() < 1e-15);
    }

    #[test]
    fn the_bound_tells_faults_apart() {
        // A large parameter's own rounding hides more.
        let old = Element { parameter: 0.01, first: 0.1, second: 0.2 };
        let step = Step { taken: 20, ..STEP };
        let (new, bound) = (
            update(&step, old, 0.3),
            bound(&step, old, 0.3, Storage::F32, Rounding::Nearest, Corrections::Device),
        );
        for wrong in [
            Step { taken: 21, ..step },
            Step { weight_decay: 0.0, ..step },
            Step { beta_2: 0.951, ..step },
        ] {
            let error = (update(&wrong, old, 0.3).parameter - new.parameter).abs();
            assert!(error > 4.0 * bound.parameter, "{wrong:?}: {error:e}, {bound:?}");
        }
    }

    #[test]
    fn rounding_by_chance_takes_neighbors_as_often_as_they_are_near() {
        for (stored, value, low, high) in [
            (Storage::Bf16, 1.001_953_1, 1.0, 1.007_812_5),
            (Storage::Bf16, -1.001_953_1, -1.0, -1.007_812_5),
            (Storage::F16, 1.000_244_1, 1.0, 1.000_976_562_5),
            (Storage::F16, 2f32.powi(-26), 0.0, 2f64.powi(-24)),
        ] {
            let rounded: Vec<f64> =
                (0..4000).map(|i| round_by_chance(value, word_of(i, 7, [1, 2]), stored)).collect();
            assert!(rounded.iter().all(|x| *x == low || *x == high), "{stored:?} {value}");
            let ups = rounded.iter().filter(|x| **x == high).count() as f64 / 4000.0;
            // A quarter, and five deviations of its binomial share.
            assert!((ups - 0.25).abs() < 5.0 * (0.1875f64 / 4000.0).sqrt(), "{stored:?}: {ups}");
        }
        assert_eq!(round_by_chance(-1.5, u32::MAX, Storage::Bf16), -1.5);
        assert_eq!(round_by_chance(f32::INFINITY, 1, Storage::F16), f64::INFINITY);
    }
}
