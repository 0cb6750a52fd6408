//! The sum of squares of many tensors, for their joint norm: each tensor is read once, eight in a launch,
//! and adds to the same few sums, which a last sum joins.
//!
//! ```text
//! sums[c] += sum of x[i]^2 over the elements of cube c           norm = sqrt(sum of sums)
//! ```
//!
//! | tensor | shape | dtype |
//! |---|---|---|
//! | x | n | f32, f16 or bf16 |
//! | sums, in and out | [`PLACES`] | f32 |
//!
//! Squares and sums are in f32. A cube owns its place, so there are no atomics and results repeat to the
//! bit. Infinite and missing numbers, and squares beyond f32, come out as such.

mod blueprint;
mod forward;
mod launch;

#[cfg(feature = "cuda-source")]
pub(crate) use blueprint::UNITS;
pub use blueprint::{MOST_TENSORS, PLACES, SquareSumBlueprint};
#[cfg(feature = "cuda-source")]
pub(crate) use forward::{CountsCompilationArg, square_sum_kernel};
pub use launch::square_sum;
