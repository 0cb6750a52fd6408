//! Scaled dot-product attention, forward and backward, and how far off a device may be.
//!
//! For each batch, query head `h` and its key/value head `h / (heads_q / heads_kv)`:
//!
//! ```text
//! s_ij     = scale q_i . k_j
//! c_ij     = cap tanh(s_ij / cap)                 with a softcap, else s_ij
//! x_ij     = c_ij + bias_ij
//! lse_i    = ln sum_j exp(x_ij)                   over the visible j
//! p_ij     = exp(x_ij - lse_i)                    0 where j is not visible
//! w_ij     = p_ij keep_ij / (1 - rate)            with dropout, else p_ij
//! o_i      = sum_j w_ij v_j
//!
//! dv_j     = sum_i w_ij dout_i
//! dp_ij    = keep_ij / (1 - rate) dout_i . v_j
//! delta_i  = dout_i . o_i
//! dx_ij    = p_ij (dp_ij - delta_i)
//! dbias    = dx, summed over the dimensions in which the bias has length 1
//! ds_ij    = dx_ij (1 - (c_ij / cap)^2)
//! dq_i     = scale sum_j ds_ij k_j
//! dk_j     = scale sum_i ds_ij q_i
//! ```
//!
//! `dk` and `dv` also sum over the query heads that share a key/value head.
//!
//! | tensor | shape |
//! |---|---|
//! | `q`, `o`, `dout`, `dq` | `[batch, heads_q, seq_q, head_dim]` |
//! | `k`, `v`, `dk`, `dv` | `[batch, heads_kv, seq_kv, head_dim]` |
//! | `lse` | `[batch, heads_q, seq_q]` |
//! | mask, bias, `dbias` | one of [`PairShape`] |
//!
//! All are contiguous and row-major. A mask is true where a pair is left out, as Burn has it.
//! Causal masks and windows are aligned bottom-right: the last query sees the last key. A row that
//! sees nothing has an output of zero, an `lse` of minus infinity, and passes no gradient on.
//!
//! | module | gives |
//! |---|---|
//! | [`cases`] | the catalogue, which tests and benches share |
//! | [`dropout`] | which pairs dropout keeps: the same ones on every device |

mod backward;
mod bounds;
pub mod cases;
pub mod dropout;
mod forward;
mod inputs;
mod packed;
mod problem;
mod rounding;
mod sampled;

pub use bounds::{AttentionPrecision, Roundings};
pub use dropout::Dropout;
pub use inputs::AttentionInputs;
pub use packed::{PackedAttention, PackedSequence};
pub use problem::{AttentionCase, AttentionOptions, PairShape, Window};
pub use sampled::{Sampled, SampledKey, SampledRow};

use crate::matmul::MatmulPrecision;
use rounding::Rounding;

/// Attention with its inputs.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Sizes and options.
    pub case: AttentionCase,
    /// Queries.
    pub q: &'a [f64],
    /// Keys.
    pub k: &'a [f64],
    /// Values.
    pub v: &'a [f64],
    /// True where a pair is left out; in the shape that the options say.
    pub mask: Option<&'a [bool]>,
    /// What is added to the scores; in the shape that the options say.
    pub bias: Option<&'a [f64]>,
    /// What dropout counts batches from: 0, or the number of a sequence that is computed alone.
    pub first_batch: usize,
}

/// What forward computes, or the bounds of it.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionForward {
    /// The output.
    pub o: Vec<f64>,
    /// Logarithms of the sums of exponentials, for backward. Dropout does not change them.
    pub lse: Vec<f64>,
}

/// What backward computes, or the bounds of it.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionGradients {
    /// Of the queries.
    pub dq: Vec<f64>,
    /// Of the keys.
    pub dk: Vec<f64>,
    /// Of the values.
    pub dv: Vec<f64>,
    /// Of the bias, where there is one, in its shape.
    pub dbias: Option<Vec<f64>>,
}

impl Attention<'_> {
    /// `o` and `lse`.
    ///
    /// # Panics
    ///
    /// When the case makes no sense, or a slice has another length than its shape.
    pub fn forward(&self) -> AttentionForward {
        self.forward_rounded(Rounding::NONE)
    }

    /// The gradients, given that of `o`.
    ///
    /// # Panics
    ///
    /// When the case makes no sense, or a slice has another length than its shape.
    pub fn backward(&self, dout: &[f64]) -> AttentionGradients {
        self.backward_rounded(dout, Rounding::NONE)
    }

    /// Forward as a program of one tensor operation per line has it, each result rounded to the
    /// product's type of output: the scores after scaling, after the cap and after the bias, `p`,
    /// `w` and `o`. Operands of products lose the bits that the product does not take. Sums are
    /// exact, so the errors are those of storing and multiplying alone.
    ///
    /// # Panics
    ///
    /// When the case makes no sense, or a slice has another length than its shape.
    pub fn naive_forward(&self, product: &MatmulPrecision) -> AttentionForward {
        self.forward_rounded(Rounding::of(product))
    }

    /// Backward in the same way: `dp`, `dx`, `ds` and the gradients are rounded, and `delta` is
    /// computed from the rounded `o`, which is what forward saved.
    ///
    /// # Panics
    ///
    /// When the case makes no sense, or a slice has another length than its shape.
    pub fn naive_backward(&self, dout: &[f64], product: &MatmulPrecision) -> AttentionGradients {
        self.backward_rounded(dout, Rounding::of(product))
    }

    fn check(&self) {
        let case = &self.case;
        case.check();
        let pairs = |shape: Option<PairShape>| shape.map(|shape| case.pair_len(shape));
        assert_eq!(self.q.len(), case.q_len(), "q of {case} differs in length");
        assert_eq!(self.k.len(), case.kv_len(), "k of {case} differs in length");
        assert_eq!(self.v.len(), case.kv_len(), "v of {case} differs in length");
        let mask = self.mask.map(<[bool]>::len);
        assert_eq!(mask, pairs(case.options.mask), "the mask of {case} differs in length");
        let bias = self.bias.map(<[f64]>::len);
        assert_eq!(bias, pairs(case.options.bias), "the bias of {case} differs in length");
    }

    /// The bias of a pair.
    fn bias_at(&self, at: [usize; 3], j: usize) -> f64 {
        let shaped = self.bias.zip(self.case.options.bias);
        shaped.map_or(0.0, |(bias, shape)| bias[self.case.pair_index(shape, at, j)])
    }

    /// Row `at` of the queries, or of a tensor of their shape.
    fn query<'t>(&self, q: &'t [f64], at: [usize; 3]) -> &'t [f64] {
        let start = self.case.q_start(at);
        &q[start..start + self.case.head_dim]
    }

    /// Row `j` of the keys or values that the query at `at` attends to.
    fn key<'t>(&self, k: &'t [f64], at: [usize; 3], j: usize) -> &'t [f64] {
        let start = self.case.kv_start(at, j);
        &k[start..start + self.case.head_dim]
    }
}

/// Adds `factor` times `x` to `y`.
fn add_scaled(y: &mut [f64], factor: f64, x: &[f64]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += factor * x);
}

/// In eight sums, so that additions need not wait for each other.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (a, b) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f64 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a.zip(b) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests;
