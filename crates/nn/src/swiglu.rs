//! Burn's `SwiGlu` in one pass each way: a module, a function that runs Burn's own, and `silu(gate) * up` of other
//! layers.
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

use crate::drop_in::{drop_in, same_config};
pub use blackburn_backend::swiglu::swiglu;
use burn::{
    config::Config,
    nn::{Initializer, LinearLayout},
    tensor::{Device, Tensor},
};

/// Configuration of [`SwiGlu`], as of Burn's.
#[derive(Config, Debug)]
pub struct SwiGluConfig {
    /// Size of a token.
    pub d_input: usize,
    /// Size of what is made of it.
    pub d_output: usize,
    /// Whether the two linear layers have a bias. Default: no
    #[config(default = false)]
    pub bias: bool,
    /// How weights begin.
    #[config(
        default = "Initializer::KaimingUniform { gain: 1.0 / 3f64.sqrt(), fan_out_only: false }"
    )]
    pub initializer: Initializer,
    /// How weights lie in memory.
    #[config(default = "LinearLayout::Row")]
    pub layout: LinearLayout,
}

same_config!(SwiGluConfig, burn::nn::SwiGluConfig, d_input, d_output, bias, initializer, layout);

impl SwiGluConfig {
    /// Creates the module.
    pub fn init(&self, device: &Device) -> SwiGlu {
        burn::nn::SwiGluConfig::from(self.clone()).init(device).into()
    }
}

drop_in! {
    /// Burn's [`SwiGlu`](burn::nn::SwiGlu), run by [`forward`]; [`SwiGluConfig`] makes it.
    SwiGlu, burn::nn::SwiGlu
}

impl SwiGlu {
    /// Computes `silu(linear_inner(input)) * linear_outer(input)` of tokens `[.., d_input]`, and returns
    /// `[.., d_output]`.
    ///
    /// # Panics
    ///
    /// If the last dimension is not `d_input`.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        forward(self, input)
    }
}

/// Runs `module` on `x` of shape `[.., d_input]`, like `module.forward(x)`.
pub fn forward<const D: usize>(module: &burn::nn::SwiGlu, x: Tensor<D>) -> Tensor<D> {
    let gate = module.linear_inner.forward(x.clone());
    swiglu(gate, module.linear_outer.forward(x))
}
