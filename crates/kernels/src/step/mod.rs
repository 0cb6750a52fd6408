//! What the steps of optimizers share: a kernel that goes through parameters with their gradients and what
//! is kept for them, several in one launch, by a `Rule` that says what becomes of each
//! vector.
//!
//! A rule's own module has its equations, its numbers, and its tensors by name. Here those are an array:
//! parameter, gradient, then the states.

mod blueprint;
mod gate;
mod kernel;
mod launch;
mod layout;
mod loads;
mod problem;
mod rounding;

pub use blueprint::{Blueprint, Tuning, Walk};
pub use gate::{Chance, Gate};
pub use launch::{MOST_TENSORS, Update};
pub use problem::Problem;

pub(crate) use kernel::Rule;
pub(crate) use launch::{Step, update_many, update_one};

#[cfg(feature = "cuda-source")]
pub(crate) use {
    blueprint::UNITS,
    kernel::{Compiled, PartCompilationArg, PitchesCompilationArg, optimizer_step_kernel},
};
