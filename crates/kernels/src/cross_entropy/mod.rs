//! Softmax cross-entropy over large vocabularies, and its gradient.
//!
//! With logits `x[r, :]` of `c` classes, target `t[r]` and label smoothing `eps`:
//!
//! ```text
//! forward:   lse[r]     = log sum_j exp(x[r, j])
//!            loss[r]    = (1 - eps) (lse[r] - x[r, t]) + eps (lse[r] - mean_j x[r, j])
//! reduction: y          = sum_r loss[r] / n,        n the rows that count
//! backward:  dx[r, j]   = g[r] (exp(x[r, j] - lse[r]) - eps / c - (1 - eps) [j == t[r]])
//! ```
//!
//! `g[r]` is the gradient of `loss[r]`. After a reduction it is the gradient of the mean or sum, times the `factor`
//! that the reduction leaves: `1 / n` or 1.
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | logits, dlogits | rows, classes | rows `row_stride` elements apart, both the same | f32, f16 or bf16 |
//! | targets | rows | contiguous | i32 |
//! | loss, lse | rows | contiguous | f32 |
//! | grad | rows, or 1 for all | contiguous | f32 |
//! | reduced loss, factor | 1 | | f32 |
//!
//! - A row whose target is `ignore_index` has loss 0 and gradient 0, whatever its logits hold, and does not count.
//! - A row with any other target below 0 or from `c` on has loss NaN and gradient NaN: a mistake shows, and nothing
//!   is read out of bounds.
//! - The mean of no rows is NaN.
//! - A logit of minus infinity leaves its class out, with gradient 0. A row of nothing else has loss and gradients
//!   NaN, and so has a row with plus infinity or NaN.
//!
//! # Precision
//!
//! Logits are widened to f32, everything is computed there, and dx is rounded once. The largest logit so far is
//! subtracted before the exponential, so no logit is too large.
//!
//! # Traffic
//!
//! The forward pass reads the logits once. A unit keeps the largest logit that it has met and the sum of exponentials
//! relative to it, and the units of a row meet at its end. The backward pass reads the logits once more and writes as
//! much, over them if nobody else holds their memory. There is no copy in f32. Saved for backward: logits, targets and
//! lse. [`cross_entropy_at_once`] does both at once: it reads the logits from memory once, and again from the cache.
//!
//! With an odd number of classes, such as GPT-2's 50257, rows begin anywhere between two vectors. The forward pass
//! reads whole vectors between the first and the last boundary within a row, and the elements at both ends one by one.
//! The backward pass gives a vector that two rows share to the first row, which computes both parts. So every store is
//! one of a whole vector by one unit.
//!
//! The same input gives the same bits each time: there are no atomics.
//!
//! Not served: logits that span 2^32 elements or nearly so.
//!
//! Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867,
//! algorithm 3; Szegedy et al., "Rethinking the Inception Architecture for Computer Vision",
//! arXiv:1512.00567, section 7, for label smoothing.

mod at_once;
mod at_once_launch;
mod backward;
mod blueprint;
mod forward;
mod launch;
mod problem;
mod reduce;
pub mod variants;

pub use at_once_launch::{CrossEntropyAtOnce, cross_entropy_at_once, cross_entropy_rescale};
pub use blueprint::CrossEntropyBlueprint;
pub use launch::{
    CrossEntropyOutput, Reduced, cross_entropy_backward, cross_entropy_forward,
    cross_entropy_forward_with, cross_entropy_reduce,
};
pub use problem::{CrossEntropyProblem, Reduction};
pub(crate) use variants::variants;

pub(crate) use {
    backward::ElementForm,
    forward::{Extent, Logits, join_row, nothing, see_row},
    launch::{RowNumbers, launch_elements, logits_of, row_cubes},
};
