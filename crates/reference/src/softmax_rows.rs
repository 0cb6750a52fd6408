//! Softmax of a row, and its gradient.

use crate::{
    cross_entropy::{exponent_error, sum_relative_error},
    gelu::exp_relative_error,
    softmax::{Bounded, SoftmaxRow, rounded},
    storage::Storage,
};

impl SoftmaxRow<'_> {
    /// `exp(x[j] - peak)`, rounded to `storage`.
    pub fn exponentials(&self, storage: Storage) -> Vec<Bounded> {
        self.map(|shifted, relative| (shifted.exp(), relative), storage)
    }

    /// `exp(x[j] - peak) / sum`, rounded to `storage`.
    pub fn softmax(&self, storage: Storage) -> Vec<Bounded> {
        let u = Storage::F32.unit_roundoff();
        let sum = self.sum(Storage::F32).0;
        let of_sum = sum_relative_error(self.x, self.steps);
        // A quotient of 2.5 units in the last place, and two products.
        self.map(|shifted, relative| (shifted.exp() / sum, relative + of_sum + 7.0 * u), storage)
    }

    /// A function of the elements less the largest, of which it tells the relative error from that of
    /// the exponential.
    fn map(&self, of: impl Fn(f64, f64) -> Bounded, storage: Storage) -> Vec<Bounded> {
        let u = Storage::F32.unit_roundoff();
        let peak = self.peak();
        let element = |x: &f64| {
            let shifted = x - peak;
            // Its exponential is that of a smaller difference times that of the rest, which are
            // proportional to it together; what is not comes with each.
            let exponent = 2.0 * exponent_error(shifted) + exp_relative_error(0.0) + 2.0 * u;
            let (value, relative) = of(shifted, exponent.exp_m1());
            let error = if value == 0.0 { 0.0 } else { value * relative };
            (value, rounded(value, error + Storage::F32.underflow(), storage))
        };
        self.x.iter().map(element).collect()
    }
}

/// The gradient of a row where `dy` is that of its softmax: `p (dy - sum_j p[j] dy[j])`, in `storage`. `p`
/// is `y / sum`, of numbers as a device has them, which adds up with so many additions.
pub fn softmax_gradient(
    y: &[f64],
    sum: f64,
    dy: &[f64],
    additions: usize,
    storage: Storage,
) -> Vec<Bounded> {
    let u = Storage::F32.unit_roundoff();
    let products = || y.iter().zip(dy).map(|(y, dy)| y / sum * dy);
    let mean: f64 = products().sum();
    let magnitudes: f64 = products().map(f64::abs).sum();
    // A product each, the additions, and the product with a rounded quotient of 2.5 units in the last
    // place.
    let of_mean = (additions as f64 + 7.0) * u * magnitudes;
    let element = |(y, dy): (&f64, &f64)| {
        let (p, difference) = (y / sum, dy - mean);
        let dx = p * difference;
        // The quotient and the product that make p, and the last product.
        let error = p.abs() * (of_mean + u * (difference.abs() + of_mean)) + 7.0 * u * dx.abs();
        (dx, rounded(dx, error + Storage::F32.underflow(), storage))
    };
    y.iter().zip(dy).map(element).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cross_entropy::Steps, gradcheck::check_derivative, random::normal};

    const STEPS: Steps = Steps { additions: 40, rescales: 10 };

    fn softmax(x: &[f64]) -> Vec<f64> {
        let row = SoftmaxRow { x, steps: STEPS };
        row.softmax(Storage::F32).into_iter().map(|(y, _)| y).collect()
    }

    #[test]
    fn it_adds_up_to_one_and_its_logarithm_is_log_softmax() {
        let x = normal(1, 33, 3.0, Storage::F32);
        let y = softmax(&x);
        assert!((y.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        let row = SoftmaxRow { x: &x, steps: STEPS };
        for (y, (log, _)) in y.iter().zip(row.log_softmax(Storage::F32)) {
            assert!((y.ln() - log).abs() < 1e-12);
        }
        let sum: f64 = row.exponentials(Storage::F32).iter().map(|(e, _)| e).sum();
        assert!((sum - row.sum(Storage::F32).0).abs() < 1e-12);
    }

    #[test]
    fn the_gradient_is_that_of_softmax() {
        let (x, dy) = (normal(2, 9, 2.0, Storage::F32), normal(3, 9, 1.0, Storage::F32));
        for j in 0..x.len() {
            let with = |value: f64| {
                let mut x = x.clone();
                x[j] = value;
                softmax(&x)
            };
            check_derivative(
                |value| with(value).iter().zip(&dy).map(|(y, dy)| y * dy).sum(),
                |value| softmax_gradient(&with(value), 1.0, &dy, 9, Storage::F32)[j].0,
                x[j],
            )
            .unwrap();
        }
    }

    #[test]
    fn what_exponentials_are_divided_by_makes_no_difference() {
        let (x, dy) = (normal(4, 9, 2.0, Storage::F32), normal(5, 9, 1.0, Storage::F32));
        let y = softmax(&x);
        let scaled: Vec<f64> = y.iter().map(|y| 8.0 * y).collect();
        let [plain, scaled] = [(&y, 1.0), (&scaled, 8.0)]
            .map(|(y, sum)| softmax_gradient(y, sum, &dy, 9, Storage::F32));
        assert_eq!(plain, scaled);
    }

    #[test]
    fn bounds_tell_faults_apart() {
        let x = normal(6, 4096, 1.0, Storage::Bf16);
        let row = SoftmaxRow { x: &x, steps: STEPS };
        let (y, bound) = row.softmax(Storage::F32)[7];
        assert!(bound < 1e-4 * y, "{bound:e} of {y:e}");
        // Without the mean.
        let (y, dy) = (softmax(&x), vec![1.0; 4096]);
        let (dx, bound) = softmax_gradient(&y, 1.0, &dy, 60, Storage::F32)[7];
        assert!((dx - y[7]).abs() > 100.0 * bound, "{bound:e}");
    }
}
