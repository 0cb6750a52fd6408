//! Layer and RMS normalization of rows, and their gradients.
//!
//! With rows `x` of `width` elements, or `x = x + residual` where there is a residual:
//!
//! ```text
//! mean = sum(x) / width                                 0 for the RMS norm
//! rstd = 1 / sqrt(sum((x - mean)^2) / width + epsilon)
//! h    = (x - mean) rstd
//! y    = gamma h + beta                                 beta may be left out
//! ```
//!
//! Backward, with `g = gamma dy`, and the gradient `dsum` that reached the sum `x + residual` from elsewhere:
//!
//! ```text
//! dx     = rstd (g - sum(g) / width - h sum(g h) / width) + dsum      sum(g) is left out for RMS
//! dgamma = sum over rows of dy h                        dbeta = sum over rows of dy
//! ```
//!
//! With [dropout](crate::dropout) of the residual, `k[i] residual[i]` is added in its place, and its gradient is
//! `dresidual[i] = k[i] dx[i]`, which is written beside dx. The mask is drawn anew in both passes.
//!
//! A bias of the residual, that of the layer which made it, is added to its rows first, and
//! `dbias = sum over rows of dresidual`. The layer needs no pass over its output's gradient for that of its bias then.
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | x, residual, sum, y, dy, dsum, dx, dresidual | rows, width | contiguous | f32, f16 or bf16, all the same |
//! | gamma, beta, bias and their gradients | width | contiguous | f32, or that of x; all the same |
//! | mean, rstd | rows | contiguous | f32 |
//!
//! Everything is widened to f32 and computed there, and outputs are rounded once. The sum with a residual is rounded
//! to its type before it is normalized. So the result is that of two operations, and backward reads the numbers that
//! forward normalized. Saved for backward: x or the sum, mean, rstd and gamma. Outputs are overwritten.
//!
//! # For programs that changed nothing
//!
//! Burn's automatic differentiation keeps what each step of a norm makes: `x - mean`, `h`, the variance with epsilon and
//! its root. One launch writes these beside y, in the type of x, and the gradients are made of the first and the last.
//!
//! # One look at memory
//!
//! A row is loaded once, in vectors of up to 16 bytes, and stays in registers in its own type. Its units first add up
//! its mean, and then its variance around that mean, which loses no digits if the mean is large. A narrow row has a
//! plane to itself, whose units exchange sums without memory. A wider one has several planes, up to a cube, which meet
//! in shared memory. On devices without operations of planes all units meet there. Widths that no vector divides take
//! narrower loads, and units that have nothing left hold zeros.
//!
//! Backward, each cube works through many rows and keeps their sums of dgamma and dbeta in registers. At the end it
//! writes a row for each parameter, of `[parameters, cubes, width]` in f32, and a second launch adds these up in order. There are no atomic
//! operations, so the same input gives the same bits each time.
//!
//! Each tensor is moved once. The partial sums are 16 bytes a column and cube, and there are as many cubes as the
//! device holds at once.
//!
//! Without rows the parameters' gradients are zero. A row with a NaN or an infinity becomes all NaN. A row whose
//! squares exceed f32 is normalized to zeros.
//!
//! Where y or the residual's gradient is rounded to 8 bits next, its largest [magnitudes](crate::magnitude) come with it.
//!
//! Not served: rows beyond a cube's registers, which on devices with planes of 32 hold 24,576 elements
//! forward and 8192 backward. Without gamma [`group_norm`](crate::group_norm) serves these.
//!
//! Sources: Ba et al., "Layer Normalization", arXiv:1607.06450, section 3; Zhang and Sennrich, "Root
//! Mean Square Layer Normalization", arXiv:1910.07467, section 4.

mod backward;
mod blueprint;
mod forward;
mod launch;
mod problem;
mod row_sums;
pub mod variants;

pub(crate) use backward::{SUM_COLUMNS, layer_norm_parameters_kernel};
pub use blueprint::LayerNormBlueprint;
pub use launch::{
    LayerNormGradients, LayerNormInputs, LayerNormOutput, LayerNormParts, LayerNormSaved,
    LayerNormWanted, layer_norm_backward, layer_norm_backward_of_parts, layer_norm_forward,
    layer_norm_forward_with_parts,
};
pub use problem::{LayerNormProblem, Norm};
pub(crate) use variants::variants;
