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
//!
//! Every element is widened to f32, computed there, and rounded once. Saved for backward: x.
//! Outputs are overwritten, never accumulated into.
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

pub use blueprint::GeluBlueprint;
pub use launch::{gelu_backward, gelu_forward};
pub use problem::GeluProblem;

#[cfg(feature = "cuda-source")]
pub(crate) use {backward::gelu_backward_kernel, forward::gelu_forward_kernel};
