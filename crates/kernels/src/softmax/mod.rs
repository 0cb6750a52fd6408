//! Softmax of rows, and its gradient; and the pieces of its logarithm, for programs whose steps, and so whatever is
//! kept between them, are those of Burn's autodiff.
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
//! `g[r]` is the gradient of `picked[r]`. The gradient of `x` is that of `shifted`, because the peak cancels in
//! every output.
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | x, dp | rows, classes | rows `row_stride` elements apart | f32, f16 or bf16 |
//! | shifted, e, p, y, dx | rows, classes | that of what they are made of | f32, f16 or bf16 |
//! | targets | rows | contiguous | i32 |
//! | peak, sum, log, picked, g | rows | contiguous | f32 |
//!
//! Elements are widened to f32, everything is computed there, and results are rounded once. Plus infinity and NaN
//! make the whole row NaN, and so does a row of nothing but minus infinity. If the target is no class, `picked` is
//! NaN, and nothing is taken off `dx`.
//!
//! [`softmax_sums`] reads the rows once. [`softmax_shifted`], [`log_softmax`] and [`picked_backward`] read them once
//! more and write as much. They write over their input if nobody else holds it and the type is the same.
//!
//! # Whole rows
//!
//! ```text
//! e[r, j]  = exp(shifted[r, j])
//! p[r, j]  = e[r, j] / sum[r]                              softmax
//! dx[r, j] = p[r, j] (dp[r, j] - sum_k dp[r, k] p[r, k])
//! ```
//!
//! [`softmax_rows`] reads a row once, in vectors of up to 16 bytes. It writes p or y, and shifted and e if asked
//! for. The row stays in registers while its units find its peak and add it up. The units of a plane exchange sums
//! without memory, and planes meet once, each with the sum relative to its own peak.
//!
//! A cube reads a row twice if its registers do not hold it (above 24,576 elements on devices with planes of 32).
//! Each unit then keeps the peak that it has met and the sum relative to it. [`softmax_rows_backward`] reads p or e,
//! and dp, in the same way: once, up to 16,384 elements. The same input gives the same bits each time.
//!
//! A [`RowMask`] gives elements of x another value on the way in, and elements of dx 0 on the way out. It is read where it
//! lies, one element at a time: rows of all heads share it, so that it comes from the caches.
//!
//! Vectors reach beyond a row's end if rows are apart by whole vectors and there is memory behind the last one. The
//! elements there are not counted, and may hold anything afterwards.
//!
//! # Pieces
//!
//! The device code of [`cross_entropy`](crate::cross_entropy) adds up the rows and goes through their elements. It
//! has the same sums, leaves out `shifted`, and names the sources.

mod blueprint;
mod forward;
mod launch;
mod problem;
mod row_mask;
mod rows_backward;
mod rows_forward;
mod rows_launch;
pub mod variants;

pub use blueprint::SoftmaxBlueprint;
pub use launch::{SoftmaxSums, log_softmax, picked_backward, softmax_shifted, softmax_sums};
pub use problem::SoftmaxProblem;
pub use row_mask::RowMask;
pub use rows_launch::{
    SoftmaxGradient, SoftmaxOutputs, SoftmaxRows, masked_softmax_rows, plan_backward, plan_forward,
    softmax_rows, softmax_rows_backward,
};
pub(crate) use variants::variants;
