//! Softmax cross-entropy of a row, and its gradient.

use crate::{gelu::exp_relative_error, storage::Storage};

/// Relative error of a device's f32 logarithm, and its absolute error near 1, where it is small: WGSL
/// allows 2^-21 between 0.5 and 2, and 3 ulp beyond.
const LOG_ERROR: f64 = 4.8e-7;

/// What a row is told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropy {
    /// The class; `None` where the row does not count.
    pub target: Option<usize>,
    /// The share of the target that is spread evenly over all classes.
    pub smoothing: f64,
}

/// What lies between a logit and the sum of its row, at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steps {
    /// Additions.
    pub additions: usize,
    /// Products with an exponential, where what is subtracted from logits has grown.
    pub rescales: usize,
}

/// The largest logit; NaN if there is one.
pub(crate) fn peak(logits: &[f64]) -> f64 {
    logits
        .iter()
        .copied()
        // `f64::max` would forget a NaN.
        .fold(f64::NEG_INFINITY, |peak, x| {
            if peak.is_nan() || x.is_nan() { f64::NAN } else { peak.max(x) }
        })
}

/// `log sum_j exp(x[j])`: minus infinity of nothing but minus infinity; NaN where a logit is NaN or plus
/// infinity.
pub fn log_sum_exp(logits: &[f64]) -> f64 {
    let peak = peak(logits);
    if peak == f64::NEG_INFINITY {
        return peak;
    }
    peak + logits.iter().map(|x| (x - peak).exp()).sum::<f64>().ln()
}

impl CrossEntropy {
    /// `(1 - smoothing) (-log p[t]) + smoothing mean_j (-log p[j])`; zero where the row does not count,
    /// NaN where the target is no class.
    pub fn loss(&self, logits: &[f64]) -> f64 {
        let Some(target) = self.target else { return 0.0 };
        let Some(logit) = logits.get(target) else { return f64::NAN };
        let lse = log_sum_exp(logits);
        let of_target = lse - logit;
        if self.smoothing == 0.0 {
            return of_target;
        }
        let mean = logits.iter().sum::<f64>() / logits.len() as f64;
        (1.0 - self.smoothing) * of_target + self.smoothing * (lse - mean)
    }

    /// The derivative of [`loss`](Self::loss) in each logit, times `grad`.
    pub fn gradient(&self, logits: &[f64], grad: f64) -> Vec<f64> {
        let Some(target) = self.target else { return vec![0.0; logits.len()] };
        if target >= logits.len() {
            return vec![f64::NAN; logits.len()];
        }
        let lse = log_sum_exp(logits);
        let gradient = |(class, x): (usize, &f64)| {
            let at_target = if class == target { 1.0 - self.smoothing } else { 0.0 };
            grad * ((x - lse).exp() - self.smoothing / logits.len() as f64 - at_target)
        };
        logits.iter().enumerate().map(gradient).collect()
    }

    /// How far off the loss may be in f32.
    pub fn loss_bound(&self, logits: &[f64], steps: Steps) -> f64 {
        let Some(logit) = self.target.and_then(|target| logits.get(target)) else { return 0.0 };
        let u = Storage::F32.unit_roundoff();
        let lse = log_sum_exp(logits);
        let of_lse = lse_bound(logits, steps);
        // The difference is rounded.
        let of_target = of_lse + u * (lse - logit).abs();
        if self.smoothing == 0.0 {
            return of_target * (1.0 + 4.0 * u) + Storage::F32.underflow();
        }
        let count = logits.len() as f64;
        let magnitudes = logits.iter().map(|x| x.abs()).sum::<f64>() / count;
        let mean = logits.iter().sum::<f64>() / count;
        // As many additions, a quotient of 2.5 ulp, and the difference.
        let of_mean =
            (steps.additions as f64 + 5.0) * u * magnitudes + of_lse + u * (lse - mean).abs();
        // Both factors are rounded, and one is a difference; both products, and their sum.
        let share = self.smoothing;
        let parts = (1.0 - share) * (lse - logit).abs() + share * (lse - mean).abs();
        (1.0 - share) * of_target + share * of_mean + 5.0 * u * parts + Storage::F32.underflow()
    }

