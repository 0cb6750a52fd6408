//! The gradient of an embedding: rows that belong to the same index are added up.
//!
//! ```text
//! dw[v, c] = sum of dy[i, c] over the i with index[i] = v
//! ```
//!
//! | tensor | shape | dtype |
//! |---|---|---|
//! | index | n | i32; others than 0 to v - 1 belong to no row |
//! | dy | n x columns | f32, f16 or bf16 |
//! | dw, overwritten where an index names a row | v x columns | that of dy |
//!
//! [`embedding_backward_onto`] adds the sums to the rows of dw instead, for weights that have another gradient, as
//! those of a language model have that are its head as well.
//!
//! Sums are in f32 and rounded once. The order of their additions depends on the indices alone, and there
//! are no atomics, so results repeat to the bit.
//!
//! 1. `sort`: places are sorted by their index, by 8 bits in each pass. A pass counts the digits of 256
//!    stretches of places, and then moves each place behind those that come before it. Two passes serve
//!    65,535 rows; the time is proportional to the number of indices.
//! 2. `backward`: places of one index now follow each other. A cube adds up those of one index within 256
//!    places.
//! 3. `join` adds up the sums of an index that has places in more than one such chunk, so that frequent
//!    tokens are spread over the device.
//!
//! Source of the sort: Satish, Harris, Garland, "Designing efficient sorting algorithms for manycore GPUs"
//! (2009), section IV.

mod backward;
mod launch;
mod problem;
mod sort;
pub mod variants;

pub(crate) use launch::sorted;
pub use launch::{embedding_backward, embedding_backward_onto};
pub use problem::EmbeddingProblem;
pub(crate) use variants::variants;
