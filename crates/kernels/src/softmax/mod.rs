//! The pieces that the logarithm of softmax is made of where its steps are given, and so what is kept of
//! it: as Burn's autodiff has them.
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
//! | x | rows, classes | rows `row_stride` elements apart | f32, f16 or bf16 |
//! | shifted, y, dx | rows, classes | that of what they are made of | f32, f16 or bf16 |
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
//! The rows are added up, and their elements gone through, by the device code of
//! [`cross_entropy`](crate::cross_entropy), where the sources are: it has the same sums, and leaves out
//! `shifted`.

mod forward;
mod launch;
mod problem;

#[cfg(feature = "cuda-source")]
pub(crate) use forward::softmax_sums_kernel;
pub use launch::{SoftmaxSums, log_softmax, picked_backward, softmax_shifted, softmax_sums};
pub use problem::SoftmaxProblem;
