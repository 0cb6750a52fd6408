//! Some rows and keys of attention that is too long to be computed whole.
//!
//! A row of the output, and of the gradient of q, takes time in proportion to the keys. A key's gradients
//! take all rows that see it, each with its own sum and `delta`: time in proportion to all pairs of its
//! heads, whatever the number of keys that are asked for. It is divided among threads.

use super::{
    Attention, AttentionPrecision, Roundings, add_scaled,
    bounds::{
        absolute,
        arithmetic::{ExactMagnitudes, Magnitudes},
    },
    rounding::Rounding,
};
use crate::storage::Storage;
use std::{num::NonZero, thread};

/// Some of a tensor's elements, how far off each may be, and how far off it is likely to be.
///
/// A bound grows with the terms of a sum, as if all of their roundings went the same way. They do not:
/// errors of many elements, each in units of its deviation, have a root mean square of at most 1. That
/// finds what is a little wrong everywhere, and the bound what is very wrong somewhere.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// What they are.
    pub values: Vec<f64>,
    /// How far off they may be.
    pub bounds: Vec<f64>,
    /// The root of the sum of squares of the largest errors of rounding to storage: of each factor that is
    /// stored, times what it is multiplied by, of the output that deltas are made of, and of the result. An error is anywhere below the largest, so
    /// this is about 1.7 times the standard deviation, which leaves room for what f32 adds. Nothing for
    /// storage in f32, nor for `lse`.
    pub deviations: Vec<f64>,
}

impl Sampled {
    /// The mean of the squares of these errors in units of their deviations. Elements without a deviation,
    /// as those that are not finite, do not count.
    pub fn mean_square(samples: &[Self], actual: &[Vec<f64>]) -> f64 {
        let elements = samples
            .iter()
            .zip(actual)
            .flat_map(|(sample, actual)| sample.values.iter().zip(&sample.deviations).zip(actual));
        let squares: Vec<f64> = elements
            .filter(|((_, deviation), _)| deviation.is_finite() && **deviation > 0.0)
            .map(|((value, deviation), actual)| ((actual - value) / deviation).powi(2))
            .collect();
        squares.iter().sum::<f64>() / squares.len().max(1) as f64
    }
}

/// What belongs to a query.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledRow {
    /// Its row of the output.
    pub o: Sampled,
    /// Its logarithm: one element.
    pub lse: Sampled,
    /// Its row of the gradient of q.
    pub dq: Sampled,
}

/// What belongs to a key.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledKey {
    /// Its row of the gradient of k.
    pub dk: Sampled,
    /// Its row of the gradient of v.
    pub dv: Sampled,
}

