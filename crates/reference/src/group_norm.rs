//! Normalization of groups of channels of each sample, and its gradients.

pub use crate::batch_norm::{Statistics, Sums};
use crate::{column_sum, storage::Storage};

/// A normalization of `[samples, channels, pixels]`, pixels last.
#[derive(Clone, Copy, Debug)]
pub struct GroupNorm<'a> {
    /// Factors of the channels.
    pub gamma: &'a [f64],
    /// Is added to the channels.
    pub beta: &'a [f64],
    /// Groups of channels.
    pub groups: usize,
    /// Pixels of a sample.
    pub pixels: usize,
    /// Is added to the variance.
    pub epsilon: f64,
}

/// Gradients, or bounds of their errors.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// Of the samples.
    pub dx: Vec<f64>,
    /// Of the factors.
    pub dgamma: Vec<f64>,
    /// Of what is added.
    pub dbeta: Vec<f64>,
}

/// How a device computes gradients, as far as errors depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Arithmetic {
    /// The type of the samples.
    pub samples: Storage,
    /// The type of the parameters' gradients.
    pub parameters: Storage,
    /// How the pixels of a channel are added up.
    pub sums: Sums,
    /// Additions that a channel's sum goes through until it is the group's, at most.
    pub group_merges: usize,
}

/// Unit roundoff of f32.
const U: f64 = 1.0 / (1u64 << 24) as f64;

/// Relative error of a device's inverse square root in f32: 2 units in the last place, of CUDA's
/// (CUDA C++ Programming Guide, mathematical functions) as of WGSL's.
const ROOT_ERROR: f64 = 4.0 * U;

/// Of second order: products of the relative errors here, the largest of which is below a hundredth.
const SECOND_ORDER: f64 = 1.02;

