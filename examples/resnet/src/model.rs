//! Residual networks of standard Burn modules, as torchvision has them (He et al., "Deep Residual Learning for
//! Image Recognition", arXiv:1512.03385, table 1): the stride of a bottleneck is in its kernel of 3 by 3.

use anyhow::{Result, bail};
use blackburn::nn::vision::conv_norm;
use burn::{
    module::Module,
    nn::{
        BatchNorm, BatchNormConfig, Initializer, Linear, LinearConfig, PaddingConfig2d,
        conv::{Conv2d, Conv2dConfig},
        pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig},
    },
    tensor::{Device, Tensor, activation::relu},
};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// How many layers the network has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Depth {
    #[serde(rename = "18")]
    D18,
    #[serde(rename = "34")]
    D34,
    #[serde(rename = "50")]
    D50,
    #[serde(rename = "101")]
    D101,
}

impl Depth {
    pub(crate) const ALL: [Self; 4] = [Self::D18, Self::D34, Self::D50, Self::D101];

    fn layers(self) -> usize {
        match self {
            Self::D18 => 18,
            Self::D34 => 34,
            Self::D50 => 50,
            Self::D101 => 101,
        }
    }

    /// Blocks of each stage.
    pub(crate) fn blocks(self) -> [usize; 4] {
        match self {
            Self::D18 => [2, 2, 2, 2],
            Self::D34 | Self::D50 => [3, 4, 6, 3],
            Self::D101 => [3, 4, 23, 3],
        }
    }

    /// Whether blocks go through fewer channels, by kernels of 1 by 1 on both sides.
    pub(crate) fn has_bottlenecks(self) -> bool {
        matches!(self, Self::D50 | Self::D101)
    }
}

impl fmt::Display for Depth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.layers())
    }
}

impl FromStr for Depth {
    type Err = anyhow::Error;

    fn from_str(given: &str) -> Result<Self> {
        match Self::ALL.into_iter().find(|depth| depth.to_string() == given) {
            Some(depth) => Ok(depth),
            None => bail!("expected 18, 34, 50 or 101, got `{given}`"),
        }
    }
}

/// The sizes of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ModelConfig {
    pub(crate) depth: Depth,
    /// Channels of the stem and of the first stage's kernels of 3 by 3: 64 in the paper.
    pub(crate) width: usize,
    /// Classes that it tells apart.
    pub(crate) classes: usize,
}

/// A convolution and its normalization.
#[derive(Module, Debug)]
struct ConvNorm {
    conv: Conv2d,
    norm: BatchNorm,
}

impl ConvNorm {
    /// With a padding by which stride 1 keeps the size.
    fn new(channels: [usize; 2], kernel: usize, stride: usize, device: &Device) -> Self {
        let padding = (kernel - 1) / 2;
        let conv = Conv2dConfig::new(channels, [kernel; 2])
            .with_stride([stride; 2])
            .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
            .with_bias(false)
            .with_initializer(Initializer::KaimingNormal {
                gain: f64::sqrt(2.0),
                fan_out_only: true,
            });
        Self { conv: conv.init(device), norm: BatchNormConfig::new(channels[1]).init(device) }
    }

    /// The normalized convolution, with a residual and a `ReLU` behind it where these are asked for.
    fn forward(&self, x: Tensor<4>, residual: Option<Tensor<4>>, is_relu: bool) -> Tensor<4> {
        conv_norm(&self.conv, &self.norm, x, residual, is_relu)
    }

    /// The same by Burn's modules alone.
    fn unmodified(&self, x: Tensor<4>, residual: Option<Tensor<4>>, is_relu: bool) -> Tensor<4> {
        let y = self.norm.forward(self.conv.forward(x));
        let y = match residual {
            Some(residual) => y + residual,
            None => y,
        };
        if is_relu { relu(y) } else { y }
    }
}

/// How a layer runs: see [`ConvNorm::forward`].
type Layer = fn(&ConvNorm, Tensor<4>, Option<Tensor<4>>, bool) -> Tensor<4>;

/// Convolutions whose result is added to their input.
#[derive(Module, Debug)]
struct Block {
    layers: Vec<ConvNorm>,
    /// What the input goes through where the result has another size.
    shortcut: Option<ConvNorm>,
}