impl Attention<'_> {
    /// The query `at`: batch, head and row. `precision` counts roundings.
    ///
    /// # Panics
    ///
    /// When the case makes no sense, a slice has another length than its shape, or the precision is by
    /// the naive computation, which would have to be computed for whole heads.
    pub fn sampled_row(
        &self,
        at: [usize; 3],
        dout: &[f64],
        precision: &AttentionPrecision,
    ) -> SampledRow {
        self.check_sample(dout, precision);
        let (case, scale) = (&self.case, self.case.scale());
        let row = self.row(at, Rounding::NONE);
        let o = self.output(at, &row, Rounding::NONE);
        let (o_bounds, lse_bound) = self.row_bounds(at, &row, &o, precision);
        let exact = ExactMagnitudes { attention: self, at, dout };
        let (errors, _) = self.row_errors(at, &row, &exact, precision);
        let steps = self.row_gradient_errors(at, &row, &errors, dout, &exact, precision);
        // The forward pass divides by the sum of weights later. It stores multiples of the largest.
        let largest = row.pairs.iter().map(|pair| pair.p).fold(0.0, f64::max);
        let (mut out, mut dq) = (Sum::zeros(case.head_dim), Sum::zeros(case.head_dim));
        for (pair, [_, _, ds, error]) in row.pairs.iter().zip(steps) {
            let factor = Factor {
                value: pair.weight,
                error: 0.0,
                rounding: largest * precision.rounding(pair.weight / largest),
            };
            out.add(factor, self.key(self.v, at, pair.j));
            let factor = Factor::stored([ds, error], precision).scaled(scale);
            dq.add(factor, self.key(self.k, at, pair.j));
        }
        // The gradients of all scores of the row have the error of its delta, so that their sum has it once.
        let of_delta = self.delta_rounding(at, &o, dout, precision);
        let mut keys = vec![0.0; case.head_dim];
        for pair in &row.pairs {
            let factor = scale * pair.p * self.cap_slope(pair) * of_delta;
            add_scaled(&mut keys, factor, self.key(self.k, at, pair.j));
        }
        dq.roundings.iter_mut().zip(&keys).for_each(|(sum, x)| *sum += x.powi(2));
        let deviations = out.deviations(precision);
        SampledRow {
            o: Sampled { values: o, bounds: o_bounds, deviations },
            lse: Sampled { values: vec![row.lse], bounds: vec![lse_bound], deviations: vec![0.0] },
            dq: dq.sampled(precision, case.seq_kv),
        }
    }

    /// Keys of a head of a sequence. `precision` counts roundings.
    ///
    /// # Panics
    ///
    /// As [`sampled_row`](Self::sampled_row).
    pub fn sampled_keys(
        &self,
        [batch, head]: [usize; 2],
        keys: &[usize],
        dout: &[f64],
        precision: &AttentionPrecision,
    ) -> Vec<SampledKey> {
        self.check_sample(dout, precision);
        let (case, group) = (&self.case, self.case.group());
        let start = case.kv_start([batch, head * group, 0], 0);
        let norms = |tensor: &[f64]| -> Vec<f64> {
            let rows = tensor[start..].chunks_exact(case.head_dim).take(case.seq_kv);
            rows.map(norm).collect()
        };
        let (k_norms, v_norms) = (norms(self.k), norms(self.v));
        let sees_some = |i: usize| keys.iter().any(|key| case.keys(i).contains(key));
        let members = head * group..(head + 1) * group;
        let rows: Vec<_> = members
            .flat_map(|h| (0..case.seq_q).map(move |i| [batch, h, i]))
            .filter(|[_, _, i]| sees_some(*i))
            .collect();
        let sum_of = |rows: &[[usize; 3]]| {
            let mut sums = vec![[Sum::zeros(case.head_dim), Sum::zeros(case.head_dim)]; keys.len()];
            for at in rows.iter().copied() {
                let (q, dout_row) = (self.query(self.q, at), self.query(dout, at));
                let (q_norm, dout_norm) = (norm(q), norm(dout_row));
                let magnitudes = Norms { q_norm, dout_norm, k_norms: &k_norms, v_norms: &v_norms };
                let row = self.row(at, Rounding::NONE);
                let (errors, _) = self.row_errors(at, &row, &magnitudes, precision);
                let steps =
                    self.row_gradient_errors(at, &row, &errors, dout, &magnitudes, precision);
                let o = self.output(at, &row, Rounding::NONE);
                let of_delta = self.delta_rounding(at, &o, dout, precision);
                for (key, [dk, dv]) in keys.iter().zip(&mut sums) {
                    // Pairs are in the order of their keys.
                    let Ok(place) = row.pairs.binary_search_by_key(key, |pair| pair.j) else {
                        continue;
                    };
                    let (pair, error) = (&row.pairs[place], &errors[place]);
                    let [_, _, ds, ds_error] = steps[place];
                    let of_delta = pair.p * self.cap_slope(pair) * of_delta;
                    let ds = Factor::stored([ds, ds_error], precision).also_rounded(of_delta);
                    dk.add(ds.scaled(case.scale()), q);
                    let weight_error = pair.weight * error.stored + precision.counted_least();
                    dv.add(Factor::stored([pair.weight, weight_error], precision), dout_row);
                }
            }
            sums
        };
        let threads = thread::available_parallelism().map_or(1, NonZero::get);
        let chunk = rows.len().div_ceil(threads).max(1);
        let mut sums = sum_of(&[]);
        thread::scope(|scope| {
            let parts: Vec<_> =
                rows.chunks(chunk).map(|rows| scope.spawn(move || sum_of(rows))).collect();
            for part in parts {
                let part = part.join().expect("sums do not panic");
                for ([dk, dv], [dk_part, dv_part]) in sums.iter_mut().zip(&part) {
                    dk.merge(dk_part);
                    dv.merge(dv_part);
                }
            }
        });
        let terms = group * case.seq_q;
        sums.iter()
            .map(|[dk, dv]| SampledKey {
                dk: dk.sampled(precision, terms),
                dv: dv.sampled(precision, terms),
            })
            .collect()
    }

    /// The root of the sum of squares of what storing the output `o` of a query moves its delta by, which is the
    /// product of `o`, as it is stored, with its gradient.
    fn delta_rounding(
        &self,
        at: [usize; 3],
        o: &[f64],
        dout: &[f64],
        precision: &AttentionPrecision,
    ) -> f64 {
        let elements = o.iter().zip(self.query(dout, at));
        norm(&elements.map(|(o, dout)| precision.rounding(*o) * dout).collect::<Vec<f64>>())
    }

    fn check_sample(&self, dout: &[f64], precision: &AttentionPrecision) {
        self.check();
        assert_eq!(dout.len(), self.case.q_len(), "dout of {} differs in length", self.case);
        let counts = precision.roundings != Roundings::Naive;
        assert!(counts, "roundings of samples are counted, not those of the naive computation");
    }
}

