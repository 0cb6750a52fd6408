//! Cumulative sums, products, maxima and minima along a dimension: inclusive scans.
//!
//! ```text
//! y[o, i, c] = x[o, 0, c] + ... + x[o, i, c]        likewise with *, max, min
//! ```
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | x | outer, length, inner | contiguous | f32, f16, bf16, i32 or u32 |
//! | y, overwritten | outer, length, inner | contiguous | that of x |
//!
//! Floating-point numbers are combined in f32 and rounded once. Integers wrap. NaN makes each place from its own on
//! NaN. Which numbers are combined first depends on the shape and the device alone, and there are no atomic operations:
//! the same input gives the same bits each time. Nothing is saved for backward: Burn makes gradients of scans of
//! reversed tensors.
//!
//! A product of floating-point numbers is kept as a number of `[1, 2)` and a power of two, and is joined where it is
//! written. A parallel scan multiplies numbers that a loop would not: a later part of a row may be infinite by itself
//! while what comes before it is zero, and both together would be NaN.
//!
//! 1. `totals`, where there are too few rows or columns to fill the device: each is cut into chunks, and every chunk but
//!    the last is combined to one number.
//! 2. `rows` scans along the last dimension. A unit scans neighboring elements, a plane their totals by shuffles in
//!    logarithmically many steps, and a cube those of its planes. Cubes walk through their chunk and start from the
//!    totals of the chunks before it.
//! 3. `columns` scans along another dimension. A unit walks down a column of its chunk, so that neighboring units read
//!    neighboring elements.
//!
//! Without chunks a tensor is read and written once; with chunks it is read twice.
//!
//! Sources: Blelloch, "Prefix sums and their applications" (1990), for scans of chunks; Kogge, Stone, "A parallel
//! algorithm for the efficient solution of a general class of recurrence equations" (1973), for the steps in a plane.
//!
//! Not served: empty tensors, and tensors of 2^31 elements and more.

mod blueprint;
mod columns;
mod launch;
mod operation;
mod problem;
mod rows;
pub mod variants;

pub use blueprint::{ScanBlueprint, ScanWay};
pub use launch::scan;
pub use operation::ScanOperation;
pub use problem::ScanProblem;
pub(crate) use variants::variants;
