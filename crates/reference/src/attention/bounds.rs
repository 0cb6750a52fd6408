//! How far off attention and its gradients may be.

pub(super) mod arithmetic;

use super::{
    Attention, AttentionForward, AttentionGradients, add_scaled,
    forward::{Pair, Row},
    rounding::Rounding,
};
use crate::{activation::FunctionErrors, matmul::MatmulPrecision, storage::Storage};
use arithmetic::ExactMagnitudes;

/// What a device computes attention in.
///
/// # The bound
///
/// `2 N + F + 2 u_out |y|`, where
///
/// - `N` is the largest error of the naive computation ([`Attention::naive_forward`] and
///   [`Attention::naive_backward`]) over the head of the batch that the element is in. A kernel
///   rounds other values than the naive computation does, at other places, so no element's error
///   follows from the naive error of the same element, which may be zero by luck. The rule, that of
///   the tests of `FlashAttention`, is one about the largest errors: at most twice that of the
///   naive computation in the same type. Where products take part of an operand's bits, as in TF32,
///   `N` is the larger of truncating and rounding operands. That of `lse` is of storing f32, for no
///   rounding of scores to a narrower type may enter it. Among the elements of a small
///   head, even the largest naive error may be small by luck: count roundings there.
/// - `F` is what f32 arithmetic adds in the worst case, as [`MatmulPrecision`] has it for sums, and
///   carried through the formulas to first order. In f16 and bf16 it is small beside `N`; in f32 it
///   is the bound, because there the naive computation with its exact sums hardly errs.
/// - `2 u_out |y|` is one ulp of the result.
///
/// `F`, with `e` the bound of a sum of products:
///
/// | value | error |
/// |---|---|
/// | `s` | `e` over `head_dim` products |
/// | `c` | that of `s`, as 1 is the cap's steepest slope, and `cap` times that of tanh |
/// | `x` | that of `c`, and roundings; with the relative error of exp, and of what takes its place, it is `X` |
/// | `lse` | the mean of `X` with the weights `p`, and the errors of the sum and of ln |
/// | `p`, `w` | relative: `R = exp(X + error of lse) - 1` |
/// | `o`, `dv` | the sum of `R w` times the other factor's magnitude, and `e` |
/// | `dp` | `e` over `head_dim` products |
/// | `delta` | the sum of `R p` times the magnitude of `dp`, which is what `o` carries; `e` twice |
/// | `dx` | `p` times the errors of `dp` and `delta`, and `R` times `dx` itself |
/// | `ds` | that of `dx`, and `dx` times the error of the cap's slope |
/// | `dq`, `dk` | the sum of the error of `ds` times the other factor's magnitude, and `e` |
/// | `dbias` | the sum of the error of `dx`, and that of the additions |
///
/// The factor 2 that `e` has also covers what an online softmax does to its sums: it multiplies
/// them by a rounded exponential once for each tile of keys, of 16 or more, which adds less than
/// one rounding for each key.
///
/// Under causality, the largest error is that of rows which see few keys, so a single key that one
/// late row sees can hide in the bound; a tile of keys cannot.
///
/// With [`Roundings::Counted`] there is no `N`. What a kernel rounds to storage is counted instead,
/// each rounding in the worst case: `w` and `ds` where they are multiplied, and `o` where `delta` is
/// computed from it. Each product has the errors of its operands, where it takes part of their bits. With `u` the roundoff of storage and `t` half the distance of its smallest numbers:
///
/// | value | error besides |
/// |---|---|
/// | `w` | `u w`, and `t` |
/// | `delta` | the sum of `u abs(o) + t` times the magnitude of `dout` |
/// | `ds` | `u abs(ds)`, and `t` |
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionPrecision {
    /// Of the products. Its `out` is the type in which `q`, `k`, `v`, `o` and the gradients are
    /// stored and in which `p` and `ds` are multiplied.
    pub product: MatmulPrecision,
    /// Of a softcap's tanh.
    pub functions: FunctionErrors,
    /// Relative error of a weight's exponential besides that of f32's: of a polynomial in its place.
    pub exponentials: f64,
    /// How roundings to storage enter the bound.
    pub roundings: Roundings,
}

/// How roundings to storage enter the bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Roundings {
    /// By the errors of the naive computation.
    Naive,
    /// Each where a kernel does it.
    Counted,
    /// As [`Counted`](Self::Counted), of inputs whose scores are numbers of f32 in whatever order
    /// their terms are added: a kernel then has no error before the difference of two scores.
    CountedBehindExactScores,
}

