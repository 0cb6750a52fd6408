//! GELU, exact (erf) form, and its gradient.
//!
//! ```text
//! forward:   y  = x * Phi(x),                      Phi(x) = (1 + erf(x / sqrt 2)) / 2
//! backward:  dx = dy * (Phi(x) + x * phi(x)),      phi(x) = exp(-x^2 / 2) / sqrt(2 pi)
//! ```
//!
//! The gradient is the derivative of the forward pass. (Burn's forward pass is the same, but its backward pass
//! differentiates the tanh approximation.)
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
//! If x is the output of a linear layer, the gradient of its bias is a sum of dx, `rows` by `columns`:
//!
//! ```text
//! db[c] = sum_r dx[r, c]
//! ```
//!
//! [`gelu_backward_sum`] makes both in one kernel, which does not read dx again. It adds up the f32 values, before
//! they are rounded to dx. Its cubes have the rows and columns of a [column sum](crate::column_sum), and add up in
//! the same way. With more than one split, a cube's sums go to an f32 workspace `[splits, columns]`. Row `s` of it
//! is the sum over the groups of 8 rows `s, s + splits, ..`, and the second launch of the column sum adds these rows
//! in order. The same input gives the same bits each time.
//!
//! It moves x, dy and dx once, and 8 bytes a column and split. For 8192 by 3072 in bf16 on 132 multiprocessors these
//! are 44 splits, 1 MB beside 151 MB. Two kernels would move dx, 50 MB, once more.
//!
//! # With a bias in front and dropout behind
//!
//! A [`GeluCall`] computes `y = dropout(gelu(x + bias))` in the same passes, and its gradients. The elements that are left
//! out are those of [`dropout`](crate::dropout), which would move y and dy once more, 201 MB in that example.
//!
//! # Precision
//!
//! Elements of f32 have the device's erf. Those of 16 bits have Phi and phi from one power of two, in half as many
//! instructions (Abramowitz and Stegun 7.1.26): with erf's own they would wait longer for arithmetic than for memory
//! on an H200. Error of an element: the absolute error of erf, 2.4e-7 of CUDA's and 1.2e-6 of the other with its f32
//! roundings, times |x| / 2, plus the rounding of the result.
//!
//! Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415, section 2.

mod backward;
mod blueprint;
mod forward;
mod launch;
mod normal;
pub mod variants;

pub use blueprint::GeluSumBlueprint;
pub use launch::{
    GeluCall, GeluGradients, gelu_backward, gelu_backward_sum, gelu_backward_sum_with,
    gelu_call_backward, gelu_call_backward_sum, gelu_call_forward, gelu_forward,
};
pub(crate) use variants::variants;
