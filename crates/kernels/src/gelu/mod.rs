//! GELU, exact (erf) form, and its gradient.
//!
//! ```text
//! forward:   y  = x * Phi(x),                      Phi(x) = (1 + erf(x / sqrt 2)) / 2
//! backward:  dx = dy * (Phi(x) + x * phi(x)),      phi(x) = exp(-x^2 / 2) / sqrt(2 pi)
//! ```
//!
//! The gradient is the derivative of the forward. (Burn's own backward differentiates the tanh
//! approximation of an erf forward.)
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | x, y, dy, dx | any, `elements` in all | contiguous | f32, f16 or bf16, all the same |
//! | db | columns | contiguous | that of x |
//!
//! Every element is widened to f32, computed there, and rounded once. Saved for backward: x.
//! Outputs are overwritten, never accumulated into.
//!
//! # With the gradient of a bias
//!
//! Where x is the output of a linear layer, dx of `rows` by `columns` is summed once more:
//!
//! ```text
//! db[c] = sum_r dx[r, c]
//! ```
//!
//! [`gelu_backward_sum`] makes both in one kernel, which does not read dx again. Its terms are the f32
//! values, before they are rounded to be dx. Its cubes have the rows and columns that those of a
//! [column sum](crate::column_sum) have, and add up as they do: with more than one split, a cube's sums
//! of its columns go to an f32 workspace `[splits, columns]`, row `s` of which is the sum over the
//! groups of 8 rows `s, s + splits, ..`; the second launch of the column sum adds these rows in order.
//! The same input gives the same bits each time.
//!
//! Traffic is x, dy and dx once, and 8 bytes a column and split: for 8192 by 3072 in bf16 on 132
//! multiprocessors 44 splits, 1 MB beside 151 MB. What one kernel moves less is the 50 MB of dx.
//!
//! Error of an element: the absolute error of the device's erf, at most 2e-7 for the portable
//! approximation (Abramowitz and Stegun 7.1.26), times |x| / 2, plus the rounding of the result.
//!
//! Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415, section 2.

mod backward;
mod blueprint;
mod forward;
mod launch;
mod problem;

pub use blueprint::{GeluBlueprint, GeluSumBlueprint};
pub use launch::{
    GeluGradients, gelu_backward, gelu_backward_sum, gelu_backward_sum_with, gelu_forward,
};
pub use problem::GeluProblem;

#[cfg(feature = "cuda-source")]
pub(crate) use {
    backward::{gelu_backward_kernel, gelu_backward_sum_kernel},
    forward::gelu_forward_kernel,
};
