//! The steps of the logarithm of softmax of a row, and the gradient of one element of it.

use crate::{
    cross_entropy::{Steps, exponent_error, log_bound, peak, sum_relative_error},
    storage::Storage,
};

/// A row, and how a device adds it up.
#[derive(Clone, Copy, Debug)]
pub struct SoftmaxRow<'a> {
    /// The elements.
    pub x: &'a [f64],
    /// What lies between an element and the sum.
    pub steps: Steps,
}

/// A number with how far off it may be.
pub type Bounded = (f64, f64);

impl SoftmaxRow<'_> {
    /// The largest element.
    pub fn peak(&self) -> f64 {
        peak(self.x)
    }

    /// `sum_j exp(x[j] - peak)`, rounded to `storage`.
    pub fn sum(&self, storage: Storage) -> Bounded {
        let sum = self.exact_sum();
        (sum, rounded(sum, sum_relative_error(self.x, self.steps) * sum, storage))
    }

    /// `x[j] - peak`, rounded to `storage`.
    pub fn shifted(&self, storage: Storage) -> Vec<Bounded> {
        let peak = self.peak();
        let shifted = |x: &f64| {
            let shifted = x - peak;
            (shifted, rounded(shifted, Storage::F32.unit_roundoff() * shifted.abs(), storage))
        };
        self.x.iter().map(shifted).collect()
    }

    /// `x[j] - peak - log sum`, rounded to `storage`.
    pub fn log_softmax(&self, storage: Storage) -> Vec<Bounded> {
        let u = Storage::F32.unit_roundoff();
        let (peak, log) = (self.peak(), self.log());
        let of_log = log_bound(self.x, self.steps);
        let element = |x: &f64| {
            let y = x - peak - log;
            // Both differences are rounded.
            (y, rounded(y, of_log + u * ((x - peak).abs() + y.abs()), storage))
        };
        self.x.iter().map(element).collect()
    }

    /// The gradient of `x` in `storage` where that of [`log_softmax`](Self::log_softmax) is `grad` at
    /// `target` and zero elsewhere, made of [`shifted`](Self::shifted) and [`sum`](Self::sum) as they are
    /// in `kept`. A target that is none of the elements' has no element.
    pub fn picked_gradient(
        &self,
        target: usize,
        grad: f64,
        kept: Storage,
        storage: Storage,
    ) -> Vec<Bounded> {
        let u = Storage::F32.unit_roundoff();
        let rounding = if kept == Storage::F32 { 0.0 } else { kept.unit_roundoff() };
        let (peak, log) = (self.peak(), self.log());
        // A relative error of the sum is an absolute one of its logarithm.
        let of_log = log_bound(self.x, self.steps) + 2.0 * rounding;
        let element = |(j, x): (usize, &f64)| {
            let shifted = x - peak;
            let exponent = shifted - log;
            let probability = exponent.exp();
            let of_shifted = (u + 2.0 * rounding) * shifted.abs() + kept.underflow();
            let of_exponent = of_shifted + of_log + exponent_error(exponent);
            let relative = if probability == 0.0 { 0.0 } else { of_exponent.exp_m1() };
            let at_target = if j == target { 1.0 } else { 0.0 };
            let dx = grad * (at_target - probability);
            let of_probability = probability * relative + Storage::F32.underflow();
            let of_difference = of_probability + 2.0 * u * (probability + at_target);
            // Besides the product, the gradient may be one of its own.
            let in_f32 = grad.abs() * of_difference + 4.0 * u * dx.abs();
            (dx, rounded(dx, in_f32, storage))
        };
        self.x.iter().enumerate().map(element).collect()
    }

    fn log(&self) -> f64 {
        self.exact_sum().ln()
    }

    fn exact_sum(&self) -> f64 {
        let peak = self.peak();
        self.x.iter().map(|x| (x - peak).exp()).sum()
    }
}

/// The bound of a number that was `error` off before it was rounded to `storage`.
pub(crate) fn rounded(exact: f64, error: f64, storage: Storage) -> f64 {
    error + storage.unit_roundoff() * (exact.abs() + error) + storage.underflow()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cross_entropy::log_sum_exp, gradcheck::check_derivative, random::normal};

    const STEPS: Steps = Steps { additions: 40, rescales: 10 };

    fn first((value, _): &Bounded) -> f64 {
        *value
    }

    #[test]
    fn its_exponentials_add_up_to_one() {
        let x = normal(1, 33, 3.0, Storage::F32);
        let row = SoftmaxRow { x: &x, steps: STEPS };
        let y = row.log_softmax(Storage::F32);
        assert!((y.iter().map(|y| first(y).exp()).sum::<f64>() - 1.0).abs() < 1e-12);
        assert!((first(&row.sum(Storage::F32)).ln() + row.peak() - log_sum_exp(&x)).abs() < 1e-12);
        assert_eq!(row.shifted(Storage::F32).iter().map(first).fold(-1.0, f64::max), 0.0);
    }

    #[test]
    fn the_gradient_is_that_of_the_element_at_the_target() {
        let x = normal(2, 9, 2.0, Storage::F32);
        for j in 0..x.len() {
            let with = |value: f64| {
                let mut x = x.clone();
                x[j] = value;
                x
            };
            let row = |x: &[f64]| -> (f64, f64) {
                let row = SoftmaxRow { x, steps: STEPS };
                let gradient = row.picked_gradient(4, 1.7, Storage::F32, Storage::F32);
                (1.7 * first(&row.log_softmax(Storage::F32)[4]), first(&gradient[j]))
            };
            check_derivative(|value| row(&with(value)).0, |value| row(&with(value)).1, x[j])
                .unwrap();
        }
    }

    #[test]
    fn bounds_tell_faults_apart() {
        let x = normal(3, 50_257, 1.0, Storage::Bf16);
        let row = SoftmaxRow { x: &x, steps: Steps { additions: 220, rescales: 45 } };
        let (sum, bound) = row.sum(Storage::F32);
        // Of 50257 elements, 32 are left out.
        let left_out: f64 = x[..32].iter().map(|x| (x - row.peak()).exp()).sum();
        assert!(left_out > 2.0 * bound, "{left_out:e}, {bound:e} of {sum}");
        let gradient = row.picked_gradient(7, 1.0, Storage::F32, Storage::Bf16);
        let (dx, bound) = gradient[8];
        assert!(bound < 0.01 * dx.abs(), "{bound:e} of {dx:e}");
        // The one at the target is taken off.
        assert!(gradient[7].1 < 0.01);
    }
}
