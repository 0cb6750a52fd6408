//! The sum of squares of many tensors, for their joint norm: each tensor is read once, 32 in a launch, and
//! adds to the same few sums, which a last sum joins.
//!
//! ```text
//! sums[c] += sum of x[i]^2 over the elements of cube c           norm = sqrt(sum of sums)
//! ```
//!
//! | tensor | shape | dtype |
//! |---|---|---|
//! | x | rows x columns, each tensor with its pitch | f32, f16 or bf16 |
//! | sums, in and out | [`PLACES`] | f32 |
//!
//! The cubes of a launch are divided among its tensors by what these have to read, so that each cube reads
//! of one alone, and none waits for one after another. A unit has four vectors on the way before it squares
//! any. Where vectors do not divide a row, its last one goes beyond its end, and what is there does not
//! count.
//!
//! Squares and sums are in f32. A cube owns its place, so there are no atomics and results repeat to the
//! bit. Infinite and missing numbers, and squares beyond f32, come out as such.

mod blueprint;
mod forward;
mod launch;
pub mod variants;

pub use blueprint::{MOST_TENSORS, PLACES, SquareSumBlueprint};
pub use launch::square_sum;
pub(crate) use variants::variants;
