//! What f32 arithmetic adds to the errors of a row, step by step.

use super::AttentionPrecision;
use crate::{
    attention::{Attention, dot, forward::Row},
    gelu::exp_relative_error,
    matmul::MatmulPrecision,
    storage::Storage,
};

/// Absolute error of a device's ln between 1/2 and 2, as WGSL allows it; elsewhere it is 3 ulp.
const LN_ERROR: f64 = 1.0 / (1 << 21) as f64;

/// What f32 arithmetic does to a pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct PairError {
    /// Relative, of `p` and `w`.
    pub(super) weight: f64,
    /// Absolute, of the cap's slope.
    pub(super) slope: f64,
}

impl Attention<'_> {
    /// What f32 arithmetic does to a row: to its pairs, and to `lse`.
    pub(super) fn row_errors(
        &self,
        at: [usize; 3],
        row: &Row,
        precision: &AttentionPrecision,
    ) -> (Vec<PairError>, f64) {
        if row.pairs.is_empty() {
            return (Vec::new(), 0.0);
        }
        let (case, u) = (&self.case, Storage::F32.unit_roundoff());
        let q = self.query(self.q, at);
        // Absolute errors of `x`, and of the cap's slope.
        let errors: Vec<[f64; 2]> = row
            .pairs
            .iter()
            .map(|pair| {
                let magnitude = case.scale().abs() * magnitude(q, self.key(self.k, at, pair.j));
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
                let exp = exp_relative_error(pair.score - row.lse);
                [c + 4.0 * u * largest + exp, slope]
            })
            .collect();
        let mean: f64 =
            row.pairs.iter().zip(&errors).map(|(pair, [x, _])| pair.p * x.exp_m1()).sum();
        let max = row.pairs.iter().map(|pair| pair.score).fold(f64::NEG_INFINITY, f64::max);
        // The largest score and the logarithm, of 3 ulp, are added.
        let logarithm = LN_ERROR + 8.0 * u * (row.lse.abs() + max.abs());
        let lse = mean + 2.0 * row.pairs.len() as f64 * u + logarithm;
        let pair = |[x, slope]: &[f64; 2]| {
            // Division by the sum, and dropout's factor.
            PairError { weight: (x + lse).exp_m1() + 4.0 * u, slope: *slope }
        };
        (errors.iter().map(pair).collect(), lse)
    }

    /// `dx` and `ds` of each pair, each with its error behind it.
    pub(super) fn row_gradient_errors(
        &self,
        at: [usize; 3],
        row: &Row,
        errors: &[PairError],
        dout: &[f64],
        precision: &AttentionPrecision,
    ) -> Vec<[f64; 4]> {
        let (product, u) = (precision.sums(Storage::F32), Storage::F32.unit_roundoff());
        let (dout, d) = (self.query(dout, at), self.case.head_dim);
        // `dp`, and the sum of its products' magnitudes.
        let dps: Vec<[f64; 2]> = row
            .pairs
            .iter()
            .map(|pair| {
                let v = self.key(self.v, at, pair.j);
                [pair.keep * dot(dout, v), pair.keep * magnitude(dout, v)]
            })
            .collect();
        let pairs = || row.pairs.iter().zip(errors).zip(&dps);
        let delta: f64 = pairs().map(|((pair, _), [dp, _])| pair.p * dp).sum();
        let carried: f64 = pairs().map(|((pair, e), [dp, _])| pair.p * e.weight * dp.abs()).sum();
        let magnitude: f64 =
            pairs().map(|((pair, e), [_, magnitude])| pair.p * (1.0 + e.weight) * magnitude).sum();
        let o = product.bound(magnitude, magnitude, row.pairs.len());
        let last = MatmulPrecision::exact(Storage::F32).bound(delta, magnitude, d);
        let delta_error = carried + o + last;
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
                [dx, dx_error, ds, ds_error + 2.0 * u * ds.abs()]
            })
            .collect()
    }
}

/// The sum of the magnitudes of a dot product's terms.
fn magnitude(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum()
}
