//! Models of images.

use super::{Batch, Small, trial};
use blackburn::train::precision::full_precision;
use burn::{
    module::Module,
    nn::{
        BatchNorm, BatchNormConfig, GroupNorm, GroupNormConfig, InstanceNorm, InstanceNormConfig,
        LayerNorm, LayerNormConfig, LeakyReluConfig, Linear, LinearConfig, PaddingConfig2d,
        conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig},
        interpolate::{Interpolate2dConfig, InterpolateMode},
        loss::CrossEntropyLossConfig,
        pool::{AdaptiveAvgPool2dConfig, AvgPool2dConfig, MaxPool2dConfig},
    },
    tensor::{
        Device, Int, Tensor,
        activation::{gelu, relu, sigmoid, silu, softmax},
        s,
    },
};
use libtest_mimic::Trial;

pub(super) fn trials() -> Vec<Trial> {
    vec![
        trial::<ConvNext>(),
        trial::<SqueezeExcite>(),
        trial::<DenseNet>(),
        trial::<MobileNet>(),
        trial::<Vae>(),
        trial::<UNet>(),
        trial::<Swin>(),
        trial::<Mixer>(),
        trial::<PatchGan>(),
    ]
}

const IMAGES: usize = 4;
const CLASSES: usize = 5;

fn images<const C: usize, const SIDE: usize>(numbers: Tensor<1>) -> Tensor<4> {
    numbers.reshape([IMAGES, C, SIDE, SIDE])
}

fn conv([from, to]: [usize; 2], kernel: usize, stride: usize) -> Conv2dConfig {
    let padding = kernel / 2;
    Conv2dConfig::new([from, to], [kernel; 2])
        .with_stride([stride; 2])
        .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
}

pub(super) fn classified(logits: Tensor<2>, classes: Tensor<1, Int>) -> Tensor<1> {
    let loss = CrossEntropyLossConfig::new().init(&logits.device());
    loss.forward(full_precision(logits), classes)
}

/// Depthwise kernels of 7 by 7, and norms over channels that are last.
#[derive(Module, Debug)]
struct ConvNext {
    stem: Conv2d,
    depthwise: Conv2d,
    norm: LayerNorm,
    up: Linear,
    down: Linear,
    head: Linear,
}

impl Small for ConvNext {
    const NAME: &'static str = "convnext";
    const NUMBERS: usize = IMAGES * 3 * 16 * 16;
    const WHOLE: usize = IMAGES;
    const BELOW: i64 = CLASSES as i64;

    fn new(device: &Device) -> Self {
        Self {
            stem: Conv2dConfig::new([3, 16], [4, 4]).with_stride([4, 4]).init(device),
            depthwise: conv([16, 16], 7, 1).with_groups(16).init(device),
            norm: LayerNormConfig::new(16).init(device),
            up: LinearConfig::new(16, 64).init(device),
            down: LinearConfig::new(64, 16).init(device),
            head: LinearConfig::new(16, CLASSES).init(device),
        }
    }

    fn loss(&self, (numbers, classes): Batch) -> Tensor<1> {
        let x = self.stem.forward(images::<3, 16>(numbers));
        let y = self.depthwise.forward(x.clone()).permute([0, 2, 3, 1]);
        let y = self.down.forward(gelu(self.up.forward(self.norm.forward(y))));
        let x = x + y.permute([0, 3, 1, 2]) * 0.5;
        let pooled: Tensor<2> = x.mean_dim(3).mean_dim(2).flatten(1, 3);
        classified(self.head.forward(pooled), classes)
    }
}

/// A residual block whose channels are weighted by what a small network makes of their means.
#[derive(Module, Debug)]
struct SqueezeExcite {
    first: Conv2d,
    norm: BatchNorm,
    squeeze: Linear,
    excite: Linear,
    second: Conv2d,
    last: BatchNorm,
    head: Linear,
}

impl Small for SqueezeExcite {
    const NAME: &'static str = "squeeze_excite";
    const NUMBERS: usize = IMAGES * 3 * 12 * 12;
    const WHOLE: usize = IMAGES;
    const BELOW: i64 = CLASSES as i64;

    fn new(device: &Device) -> Self {
        Self {
            first: conv([3, 16], 3, 2).with_bias(false).init(device),
            norm: BatchNormConfig::new(16).init(device),
            squeeze: LinearConfig::new(16, 4).init(device),
            excite: LinearConfig::new(4, 16).init(device),
            second: conv([16, 16], 3, 1).with_bias(false).init(device),
            last: BatchNormConfig::new(16).init(device),
            head: LinearConfig::new(16, CLASSES).init(device),
        }
    }

