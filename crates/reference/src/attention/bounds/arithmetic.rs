//! What f32 arithmetic adds to the errors of a row, step by step.

use super::{AttentionPrecision, Roundings};
use crate::{
    attention::{Attention, dot, forward::Row, rounding::Rounding},
    gelu::exp_relative_error,
    matmul::MatmulPrecision,
    storage::Storage,
};

/// Absolute error of a device's ln between 1/2 and 2, as WGSL allows it; elsewhere it is 3 ulp.
const LN_ERROR: f64 = 1.0 / (1 << 21) as f64;

/// What arithmetic does to a pair.
#[derive(Clone, Copy, Debug)]
pub(in crate::attention) struct PairError {
    /// Relative, of `p`.
    pub(in crate::attention) weight: f64,
    /// Relative, of `w` as it is multiplied.
    pub(in crate::attention) stored: f64,
    /// Absolute, of the cap's slope.
    pub(in crate::attention) slope: f64,
}

/// The sums of the magnitudes of the terms of a row's products, or more.
pub(in crate::attention) trait Magnitudes {
    /// Of the query and key `j`.
    fn of_score(&self, j: usize) -> f64;
    /// Of the gradient of the output and value `j`.
    fn of_gradient(&self, j: usize) -> f64;
}

/// The sums themselves.
pub(in crate::attention) struct ExactMagnitudes<'a> {
    pub(in crate::attention) attention: &'a Attention<'a>,
    pub(in crate::attention) at: [usize; 3],
    /// Empty in the forward pass.
    pub(in crate::attention) dout: &'a [f64],
}

impl Magnitudes for ExactMagnitudes<'_> {
    fn of_score(&self, j: usize) -> f64 {
        let a = self.attention;
        magnitude(a.query(a.q, self.at), a.key(a.k, self.at, j))
    }

    fn of_gradient(&self, j: usize) -> f64 {
        let a = self.attention;
        magnitude(a.query(self.dout, self.at), a.key(a.v, self.at, j))
    }
}