    /// How far off each element of the gradient may be, computed in f32 from an `lse` within its bound
    /// and rounded to `storage`. That of a row that does not count is zero exactly, whatever its logits are.
    pub fn gradient_bounds(
        &self,
        logits: &[f64],
        grad: f64,
        steps: Steps,
        storage: Storage,
    ) -> Vec<f64> {
        if self.target.is_none() {
            return vec![0.0; logits.len()];
        }
        let u = Storage::F32.unit_roundoff();
        let lse = log_sum_exp(logits);
        let of_lse = lse_bound(logits, steps);
        let everywhere = self.smoothing / logits.len() as f64;
        let bound = |(class, (x, dx)): (usize, (&f64, f64))| {
            let at_target = if self.target == Some(class) { 1.0 - self.smoothing } else { 0.0 };
            let exponent = x - lse;
            let probability = exponent.exp();
            // An absolute error of the exponent is a relative one of the exponential.
            let of_exponent = of_lse + exponent_error(exponent);
            let relative = if probability == 0.0 { 0.0 } else { of_exponent.exp_m1() };
            let of_probability = probability * relative + Storage::F32.underflow();
            // What is subtracted is rounded, and so are the differences.
            let of_excess = of_probability + 3.0 * u * (probability + everywhere + at_target);
            // Besides the product, the gradient may be one of its own.
            let in_f32 = grad.abs() * of_excess + 4.0 * u * dx.abs();
            let rounding = storage.unit_roundoff() * (dx.abs() + in_f32) + storage.underflow();
            in_f32 + rounding
        };
        logits.iter().zip(self.gradient(logits, grad)).enumerate().map(bound).collect()
    }
}

/// The error of `exp(x)` in f32 as one of its exponent: the rounded difference that the exponent is, and
/// the function's own.
pub(crate) fn exponent_error(exponent: f64) -> f64 {
    let u = Storage::F32.unit_roundoff();
    // Twice more, where a power of two is taken of a product with a rounded factor.
    3.0 * u * exponent.abs() + exp_relative_error(exponent)
}

/// How far off [`log_sum_exp`] may be in f32.
pub fn lse_bound(logits: &[f64], steps: Steps) -> f64 {
    let u = Storage::F32.unit_roundoff();
    let (peak, lse) = (peak(logits), log_sum_exp(logits));
    if !lse.is_finite() {
        return 0.0;
    }
    // The logarithm, and its sum with the peak.
    log_bound(logits, steps) + u * (lse.abs() + peak.abs())
}

/// How far off the sum of exponentials of what logits lack to the largest may be in f32, relative to it.
pub(crate) fn sum_relative_error(logits: &[f64], steps: Steps) -> f64 {
    let u = Storage::F32.unit_roundoff();
    let peak = peak(logits);
    // A term is multiplied by exponentials whose exponents add up to what its own lacks, so that what is
    // proportional to them is that of one exponential; the rest of each, and its product, comes every
    // time.
    let on_the_way =
        u * steps.additions as f64 + steps.rescales as f64 * (u + exp_relative_error(0.0));
    let total: f64 = logits.iter().map(|x| (x - peak).exp()).sum();
    let relative: f64 = logits
        .iter()
        .filter(|x| x.is_finite())
        .map(|x| (x - peak).exp() * (2.0 * exponent_error(x - peak) + on_the_way))
        .sum::<f64>()
        / total;
    relative.exp_m1()
}

