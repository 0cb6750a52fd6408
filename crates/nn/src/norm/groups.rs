//! The norms of groups of channels of `burn::nn`.

use super::{group_norm, instance_norm};
use crate::drop_in::{drop_in, same_config};
use burn::{
    config::Config,
    tensor::{Device, Tensor},
};

/// Configuration of [`GroupNorm`], as of Burn's.
#[derive(Config, Debug)]
pub struct GroupNormConfig {
    /// Groups, which divide the channels.
    pub num_groups: usize,
    /// Size of the second dimension.
    pub num_channels: usize,
    /// What is added to variances. Default: 1e-5
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// Whether there are factors and a bias. Default: true
    #[config(default = true)]
    pub affine: bool,
}

same_config!(GroupNormConfig, burn::nn::GroupNormConfig, num_groups, num_channels, epsilon, affine);

impl GroupNormConfig {
    /// Creates the module: factors of one, and a bias of zero.
    ///
    /// # Panics
    ///
    /// If the groups do not divide the channels.
    pub fn init(&self, device: &Device) -> GroupNorm {
        burn::nn::GroupNormConfig::from(self.clone()).init(device).into()
    }
}

drop_in! {
    /// Burn's [`GroupNorm`](burn::nn::GroupNorm), which keeps its input alone for the backward pass;
    /// [`GroupNormConfig`] makes it. `gamma` and `beta` are `[num_channels]`.
    GroupNorm, burn::nn::GroupNorm
}

impl GroupNorm {
    /// Normalizes groups of the channels of `input`, `[batch, channels, ..]`. The result has the type of `input`,
    /// whatever the parameters have; it is computed in f32.
    ///
    /// # Panics
    ///
    /// As [`group_norm()`], for example if there are other channels than `num_channels`.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        group_norm(self, input)
    }
}

/// Configuration of [`InstanceNorm`], as of Burn's.
#[derive(Config, Debug)]
pub struct InstanceNormConfig {
    /// Size of the second dimension.
    pub num_channels: usize,
    /// What is added to variances. Default: 1e-5
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// Whether there are factors and a bias. Default: true
    #[config(default = true)]
    pub affine: bool,
}

same_config!(InstanceNormConfig, burn::nn::InstanceNormConfig, num_channels, epsilon, affine);

impl InstanceNormConfig {
    /// Creates the module: factors of one, and a bias of zero.
    pub fn init(&self, device: &Device) -> InstanceNorm {
        burn::nn::InstanceNormConfig::from(self.clone()).init(device).into()
    }
}

drop_in! {
    /// Burn's [`InstanceNorm`](burn::nn::InstanceNorm), which keeps its input alone for the backward pass;
    /// [`InstanceNormConfig`] makes it. `gamma` and `beta` are `[num_channels]`.
    InstanceNorm, burn::nn::InstanceNorm
}

impl InstanceNorm {
    /// Normalizes each channel of each sample of `input`, as [`GroupNorm::forward`] does groups of them.
    ///
    /// # Panics
    ///
    /// As [`instance_norm`].
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        instance_norm(self, input)
    }
}