impl GroupNorm<'_> {
    fn channels(&self) -> usize {
        self.gamma.len()
    }

    /// Numbers of a group of a sample.
    fn count(&self) -> usize {
        self.channels() / self.groups * self.pixels
    }

    fn channel(&self, i: usize) -> usize {
        i / self.pixels % self.channels()
    }

    /// Among those of all samples, as channels below are.
    fn group(&self, i: usize) -> usize {
        i / self.count()
    }

    fn group_of_channel(&self, c: usize) -> usize {
        c / (self.channels() / self.groups)
    }

    /// Mean and biased variance of each group of each sample.
    pub fn statistics(&self, x: &[f64]) -> Statistics {
        let (columns, groups) = self.as_columns(x);
        Statistics::of(&columns, groups)
    }

    /// How far off they may be that a device computes: see [`Statistics::bounds`].
    pub fn statistics_bounds(&self, x: &[f64], sums: Sums) -> Statistics {
        let (columns, groups) = self.as_columns(x);
        Statistics::bounds(&columns, groups, sums)
    }

    /// x with the groups of all samples as columns, and how many these are.
    fn as_columns(&self, x: &[f64]) -> (Vec<f64>, usize) {
        let (count, groups) = (self.count(), x.len() / self.count());
        let turned = (0..x.len()).map(|i| x[i % groups * count + i / groups]).collect();
        (turned, groups)
    }

    /// 1 / deviation of each group.
    pub fn inverse_deviations(&self, statistics: &Statistics) -> Vec<f64> {
        statistics.variance.iter().map(|variance| 1.0 / (variance + self.epsilon).sqrt()).collect()
    }

    /// How far off these may be, computed in f32 of variances that are off by `errors`.
    pub fn inverse_deviation_bounds(
        &self,
        statistics: &Statistics,
        errors: &Statistics,
    ) -> Vec<f64> {
        let exact = self.inverse_deviations(statistics);
        let bound = |(g, rstd): (usize, &f64)| rstd * self.root_error(statistics, errors, g);
        exact.iter().enumerate().map(bound).collect()
    }

    /// `gamma (x - mean) / sqrt(variance + epsilon) + beta`.
    pub fn forward(&self, x: &[f64], statistics: &Statistics) -> Vec<f64> {
        let rstd = self.inverse_deviations(statistics);
        let element = |(i, x): (usize, &f64)| {
            let (c, g) = (self.channel(i), self.group(i));
            self.gamma[c] * ((x - statistics.mean[g]) * rstd[g]) + self.beta[c]
        };
        x.iter().enumerate().map(element).collect()
    }

    /// How far off each element of [`forward`](Self::forward) may be, computed in f32 from statistics that are
    /// off by `errors`: every operation's rounding, carried through the formula, and one rounding to storage.
    pub fn forward_bounds(
        &self,
        x: &[f64],
        statistics: &Statistics,
        errors: &Statistics,
        storage: Storage,
    ) -> Vec<f64> {
        let y = self.forward(x, statistics);
        let rstd = self.inverse_deviations(statistics);
        let element = |(i, (x, y)): (usize, (&f64, f64))| {
            let (c, g) = (self.channel(i), self.group(i));
            let product = (self.gamma[c] * (x - statistics.mean[g]) * rstd[g]).abs();
            let of_h = self.gamma[c].abs() * self.normal_error(*x, statistics, errors, g);
            let error = of_h + U * product + U * (product + self.beta[c].abs());
            error * SECOND_ORDER + stored(y, error, storage)
        };
        x.iter().zip(y).enumerate().map(element).collect()
    }

    /// The gradients of `sum(dy forward(x))`, where the statistics are those of x.
    pub fn backward(&self, x: &[f64], statistics: &Statistics, dy: &[f64]) -> Gradients {
        let rstd = self.inverse_deviations(statistics);
        let normal = |i: usize| (x[i] - statistics.mean[self.group(i)]) * rstd[self.group(i)];
        let [mut dgamma, mut dbeta] = [(); 2].map(|()| vec![0.0; self.channels()]);
        let [mut plain, mut weighted] = [(); 2].map(|()| vec![0.0; rstd.len()]);
        for (i, dy) in dy.iter().enumerate() {
            let (c, g) = (self.channel(i), self.group(i));
            dgamma[c] += dy * normal(i);
            dbeta[c] += dy;
            plain[g] += self.gamma[c] * dy;
            weighted[g] += self.gamma[c] * dy * normal(i);
        }
        let count = self.count() as f64;
        let dx = |(i, dy): (usize, &f64)| {
            let g = self.group(i);
            let of_mean = plain[g] / count + normal(i) * weighted[g] / count;
            rstd[g] * (self.gamma[self.channel(i)] * dy - of_mean)
        };
        Gradients { dx: dy.iter().enumerate().map(dx).collect(), dgamma, dbeta }
    }

    /// How far off each element of [`backward`](Self::backward) may be, computed in f32 from statistics that are
    /// off by `errors`: the pixels of a channel are added up, then the channels of a group, and for the parameters'
    /// gradients the samples.
    pub fn backward_bounds(
        &self,
        x: &[f64],
        statistics: &Statistics,
        errors: &Statistics,
        dy: &[f64],
        how: Arithmetic,
    ) -> Gradients {
        let (channels, count) = (self.channels(), self.count() as f64);
        let samples = x.len() / (channels * self.pixels);
        let exact = self.backward(x, statistics, dy);
        let rstd = self.inverse_deviations(statistics);
        let [mut sizes, mut weighted_sizes, mut weighted_errors] =
            [(); 3].map(|()| vec![0.0; samples * channels]);
        let [mut plain, mut weighted] = [(); 2].map(|()| vec![0.0; rstd.len()]);
        for (i, dy) in dy.iter().enumerate() {
            let (c, g, at) = (self.channel(i), self.group(i), i / self.pixels);
            let h = (x[i] - statistics.mean[g]) * rstd[g];
            sizes[at] += dy.abs();
            weighted_sizes[at] += (dy * h).abs();
            weighted_errors[at] += dy.abs() * self.normal_error(x[i], statistics, errors, g);
            plain[g] += self.gamma[c] * dy / count;
            weighted[g] += self.gamma[c] * dy * h / count;
        }
        let additions = how.sums.additions + how.sums.merges;
        // Of a group: the additions, and the products with gamma and with the rounded 1 / n.
        let of_sums = (additions + how.group_merges + 3) as f64 * U;
        let [mut plain_error, mut weighted_error] = [(); 2].map(|()| vec![0.0; rstd.len()]);
        for at in 0..samples * channels {
            let g = self.group_of_channel(at);
            let factor = self.gamma[at % channels].abs() / count;
            plain_error[g] += factor * of_sums * sizes[at];
            // And each product's rounding, and that with 1 / deviation.
            weighted_error[g] +=
                factor * (weighted_errors[at] + (of_sums + 2.0 * U) * weighted_sizes[at]);
        }
        let dx = |(i, dy): (usize, &f64)| {
            let g = self.group(i);
            let root = self.root_error(statistics, errors, g);
            let h = (x[i] - statistics.mean[g]) * rstd[g];
            let h_error = self.normal_error(x[i], statistics, errors, g);
            let [of_dy, of_plain, of_weighted] =
                [self.gamma[self.channel(i)] * dy, plain[g], h * weighted[g]].map(f64::abs);
            // Two products and 1 / deviation; one; and three products, of which the distance has one too.
            let error = of_dy * (root + 2.0 * U)
                + plain_error[g]
                + of_plain * (root + U)
                + h_error * weighted[g].abs()
                + h.abs() * weighted_error[g]
                + of_weighted * (root + 4.0 * U)
                + 2.0 * U * (of_dy + of_plain + of_weighted);
            let error = rstd[g] * error;
            error * SECOND_ORDER + stored(exact.dx[i], error, how.samples)
        };
        let of_channel =
            |numbers: &[f64], c: usize| -> f64 { numbers.iter().skip(c).step_by(channels).sum() };
        let all = additions + samples;
        let dgamma = |c: usize| {
            let errors = of_channel(&weighted_errors, c);
            // Two terms more, for the product's rounding and that with 1 / deviation.
            let size = of_channel(&weighted_sizes, c) + errors;
            let sum = column_sum::bound(exact.dgamma[c], size, all + 2, how.parameters);
            sum + errors * (SECOND_ORDER + how.parameters.unit_roundoff())
        };
        let dbeta = |c: usize| {
            column_sum::bound(exact.dbeta[c], of_channel(&sizes, c), all, how.parameters)
        };
        Gradients {
            dx: dy.iter().enumerate().map(dx).collect(),
            dgamma: (0..channels).map(dgamma).collect(),
            dbeta: (0..channels).map(dbeta).collect(),
        }
    }

    /// How far off 1 / deviation may be, relatively: the variance, epsilon and their sum, half of which the root
    /// leaves, and its own.
    fn root_error(&self, statistics: &Statistics, errors: &Statistics, g: usize) -> f64 {
        let sum = statistics.variance[g] + self.epsilon;
        0.5 * (errors.variance[g] / sum + 2.0 * U) * SECOND_ORDER + ROOT_ERROR
    }

    /// How far off (x - mean) / deviation may be: the mean, the distance's rounding, the factor and the product's.
    fn normal_error(&self, x: f64, statistics: &Statistics, errors: &Statistics, g: usize) -> f64 {
        let distance = (x - statistics.mean[g]).abs();
        let of_factor = self.root_error(statistics, errors, g) + 2.0 * U;
        let rstd = 1.0 / (statistics.variance[g] + self.epsilon).sqrt();
        rstd * (errors.mean[g] + distance * of_factor)
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
    use crate::{
        batch_norm::BatchNorm, gradcheck::check_derivative, random::normal, tolerance::compare,
    };

    const SAMPLES: usize = 2;
    const CHANNELS: usize = 6;
    const PIXELS: usize = 4;
    const SUMS: Sums = Sums { additions: 16, merges: 10 };
    const HOW: Arithmetic =
        Arithmetic { samples: Storage::F32, parameters: Storage::F32, sums: SUMS, group_merges: 9 };

    fn numbers(seed: u64, count: usize) -> Vec<f64> {
        normal(seed, count, 1.0, Storage::F32)
    }

    #[test]
    fn a_group_of_a_sample_has_its_own_mean_and_deviation() {
        // Two samples of two channels of two pixels in one group, and then in two.
        let x = [1.0, 2.0, 3.0, 6.0, 10.0, 10.0, 12.0, 12.0];
        let op = GroupNorm {
            gamma: &[2.0, 1.0],
            beta: &[0.5, -1.0],
            groups: 1,
            pixels: 2,
            epsilon: 0.25,
        };
        let statistics = op.statistics(&x);
        assert_eq!(statistics, Statistics { mean: vec![3.0, 11.0], variance: vec![3.5, 1.0] });
        let (a, b) = (3.75f64.sqrt(), 1.25f64.sqrt());
        let expected = [
            -4.0 / a + 0.5,
            -2.0 / a + 0.5,
            -1.0,
            3.0 / a - 1.0,
            -2.0 / b + 0.5,
            -2.0 / b + 0.5,
            1.0 / b - 1.0,
            1.0 / b - 1.0,
        ];
        compare(&op.forward(&x, &statistics), &expected, &[1e-15; 8]).unwrap();
        let of_channels = GroupNorm { groups: 2, ..op }.statistics(&x);
        assert_eq!(of_channels.mean, [1.5, 4.5, 10.0, 12.0]);
        assert_eq!(of_channels.variance, [0.25, 2.25, 0.0, 0.0]);
    }

    #[test]
    fn gradients_are_those_of_central_differences() {
        let [x, dy] = [1, 2].map(|seed| numbers(seed, SAMPLES * CHANNELS * PIXELS));
        let [gamma, beta] = [3, 4].map(|seed| numbers(seed, CHANNELS));
        for groups in [1, 2, 6] {
            let op = GroupNorm { gamma: &gamma, beta: &beta, groups, pixels: PIXELS, epsilon: 0.1 };
            let loss = |op: GroupNorm<'_>, x: &[f64]| -> f64 {
                let y = op.forward(x, &op.statistics(x));
                y.iter().zip(&dy).map(|(y, dy)| y * dy).sum()
            };
            let Gradients { dx, dgamma, dbeta } = op.backward(&x, &op.statistics(&x), &dy);
            let with = |values: &[f64], i: usize, value: f64| {
                let mut changed = values.to_vec();
                changed[i] = value;
                changed
            };
            for i in 0..x.len() {
                check_derivative(|v| loss(op, &with(&x, i, v)), |_| dx[i], x[i]).unwrap();
            }
            for c in 0..CHANNELS {
                let of_gamma = |v| loss(GroupNorm { gamma: &with(&gamma, c, v), ..op }, &x);
                check_derivative(of_gamma, |_| dgamma[c], gamma[c]).unwrap();
                let of_beta = |v| loss(GroupNorm { beta: &with(&beta, c, v), ..op }, &x);
                check_derivative(of_beta, |_| dbeta[c], beta[c]).unwrap();
            }
        }
    }

    #[test]
    fn groups_of_samples_of_one_pixel_row_are_those_of_a_batch_norm() {
        let x = numbers(1, 12);
        let op =
            GroupNorm { gamma: &[1.0; 6], beta: &[0.0; 6], groups: 2, pixels: 2, epsilon: 0.1 };
        let turned: Vec<f64> = (0..12).map(|i| x[i % 2 * 6 + i / 2]).collect();
        let y = BatchNorm { gamma: &[1.0; 2], beta: &[0.0; 2], epsilon: 0.1, relu: false }.forward(
            &turned,
            &Statistics::of(&turned, 2),
            None,
        );
        let expected: Vec<f64> = (0..12).map(|i| y[i % 6 * 2 + i / 6]).collect();
        compare(&op.forward(&x, &op.statistics(&x)), &expected, &[1e-14; 12]).unwrap();
    }

    #[test]
    fn bounds_tell_faults_apart() {
        let (channels, pixels) = (8, 50);
        let [x, dy] = [1, 2].map(|seed| numbers(seed, 3 * channels * pixels));
        let [gamma, beta] = [3, 4].map(|seed| numbers(seed, channels));
        let right = GroupNorm { gamma: &gamma, beta: &beta, groups: 4, pixels, epsilon: 1e-5 };
        let statistics = right.statistics(&x);
        let errors = right.statistics_bounds(&x, SUMS);
        let others = GroupNorm { groups: 2, ..right };
        let of_others = others.statistics(&x);
        let doubled: Vec<f64> = of_others.mean.iter().flat_map(|mean| [*mean; 2]).collect();
        assert!(compare(&doubled, &statistics.mean, &errors.mean).is_err(), "other groups");

        let wrong = GroupNorm { epsilon: 1e-4, ..right };
        let none = Statistics::exact(statistics.mean.len());
        let bounds = right.forward_bounds(&x, &statistics, &none, Storage::F32);
        let y = right.forward(&x, &statistics);
        assert!(compare(&wrong.forward(&x, &statistics), &y, &bounds).is_err());

        let gradients = right.backward(&x, &statistics, &dy);
        let bounds = right.backward_bounds(&x, &statistics, &none, &dy, HOW);
        let of_wrong = wrong.backward(&x, &statistics, &dy);
        assert!(compare(&of_wrong.dx, &gradients.dx, &bounds.dx).is_err(), "another epsilon");
        let fewer = 2 * channels * pixels;
        let of_two = right.backward(&x[..fewer], &right.statistics(&x[..fewer]), &dy[..fewer]);
        assert!(
            compare(&of_two.dgamma, &gradients.dgamma, &bounds.dgamma).is_err(),
            "a sample less"
        );
        assert!(compare(&of_two.dbeta, &gradients.dbeta, &bounds.dbeta).is_err(), "a sample less");
    }
}
