//! Blackburn's plug into Burn's CubeCL backend.
//!
//! Burn extends a backend in two ways, and both live here:
//!
//! - **Fusion providers** see the operation stream of every module, below autodiff, and replace
//!   stretches of it with tuned kernels: that is how unmodified `burn::nn` modules gain them.
//!   [`providers`] registers them, and takes out those that a caller switched off.
//! - **Extension operations**, with hand-written gradients, for what the stream cannot express:
//!   [`attention`], [`cross_entropy`], [`embedding`], [`fp8_linear`] and [`layer_norm`]. They run on the CPU
//!   too, where they are all that a build without the feature `gpu` has. And without a gradient, for GPUs
//!   alone, what training needs around the passes: an optimizer's step ([`adamw`], [`sgd`]), a
//!   norm ([`square_sum`]), a loss scaler's numbers ([`loss_scale`]), memory of one's own ([`overwrite`]).
//!
//! [`graph`] has the device's work recorded and replayed; [`profile`] tells what it was and how long each
//! kernel took.
//!
//! [`runtime`] sets up CubeCL before the first device starts.

pub mod adamw;
#[cfg(feature = "gpu")]
mod arithmetic;
pub mod attention;
mod casting;
#[cfg(feature = "gpu")]
mod column_sum;
pub mod cross_entropy;
#[cfg(feature = "gpu")]
mod declined;
mod device;
pub mod dropout;
pub mod embedding;
pub mod fp8_linear;
#[cfg(feature = "gpu")]
mod gelu;
pub mod graph;
#[cfg(feature = "gpu")]
mod handles;
pub mod layer_norm;
pub mod linear_cross_entropy;
pub mod loss_scale;
#[cfg(feature = "gpu")]
mod matmul;
pub mod overwrite;
#[cfg(feature = "gpu")]
mod pattern;
pub mod profile;
#[cfg(feature = "gpu")]
pub mod providers;
#[cfg(feature = "gpu")]
mod rows;
#[cfg(feature = "gpu")]
pub mod runtime;
pub mod sgd;
#[cfg(feature = "gpu")]
mod softmax;
pub mod square_sum;
#[cfg(feature = "gpu")]
mod steps;
