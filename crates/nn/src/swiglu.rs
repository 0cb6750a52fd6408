//! Functions that run Burn's `SwiGlu`, and `silu(gate) * up` of other layers, in one pass each way. Call them
//! instead of `forward`.
//!
//! ```
//! use blackburn_nn::swiglu;
//! use burn::{nn::SwiGluConfig, prelude::*};
//!
//! let device = Device::flex().autodiff();
//! let module = SwiGluConfig::new(8, 16).init(&device);
//! let x = Tensor::<2>::ones([3, 8], &device);
//!
//! // Instead of `module.forward(x)`:
//! let y = swiglu::forward(&module, x);
//! assert_eq!(y.dims(), [3, 16]);
//! ```
//!
//! Autodiff keeps the two products that are multiplied, and not the sigmoid and the product with it besides.

pub use blackburn_backend::swiglu::swiglu;
use burn::{nn::SwiGlu, tensor::Tensor};

/// Runs `module` on `x` of shape `[.., d_input]`, like `module.forward(x)`.
pub fn forward<const D: usize>(module: &SwiGlu, x: Tensor<D>) -> Tensor<D> {
    let gate = module.linear_inner.forward(x.clone());
    swiglu(gate, module.linear_outer.forward(x))
}
