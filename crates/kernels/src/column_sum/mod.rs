//! Sums of columns: the gradient of a bias, and of every other broadcast. And sums of their squared distances from means:
//! variances.
//!
//! ```text
//! y[o, c] = factor sum_r x[o, r, c]                       column_sum
//! y[o, c] = factor sum_r (x[o, r, c] - means[o, c])^2     column_squares
//! ```
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | x | outer, rows, columns | columns contiguous, any stride of rows and of outer | f32, f16, bf16 |
//! | means, y | outer, columns | contiguous | that of x |
//!
//! Terms are widened to f32 and added there, and the sum is rounded once. The order of addition depends on the shape
//! and the device alone, so the same input gives the same bits each time. The output is overwritten.
//!
//! 1. Each cube takes 32 vectors of columns and every `splits`-th group of rows. Its units add up
//!    their rows in registers, then meet in shared memory.
//! 2. With more than one split, the cubes' partial sums go to an f32 workspace `[outer, splits,
//!    columns]`, whose columns a second launch of the same kernel sums.
//!
//! GPUs with clusters take one launch where that keeps most multiprocessors busy and none waits, and x is no larger than
//! 16 MiB: eight cubes share the rows of 128 bytes of columns, and meet in the shared memory of one of them.
//!
//! As many cubes as the device holds read memory once, in whole vectors. A reduction with one unit a column would
//! leave nearly all of the device idle: 768 columns are 96 vectors of eight.
//!
//! [`gelu_backward_sum`](crate::gelu::gelu_backward_sum) computes its own terms and shares the rest.
//!
//! Not served: sums along the last dimension (`columns == 1`).

mod blueprint;
mod clusters;
mod forward;
mod launch;
mod problem;
pub mod variants;

pub use blueprint::ColumnSumBlueprint;
pub use launch::{column_squares, column_sum, column_sum_scaled};
pub use problem::ColumnSumProblem;
pub(crate) use variants::variants;

pub(crate) use {
    blueprint::{ROW_LANES, VECTOR_LANES},
    forward::write_cube_sum,
    launch::{cube_count, sum_with},
};
