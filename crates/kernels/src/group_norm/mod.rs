//! Normalization of groups of channels of each sample, and its gradients. Groups of one channel are instance
//! norm.
//!
//! With `x[b, c, p]` of sample b, channel c and pixel p, the groups g being runs of channels, and n the numbers of
//! a group, its channels times the pixels:
//!
//! ```text
//! mean[b, g] = sum x / n                           over the channels and pixels of the group
//! rstd[b, g] = 1 / sqrt(sum (x - mean)^2 / n + epsilon)
//! h[b, c, p] = (x[b, c, p] - mean[b, g]) rstd[b, g]
//! y[b, c, p] = gamma[c] h[b, c, p] + beta[c]       gamma and beta may be left out
//! ```
//!
//! Backward:
//!
//! ```text
//! plain[b, c]    = sum over p of dy                dbeta[c]  = sum over b of plain
//! weighted[b, c] = sum over p of dy h              dgamma[c] = sum over b of weighted
//! dx = rstd (gamma dy - sum(gamma plain) / n - h sum(gamma weighted) / n)      sums over the group's channels
//! ```
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | x, dy | samples, channels, pixels | by [`Order`]; with channels last, pixels any stride from `channels` apart | f32, f16 or bf16, all the same |
//! | y, normalized, dx | samples, channels, pixels | that of x, contiguous | that of x |
//! | centered | samples, channels, pixels | pixels last, contiguous | that of x |
//! | gamma, beta, dgamma, dbeta | channels | contiguous | f32, or that of x; all the same |
//! | mean, rstd | samples, groups | contiguous | f32 |
//! | variance, deviation | samples, groups | contiguous | that of x |
//!
//! Everything is widened to f32 and computed there, and outputs are rounded once. Saved for backward: x, mean,
//! rstd and gamma. Outputs are overwritten. There are no atomic operations, and the order of additions depends on
//! the shape and the device alone: the same input gives the same bits each time.
//!
//! # For programs that changed nothing
//!
//! Burn's automatic differentiation keeps what each step of a norm makes: `x - mean`, h, the variance with epsilon
//! and its root. The pass that writes y writes these beside it, in the type of x. Backward takes h or `x - mean`
//! for x, and the root for the deviation: see [`Form`].
//!
//! # Passes
//!
//! | launch | reads | writes |
//! |---|---|---|
//! | statistics | x | partial moments |
//! | merge of moments | these, the parameters | mean, rstd; for each channel of a sample what y is made with |
//! | apply | x | y |
//! | sums | x, dy | partial sums |
//! | merge of sums | these, gamma | plain, weighted; for each channel of a sample what dx is made with |
//! | parameters | plain, weighted | dbeta, dgamma |
//! | input gradient | x, dy | dx |
//!
//! Each tensor is moved once a pass. With channels last a sample is rows of channels, and lanes beside each other
//! have a vector of channels each; they share the rows as those of [`batch_norm`](crate::batch_norm) do. With
//! pixels last what belongs together lies in one piece, a group's moments or a channel's sums: it is taken for rows
//! of a single vector. In both orders the rows of a sample, or of a piece, are split between cubes where there
//! are fewer of them than the device holds cubes, however long they are. Partial results are f32, and a second
//! launch merges them, with a cube for each group.
//!
//! # Moments
//!
//! As in [`batch_norm`](crate::batch_norm): each unit takes the first value of its own rows from the others, and
//! parts are merged by the formula of Chan, Golub and LeVeque. Means are kept as distances from a column's first
//! value while the splits of a column are merged, and then from the group's first value, so that their roundings
//! are those of distances, however far from zero the group lies.
//!
//! A group with a NaN or an infinity has statistics, results and gradients of NaN, and other groups are not
//! touched; the parameters' gradients have NaN in its channels.
//!
//! Not served: empty tensors, tensors beyond 32-bit indices, tensors that do not begin at a multiple of 16 bytes,
//! and pixels last with gaps. Counts of more than 2^24 numbers are rounded.
//!
//! Sources: Wu and He, "Group Normalization", arXiv:1803.08494, section 3; Chan, Golub and LeVeque, "Algorithms
//! for Computing the Sample Variance: Analysis and Recommendations", The American Statistician 37 (1983).

mod backward;
mod blueprint;
mod forward;
mod launch;
mod problem;
mod samples;
pub mod variants;

pub use blueprint::{GroupNormBlueprint, GroupNormPass};
pub use launch::{
    Affine, GroupNormGradients, GroupNormInputs, GroupNormOutput, GroupNormParts, GroupNormSaved,
    group_norm_backward, group_norm_forward, group_norm_forward_with_parts,
};
pub use problem::{Form, GroupNormProblem, Order};
pub(crate) use variants::variants;
