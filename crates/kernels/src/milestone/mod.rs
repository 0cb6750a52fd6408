//! A count that grows by one each time the device comes by: work between two counts is done when the second is there.
//!
//! ```text
//! counter = counter + 1                                                     modulo 2^32
//! ```
//!
//! | tensor | elements | dtype |
//! |---|---|---|
//! | counter | 1 | u32 |
//!
//! Kernels of one stream run one after the other, so whoever sees the count sees all that was launched before it.

mod forward;
mod launch;
mod variants;

pub use launch::milestone;
pub(crate) use variants::variants;
