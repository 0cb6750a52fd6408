//! What the steps of optimizers share: a kernel that goes through parameters with their gradients and what
//! is kept for them, several in one launch, and launches that do as [`adamw`](crate::adamw) and
//! [`sgd`](crate::sgd) tell.
//!
//! What becomes of a vector of the parameter and of its states is a `Rule`, for which the kernel is compiled;
//! `StepNumbers` are what it multiplies by. Both have their places in the optimizer's own module, with its equations and
//! its tensors by name. Here those are an array: parameter, gradient, then the states.
//!
//! Launches are compiled for powers of two of tensors; where there are fewer, the first stands in for those that
//! are not there, and no cube goes there.

mod blueprint;
mod gate;
mod kernel;
mod launch;
mod layout;
mod loads;
mod problem;
mod rounding;
mod variants;

pub use crate::together::MOST_TENSORS;
pub use blueprint::{Blueprint, Tuning};
pub use gate::{Chance, Gate};
pub use launch::{Update, Updates, update, update_many, update_many_with, update_with};
pub use layout::Walk;
pub use problem::Problem;
pub(crate) use variants::variants;

pub use kernel::StepNumbers;

pub(crate) use kernel::Rule;
