//! Softmax of rows, and its gradient; and the pieces that its logarithm is made of where its steps are
//! given, and so what is kept of it: as Burn's autodiff has them.
//!
//! With rows `x[r, :]` of `c` classes and a target `t[r]` for each:
//!
//! ```text
//! peak[r]       = max_j x[r, j]
//! shifted[r, j] = x[r, j] - peak[r]
//! sum[r]        = sum_j exp(shifted[r, j])
//! y[r, j]       = shifted[r, j] - log sum[r]             the logarithm of softmax
//! picked[r]     = y[r, t[r]]
//! dx[r, j]      = g[r] ([j == t[r]] - exp(shifted[r, j]) / sum[r])
//! ```
//!
//! `g[r]` is the gradient of `picked[r]`. That of `x` is that of `shifted`: what moves the peak moves no
//! output.
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | x, dp | rows, classes | rows `row_stride` elements apart | f32, f16 or bf16 |
//! | shifted, e, p, y, dx | rows, classes | that of what they are made of | f32, f16 or bf16 |
//! | targets | rows | contiguous | i32 |
//! | peak, sum, log, picked, g | rows | contiguous | f32 |
//!
//! Elements are widened to f32 and everything is computed there; what is written is rounded once. Plus
//! infinity and NaN make the whole row NaN, as minus infinity in all of it does. `picked` is NaN where the
//! target is no class; `dx` has nothing taken off for it there.
//!
//! [`softmax_sums`] reads the rows once, [`softmax_shifted`] and [`log_softmax`] once more and write as
//! much; so does [`picked_backward`]. What is written lies in the memory of what is read where nobody else
//! holds that and the type is the same.
//!
//! # Whole rows
//!
//! ```text
//! e[r, j]  = exp(shifted[r, j])
//! p[r, j]  = e[r, j] / sum[r]                              softmax
//! dx[r, j] = p[r, j] (dp[r, j] - sum_k dp[r, k] p[r, k])
//! ```
//!
//! [`softmax_rows`] reads a row once, in vectors of up to 16 bytes, and writes p or y, and of shifted and e
//! what is asked for. The row stays in registers while its units find its peak and add it up: a plane's
//! exchange without memory, and planes meet once, each with the sum relative to its own peak. Rows that a
//! cube's registers do not hold (above 24,576 elements on devices with planes of 32) are read twice by the
//! same cube, each unit keeping the peak that it has met and the sum relative to it; the second time they
//! come from a cache, if that is large enough. [`softmax_rows_backward`] has p or e, and dp, in the same
//! way: each once, up to 16,384 elements. The same input gives the same bits each time.
//!
//! Vectors reach beyond a row's end where rows are apart by whole vectors and there is memory behind the
//! last one; what lies there is not counted, and what is written there is unspecified.
//!
//! # Pieces
//!
//! The rows are added up, and their elements gone through, by the device code of
//! [`cross_entropy`](crate::cross_entropy), where the sources are: it has the same sums, and leaves out
//! `shifted`.

mod blueprint;
mod forward;
mod launch;
mod problem;
mod rows_backward;
mod rows_forward;
mod rows_launch;

pub use blueprint::{Pass, SoftmaxBlueprint};
pub use launch::{SoftmaxSums, log_softmax, picked_backward, softmax_shifted, softmax_sums};
pub use problem::SoftmaxProblem;
pub use rows_launch::{
    SoftmaxOutputs, SoftmaxRows, plan_backward, plan_forward, softmax_rows, softmax_rows_backward,
};
#[cfg(feature = "cuda-source")]
pub(crate) use {
    forward::softmax_sums_kernel,
    rows_backward::softmax_rows_backward_kernel,
    rows_forward::{SoftmaxForm, softmax_rows_kernel},
};
