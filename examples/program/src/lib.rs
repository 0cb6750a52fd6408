//! What a program that trains in a folder of its own needs besides its model and its data.

mod cadence;
mod failure;
mod folder;
mod options;
mod progress;
mod rank;
#[cfg(feature = "testing")]
pub mod testing;

pub use cadence::{Cadence, CadenceOptions};
pub use failure::{catch, ended};
pub use folder::lock;
pub use options::{differences, or_none};
pub use progress::Progress;
pub use rank::{agree, log, on_ranks};
