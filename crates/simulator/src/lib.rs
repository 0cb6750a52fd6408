//! Executes the PTX that our kernels compile to, so that tests can check them without a GPU.

#![deny(missing_docs)]

mod async_;
mod device;
mod error;
mod machine;
mod memory;
mod ptx;
mod race;
mod schedule;
mod tensor;

pub use async_::{Swizzle, TensorMap};
pub use device::{Argument, Device, Launch, Options, Report};
pub use error::{Fault, FaultKind, ParseError, Place, SimulatorError};
pub use ptx::Program;
pub use schedule::{Landing, Schedule};
