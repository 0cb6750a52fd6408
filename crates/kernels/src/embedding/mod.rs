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
//! Sums are in f32, in an order that depends on the indices alone, and rounded once. There are no atomics, so results repeat to the bit;
//! instead the places are sorted by index first, by counting: the place of i is the number of smaller
//! indices and of equal ones before it. That takes n^2 comparisons, which for the tokens of a step are few
//! microseconds, and beyond [`MOST_INDICES`] too many.

mod backward;
mod launch;
mod problem;
mod sort;

#[cfg(feature = "cuda-source")]
pub(crate) use backward::embedding_backward_kernel;
#[cfg(feature = "cuda-source")]
pub(crate) use launch::WIDEST;
pub use launch::embedding_backward;
pub use problem::{EmbeddingProblem, MOST_INDICES};
#[cfg(feature = "cuda-source")]
pub(crate) use sort::UNITS as SORT_UNITS;
#[cfg(feature = "cuda-source")]
pub(crate) use sort::embedding_sort_kernel;
