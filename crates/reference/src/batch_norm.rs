//! Batch normalization of channels, with what follows it, and its gradients.

use crate::{column_sum, storage::Storage};

/// A normalization of as many channels as `gamma` has, of rows of them.
#[derive(Clone, Copy, Debug)]
pub struct BatchNorm<'a> {
    /// Factors of the channels.
    pub gamma: &'a [f64],
    /// Is added to the channels.
    pub beta: &'a [f64],
    /// Is added to the variance.
    pub epsilon: f64,
    /// Whether a `ReLU` comes last.
    pub relu: bool,
}

/// Mean and biased variance of each channel, or bounds of their errors.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// Means.
    pub mean: Vec<f64>,
    /// Variances.
    pub variance: Vec<f64>,
}

/// What backward reads.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a> {
    /// Rows of channels.
    pub x: &'a [f64],
    /// Of the batch, or what a device made of them.
    pub statistics: &'a Statistics,
    /// What came out of the `ReLU`, where there is one.
    pub y: Option<&'a [f64]>,
}

/// Gradients, or bounds of their errors.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// Of the rows.
    pub dx: Vec<f64>,
    /// Of the factors.
    pub dgamma: Vec<f64>,
    /// Of what is added.
    pub dbeta: Vec<f64>,
}

/// How a device adds up the rows of a channel.
#[derive(Clone, Copy, Debug)]
pub struct Sums {
    /// Rows that are added up one after the other, at most.
    pub additions: usize,
    /// How often what came of them is merged with others, at most.
    pub merges: usize,
}

/// How a device computes gradients, as far as errors depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Arithmetic {
    /// The type of the rows.
    pub rows: Storage,
    /// The type of the parameters' gradients.
    pub parameters: Storage,
    /// How rows are added up.
    pub sums: Sums,
}

/// Unit roundoff of f32.
const U: f64 = 1.0 / (1u64 << 24) as f64;

/// Relative error of a device's f32 quotient, in unit roundoffs: the 2.5 units in the last place of WGSL's.
const QUOTIENT: f64 = 5.0;

/// Relative error of a device's inverse square root in f32: 2 units in the last place, of CUDA's
/// (CUDA C++ Programming Guide, mathematical functions) as of WGSL's.
const ROOT_ERROR: f64 = 4.0 * U;

/// Of second order: products of the relative errors here, the largest of which is below a hundredth.
const SECOND_ORDER: f64 = 1.02;

impl Statistics {
    /// Mean and biased variance of each channel.
    pub fn of(x: &[f64], channels: usize) -> Self {
        let means = |term: &dyn Fn(f64, usize) -> f64| mean_of(x, channels, term);
        let mean = means(&|x, _| x);
        let variance = means(&|x, c| (x - mean[c]).powi(2));
        Self { mean, variance }
    }

    /// No errors: for statistics that both sides are given.
    pub fn exact(channels: usize) -> Self {
        Self { mean: vec![0.0; channels], variance: vec![0.0; channels] }
    }