    fn loss(&self, (numbers, classes): Batch) -> Tensor<1> {
        let x = self.first.forward(images::<3, 12>(numbers));
        let x = silu(self.norm.forward(x));
        let pool = AdaptiveAvgPool2dConfig::new([1, 1]).init();
        let means: Tensor<2> = pool.forward(x.clone()).flatten(1, 3);
        let weights = sigmoid(self.excite.forward(relu(self.squeeze.forward(means))));
        let weighted = x.clone() * weights.reshape([IMAGES, 16, 1, 1]);
        let x = relu(self.last.forward(self.second.forward(weighted)) + x);
        let pooled: Tensor<2> = pool.forward(x).flatten(1, 3);
        classified(self.head.forward(pooled), classes)
    }
}

/// Each layer sees what all layers in front of it made.
#[derive(Module, Debug)]
struct DenseNet {
    stem: Conv2d,
    norms: Vec<BatchNorm>,
    layers: Vec<Conv2d>,
    head: Linear,
}

impl Small for DenseNet {
    const NAME: &'static str = "densenet";
    const NUMBERS: usize = IMAGES * 3 * 16 * 16;
    const WHOLE: usize = IMAGES;
    const BELOW: i64 = CLASSES as i64;

    fn new(device: &Device) -> Self {
        let channels = |layer: usize| 8 + 8 * layer;
        Self {
            stem: conv([3, 8], 5, 1).init(device),
            norms: (0..3).map(|layer| BatchNormConfig::new(channels(layer)).init(device)).collect(),
            layers: (0..3).map(|layer| conv([channels(layer), 8], 3, 1).init(device)).collect(),
            head: LinearConfig::new(32, CLASSES).init(device),
        }
    }

    fn loss(&self, (numbers, classes): Batch) -> Tensor<1> {
        let pool = MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init();
        let mut x = pool.forward(self.stem.forward(images::<3, 16>(numbers)));
        for (norm, layer) in self.norms.iter().zip(&self.layers) {
            let new = layer.forward(relu(norm.forward(x.clone())));
            x = Tensor::cat(vec![x, new], 1);
        }
        let pool = AvgPool2dConfig::new([8, 8]).init();
        let pooled: Tensor<2> = pool.forward(x).flatten(1, 3);
        classified(self.head.forward(pooled), classes)
    }
}

/// An inverted residual whose activation is cut off at 6.
#[derive(Module, Debug)]
struct MobileNet {
    expand: Conv2d,
    norms: Vec<BatchNorm>,
    depthwise: Conv2d,
    project: Conv2d,
    head: Conv2d,
}

impl Small for MobileNet {
    const NAME: &'static str = "mobilenet";
    const NUMBERS: usize = IMAGES * 8 * 10 * 10;
    const WHOLE: usize = IMAGES;
    const BELOW: i64 = CLASSES as i64;

    fn new(device: &Device) -> Self {
        Self {
            expand: conv([8, 32], 1, 1).with_bias(false).init(device),
            norms: [32, 32, 8].map(|channels| BatchNormConfig::new(channels).init(device)).into(),
            depthwise: conv([32, 32], 3, 1).with_groups(32).with_bias(false).init(device),
            project: conv([32, 8], 1, 1).with_bias(false).init(device),
            head: conv([8, CLASSES], 1, 1).init(device),
        }
    }

    fn loss(&self, (numbers, classes): Batch) -> Tensor<1> {
        let x = images::<8, 10>(numbers);
        let y = self.norms[0].forward(self.expand.forward(x.clone())).clamp(0.0, 6.0);
        let y = self.norms[1].forward(self.depthwise.forward(y)).clamp(0.0, 6.0);
        let x = x + self.norms[2].forward(self.project.forward(y));
        let logits: Tensor<2> = self.head.forward(x).mean_dim(3).mean_dim(2).flatten(1, 3);
        classified(logits, classes)
    }
}

/// Of grey images: one channel in and one out, with noise that comes with the batch.
#[derive(Module, Debug)]
struct Vae {
    encoder: Conv2d,
    moments: Linear,
    decode: Linear,
    decoder: ConvTranspose2d,
}

impl Small for Vae {
    const NAME: &'static str = "vae";
    const NUMBERS: usize = IMAGES * (12 * 12 + 6);
    const WHOLE: usize = 0;