type Tensor = fn(&AttentionGradients) -> &[f64];

impl AttentionPrecision {
    /// A kernel on CUDA with that product.
    pub fn cuda(product: MatmulPrecision) -> Self {
        Self {
            product,
            functions: FunctionErrors::CUDA,
            exponentials: 0.0,
            roundings: Roundings::Naive,
        }
    }

    /// A kernel on any runtime, without tensor cores.
    pub fn portable(out: Storage) -> Self {
        Self {
            product: MatmulPrecision::exact(out),
            functions: FunctionErrors::PORTABLE,
            exponentials: 0.0,
            roundings: Roundings::Naive,
        }
    }

    /// The same, of weights some of whose exponentials are off by so much more, relatively.
    pub fn with_exponentials(self, exponentials: f64) -> Self {
        Self { exponentials, ..self }
    }

    /// The same with another way to count roundings.
    pub fn with_roundings(self, roundings: Roundings) -> Self {
        Self { roundings, ..self }
    }

    /// Relative error of rounding to storage, where each is counted.
    fn counted_roundoff(&self) -> f64 {
        match self.roundings {
            Roundings::Naive => 0.0,
            _ => self.product.out.unit_roundoff(),
        }
    }

    /// Absolute error of rounding numbers near zero, where each is counted. Tensor cores take
    /// subnormal numbers of f16 as they are.
    pub(super) fn counted_least(&self) -> f64 {
        match (self.roundings, self.product.out) {
            (Roundings::Naive, _) => 0.0,
            (_, Storage::F16) => 2f64.powi(-25),
            (_, storage) => storage.underflow(),
        }
    }

    /// The naive computations that the bound is measured by.
    fn naive_roundings(&self, out: Storage) -> Vec<Rounding> {
        match self.roundings {
            Roundings::Naive => Rounding::all_of(&self.product.with_out(out)),
            _ => Vec::new(),
        }
    }

    /// The product's sums, without what becomes of operands where that is in the naive computation.
    pub(super) fn sums(&self, out: Storage) -> MatmulPrecision {
        let operand_error = match self.roundings {
            Roundings::Naive => 0.0,
            _ => self.product.operand_error,
        };
        MatmulPrecision { operand_error, out, ..self.product }
    }
}

