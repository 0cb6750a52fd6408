//! Burn's `GaussianNoise` on tensors of any type.
//!
//! Burn draws the noise in the device's default type, f32, and adds it to what comes in, which fails where that is
//! in 16 bits.

use crate::drop_in::{drop_in, same_config};
use burn::{
    config::Config,
    nn as burns,
    tensor::{Distribution, Tensor},
};

/// Runs `module` on `x` of any shape and type, like `module.forward(x)`: adds noise in the type of `x`. Returns `x`
/// itself where no backward pass is possible or the module is frozen.
pub fn gaussian_noise<const D: usize>(module: &burns::GaussianNoise, x: Tensor<D>) -> Tensor<D> {
    let is_training = module.training.is_enabled() && x.device().is_autodiff();
    if !is_training || module.std == 0.0 {
        return x;
    }
    let noise = x.random_like(Distribution::Normal(0.0, module.std));
    x + noise
}

/// Configuration of [`GaussianNoise`], as of Burn's.
#[derive(Config, Debug)]
pub struct GaussianNoiseConfig {
    /// The noise's standard deviation: finite, and not below 0.
    pub std: f64,
}

same_config!(GaussianNoiseConfig, burns::GaussianNoiseConfig, std);

impl GaussianNoiseConfig {
    /// Creates the module.
    ///
    /// # Panics
    ///
    /// If `std` is not finite or below 0.
    pub fn init(&self) -> GaussianNoise {
        burns::GaussianNoiseConfig::from(self.clone()).init().into()
    }
}

drop_in! {
    /// Burn's [`GaussianNoise`](burns::GaussianNoise) on tensors of any type; [`GaussianNoiseConfig`] makes it.
    GaussianNoise, burns::GaussianNoise
}

impl GaussianNoise {
    /// As [`gaussian_noise`].
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        gaussian_noise(self, input)
    }
}
