//! Sums and means of rows, and of their squared distances from means: variances.
//!
//! ```text
//! y[r] = factor sum_c x[r, c]                    row_sum
//! y[r] = factor sum_c (x[r, c] - means[r])^2     row_squares
//! ```
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | x | rows, columns | columns contiguous, any pitch of rows | f32, f16, bf16 |
//! | means, y | rows | contiguous | that of x |
//!
//! A mean has the factor `1 / columns`. Terms are widened to f32 and added there, and the sum is rounded once.
//! The order of addition depends on the shape and the device alone, so the same input gives the same bits each
//! time. The output is overwritten.
//!
//! 1. As many units as a row has vectors, up to a cube, add up each a part of it and meet in shared memory.
//!    Cubes of short rows have several.
//! 2. Where there are too few rows to fill the device, several cubes share each. Their partial sums go to an f32
//!    workspace `[rows, splits]`, whose rows a second launch of the same kernel sums.
//!
//! Not served: empty tensors, and more rows or elements than 32 bits count.

mod blueprint;
mod forward;
mod launch;
pub mod variants;

pub use blueprint::RowSumBlueprint;
pub use launch::{row_squares, row_sum, row_sum_as};
pub(crate) use variants::variants;
