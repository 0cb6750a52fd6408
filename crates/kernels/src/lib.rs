//! Blackburn's CubeCL kernels: device code, launchers and the choice between variants.
//!
//! A kernel here knows CubeCL's buffers and nothing of Burn. Every op has the same rooms:
//!
//! | file | holds |
//! |---|---|
//! | `mod.rs` | the maths, the contract, the sources |
//! | `problem.rs` | **Problem**: what is asked: sizes, dtypes, validation, cost in FLOPs and bytes |
//! | `blueprint.rs` | **Blueprint**: how it is compiled: vector width, tiles, what fits the device |
//! | `forward.rs`, `backward.rs` | device code, each function beside its derivative |
//! | `launch.rs` | validate, plan, allocate, launch |
//! | `tune.rs` | the fastest of a few blueprints, by measurement |
//! | `variants.rs` | problems that cover the blueprints, for checks, tests and benches |
//!
//! Optimizers have a `rule.rs` for their device code; the rest of their rooms is one, [`step`].
//!
//! Kernels hold no state; only what was chosen for a problem is remembered. [`gelu`] is the smallest example of the layout.
//!
//! With the feature `recorder`, `recorder` keeps what launchers launch on a GPU that is not there, as CUDA
//! C++: this is how `cargo xtask sass` checks registers, spills and instructions without one. [`ahead`] then
//! shows kernels before the device has to have them.

#![allow(
    clippy::collapsible_if,
    reason = "a condition that is known when a kernel is expanded stays apart from one on the device"
)]

pub mod adamw;
pub mod ahead;
pub mod attention;
pub mod batch_norm;
mod block_format;
pub mod buffer;
pub mod column_sum;
pub mod conv;
pub mod cross_entropy;
mod device;
mod divisor;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
mod error;
pub mod family;
pub mod frames;
mod functions;
pub mod gelu;
pub mod group_norm;
pub mod interpolate;
pub mod layer_norm;
pub mod loss_scale;
pub mod lstm;
pub mod magnitude;
pub mod matmul;
pub mod milestone;
mod outlier;
pub mod overwrite;
mod pass;
mod philox;
mod pixels;
mod plan;
pub mod pool;
mod promise;
#[cfg(feature = "cuda")]
mod ptx;
pub mod quantize;
pub mod random;
#[cfg(feature = "recorder")]
pub mod recorder;
pub mod region;
pub mod rotary;
pub mod row_sum;
pub mod scan;
pub mod scatter;
pub mod sgd;
pub mod sketch;
pub mod softmax;
pub mod square_sum;
pub mod step;
pub mod swiglu;
mod together;
pub mod top_k;
pub mod variants;

pub use device::{DeviceProfile, plane_units};
pub use error::KernelError;
pub use family::{Families, Family, FamilyOp};
pub use pass::Pass;
pub use promise::Promise;