impl Attention<'_> {
    /// How far off `forward`, which is this attention's, may be.
    ///
    /// # Panics
    ///
    /// When the case makes no sense, or a slice has another length than its shape.
    pub fn forward_bounds(
        &self,
        forward: &AttentionForward,
        precision: &AttentionPrecision,
    ) -> AttentionForward {
        let (case, out) = (&self.case, precision.product.out);
        let naive = |out| {
            let roundings = precision.naive_roundings(out).into_iter();
            roundings.map(|rounding| self.forward_rounded(rounding)).collect::<Vec<_>>()
        };
        let mut o =
            naive_term(&naive(out), forward, |forward| &forward.o, case.seq_q * case.head_dim);
        let mut lse = naive_term(&naive(Storage::F32), forward, |forward| &forward.lse, case.seq_q);
        for (index, at) in case.rows().enumerate() {
            let row = self.row(at, Rounding::NONE);
            let start = case.q_start(at);
            let values = &forward.o[start..start + case.head_dim];
            let (bounds, lse_error) = self.row_bounds(at, &row, values, precision);
            lse[index] += lse_error;
            o[start..start + case.head_dim].iter_mut().zip(bounds).for_each(|(o, b)| *o += b);
        }
        AttentionForward { o, lse }
    }

    /// How far off a row of the output, which is `o`, and its `lse` may be but for the naive term.
    pub(super) fn row_bounds(
        &self,
        at: [usize; 3],
        row: &Row,
        o: &[f64],
        precision: &AttentionPrecision,
    ) -> (Vec<f64>, f64) {
        let head_dim = self.case.head_dim;
        let exact = ExactMagnitudes { attention: self, at, dout: &[] };
        let (errors, lse) = self.row_errors(at, row, &exact, precision);
        let (mut moved, mut magnitudes) = (vec![0.0; head_dim], vec![0.0; head_dim]);
        for (pair, error) in row.pairs.iter().zip(&errors) {
            let v = absolute(self.key(self.v, at, pair.j));
            let off = pair.weight * error.stored + precision.counted_least() * pair.keep;
            add_scaled(&mut moved, off, &v);
            add_scaled(&mut magnitudes, pair.weight * (1.0 + error.stored), &v);
        }
        let sums = precision.sums(precision.product.out);
        let bound = |d: usize| {
            let y = o[d].abs() + moved[d];
            moved[d] + sums.bound(y, magnitudes[d], row.pairs.len())
        };
        ((0..head_dim).map(bound).collect(), lse)
    }

    /// How far off `gradients`, which are this attention's and those of `dout`, may be, where the
    /// device was given its own `o` and `lse`.
    ///
    /// # Panics
    ///
    /// When the case makes no sense, or a slice has another length than its shape.
    pub fn backward_bounds(
        &self,
        gradients: &AttentionGradients,
        dout: &[f64],
        precision: &AttentionPrecision,
    ) -> AttentionGradients {
        let (case, out) = (&self.case, precision.product.out);
        let roundings = precision.naive_roundings(out).into_iter();
        let naive: Vec<_> = roundings.map(|r| self.backward_rounded(dout, r)).collect();
        let (mut moved, mut magnitudes) =
            (AttentionGradients::zeros(case), AttentionGradients::zeros(case));
        let (q, k) = (absolute(self.q), absolute(self.k));
        let mut positive = Attention { q: &q, k: &k, ..*self };
        positive.case.options.scale = Some(case.scale().abs());
        for at in case.rows() {
            let row = self.row(at, Rounding::NONE);
            let exact = ExactMagnitudes { attention: self, at, dout };
            let (errors, _) = self.row_errors(at, &row, &exact, precision);
            let dout_magnitude = absolute(self.query(dout, at));
            let steps = self.row_gradient_errors(at, &row, &errors, dout, &exact, precision);
            for ((pair, error), [dx, dx_error, ds, ds_error]) in
                row.pairs.iter().zip(&errors).zip(steps)
            {
                let off = pair.weight * error.stored + precision.counted_least();
                let off = Pair { weight: off, ..*pair };
                moved.add(&positive, at, &off, ds_error, dx_error, &dout_magnitude);
                let largest = Pair { weight: pair.weight * (1.0 + error.stored), ..*pair };
                let (ds, dx) = (ds.abs() + ds_error, dx.abs() + dx_error);
                magnitudes.add(&positive, at, &largest, ds, dx, &dout_magnitude);
            }
        }
        let bounds = |sums: MatmulPrecision, tensor: Tensor, slice: usize, terms: usize| {
            let [values, moved, magnitudes] = [gradients, &moved, &magnitudes].map(tensor);
            let mut bounds = naive_term(&naive, gradients, tensor, slice);
            for (i, bound) in bounds.iter_mut().enumerate() {
                let y = values[i].abs() + moved[i];
                *bound += moved[i] + sums.bound(y, magnitudes[i], terms);
            }
            bounds
        };
        let (head_q, head_kv) = (case.seq_q * case.head_dim, case.seq_kv * case.head_dim);
        let (sums, shared_rows) = (precision.sums(out), case.group() * case.seq_q);
        AttentionGradients {
            dq: bounds(sums, |g| &g.dq, head_q, case.seq_kv),
            dk: bounds(sums, |g| &g.dk, head_kv, shared_rows),
            dv: bounds(sums, |g| &g.dv, head_kv, shared_rows),
            dbias: case.options.bias.map(|shape| {
                let [_, _, rows, keys] = case.pair_dims(shape);
                let terms = case.lse_len() * case.seq_kv / case.pair_len(shape).max(1);
                // Sums of values that are there already, which no tensor core computes.
                let sums = MatmulPrecision::exact(out);
                bounds(sums, |g| g.dbias.as_deref().unwrap_or_default(), rows * keys, terms)
            }),
        }
    }
}

/// Twice the largest error of the naive computations in each slice of that length.
fn naive_term<T>(naive: &[T], exact: &T, tensor: fn(&T) -> &[f64], slice: usize) -> Vec<f64> {
    let (exact, slice) = (tensor(exact), slice.max(1));
    let mut term = vec![0.0; exact.len()];
    for naive in naive {
        let naive = tensor(naive);
        assert_eq!(naive.len(), exact.len(), "results of another case");
        for (start, term) in term.chunks_mut(slice).enumerate() {
            let elements = start * slice..start * slice + term.len();
            let errors = naive[elements.clone()].iter().zip(&exact[elements]);
            let worst = errors.map(|(n, e)| 2.0 * (n - e).abs()).fold(term[0], f64::max);
            term.fill(worst);
        }
    }
    term
}

pub(super) fn absolute(values: &[f64]) -> Vec<f64> {
    values.iter().map(|value| value.abs()).collect()
}

#[cfg(test)]
mod tests;
