//! Layer and RMS normalization of rows, with their gradients.

use crate::{column_sum, storage::Storage};

/// What rows are divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// Their deviation, after their mean was taken off.
    Layer,
    /// The root of the mean of their squares.
    Rms,
}

/// A normalization of rows as long as `gamma`.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm<'a> {
    /// Which one.
    pub norm: Norm,
    /// Factors of the columns.
    pub gamma: &'a [f64],
    /// Is added to the columns.
    pub beta: Option<&'a [f64]>,
    /// Is added to the variance.
    pub epsilon: f64,
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

/// How a device computes, as far as errors depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Arithmetic {
    /// The type of the rows.
    pub rows: Storage,
    /// The type of the parameters' gradients.
    pub parameters: Storage,
    /// Additions that a term of a row's sum goes through, at most.
    pub additions: usize,
}

/// Relative error of a device's inverse square root in f32: 2 units in the last place, of CUDA's
/// (CUDA C++ Programming Guide, mathematical functions) as of WGSL's.
const ROOT_ERROR: f64 = 2.0 / (1u64 << 23) as f64;

/// Of second order: products of the relative errors here, the largest of which is below a hundredth.
const SECOND_ORDER: f64 = 1.02;

/// Mean and inverse deviation of a row.
#[derive(Clone, Copy, Debug)]
struct Statistics {
    mean: f64,
    rstd: f64,
}

/// How far off a device's are: the mean absolutely, the inverse deviation relatively.
#[derive(Clone, Copy, Debug)]
struct Errors {
    mean: f64,
    rstd: f64,
}