impl Attention<'_> {
    /// What arithmetic does to a row: to its pairs, and to `lse`.
    pub(in crate::attention) fn row_errors(
        &self,
        at: [usize; 3],
        row: &Row,
        magnitudes: &impl Magnitudes,
        precision: &AttentionPrecision,
    ) -> (Vec<PairError>, f64) {
        if row.pairs.is_empty() {
            return (Vec::new(), 0.0);
        }
        let (case, u) = (&self.case, Storage::F32.unit_roundoff());
        let has_exact_scores = precision.roundings == Roundings::CountedBehindExactScores;
        let max = row.pairs.iter().map(|pair| pair.score).fold(f64::NEG_INFINITY, f64::max);
        // Absolute errors of `x`, and of the cap's slope.
        let errors: Vec<[f64; 2]> = row
            .pairs
            .iter()
            .map(|pair| {
                // Of weights that are zero no share can be off.
                if pair.p == 0.0 {
                    return [0.0; 2];
                }
                let exp = exp_relative_error(pair.score - row.lse) + precision.exponentials;
                if has_exact_scores {
                    // The difference to the largest score, and three more roundings of its size: to
                    // powers of two, of their factor, and of the subtraction of the logarithm.
                    return [4.0 * u * (max - pair.score) + exp, 0.0];
                }
                let magnitude = case.scale().abs() * magnitudes.of_score(pair.j);
                let s = precision.sums(Storage::F32).bound(pair.product, magnitude, case.head_dim);
                let (c, slope) = match case.options.softcap {
                    None => (s, 0.0),
                    Some(cap) => {
                        // The argument is scaled in two roundings.
                        let argument = (s + 2.0 * u * pair.product.abs()) / cap;
                        let tanh = argument + precision.functions.tanh;
                        let t = (pair.capped / cap).abs();
                        (cap * tanh + u * pair.capped.abs(), tanh * (2.0 * t + tanh) + 3.0 * u)
                    }
                };
                let largest = pair.capped.abs() + self.bias_at(at, pair.j).abs();
                [c + 4.0 * u * largest + exp, slope]
            })
            .collect();
        let mean: f64 =
            row.pairs.iter().zip(&errors).map(|(pair, [x, _])| pair.p * x.exp_m1()).sum();
        // The logarithm, of 3 ulp, is kept apart from the largest score, or added to it.
        let kept = if has_exact_scores { row.lse - max } else { row.lse.abs() + max.abs() };
        let lse = mean + 2.0 * row.pairs.len() as f64 * u + LN_ERROR + 8.0 * u * kept;
        let pair = |[x, slope]: &[f64; 2]| {
            // Division by the sum, and dropout's factor.
            let weight = (x + lse).exp_m1() + 4.0 * u;
            let stored = weight + (1.0 + weight) * precision.counted_roundoff();
            PairError { weight, stored, slope: *slope }
        };
        (errors.iter().map(pair).collect(), lse)
    }

    /// `dx` and `ds` of each pair, each with its error behind it.
    pub(in crate::attention) fn row_gradient_errors(
        &self,
        at: [usize; 3],
        row: &Row,
        errors: &[PairError],
        dout: &[f64],
        magnitudes: &impl Magnitudes,
        precision: &AttentionPrecision,
    ) -> Vec<[f64; 4]> {
        let (product, u) = (precision.sums(Storage::F32), Storage::F32.unit_roundoff());
        let (dout, d) = (self.query(dout, at), self.case.head_dim);
        let (counted, least) = (precision.counted_roundoff(), precision.counted_least());
        // `dp`, and the sum of its products' magnitudes.
        let dps: Vec<[f64; 2]> = row
            .pairs
            .iter()
            .map(|pair| {
                let v = self.key(self.v, at, pair.j);
                [pair.keep * dot(dout, v), pair.keep * magnitudes.of_gradient(pair.j)]
            })
            .collect();
        let pairs = || row.pairs.iter().zip(errors).zip(&dps);
        let delta: f64 = pairs().map(|((pair, _), [dp, _])| pair.p * dp).sum();
        let carried: f64 =
            pairs().map(|((pair, e), [dp, _])| (pair.p * e.stored + least) * dp.abs()).sum();
        let magnitude: f64 =
            pairs().map(|((pair, e), [_, magnitude])| pair.p * (1.0 + e.stored) * magnitude).sum();
        let o = product.bound(magnitude, magnitude, row.pairs.len());
        let last = MatmulPrecision::exact(Storage::F32).bound(delta, magnitude, d);
        let delta_error = carried + o + last + self.stored_output_error(row, dout, at, precision);
        pairs()
            .map(|((pair, error), [dp, magnitude])| {
                let dp_error = product.bound(*dp, *magnitude, d);
                let difference = dp - delta;
                let off = dp_error + delta_error + u * (dp.abs() + delta.abs());
                let dx = pair.p * difference;
                let dx_error =
                    pair.p * (1.0 + error.weight) * off + (error.weight + 2.0 * u) * dx.abs();
                let slope = self.cap_slope(pair);
                let ds = dx * slope;
                let ds_error = dx_error * (slope + error.slope) + dx.abs() * error.slope;
                let ds_error = ds_error + 2.0 * u * ds.abs();
                [dx, dx_error, ds, ds_error + counted * (ds.abs() + ds_error) + least]
            })
            .collect()
    }

    /// What `delta` is off by because the output was rounded to storage, where that is counted.
    fn stored_output_error(
        &self,
        row: &Row,
        dout: &[f64],
        at: [usize; 3],
        precision: &AttentionPrecision,
    ) -> f64 {
        let counted = precision.counted_roundoff();
        if counted == 0.0 {
            return 0.0;
        }
        let off = |o: &f64| counted * o.abs() + precision.counted_least();
        let output = self.output(at, row, Rounding::NONE);
        dout.iter().zip(&output).map(|(dout, o)| dout.abs() * off(o)).sum()
    }
}

/// The sum of the magnitudes of a dot product's terms.
fn magnitude(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum()
}