/// What a row is multiplied by.
#[derive(Clone, Copy)]
struct Factor {
    value: f64,
    /// How far off it may be.
    error: f64,
    /// How far off it may be because it is stored.
    rounding: f64,
}

impl Factor {
    /// One that is rounded to storage as it is.
    fn stored([value, error]: [f64; 2], precision: &AttentionPrecision) -> Self {
        Self { value, error, rounding: precision.rounding(value) }
    }

    /// With another error of rounding, independent of its own.
    fn also_rounded(self, other: f64) -> Self {
        Self { rounding: self.rounding.hypot(other), ..self }
    }

    /// Times what f32 multiplies the sum by.
    fn scaled(self, scale: f64) -> Self {
        let size = scale.abs();
        Self { value: scale * self.value, error: size * self.error, rounding: size * self.rounding }
    }
}

impl AttentionPrecision {
    /// The largest error of rounding a number near `x` to storage: half a unit of its last place, of which
    /// the smallest is that of subnormal numbers, but no more than `x`, because zero is as near. NaN unless
    /// `x` is finite, and nothing of f32.
    fn rounding(&self, x: f64) -> f64 {
        let storage = self.product.out;
        if !x.is_finite() {
            return f64::NAN;
        }
        if storage == Storage::F32 {
            return 0.0;
        }
        (storage.unit_roundoff() * x.abs()).max(self.counted_least()).min(x.abs())
    }
}

/// A row that is a sum of rows with factors.
#[derive(Clone)]
struct Sum {
    values: Vec<f64>,
    /// What errors of the factors move it by.
    moved: Vec<f64>,
    /// The sum of the terms' magnitudes.
    magnitudes: Vec<f64>,
    /// The sum of the squares of the terms' errors of rounding their factors.
    roundings: Vec<f64>,
}

impl Sum {
    fn zeros(head_dim: usize) -> Self {
        let zeros = || vec![0.0; head_dim];
        Self { values: zeros(), moved: zeros(), magnitudes: zeros(), roundings: zeros() }
    }

    fn add(&mut self, Factor { value, error, rounding }: Factor, row: &[f64]) {
        add_scaled(&mut self.values, value, row);
        let row = absolute(row);
        add_scaled(&mut self.moved, error, &row);
        add_scaled(&mut self.magnitudes, value.abs() + error, &row);
        self.roundings.iter_mut().zip(&row).for_each(|(sum, x)| *sum += (rounding * x).powi(2));
    }

    fn merge(&mut self, other: &Self) {
        add_scaled(&mut self.values, 1.0, &other.values);
        add_scaled(&mut self.moved, 1.0, &other.moved);
        add_scaled(&mut self.magnitudes, 1.0, &other.magnitudes);
        add_scaled(&mut self.roundings, 1.0, &other.roundings);
    }

    fn deviations(&self, precision: &AttentionPrecision) -> Vec<f64> {
        let elements = self.values.iter().zip(&self.roundings);
        elements.map(|(y, factors)| (factors + precision.rounding(*y).powi(2)).sqrt()).collect()
    }

    fn sampled(&self, precision: &AttentionPrecision, terms: usize) -> Sampled {
        let sums = precision.sums(precision.product.out);
        let elements = self.values.iter().zip(&self.moved).zip(&self.magnitudes);
        let bounds = elements
            .map(|((y, moved), magnitude)| moved + sums.bound(y.abs() + moved, *magnitude, terms));
        Sampled {
            values: self.values.clone(),
            bounds: bounds.collect(),
            deviations: self.deviations(precision),
        }
    }
}

