//! One of several norms, chosen by a configuration.

use super::{
    GroupNorm, GroupNormConfig, InstanceNorm, InstanceNormConfig, LayerNorm, LayerNormConfig,
    RmsNorm, RmsNormConfig,
};
use burn::{
    config::Config,
    module::Module,
    nn::{BatchNorm, BatchNormConfig, Identity},
    tensor::{Device, Tensor},
};

/// Configuration of a [`Normalization`], as of Burn's. More may be added.
#[derive(Config, Debug)]
#[non_exhaustive]
pub enum NormalizationConfig {
    /// None.
    Identity,
    /// Of a batch.
    Batch(BatchNormConfig),
    /// Of groups of channels.
    Group(GroupNormConfig),
    /// Of each channel of an instance.
    Instance(InstanceNormConfig),
    /// Of the last dimension.
    Layer(LayerNormConfig),
    /// Of the last dimension, by its root mean square.
    Rms(RmsNormConfig),
}

/// One of several norms; [`NormalizationConfig`] makes it. Records go both ways between it and Burn's.
#[derive(Module, Debug)]
#[non_exhaustive]
pub enum Normalization {
    /// None.
    Identity(Identity),
    /// Of a batch.
    Batch(BatchNorm),
    /// Of groups of channels.
    Group(GroupNorm),
    /// Of each channel of an instance.
    Instance(InstanceNorm),
    /// Of the last dimension.
    Layer(LayerNorm),
    /// Of the last dimension, by its root mean square.
    Rms(RmsNorm),
}

/// A norm, and its configuration, as one of several.
macro_rules! from_each {
    ($($variant:ident: $module:ident, $config:ident);+) => {$(
        impl From<$module> for Normalization {
            fn from(module: $module) -> Self {
                Self::$variant(module)
            }
        }

        impl From<$config> for NormalizationConfig {
            fn from(config: $config) -> Self {
                Self::$variant(config)
            }
        }
    )+};
}

from_each! {
    Batch: BatchNorm, BatchNormConfig;
    Group: GroupNorm, GroupNormConfig;
    Instance: InstanceNorm, InstanceNormConfig;
    Layer: LayerNorm, LayerNormConfig;
    Rms: RmsNorm, RmsNormConfig
}

impl From<Identity> for Normalization {
    fn from(module: Identity) -> Self {
        Self::Identity(module)
    }
}

impl NormalizationConfig {
    /// Creates the norm.
    ///
    /// # Panics
    ///
    /// As the norm's own configuration.
    pub fn init(&self, device: &Device) -> Normalization {
        match self {
            Self::Identity => Identity::new().into(),
            Self::Batch(config) => config.init(device).into(),
            Self::Group(config) => config.init(device).into(),
            Self::Instance(config) => config.init(device).into(),
            Self::Layer(config) => config.init(device).into(),
            Self::Rms(config) => config.init(device).into(),
        }
    }

    /// The configuration for so many features: channels, or the size of the last dimension.
    pub fn with_num_features(self, num_features: usize) -> Self {
        match self {
            Self::Identity => self,
            Self::Batch(config) => BatchNormConfig { num_features, ..config }.into(),
            Self::Group(config) => GroupNormConfig { num_channels: num_features, ..config }.into(),
            Self::Instance(config) => {
                InstanceNormConfig { num_channels: num_features, ..config }.into()
            }
            Self::Layer(config) => LayerNormConfig { d_model: num_features, ..config }.into(),
            Self::Rms(config) => RmsNormConfig { d_model: num_features, ..config }.into(),
        }
    }

    /// The number of features; 0 where there is no norm.
    pub fn num_features(&self) -> usize {
        match self {
            Self::Identity => 0,
            Self::Batch(config) => config.num_features,
            Self::Group(config) => config.num_channels,
            Self::Instance(config) => config.num_channels,
            Self::Layer(config) => config.d_model,
            Self::Rms(config) => config.d_model,
        }
    }
}

impl Normalization {
    /// Normalizes `input`, of at least two dimensions, and returns as many numbers.
    ///
    /// # Panics
    ///
    /// As the norm's own `forward`.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Identity(norm) => norm.forward(input),
            Self::Batch(norm) => norm.forward(input),
            Self::Group(norm) => norm.forward(input),
            Self::Instance(norm) => norm.forward(input),
            Self::Layer(norm) => norm.forward(input),
            Self::Rms(norm) => norm.forward(input),
        }
    }

    /// The number of features; 0 where there is no norm.
    pub fn num_features(&self) -> usize {
        match self {
            Self::Identity(_) => 0,
            Self::Batch(norm) => norm.gamma.shape()[0],
            Self::Group(norm) => norm.num_channels,
            Self::Instance(norm) => norm.num_channels,
            Self::Layer(norm) => norm.gamma.shape()[0],
            Self::Rms(norm) => norm.gamma.shape()[0],
        }
    }
}
