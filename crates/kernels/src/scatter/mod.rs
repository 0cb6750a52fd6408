//! Adds values to the places that indices name.
//!
//! ```text
//! scatter    y[r, p]    = x[r, p]    + sum of values[r, t]    over the t with index[r, t] = p
//! select     y[o, p, c] = x[o, p, c] + sum of values[o, t, c] over the t with index[t] = p
//! ```
//!
//! | tensor | scatter | select | dtype |
//! |---|---|---|---|
//! | x, and y, which is overwritten | rows, places | outer, places, inner | f32, f16 or bf16; `select` i32, too |
//! | index | rows, terms | terms | i32; others than 0 to places - 1 name nothing |
//! | values | rows, terms | outer, terms, inner | that of x |
//!
//! All are contiguous. They are the gradients of `gather` and of `select`. Sums begin with x, go on in the order of the
//! terms, are in f32 and rounded once; integers wrap. There are no atomic operations: the same input gives the same bits
//! each time.
//! NaN goes where its index says, and nowhere else.
//!
//! - `scatter`: a cube sorts the indices of its row in shared memory, each with its place, by a bitonic network. A unit
//!   then finds the terms of a place by binary search. Reading and writing y once is most of the work.
//! - `select`: all rows have the same indices, which are sorted once, as those of an embedding. A unit finds the terms of
//!   its place in the same way.
//!
//! One place with very many terms is added up by one unit, as in Burn's kernels.
//!
//! Source of the network: Batcher, "Sorting networks and their applications" (1968).
//!
//! Not served: rows of `scatter` with more terms than shared memory holds or with 65,535 places and more, empty tensors,
//! and tensors of 2^31 elements and more.

mod launch;
mod problem;
mod rows;
mod select;
pub mod variants;

pub use launch::{scatter_add, select_add};
pub use problem::{ScatterProblem, SelectProblem};
pub(crate) use variants::variants;
