//! What a program that trains in a folder of its own needs besides its model and its data.

mod cadence;
mod failure;
mod folder;
mod progress;
mod rank;
#[cfg(feature = "testing")]
pub mod testing;

pub use cadence::Cadence;
pub use failure::catch;
pub use folder::lock;
pub use progress::Progress;
pub use rank::{log, on_ranks};