impl LayerNorm<'_> {
    /// `gamma (x - mean) / sqrt(variance + epsilon) + beta` of contiguous rows.
    pub fn forward(&self, x: &[f64]) -> Vec<f64> {
        self.rows(x).flat_map(|row| self.forward_row(row)).collect()
    }

    /// How far off each element of [`forward`](Self::forward) may be, computed in f32: every
    /// operation's rounding, carried through the formula, and one rounding to storage.
    pub fn forward_bounds(&self, x: &[f64], how: Arithmetic) -> Vec<f64> {
        let u = Storage::F32.unit_roundoff();
        self.rows(x)
            .flat_map(|row| {
                let (statistics, errors) = (self.statistics(row), self.errors(row, how));
                let bound = move |(c, (x, y)): (usize, (&f64, f64))| {
                    let h = (x - statistics.mean) * statistics.rstd;
                    let error = self.gamma[c].abs()
                        * (normal_error(*x, statistics, errors) + u * h.abs())
                        + u * y.abs();
                    error * SECOND_ORDER + stored(y, error, how.rows)
                };
                row.iter().zip(self.forward_row(row)).enumerate().map(bound).collect::<Vec<_>>()
            })
            .collect()
    }

    /// The gradients of `sum(dy forward(x)) + sum(dsum x)`.
    pub fn backward(&self, x: &[f64], dy: &[f64], dsum: Option<&[f64]>) -> Gradients {
        let width = self.gamma.len();
        let (mut dgamma, mut dbeta) = (vec![0.0; width], vec![0.0; width]);
        let mut dx = Vec::with_capacity(x.len());
        for (row, dy) in self.rows(x).zip(self.rows(dy)) {
            let statistics = self.statistics(row);
            let h: Vec<f64> = row.iter().map(|x| (x - statistics.mean) * statistics.rstd).collect();
            let g: Vec<f64> = dy.iter().zip(self.gamma).map(|(dy, gamma)| dy * gamma).collect();
            let [plain, weighted] = self.means(&g, &h);
            for c in 0..width {
                dx.push(statistics.rstd * (g[c] - plain - h[c] * weighted));
                dgamma[c] += dy[c] * h[c];
                dbeta[c] += dy[c];
            }
        }
        if let Some(dsum) = dsum {
            dx.iter_mut().zip(dsum).for_each(|(dx, dsum)| *dx += dsum);
        }
        Gradients { dx, dgamma, dbeta }
    }

    /// How far off each element of [`backward`](Self::backward) may be, computed in f32 from the mean
    /// and the inverse deviation that the forward pass left.
    pub fn backward_bounds(
        &self,
        x: &[f64],
        dy: &[f64],
        dsum: Option<&[f64]>,
        how: Arithmetic,
    ) -> Gradients {
        let (width, rows) = (self.gamma.len(), self.rows(x).count());
        let u = Storage::F32.unit_roundoff();
        let exact = self.backward(x, dy, dsum);
        let (mut dgamma_error, mut dgamma_size) = (vec![0.0; width], vec![0.0; width]);
        let mut dbeta_size = vec![0.0; width];
        let mut dx = Vec::with_capacity(x.len());
        for (r, (row, dy)) in self.rows(x).zip(self.rows(dy)).enumerate() {
            let (statistics, errors) = (self.statistics(row), self.errors(row, how));
            let Statistics { mean, rstd } = statistics;
            let h: Vec<f64> = row.iter().map(|x| (x - mean) * rstd).collect();
            let h_error: Vec<f64> =
                row.iter().map(|x| normal_error(*x, statistics, errors)).collect();
            let g: Vec<f64> = dy.iter().zip(self.gamma).map(|(dy, gamma)| dy * gamma).collect();
            let [plain, weighted] = self.means(&g, &h);
            let mean_of =
                |term: &dyn Fn(usize) -> f64| (0..width).map(term).sum::<f64>() / width as f64;
            // The terms are rounded, added up, and multiplied by the rounded 1 / width.
            let sums = (how.additions.min(width) + 3) as f64 * u;
            let plain_error = match self.norm {
                Norm::Layer => sums * mean_of(&|c| g[c].abs()),
                Norm::Rms => 0.0,
            };
            let weighted_error = mean_of(&|c| g[c].abs() * h_error[c])
                + (sums + u) * mean_of(&|c| (g[c] * h[c]).abs());
            for c in 0..width {
                let inner = g[c] - plain - h[c] * weighted;
                let sizes = g[c].abs() + plain.abs() + (h[c] * weighted).abs();
                let inner_error = plain_error
                    + h_error[c] * weighted.abs()
                    + h[c].abs() * weighted_error
                    + 3.0 * u * sizes;
                let result = exact.dx[r * width + c];
                let error =
                    rstd * (inner_error + inner.abs() * (errors.rstd + u)) + u * result.abs();
                dx.push(error * SECOND_ORDER + stored(result, error, how.rows));
                dgamma_error[c] += dy[c].abs() * h_error[c];
                dgamma_size[c] += (dy[c] * h[c]).abs();
                dbeta_size[c] += dy[c].abs();
            }
        }
        let columns = 0..width;
        let dgamma = columns.clone().map(|c| {
            // A term more for the product's rounding.
            let sum = column_sum::bound(
                exact.dgamma[c],
                dgamma_size[c] + dgamma_error[c],
                rows + 1,
                how.parameters,
            );
            sum + dgamma_error[c] * (SECOND_ORDER + how.parameters.unit_roundoff())
        });
        let dbeta =
            columns.map(|c| column_sum::bound(exact.dbeta[c], dbeta_size[c], rows, how.parameters));
        Gradients { dx, dgamma: dgamma.collect(), dbeta: dbeta.collect() }
    }

    fn rows<'x>(&self, x: &'x [f64]) -> impl Iterator<Item = &'x [f64]> + use<'x> {
        x.chunks_exact(self.gamma.len().max(1))
    }

    fn forward_row(&self, row: &[f64]) -> Vec<f64> {
        let Statistics { mean, rstd } = self.statistics(row);
        let beta = |c: usize| self.beta.map_or(0.0, |beta| beta[c]);
        let columns = row.iter().zip(self.gamma).enumerate();
        columns.map(|(c, (x, gamma))| gamma * ((x - mean) * rstd) + beta(c)).collect()
    }

    fn statistics(&self, row: &[f64]) -> Statistics {
        let width = row.len() as f64;
        let mean = match self.norm {
            Norm::Layer => row.iter().sum::<f64>() / width,
            Norm::Rms => 0.0,
        };
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width;
        Statistics { mean, rstd: 1.0 / (variance + self.epsilon).sqrt() }
    }

    fn errors(&self, row: &[f64], how: Arithmetic) -> Errors {
        let u = Storage::F32.unit_roundoff();
        let Statistics { mean, rstd } = self.statistics(row);
        // Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2: of a sum in any order,
        // each term's roundings are those of the additions that it goes through.
        let additions = how.additions.min(row.len()) as f64;
        let magnitude = row.iter().map(|x| x.abs()).sum::<f64>() / row.len() as f64;
        // And the quotient, a product with the rounded 1 / width.
        let mean_error = match self.norm {
            Norm::Layer => additions * u * magnitude + 2.0 * u * mean.abs(),
            Norm::Rms => 0.0,
        };
        // Relative to variance + epsilon: the distance and its square are rounded, the sum and the
        // quotient, epsilon and the last sum. That distances are taken from a mean that is off adds the
        // square of how far: their own sum is zero.
        let variance = (additions + 7.0) * u + mean_error * mean_error * rstd * rstd;
        Errors { mean: mean_error, rstd: 0.5 * variance * SECOND_ORDER + ROOT_ERROR }
    }

    /// The means of g and of g h, as the gradient subtracts them.
    fn means(&self, g: &[f64], h: &[f64]) -> [f64; 2] {
        let width = g.len() as f64;
        let plain = match self.norm {
            Norm::Layer => g.iter().sum::<f64>() / width,
            Norm::Rms => 0.0,
        };
        [plain, g.iter().zip(h).map(|(g, h)| g * h).sum::<f64>() / width]
    }
}

