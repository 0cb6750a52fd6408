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
//! A cube sorts runs of its row that hold k elements by a bitonic network, in shared memory. Then the better half of two
//! runs remains, and is sorted by the network's last steps, until there is one run. Sources: Batcher, "Sorting networks and
//! their applications" (1968); Shanbhag et al., "Efficient top-k query processing on massively parallel hardware" (2018).
//!
//! Not served: rows that shared memory does not hold, empty tensors, and tensors of 2^31 elements and more.

mod forward;
mod launch;
pub mod variants;

pub use launch::{TopK, TopKProblem, top_k};
pub(crate) use variants::variants;