    /// How far off mean and variance may be that a device computes in f32. It takes a value of the channel
    /// from the rows that it adds up, and merges means, as distances from another value of the channel, and
    /// squares around them (Chan, Golub and LeVeque, 1983). Counts are below 2^24.
    ///
    /// Which values these are is left open. With D the largest distance of a value from the mean, no
    /// two values are further apart than 2 D, and that is what every distance is taken for.
    pub fn bounds(x: &[f64], channels: usize, sums: Sums) -> Self {
        let Self { mean, variance } = Self::of(x, channels);
        let mut farthest = vec![0.0f64; channels];
        for (i, x) in x.iter().enumerate() {
            let c = i % channels;
            farthest[c] = farthest[c].max((x - mean[c]).abs());
        }
        let apart = mean_of(x, channels, &|x, c| (x - mean[c]).abs());
        let (additions, merges) = (sums.additions as f64, sums.merges as f64);
        let of_channel = |c: usize| {
            let (mean, variance) = (mean[c], variance[c]);
            let distance = 2.0 * farthest[c];
            // Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2: each term's roundings
            // are those of the additions that it goes through; before that its own, and then the quotient,
            // the distance of the two values, and the sum of both. A merge rounds a difference, a quotient, a
            // product and a sum.
            let of_unit = additions + 1.0 + QUOTIENT + 2.0;
            let offset = (of_unit + (QUOTIENT + 3.0) * merges) * U * distance;
            let mean_bound = offset + U * (mean.abs() + offset);

            // Distances from one of the values, squared: at most those from the mean and D.
            let squares = variance + 2.0 * farthest[c] * apart[c] + farthest[c].powi(2);
            // Their sum has each distance's rounding twice, the square's and the additions'. What is taken
            // off, the square of the sum divided by the count, is at most as large, and has the sum's roundings
            // twice, a quotient and a product. Then comes the difference.
            let of_unit = (additions + 3.0) + 2.0 * (additions + 1.0) + QUOTIENT + 1.0 + 1.0;
            // A merge adds (difference of means)^2 times a weight. The differences are off by twice the means'
            // error and a rounding. In a level of merges the weights add up to a quarter of the rows at
            // most, and weight times squared differences to the variance, times rows. So weight times
            // difference adds up to the root of the product of both (Cauchy and Schwarz).
            let differences = 2.0 * offset + U * distance;
            let between =
                differences * (merges * variance).sqrt() + differences.powi(2) * merges / 4.0;
            // Roundings of a merge: the square, the quotient and the products of the weight, two sums. Last
            // the quotient by the count.
            let of_merges = 1.0 + QUOTIENT + 2.0 + 2.0 * merges + QUOTIENT;
            let variance_bound = of_unit * U * squares + between + of_merges * U * variance;
            (mean_bound * SECOND_ORDER + tiny(), variance_bound * SECOND_ORDER + tiny())
        };
        let (mean, variance) = (0..channels).map(of_channel).unzip();
        Self { mean, variance }
    }
}

/// What rounding to zero may cost.
fn tiny() -> f64 {
    Storage::F32.underflow()
}

/// The mean of `term(x, channel)` over the rows, for each channel.
fn mean_of(x: &[f64], channels: usize, term: &dyn Fn(f64, usize) -> f64) -> Vec<f64> {
    let mut sums = vec![0.0; channels];
    x.iter().enumerate().for_each(|(i, x)| sums[i % channels] += term(*x, i % channels));
    let rows = (x.len() / channels) as f64;
    sums.into_iter().map(|sum| sum / rows).collect()
}

