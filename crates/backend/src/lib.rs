//! Blackburn's plug into Burn's CubeCL backend.
//!
//! Burn extends a backend in two ways, and both live here:
//!
//! - **Fusion providers** see the operation stream of every module, below autodiff, and replace
//!   stretches of it with tuned kernels: that is how unmodified `burn::nn` modules gain them.
//!   [`providers`] registers them, and takes out those that a caller switched off.
//! - **Extension operations**, with hand-written gradients, for what the stream cannot express:
//!   [`attention`], [`cross_entropy`], [`embedding`], [`fp8_linear`], [`group_norm`] and [`layer_norm`]. They run on the CPU
//!   too, where they are all that a build without the feature `gpu` has. And without a gradient, for GPUs
//!   alone, what training needs around the passes: an optimizer's step ([`steps::adamw`], [`steps::sgd`]), a
//!   norm ([`square_sum`]), a loss scaler's numbers ([`loss_scale`]), memory of one's own ([`overwrite`]), copies of
//!   parameters there ([`copies`]).
//!
//! [`graph`] has the device's work recorded and replayed; [`profile`] tells what it was and how long each
//! kernel took.
//!
//! [`readback`] has numbers copied to the host, and lets the host go on.
//!
//! [`interpolate`] tells whether a provider has the gradient of resized images.
//!
//! [`runtime`] sets up CubeCL before the first device starts, and has kernels compiled on several threads. [`dry_run`]
//! asks for work for the sake of its memory.
//!
//! | room | holds | knows |
//! |---|---|---|
//! | `tensors` | memory, rows and types of tensors, as kernels take them | |
//! | `stream` | patterns of operations, and the protocol between Burn's fusion and providers | `tensors` |
//! | `ops` | extension operations | `tensors` |
//! | `fused` | fusion providers | `tensors`, `stream`, `ops` |
//! | [`steps`] | optimizers' steps, and the provider that takes them together | `tensors`, `stream`, `ops` |

#[cfg(feature = "persistence")]
mod ahead;
#[cfg(feature = "cuda")]
pub mod cuda_memory;
#[cfg(feature = "gpu")]
mod declined;
pub mod drop_in;
mod dry_run;
#[cfg(feature = "gpu")]
mod fused;
pub mod graph;
pub mod interpolate;
mod ops;
pub mod profile;
#[cfg(feature = "gpu")]
pub mod providers;
pub mod random;
pub mod readback;
#[cfg(feature = "gpu")]
pub mod runtime;
#[cfg(feature = "gpu")]
mod served;
pub mod steps;
#[cfg(feature = "gpu")]
mod stream;
mod tensors;

pub use dry_run::{dry_run, expect_kernels};
pub use ops::{
    attention, batch_norm, copies, cross_entropy, dropout, embedding, fp8_linear, gelu_dropout,
    group_norm, layer_norm, linear_cross_entropy, loss_scale, lstm, overwrite, rotary, sketch,
    square_sum, swiglu,
};
pub use tensors::Optional;
#[cfg(feature = "gpu")]
pub use tensors::OptionalMetadata;