impl Block {
    fn new(
        [inputs, width]: [usize; 2],
        stride: usize,
        has_bottleneck: bool,
        device: &Device,
    ) -> Self {
        let outputs = if has_bottleneck { 4 * width } else { width };
        let layer = |channels, kernel, stride| ConvNorm::new(channels, kernel, stride, device);
        let layers = if has_bottleneck {
            vec![
                layer([inputs, width], 1, 1),
                layer([width, width], 3, stride),
                layer([width, outputs], 1, 1),
            ]
        } else {
            vec![layer([inputs, width], 3, stride), layer([width, width], 3, 1)]
        };
        let changes = stride > 1 || inputs != outputs;
        let shortcut = changes.then(|| layer([inputs, outputs], 1, stride));
        Self { layers, shortcut }
    }

    fn forward(&self, x: Tensor<4>, layer: Layer) -> Tensor<4> {
        let residual = match &self.shortcut {
            Some(shortcut) => layer(shortcut, x.clone(), None, false),
            None => x.clone(),
        };
        let Some((last, others)) = self.layers.split_last() else { return residual };
        let x = others.iter().fold(x, |x, one| layer(one, x, None, true));
        layer(last, x, Some(residual), true)
    }
}

/// A residual network of standard Burn modules.
#[derive(Module, Debug)]
pub(crate) struct ResNet {
    stem: ConvNorm,
    pool: MaxPool2d,
    blocks: Vec<Block>,
    average: AdaptiveAvgPool2d,
    head: Linear,
}

impl ResNet {
    /// A network with random parameters.
    pub(crate) fn new(config: &ModelConfig, device: &Device) -> Self {
        let ModelConfig { depth, width, classes } = *config;
        let has_bottlenecks = depth.has_bottlenecks();
        let mut blocks = Vec::new();
        let mut channels = width;
        for (stage, count) in depth.blocks().into_iter().enumerate() {
            let width = width << stage;
            for index in 0..count {
                let stride = if stage > 0 && index == 0 { 2 } else { 1 };
                blocks.push(Block::new([channels, width], stride, has_bottlenecks, device));
                channels = if has_bottlenecks { 4 * width } else { width };
            }
        }
        let pool = MaxPool2dConfig::new([3, 3])
            .with_strides([2, 2])
            .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1));
        Self {
            stem: ConvNorm::new([3, width], 7, 2, device),
            pool: pool.init(),
            blocks,
            average: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(channels, classes).init(device),
        }
    }

    /// Logits `[n, classes]` of images `[n, 3, h, w]`.
    pub(crate) fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        self.forward_by(ConvNorm::forward, images)
    }

    /// The same by Burn's modules alone.
    pub(crate) fn forward_unmodified(&self, images: Tensor<4>) -> Tensor<2> {
        self.forward_by(ConvNorm::unmodified, images)
    }

    fn forward_by(&self, layer: Layer, images: Tensor<4>) -> Tensor<2> {
        let x = self.pool.forward(layer(&self.stem, images, None, true));
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x, layer));
        self.head.forward(self.average.forward(x).flatten(1, 3))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Burn counts running statistics, which are as many as the parameters of the norms, among the parameters.
    #[test]
    fn networks_have_the_parameters_that_torchvision_s_have() {
        let device = Device::flex();
        for (depth, parameters, of_norms) in [
            (Depth::D18, 11_689_512, 9_600),
            (Depth::D34, 21_797_672, 17_024),
            (Depth::D50, 25_557_032, 53_120),
            (Depth::D101, 44_549_160, 105_344),
        ] {
            let config = ModelConfig { depth, width: 64, classes: 1000 };
            let network = ResNet::new(&config, &device);
            assert_eq!(network.num_params(), parameters + of_norms, "{depth}");
        }
    }

    #[test]
    fn images_become_logits() {
        let device = Device::flex();
        let config = ModelConfig { depth: Depth::D18, width: 8, classes: 7 };
        let logits = ResNet::new(&config, &device).forward(Tensor::ones([2, 3, 64, 64], &device));
        assert_eq!(logits.dims(), [2, 7]);
    }
}