impl BatchNorm<'_> {
    /// `gamma (x - mean) / sqrt(variance + epsilon) + beta + residual`, or `ReLU` of that.
    pub fn forward(
        &self,
        x: &[f64],
        statistics: &Statistics,
        residual: Option<&[f64]>,
    ) -> Vec<f64> {
        let element = |(i, x): (usize, &f64)| {
            let c = i % self.gamma.len();
            let h = (x - statistics.mean[c]) * self.inverse_deviation(statistics, c);
            let sum = self.gamma[c] * h + self.beta[c] + residual.map_or(0.0, |it| it[i]);
            // NaN passes.
            if self.relu && sum <= 0.0 { 0.0 } else { sum }
        };
        x.iter().enumerate().map(element).collect()
    }

    /// How far off each element of [`forward`](Self::forward) may be, computed in f32 from statistics that are
    /// off by `errors`: every operation's rounding, carried through the formula, and one rounding to storage.
    /// `ReLU` makes no error larger.
    pub fn forward_bounds(
        &self,
        x: &[f64],
        statistics: &Statistics,
        errors: &Statistics,
        residual: Option<&[f64]>,
        storage: Storage,
    ) -> Vec<f64> {
        let y = self.forward(x, statistics, residual);
        let element = |(i, (x, y)): (usize, (&f64, f64))| {
            let c = i % self.gamma.len();
            let h = (x - statistics.mean[c]) * self.inverse_deviation(statistics, c);
            let product = (self.gamma[c] * h).abs();
            let of_h = self.gamma[c].abs() * self.normal_error(*x, statistics, errors, c);
            let of_beta = U * (product + self.beta[c].abs());
            let sum = product + self.beta[c].abs() + residual.map_or(0.0, |it| it[i].abs());
            let of_residual = if residual.is_some() { U * sum } else { 0.0 };
            let error = of_h + U * product + of_beta + of_residual;
            error * SECOND_ORDER + stored(y, error, storage)
        };
        x.iter().zip(y).enumerate().map(element).collect()
    }

    /// The gradient of what the `ReLU` took, which is also that of the residual.
    pub fn gated(dy: &[f64], y: Option<&[f64]>) -> Vec<f64> {
        match y {
            Some(y) => dy.iter().zip(y).map(|(dy, y)| if *y <= 0.0 { 0.0 } else { *dy }).collect(),
            None => dy.to_vec(),
        }
    }

    /// The gradients of `sum(dy forward(x))`, where the statistics are those of x.
    pub fn backward(&self, saved: Saved<'_>, dy: &[f64]) -> Gradients {
        let Saved { x, statistics, y } = saved;
        let channels = self.gamma.len();
        let g = Self::gated(dy, y);
        let normal = |i: usize| {
            let c = i % channels;
            (x[i] - statistics.mean[c]) * self.inverse_deviation(statistics, c)
        };
        let (mut dgamma, mut dbeta) = (vec![0.0; channels], vec![0.0; channels]);
        for (i, g) in g.iter().enumerate() {
            dgamma[i % channels] += g * normal(i);
            dbeta[i % channels] += g;
        }
        let rows = (x.len() / channels) as f64;
        let dx = |(i, g): (usize, &f64)| {
            let c = i % channels;
            let inner = g - dbeta[c] / rows - normal(i) * dgamma[c] / rows;
            self.gamma[c] * self.inverse_deviation(statistics, c) * inner
        };
        let dx = g.iter().enumerate().map(dx).collect();
        Gradients { dx, dgamma, dbeta }
    }

    /// How far off each element of [`backward`](Self::backward) may be, computed in f32 from statistics that
    /// are off by `errors`. y is taken to be what the device read.
    pub fn backward_bounds(
        &self,
        saved: Saved<'_>,
        errors: &Statistics,
        dy: &[f64],
        how: Arithmetic,
    ) -> Gradients {
        let Saved { x, statistics, y } = saved;
        let channels = self.gamma.len();
        let rows = (x.len() / channels) as f64;
        let exact = self.backward(saved, dy);
        let g = Self::gated(dy, y);
        let (mut sizes, mut weighted_sizes) = (vec![0.0; channels], vec![0.0; channels]);
        let mut weighted_errors = vec![0.0; channels];
        for (i, g) in g.iter().enumerate() {
            let c = i % channels;
            let h = (x[i] - statistics.mean[c]) * self.inverse_deviation(statistics, c);
            sizes[c] += g.abs();
            weighted_sizes[c] += (g * h).abs();
            weighted_errors[c] += g.abs() * self.normal_error(x[i], statistics, errors, c);
        }
        let additions = how.sums.additions + how.sums.merges;
        let dx = |(i, g): (usize, &f64)| {
            let c = i % channels;
            let rstd = self.inverse_deviation(statistics, c);
            let h = (x[i] - statistics.mean[c]) * rstd;
            let h_error = self.normal_error(x[i], statistics, errors, c);
            // Sums, times the rounded 1 / rows.
            let sums = additions as f64 * U;
            let (plain, weighted) = (exact.dbeta[c] / rows, exact.dgamma[c] / rows);
            let plain_error = sums * sizes[c] / rows + 2.0 * U * plain.abs();
            // And each product's rounding, and that with 1 / deviation.
            let weighted_error = (weighted_errors[c] + (sums + U) * weighted_sizes[c]) / rows
                + 3.0 * U * weighted.abs();
            let inner = g - plain - h * weighted;
            let magnitudes = g.abs() + plain.abs() + (h * weighted).abs();
            let inner_error = plain_error
                + h_error * weighted.abs()
                + h.abs() * weighted_error
                + 3.0 * U * magnitudes;
            let root = self.root_error(statistics, errors, c);
            // The factor's product, and the last.
            let error =
                (self.gamma[c] * rstd).abs() * (inner_error + inner.abs() * (root + 2.0 * U));
            error * SECOND_ORDER + stored(exact.dx[i], error, how.rows)
        };
        let dgamma = |c: usize| {
            // Two terms more, for the product's rounding and that with 1 / deviation.
            let size = weighted_sizes[c] + weighted_errors[c];
            let sum = column_sum::bound(exact.dgamma[c], size, additions + 2, how.parameters);
            sum + weighted_errors[c] * (SECOND_ORDER + how.parameters.unit_roundoff())
        };
        let dbeta =
            |c: usize| column_sum::bound(exact.dbeta[c], sizes[c], additions, how.parameters);
        Gradients {
            dx: g.iter().enumerate().map(dx).collect(),
            dgamma: (0..channels).map(dgamma).collect(),
            dbeta: (0..channels).map(dbeta).collect(),
        }
    }

    fn inverse_deviation(&self, statistics: &Statistics, c: usize) -> f64 {
        1.0 / (statistics.variance[c] + self.epsilon).sqrt()
    }

    /// How far off 1 / deviation may be, relatively: that of the variance, of epsilon and of their sum, half of
    /// which the root leaves, and its own.
    fn root_error(&self, statistics: &Statistics, errors: &Statistics, c: usize) -> f64 {
        let sum = statistics.variance[c] + self.epsilon;
        0.5 * (errors.variance[c] / sum + 2.0 * U) * SECOND_ORDER + ROOT_ERROR
    }

    /// How far off (x - mean) / deviation may be: the mean, the distance's rounding, the factor and the
    /// product's.
    fn normal_error(&self, x: f64, statistics: &Statistics, errors: &Statistics, c: usize) -> f64 {
        let distance = (x - statistics.mean[c]).abs();
        let of_factor = self.root_error(statistics, errors, c) + 2.0 * U;
        self.inverse_deviation(statistics, c) * (errors.mean[c] + distance * of_factor)
    }
}

