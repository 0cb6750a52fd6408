//! Batch normalization of channels, with what usually follows it, and its gradients.
//!
//! With `x` as rows of channels, a row for each pixel of each image:
//!
//! ```text
//! mean[c]     = sum_r x[r, c] / rows
//! variance[c] = sum_r (x[r, c] - mean[c])^2 / rows
//! rstd[c]     = 1 / sqrt(variance[c] + epsilon)
//! h[r, c]     = (x[r, c] - mean[c]) rstd[c]
//! y[r, c]     = relu(gamma[c] h[r, c] + beta[c] + residual[r, c])      relu and residual may be left out
//! ```
//!
//! Backward, with `g = dy where y > 0, else 0` after a `ReLU`, and `g = dy` without:
//!
//! ```text
//! dbeta[c]  = sum_r g[r, c]
//! dgamma[c] = sum_r g[r, c] h[r, c]
//! dx[r, c]  = gamma[c] rstd[c] (g[r, c] - dbeta[c] / rows - h[r, c] dgamma[c] / rows)
//! dresidual = g
//! ```
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | x, dy | rows, channels | channels contiguous, any stride of rows from `channels` | f32, f16 or bf16, all the same |
//! | residual, y, dx, dresidual | rows, channels | contiguous | that of x |
//! | gamma, beta, dgamma, dbeta | channels | contiguous | f32, or that of x; all the same |
//! | mean, variance | channels | contiguous | f32 as they are made; apply and backward also take that of x |
//!
//! An image in NHWC memory is such rows. Everything is widened to f32 and computed there, and outputs are
//! rounded once. dx is computed from the sums before their rounding. Saved for backward: x, mean, variance,
//! gamma, and y after a `ReLU`. Outputs are overwritten. There are no atomic operations, and the order of
//! additions depends on the shape and the device alone: the same input gives the same bits each time.
//!
//! # Passes
//!
//! | launch | reads | writes |
//! |---|---|---|
//! | statistics | x | partial moments |
//! | merge of moments | these | mean, variance |
//! | running statistics | these, and those of earlier batches | those of all |
//! | apply | x, residual | y |
//! | sums | x, dy, y after a `ReLU` | partial sums |
//! | merge of sums | these | dbeta, dgamma |
//! | input gradient | x, dy, y after a `ReLU` | dx, dresidual |
//!
//! Each tensor is moved once a pass. A cube has 256 units. Lanes beside each other have a vector of channels
//! each, and as many of them share a row as it has vectors, up to 32; the others have rows of their own, so
//! that narrow rows keep all units busy. The rows are split between cubes. Partial results are f32
//! `[splits, 2, channels]`, which a second launch merges: its units have several splits each, and meet in
//! shared memory.
//!
//! # Moments
//!
//! The mean of squares less the square of the mean would lose all digits where the mean is large. Each unit
//! therefore takes the first value of its own rows from the others, and adds up distances and their squares:
//! a count, a mean, and a sum of squares around it follow from these. Units, and then splits, are merged by
//! the formula for two parts (Chan, Golub and LeVeque, section 2):
//!
//! ```text
//! mean    = mean_a + (mean_b - mean_a) count_b / count
//! squares = squares_a + squares_b + (mean_b - mean_a)^2 count_a count_b / count
//! ```
//!
//! Means are kept as distances from the channel's first value until the last merge, so that their roundings
//! are those of distances, however far from zero the channel lies.
//!
//! A channel with a NaN or an infinity has statistics and gradients of NaN, and others are not touched. `ReLU`
//! passes NaN on, and its gradient is `dy` where y is NaN, as Burn's is.
//!
//! Not served: empty tensors, tensors beyond 32-bit indices, and tensors that do not begin at a multiple of 16
//! bytes. Counts of more than 2^24 rows are rounded.
//!
//! Sources: Ioffe and Szegedy, "Batch Normalization", arXiv:1502.03167, section 3; Chan, Golub and LeVeque,
//! "Algorithms for Computing the Sample Variance: Analysis and Recommendations", The American Statistician
//! 37 (1983).

mod apply;
mod backward;
mod blueprint;
mod channels;
mod launch;
mod problem;
mod statistics;
pub mod variants;

pub(crate) use blueprint::Tile;
pub use blueprint::{BatchNormBlueprint, BatchNormPass};
pub(crate) use channels::{
    Merge, One, Part, StridedRows, StridedRowsLaunch, add, gated, load, meet, no_rows,
};
pub use launch::{
    BatchNormGradients, BatchNormInputs, BatchNormSaved, RunningStatistics, Statistics,
    batch_norm_apply, batch_norm_backward, batch_norm_running, batch_norm_statistics,
};
pub use problem::BatchNormProblem;
pub(crate) use variants::variants;
