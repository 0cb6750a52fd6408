//! Steps of optimizers, each one operation of Burn's stream, and the provider that takes those of several
//! parameters together. They take no part in differentiation, and exist on GPUs only.

pub mod adamw;
mod gate;
#[cfg(feature = "gpu")]
mod operation;
#[cfg(feature = "gpu")]
pub(crate) mod provider;
pub mod repeat;
pub mod sgd;
#[cfg(all(test, feature = "gpu"))]
mod tests;

pub use crate::tensors::Together;
pub use gate::{Chance, Draw, Gate, Reading, Taken};
#[cfg(feature = "gpu")]
pub use gate::{ChanceMetadata, GateMetadata, ReadingMetadata};
