//! Copies of columns of one matrix into columns of another.
//!
//! ```text
//! target[r, to + c] = source[r, from + c]
//! ```
//!
//! | tensor | shape | dtype |
//! |---|---|---|
//! | source, read | rows, at least `from + c` of each, `pitch` elements apart | f32, f16, bf16 |
//! | target, partly overwritten | the same rows, at least `to + c` of each, with a pitch of its own | the same |
//!
//! Images whose channels follow each other are joined so: a pixel is a row, and its channels are columns. Images whose
//! pixels follow each other are rows of all their pixels.

mod forward;
mod launch;
mod variants;

pub use launch::{Columns, copy_columns};
pub(crate) use variants::variants;