    fn new(device: &Device) -> Self {
        Self {
            encoder: conv([1, 8], 3, 2).init(device),
            moments: LinearConfig::new(8 * 36, 12).init(device),
            decode: LinearConfig::new(6, 8 * 36).init(device),
            decoder: ConvTranspose2dConfig::new([8, 1], [4, 4])
                .with_stride([2, 2])
                .with_padding([1, 1])
                .init(device),
        }
    }

    fn loss(&self, (numbers, _): Batch) -> Tensor<1> {
        let x = numbers.clone().slice(s![..(IMAGES * 144) as isize]);
        let x = sigmoid(x.reshape([IMAGES, 1, 12, 12]));
        let noise = numbers.slice(s![(IMAGES * 144) as isize..]).reshape([IMAGES, 6]);
        let hidden: Tensor<2> = relu(self.encoder.forward(x.clone())).flatten(1, 3);
        let [mean, log_variance] = self.moments.forward(hidden).chunk(2, 1).try_into().unwrap();
        let z = mean.clone() + (log_variance.clone() * 0.5).exp() * noise;
        let made = relu(self.decode.forward(z)).reshape([IMAGES, 8, 6, 6]);
        let made = full_precision(sigmoid(self.decoder.forward(made)));
        let x = full_precision(x);
        let likelihood =
            x.clone() * (made.clone() + 1e-4).log() + (x.neg() + 1.0) * (made.neg() + 1.0001).log();
        let (mean, log_variance) = (full_precision(mean), full_precision(log_variance));
        let divergence =
            (log_variance.clone() + 1.0 - mean.powi_scalar(2) - log_variance.exp()) * -0.5;
        divergence.mean() - likelihood.mean()
    }
}

/// Down and up again, with a connection across and group norms.
#[derive(Module, Debug)]
struct UNet {
    first: Conv2d,
    norm: GroupNorm,
    down: Conv2d,
    middle: GroupNorm,
    up: Conv2d,
    last: Conv2d,
}

impl Small for UNet {
    const NAME: &'static str = "unet";
    const NUMBERS: usize = IMAGES * 3 * 16 * 16;
    const WHOLE: usize = 0;

    fn new(device: &Device) -> Self {
        Self {
            first: conv([3, 16], 3, 1).init(device),
            norm: GroupNormConfig::new(4, 16).init(device),
            down: conv([16, 32], 3, 2).init(device),
            middle: GroupNormConfig::new(8, 32).init(device),
            up: conv([32, 16], 3, 1).init(device),
            last: conv([32, 3], 3, 1).init(device),
        }
    }

    fn loss(&self, (numbers, _): Batch) -> Tensor<1> {
        let x = images::<3, 16>(numbers);
        let first = silu(self.norm.forward(self.first.forward(x.clone())));
        let down = silu(self.middle.forward(self.down.forward(first.clone())));
        let up = Interpolate2dConfig::new()
            .with_scale_factor(Some([2.0, 2.0]))
            .with_mode(InterpolateMode::Nearest)
            .init();
        let up = self.up.forward(up.forward(down));
        let made = self.last.forward(Tensor::cat(vec![up, first], 1));
        (full_precision(made) - full_precision(x)).powi_scalar(2).mean()
    }
}

/// Attention within windows that are shifted, with a bias for each pair of places.
#[derive(Module, Debug)]
struct Swin {
    embed: Conv2d,
    norm: LayerNorm,
    qkv: Linear,
    bias: burn::module::Param<Tensor<3>>,
    out: Linear,
    head: Linear,
}

impl Small for Swin {
    const NAME: &'static str = "swin";
    const NUMBERS: usize = IMAGES * 3 * 16 * 16;
    const WHOLE: usize = IMAGES;
    const BELOW: i64 = CLASSES as i64;

    fn new(device: &Device) -> Self {
        Self {
            embed: Conv2dConfig::new([3, 32], [2, 2]).with_stride([2, 2]).init(device),
            norm: LayerNormConfig::new(32).init(device),
            qkv: LinearConfig::new(32, 96).init(device),
            bias: burn::nn::Initializer::Zeros.init([2, 16, 16], device),
            out: LinearConfig::new(32, 32).init(device),
            head: LinearConfig::new(32, CLASSES).init(device),
        }
    }

