//! Blackburn's plug into Burn's CubeCL backend.
//!
//! Burn extends a backend in two ways, and both live here:
//!
//! - **Fusion providers** see the operation stream of every module, below autodiff, and replace
//!   stretches of it with tuned kernels: that is how unmodified `burn::nn` modules gain them.
//!   [`providers`] registers them, and takes out those that a caller switched off.
//! - **Extension operations**, with hand-written gradients, for what the stream cannot express.
//!
//! [`runtime`] sets up CubeCL before the first device starts.

mod column_sum;
mod declined;
mod gelu;
mod handles;
mod matmul;
mod pattern;
pub mod providers;
pub mod runtime;