/// How far off the logarithm of that sum may be in f32.
pub(crate) fn log_bound(logits: &[f64], steps: Steps) -> f64 {
    let log = log_sum_exp(logits) - peak(logits);
    sum_relative_error(logits, steps) + LOG_ERROR * (1.0 + log.abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{gradcheck::check_derivative, random::normal};

    #[test]
    fn a_row_that_does_not_count_has_bounds_whatever_its_logits_are() {
        let asked = CrossEntropy { target: None, smoothing: 0.1 };
        let steps = Steps { additions: 2, rescales: 1 };
        for x in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let logits = [x, 1.0];
            assert_eq!(asked.gradient(&logits, 1.0), [0.0; 2]);
            assert_eq!(asked.gradient_bounds(&logits, 1.0, steps, Storage::F16), [0.0; 2]);
        }
    }

    /// Those of 256 units with a row of 50257.
    const STEPS: Steps = Steps { additions: 220, rescales: 45 };

    #[test]
    fn a_nan_anywhere_makes_the_largest_one() {
        for logits in [[f64::NAN, 1.0, 2.0], [1.0, f64::NAN, 2.0], [1.0, 2.0, f64::NAN]] {
            assert!(peak(&logits).is_nan(), "{logits:?}");
        }
        assert_eq!(peak(&[1.0, f64::INFINITY, 2.0]), f64::INFINITY);
    }

    #[test]
    fn even_logits_cost_the_logarithm_of_their_number() {
        let row = CrossEntropy { target: Some(3), smoothing: 0.0 };
        assert!((row.loss(&[2.5; 8]) - 8f64.ln()).abs() < 1e-14);
        let smoothed = CrossEntropy { smoothing: 0.3, ..row };
        assert!((smoothed.loss(&[2.5; 8]) - 8f64.ln()).abs() < 1e-14);
    }

    #[test]
    fn smoothing_mixes_the_target_with_the_mean_of_all() {
        let logits = [1.0, -2.0, 0.5];
        let lse = log_sum_exp(&logits);
        let all = logits.map(|x| lse - x);
        let expected = 0.9 * all[1] + 0.1 * all.iter().sum::<f64>() / 3.0;
        let row = CrossEntropy { target: Some(1), smoothing: 0.1 };
        assert!((row.loss(&logits) - expected).abs() < 1e-14);
    }

    #[test]
    fn the_gradient_is_that_of_the_loss() {
        let logits = normal(3, 9, 2.0, Storage::F32);
        for smoothing in [0.0, 0.1, 0.9] {
            let row = CrossEntropy { target: Some(4), smoothing };
            for class in 0..logits.len() {
                let with = |x: f64| {
                    let mut logits = logits.clone();
                    logits[class] = x;
                    logits
                };
                check_derivative(
                    |x| 1.7 * row.loss(&with(x)),
                    |x| row.gradient(&with(x), 1.7)[class],
                    logits[class],
                )
                .unwrap();
            }
        }
    }

    #[test]
    fn rows_that_do_not_count_are_zero_and_targets_that_are_no_class_are_nan() {
        let ignored = CrossEntropy { target: None, smoothing: 0.1 };
        assert_eq!(ignored.loss(&[f64::NAN, 1.0]), 0.0);
        assert_eq!(ignored.gradient(&[f64::NAN, 1.0], 2.0), [0.0; 2]);
        let wrong = CrossEntropy { target: Some(2), smoothing: 0.0 };
        assert!(wrong.loss(&[0.0, 1.0]).is_nan());
        assert!(wrong.gradient(&[0.0, 1.0], 2.0).iter().all(|dx| dx.is_nan()));
    }

    #[test]
    fn bounds_tell_faults_apart() {
        let logits = normal(5, 50_257, 1.0, Storage::Bf16);
        let row = CrossEntropy { target: Some(7), smoothing: 0.0 };
        let bound = row.loss_bound(&logits, STEPS);
        // Of 50257 logits, 32 are left out.
        let error = (row.loss(&logits[..50_225]) - row.loss(&logits)).abs();
        assert!(error > 2.0 * bound, "{error:e}, {bound:e}");
        let smoothed = CrossEntropy { smoothing: 0.01, ..row };
        let error = (smoothed.loss(&logits) - row.loss(&logits)).abs();
        assert!(error > 4.0 * bound, "{error:e}, {bound:e}");
        let [bounds, others] =
            [row, smoothed].map(|row| row.gradient_bounds(&logits, 1.0, STEPS, Storage::Bf16));
        // Without the class, the probability is there alone.
        assert!(bounds[7] < 0.01 && others[7] < 0.01);
        assert!(bounds[8] < 0.01 * row.gradient(&logits, 1.0)[8].abs());
    }
}
