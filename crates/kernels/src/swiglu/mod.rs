//! `SwiGLU`, a linear unit that another one opens and closes, and its gradients.
//!
//! ```text
//! forward:   y   = silu(g) * u,                  silu(g) = g s,      s = 1 / (1 + exp(-g))
//! backward:  dg  = dy * u * (s + g s (1 - s))
//!            du  = dy * silu(g)
//! ```
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | g (gate), u (up), y, dy, dg, du | any, `elements` in all | contiguous | f32, f16 or bf16, all the same |
//!
//! Every element is widened to f32, computed there, and rounded once; of 16 bits, by a power of two and a reciprocal
//! that are off by few units in the last place of f32. Saved for backward: g and u, which the
//! linear layers behind them keep alive anyway; s is computed again. Outputs are overwritten, never
//! accumulated into. Forward moves three tensors, backward five, each in one pass.
//!
//! Where y or the gradients are rounded to 8 bits next, their largest [magnitudes](crate::magnitude) come with them.
//!
//! A gate of minus infinity gives NaN, as the product of it and zero.
//!
//! Source: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202, equation 6, without the products.

mod element;
mod launch;
pub mod variants;

pub use launch::{
    SwigluGradients, swiglu_backward, swiglu_backward_watched, swiglu_forward,
    swiglu_forward_watched,
};
pub(crate) use variants::variants;
