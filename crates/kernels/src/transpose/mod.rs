//! Copies of matrices whose columns follow each other in memory, such that their rows do.
//!
//! | tensor | shape | dtype |
//! |---|---|---|
//! | source, read | rows x columns, columns `pitch` elements apart | any of 2 or 4 bytes |
//! | target, overwritten | rows x columns | the same |
//!
//! A cube reads a square along columns, keeps it in shared memory and writes it along rows, so that both sides are whole
//! segments. Elements of 2 bytes are read and written in pairs, which have to lie in one word: `pitch` and `columns` are
//! even then.

mod forward;
mod launch;
mod variants;

pub use launch::transpose;
pub(crate) use variants::variants;