/// No sum of the magnitudes of products is above the product of both rows' lengths (Cauchy and Schwarz).
struct Norms<'a> {
    q_norm: f64,
    dout_norm: f64,
    k_norms: &'a [f64],
    v_norms: &'a [f64],
}

impl Magnitudes for Norms<'_> {
    fn of_score(&self, j: usize) -> f64 {
        self.q_norm * self.k_norms[j]
    }

    fn of_gradient(&self, j: usize) -> f64 {
        self.dout_norm * self.v_norms[j]
    }
}

fn norm(row: &[f64]) -> f64 {
    row.iter().map(|x| x * x).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        attention::{AttentionInputs, cases},
        matmul::MatmulPrecision,
        tolerance::compare,
    };

    fn near(actual: &[f64], expected: &[f64], what: &str) {
        let bounds: Vec<_> = expected.iter().map(|e| 1e-12 * (1.0 + e.abs())).collect();
        compare(actual, expected, &bounds).unwrap_or_else(|error| panic!("{what}: {error}"));
    }

    #[test]
    fn a_rounding_is_half_a_unit_of_the_last_place_and_no_more_than_the_number() {
        let counted = |storage| {
            let product = MatmulPrecision::tensor_core(storage);
            AttentionPrecision::cuda(product).with_roundings(Roundings::Counted)
        };
        let f16 = counted(Storage::F16);
        let power = |exponent| 2f64.powi(exponent);
        for (x, rounding) in [
            (-1.0, power(-11)),
            (power(-14), power(-25)),
            (-power(-20), power(-25)),
            (power(-30), power(-30)),
            (0.0, 0.0),
        ] {
            assert_eq!(f16.rounding(x), rounding, "{x}");
            assert!((Storage::F16.round(1.3 * x) - 1.3 * x).abs() <= f16.rounding(1.3 * x), "{x}");
        }
        assert_eq!(counted(Storage::Bf16).rounding(power(-30)), power(-38));
        assert_eq!(counted(Storage::F32).rounding(1.0), 0.0);
        assert!(f16.rounding(f64::NAN).is_nan() && f16.rounding(f64::INFINITY).is_nan());
    }

    #[test]
    fn samples_are_the_elements_of_the_whole_and_bounds_not_below_theirs() {
        let product = MatmulPrecision::tensor_core(Storage::Bf16);
        let precision = AttentionPrecision::cuda(product).with_roundings(Roundings::Counted);
        for case in cases::small() {
            let inputs = AttentionInputs::generate(&case, 9, Storage::Bf16);
            let (attention, dout) = (inputs.attention(case), &inputs.dout);
            let (forward, backward) = (attention.forward(), attention.backward(dout));
            let forward_bounds = attention.forward_bounds(&forward, &precision);
            let bounds = attention.backward_bounds(&backward, dout, &precision);
            let d = case.head_dim;
            for (index, at) in case.rows().enumerate().filter(|(index, _)| index % 7 == 0) {
                let SampledRow { o, lse, dq } = attention.sampled_row(at, dout, &precision);
                let elements = index * d..(index + 1) * d;
                near(&o.values, &forward.o[elements.clone()], case.name);
                near(&o.bounds, &forward_bounds.o[elements.clone()], case.name);
                near(&lse.values, &forward.lse[index..=index], case.name);
                near(&lse.bounds, &forward_bounds.lse[index..=index], case.name);
                near(&dq.values, &backward.dq[elements.clone()], case.name);
                near(&dq.bounds, &bounds.dq[elements], case.name);
            }
            let keys: Vec<_> = (0..case.seq_kv).step_by(5).collect();
            let (batch, head) = (case.batch - 1, case.heads_kv - 1);
            let sampled = attention.sampled_keys([batch, head], &keys, dout, &precision);
            for (key, SampledKey { dk, dv }) in keys.iter().zip(sampled) {
                let start = ((batch * case.heads_kv + head) * case.seq_kv + key) * d;
                for (sample, values, bounds) in
                    [(dk, &backward.dk, &bounds.dk), (dv, &backward.dv, &bounds.dv)]
                {
                    near(&sample.values, &values[start..start + d], case.name);
                    let exact = bounds[start..start + d].iter();
                    let within =
                        |(b, e): (&f64, &f64)| *e <= b * (1.0 + 1e-12) && *b <= 1.5 * e + 1e-9;
                    assert!(sample.bounds.iter().zip(exact).all(within), "{case} {key}");
                }
            }
        }
    }
}
