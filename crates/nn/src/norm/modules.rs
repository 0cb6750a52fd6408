//! The norms of `burn::nn` that have kernels of their own.

use super::{layer_norm, rms_norm};
use crate::drop_in::{drop_in, same_config};
use burn::{
    config::Config,
    tensor::{Device, Tensor},
};

/// Configuration of [`LayerNorm`], as of Burn's.
#[derive(Config, Debug)]
pub struct LayerNormConfig {
    /// Size of the last dimension.
    pub d_model: usize,
    /// What is added to variances. Default: 1e-5
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// Whether there is a bias. Default: true
    #[config(default = true)]
    pub bias: bool,
}

same_config!(LayerNormConfig, burn::nn::LayerNormConfig, d_model, epsilon, bias);

impl LayerNormConfig {
    /// Creates the module: factors of one, and a bias of zero.
    pub fn init(&self, device: &Device) -> LayerNorm {
        burn::nn::LayerNormConfig::from(self.clone()).init(device).into()
    }
}

drop_in! {
    /// Burn's [`LayerNorm`](burn::nn::LayerNorm) by one kernel forward and two backward; [`LayerNormConfig`] makes
    /// it. `gamma` and `beta` are `[d_model]`.
    LayerNorm, burn::nn::LayerNorm
}

impl LayerNorm {
    /// Normalizes `input`, `[.., d_model]`, over its last dimension. The result has the type of `input`, whatever
    /// the parameters have; it is computed in f32.
    ///
    /// # Panics
    ///
    /// As [`layer_norm`], for example if the last dimension is not `d_model`.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        layer_norm(self, input)
    }
}

/// Configuration of [`RmsNorm`], as of Burn's.
#[derive(Config, Debug)]
pub struct RmsNormConfig {
    /// Size of the last dimension.
    pub d_model: usize,
    /// What is added to mean squares. Default: 1e-5
    #[config(default = 1e-5)]
    pub epsilon: f64,
}

same_config!(RmsNormConfig, burn::nn::RmsNormConfig, d_model, epsilon);

impl RmsNormConfig {
    /// Creates the module: factors of one.
    ///
    /// # Panics
    ///
    /// If `epsilon` is not above zero.
    pub fn init(&self, device: &Device) -> RmsNorm {
        burn::nn::RmsNormConfig::from(self.clone()).init(device).into()
    }
}

drop_in! {
    /// Burn's [`RmsNorm`](burn::nn::RmsNorm) by one kernel forward and two backward; [`RmsNormConfig`] makes it.
    /// `gamma` is `[d_model]`.
    RmsNorm, burn::nn::RmsNorm
}

impl RmsNorm {
    /// Normalizes `x`, `[.., d_model]`, over its last dimension, as [`LayerNorm::forward`] does.
    ///
    /// # Panics
    ///
    /// As [`rms_norm`].
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        rms_norm(self, x)
    }
}