/// How far off (x - mean) rstd may be: the mean, the distance's rounding, the factor and the product's.
fn normal_error(x: f64, statistics: Statistics, errors: Errors) -> f64 {
    let u = Storage::F32.unit_roundoff();
    let distance = (x - statistics.mean).abs();
    statistics.rstd * (errors.mean + distance * (errors.rstd + 2.0 * u))
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

    const ROWS: usize = 3;
    const WIDTH: usize = 5;
    const HOW: Arithmetic =
        Arithmetic { rows: Storage::F32, parameters: Storage::F32, additions: 64 };

    fn numbers(seed: u64, count: usize) -> Vec<f64> {
        normal(seed, count, 1.0, Storage::F32)
    }

    fn dot(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    #[test]
    fn normalized_rows_have_mean_zero_and_deviation_one() {
        let x = [1.0, 2.0, 3.0, 6.0];
        let ones = [1.0; 4];
        let layer = LayerNorm { norm: Norm::Layer, gamma: &ones, beta: None, epsilon: 0.0 };
        // Mean 3, variance (4 + 1 + 0 + 9) / 4.
        let deviation = 3.5f64.sqrt();
        let expected = [-2.0, -1.0, 0.0, 3.0].map(|d| d / deviation);
        compare(&layer.forward(&x), &expected, &[1e-15; 4]).unwrap();
        let rms = LayerNorm { norm: Norm::Rms, ..layer };
        let expected = x.map(|x| x / 12.5f64.sqrt());
        compare(&rms.forward(&x), &expected, &[1e-15; 4]).unwrap();
    }

    #[test]
    fn gradients_are_those_of_central_differences() {
        let (x, dy) = (numbers(1, ROWS * WIDTH), numbers(2, ROWS * WIDTH));
        let (gamma, beta, dsum) = (numbers(3, WIDTH), numbers(4, WIDTH), numbers(5, ROWS * WIDTH));
        for norm in [Norm::Layer, Norm::Rms] {
            let op = LayerNorm { norm, gamma: &gamma, beta: Some(&beta), epsilon: 0.1 };
            let gradients = op.backward(&x, &dy, Some(&dsum));
            let with = |values: &[f64], i: usize, value: f64| {
                let mut changed = values.to_vec();
                changed[i] = value;
                changed
            };
            for i in 0..x.len() {
                let loss = |value| {
                    let x = with(&x, i, value);
                    dot(&op.forward(&x), &dy) + dot(&x, &dsum)
                };
                check_derivative(loss, |_| gradients.dx[i], x[i]).unwrap();
            }
            for c in 0..WIDTH {
                let loss = |value| {
                    let gamma = with(&gamma, c, value);
                    dot(&LayerNorm { gamma: &gamma, ..op }.forward(&x), &dy)
                };
                check_derivative(loss, |_| gradients.dgamma[c], gamma[c]).unwrap();
                let loss = |value| {
                    let beta = with(&beta, c, value);
                    dot(&LayerNorm { beta: Some(&beta), ..op }.forward(&x), &dy)
                };
                check_derivative(loss, |_| gradients.dbeta[c], beta[c]).unwrap();
            }
        }
    }

    #[test]
    fn bounds_tell_faults_apart() {
        let (x, dy) = (numbers(1, 8 * 768), numbers(2, 8 * 768));
        let gamma = numbers(3, 768);
        let right = LayerNorm { norm: Norm::Layer, gamma: &gamma, beta: None, epsilon: 1e-5 };
        let (y, bounds) = (right.forward(&x), right.forward_bounds(&x, HOW));
        let wrong = LayerNorm { epsilon: 1e-4, ..right };
        assert!(compare(&wrong.forward(&x), &y, &bounds).is_err(), "another epsilon");
        let gradients = right.backward(&x, &dy, None);
        let bounds = right.backward_bounds(&x, &dy, None, HOW);
        let wrong = wrong.backward(&x, &dy, None);
        assert!(compare(&wrong.dx, &gradients.dx, &bounds.dx).is_err(), "another epsilon");
        let fewer = right.backward(&x[768..], &dy[768..], None);
        assert!(compare(&fewer.dgamma, &gradients.dgamma, &bounds.dgamma).is_err(), "a row less");
        assert!(compare(&fewer.dbeta, &gradients.dbeta, &bounds.dbeta).is_err(), "a row less");
    }
}
