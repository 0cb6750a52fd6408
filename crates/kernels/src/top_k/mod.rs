//! The k largest elements of each row, in descending order, and where they are.
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | x | rows, columns | contiguous | f32, f16 or bf16 |
//! | values, overwritten | rows, k | contiguous | that of x |
//! | indices, overwritten | rows, k | contiguous | i32 |
//!
//! The order is the total one of IEEE 754, as on Burn's CPU backend: NaN with a positive sign is the largest, and zero is
//! larger than minus zero. Of equal elements the first one comes first. Values are exact.
//!
//! A cube sorts its row in shared memory by a bitonic network: Batcher, "Sorting networks and their applications" (1968).
//!
//! Not served: rows that shared memory does not hold, empty tensors, and tensors of 2^31 elements and more.

mod forward;
mod launch;
pub mod variants;

pub use launch::{TopK, TopKProblem, top_k};
pub(crate) use variants::variants;