    fn loss(&self, (numbers, classes): Batch) -> Tensor<1> {
        // Windows of 4 by 4 of 8 by 8 tokens.
        let x = self.embed.forward(images::<3, 16>(numbers)).permute([0, 2, 3, 1]);
        let shifted = self.norm.forward(x.clone()).roll(&[-2, -2], &[1, 2]);
        let windows = shifted
            .reshape([IMAGES, 2, 4, 2, 4, 32])
            .permute([0, 1, 3, 2, 4, 5])
            .reshape([4 * IMAGES, 16, 32]);
        let qkv: Tensor<5> =
            self.qkv.forward(windows).reshape([4 * IMAGES, 16, 3, 2, 16]).permute([2, 0, 3, 1, 4]);
        let part = |at: isize| qkv.clone().slice(s![at..at + 1]).squeeze_dim::<4>(0);
        let scores = part(0).matmul(part(1).transpose()) * 0.25;
        let weights = softmax(scores + self.bias.val().unsqueeze::<4>(), 3);
        let rows = weights.matmul(part(2)).swap_dims(1, 2).reshape([4 * IMAGES, 16, 32]);
        let rows = self
            .out
            .forward(rows)
            .reshape([IMAGES, 2, 2, 4, 4, 32])
            .permute([0, 1, 3, 2, 4, 5])
            .reshape([IMAGES, 8, 8, 32]);
        let x = x + rows.roll(&[2, 2], &[1, 2]);
        let pooled: Tensor<2> = x.mean_dim(2).mean_dim(1).flatten(1, 3);
        classified(self.head.forward(pooled), classes)
    }
}

/// Layers along places and along channels in turns.
#[derive(Module, Debug)]
struct Mixer {
    embed: Conv2d,
    norm: LayerNorm,
    places: Linear,
    channels: Linear,
    head: Linear,
}

impl Small for Mixer {
    const NAME: &'static str = "mixer";
    const NUMBERS: usize = IMAGES * 3 * 12 * 12;
    const WHOLE: usize = IMAGES;
    const BELOW: i64 = CLASSES as i64;

    fn new(device: &Device) -> Self {
        Self {
            embed: Conv2dConfig::new([3, 24], [4, 4]).with_stride([4, 4]).init(device),
            norm: LayerNormConfig::new(24).init(device),
            places: LinearConfig::new(9, 9).init(device),
            channels: LinearConfig::new(24, 24).init(device),
            head: LinearConfig::new(24, CLASSES).init(device),
        }
    }

    fn loss(&self, (numbers, classes): Batch) -> Tensor<1> {
        let x: Tensor<3> = self.embed.forward(images::<3, 12>(numbers)).flatten(2, 3);
        let x = x.swap_dims(1, 2);
        let mixed = self.places.forward(self.norm.forward(x.clone()).swap_dims(1, 2));
        let x = x + gelu(mixed).swap_dims(1, 2);
        let x = x.clone() + gelu(self.channels.forward(self.norm.forward(x)));
        let pooled: Tensor<2> = x.mean_dim(1).squeeze_dim(1);
        classified(self.head.forward(pooled), classes)
    }
}

/// A map of judgements, of instance norms and leaky activations, by a hinge.
#[derive(Module, Debug)]
struct PatchGan {
    first: Conv2d,
    second: Conv2d,
    norm: InstanceNorm,
    last: Conv2d,
}

impl Small for PatchGan {
    const NAME: &'static str = "patchgan";
    const NUMBERS: usize = IMAGES * 3 * 16 * 16;
    const WHOLE: usize = 0;

    fn new(device: &Device) -> Self {
        Self {
            first: Conv2dConfig::new([3, 16], [4, 4]).with_stride([2, 2]).init(device),
            second: Conv2dConfig::new([16, 24], [3, 3]).with_stride([2, 2]).init(device),
            norm: InstanceNormConfig::new(24).init(device),
            last: Conv2dConfig::new([24, 1], [2, 2]).init(device),
        }
    }

    fn loss(&self, (numbers, _): Batch) -> Tensor<1> {
        let leaky = LeakyReluConfig::new().with_negative_slope(0.2).init();
        let judged = |x: Tensor<4>| {
            let x = leaky.forward(self.first.forward(x));
            let x = leaky.forward(self.norm.forward(self.second.forward(x)));
            full_precision(self.last.forward(x))
        };
        let real = images::<3, 16>(numbers);
        let fake = real.clone().flip([3]) * 0.5;
        relu(judged(real).neg() + 1.0).mean() + relu(judged(fake) + 1.0).mean()
    }
}