/// The rounding to storage of what is off by `error` already.
fn stored(y: f64, error: f64, storage: Storage) -> f64 {
    let u = if storage == Storage::F32 { 0.0 } else { storage.unit_roundoff() };
    (y.abs() + error) * u + storage.underflow()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{gradcheck::check_derivative, random::normal, tolerance::compare};

    const ROWS: usize = 7;
    const CHANNELS: usize = 3;
    const SUMS: Sums = Sums { additions: 16, merges: 10 };
    const HOW: Arithmetic = Arithmetic { rows: Storage::F32, parameters: Storage::F32, sums: SUMS };

    fn numbers(seed: u64, count: usize) -> Vec<f64> {
        normal(seed, count, 1.0, Storage::F32)
    }

    #[test]
    fn a_channel_has_its_own_mean_and_deviation() {
        // Channels 1, 2, 3, 6 and 10, 10, 10, 10.
        let x = [1.0, 10.0, 2.0, 10.0, 3.0, 10.0, 6.0, 10.0];
        let statistics = Statistics::of(&x, 2);
        assert_eq!(statistics, Statistics { mean: vec![3.0, 10.0], variance: vec![3.5, 0.0] });
        let op = BatchNorm { gamma: &[2.0, 1.0], beta: &[0.5, -1.0], epsilon: 0.25, relu: false };
        let deviation = 3.75f64.sqrt();
        let expected = [-2.0, -1.0, 0.0, 3.0].map(|d| [2.0 * d / deviation + 0.5, -1.0]).concat();
        compare(&op.forward(&x, &statistics, None), &expected, &[1e-15; 8]).unwrap();
        let rectified = BatchNorm { relu: true, ..op }.forward(&x, &statistics, Some(&[1.0; 8]));
        let expected: Vec<f64> = expected.iter().map(|y| (y + 1.0).max(0.0)).collect();
        compare(&rectified, &expected, &[1e-15; 8]).unwrap();
    }

    #[test]
    fn gradients_are_those_of_central_differences() {
        let [x, residual, dy] = [1, 2, 3].map(|seed| numbers(seed, ROWS * CHANNELS));
        let [gamma, beta] = [4, 5].map(|seed| numbers(seed, CHANNELS));
        for relu in [false, true] {
            let op = BatchNorm { gamma: &gamma, beta: &beta, epsilon: 0.1, relu };
            let loss = |op: BatchNorm<'_>, x: &[f64], residual: &[f64]| -> f64 {
                let y = op.forward(x, &Statistics::of(x, CHANNELS), Some(residual));
                y.iter().zip(&dy).map(|(y, dy)| y * dy).sum()
            };
            let statistics = Statistics::of(&x, CHANNELS);
            let y = op.forward(&x, &statistics, Some(&residual));
            let saved = Saved { x: &x, statistics: &statistics, y: relu.then_some(&y) };
            let Gradients { dx, dgamma, dbeta } = op.backward(saved, &dy);
            let dresidual = BatchNorm::gated(&dy, saved.y);
            assert_eq!(relu, dresidual.contains(&0.0));
            let with = |values: &[f64], i: usize, value: f64| {
                let mut changed = values.to_vec();
                changed[i] = value;
                changed
            };
            for i in 0..x.len() {
                check_derivative(|v| loss(op, &with(&x, i, v), &residual), |_| dx[i], x[i])
                    .unwrap();
                let of_residual = |v| loss(op, &x, &with(&residual, i, v));
                check_derivative(of_residual, |_| dresidual[i], residual[i]).unwrap();
            }
            for c in 0..CHANNELS {
                let of_gamma =
                    |v| loss(BatchNorm { gamma: &with(&gamma, c, v), ..op }, &x, &residual);
                check_derivative(of_gamma, |_| dgamma[c], gamma[c]).unwrap();
                let of_beta = |v| loss(BatchNorm { beta: &with(&beta, c, v), ..op }, &x, &residual);
                check_derivative(of_beta, |_| dbeta[c], beta[c]).unwrap();
            }
        }
    }

    #[test]
    fn a_large_mean_costs_its_own_rounding_alone() {
        let near = numbers(1, 1000);
        let far: Vec<f64> = near.iter().map(|x| Storage::F32.round(x + 1000.0)).collect();
        let [near, far] = [near, far].map(|x| Statistics::bounds(&x, 1, SUMS));
        assert!(far.mean[0] < near.mean[0] + 1030.0 * U, "{} {}", far.mean[0], near.mean[0]);
        assert!(far.variance[0] < 1.01 * near.variance[0]);
        // Squares less the square of the mean would be off by more than that: 10^6 of f32.
        assert!(far.variance[0] < 0.1 * 1e6 * U, "{}", far.variance[0]);
    }

    #[test]
    fn bounds_tell_faults_apart() {
        let (rows, channels) = (200, 4);
        let [x, dy] = [1, 2].map(|seed| numbers(seed, rows * channels));
        let [gamma, beta] = [3, 4].map(|seed| numbers(seed, channels));
        let statistics = Statistics::of(&x, channels);
        let errors = Statistics::bounds(&x, channels, SUMS);
        let fewer = Statistics::of(&x[channels..], channels);
        assert!(compare(&fewer.mean, &statistics.mean, &errors.mean).is_err(), "a row less");
        assert!(compare(&fewer.variance, &statistics.variance, &errors.variance).is_err());
        let unbiased: Vec<f64> = statistics.variance.iter().map(|v| v * 200.0 / 199.0).collect();
        assert!(compare(&unbiased, &statistics.variance, &errors.variance).is_err());

        let right = BatchNorm { gamma: &gamma, beta: &beta, epsilon: 1e-5, relu: false };
        let wrong = BatchNorm { epsilon: 1e-4, ..right };
        let none = Statistics::exact(channels);
        let y = right.forward(&x, &statistics, None);
        let bounds = right.forward_bounds(&x, &statistics, &none, None, Storage::F32);
        assert!(compare(&wrong.forward(&x, &statistics, None), &y, &bounds).is_err());

        let saved = Saved { x: &x, statistics: &statistics, y: None };
        let gradients = right.backward(saved, &dy);
        let bounds = right.backward_bounds(saved, &none, &dy, HOW);
        let wrong = wrong.backward(saved, &dy);
        assert!(compare(&wrong.dx, &gradients.dx, &bounds.dx).is_err(), "another epsilon");
        let fewer = right.backward(Saved { x: &x[channels..], ..saved }, &dy[channels..]);
        assert!(compare(&fewer.dgamma, &gradients.dgamma, &bounds.dgamma).is_err(), "a row less");
        assert!(compare(&fewer.dbeta, &gradients.dbeta, &bounds.dbeta).is_err(), "a row less");
    }
}
