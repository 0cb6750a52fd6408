// Further networks of images and sequences, included behind `models.rs`.

use burn::module::Param;
use nn::{
    PaddingConfig1d,
    conv::{Conv1d, Conv1dConfig},
    pool::{AvgPool2d, AvgPool2dConfig, MaxPool2d, MaxPool2dConfig},
};

/// A norm and a ReLU in front of a convolution.
#[derive(Module, Debug)]
struct NormConv {
    norm: BatchNorm,
    conv: Conv2d,
}

impl NormConv {
    fn new(channels: [usize; 2], size: usize, device: &Device) -> Self {
        let pad = size / 2;
        let conv = Conv2dConfig::new(channels, [size, size])
            .with_padding(PaddingConfig2d::Explicit(pad, pad, pad, pad))
            .with_bias(false);
        Self { norm: BatchNormConfig::new(channels[0]).init(device), conv: conv.init(device) }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.conv.forward(activation::relu(self.norm.forward(x)))
    }
}

/// Layers of which each reads what all before it made, and a narrower image.
#[derive(Module, Debug)]
struct Dense {
    layers: Vec<[NormConv; 2]>,
    narrow: Option<NormConv>,
}

/// `DenseNet-121` (Huang et al., "Densely Connected Convolutional Networks", 2017).
#[derive(Module, Debug)]
pub(crate) struct DenseNet {
    stem: ConvNorm,
    narrow: MaxPool2d,
    blocks: Vec<Dense>,
    halve: AvgPool2d,
    norm: BatchNorm,
    pool: AdaptiveAvgPool2d,
    head: Linear,
}

impl DenseNet {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        /// Channels that a layer adds, and those within it.
        const GROWTH: [usize; 2] = [32, 128];
        const LAYERS: [usize; 4] = [6, 12, 24, 16];
        let [growth, within] = GROWTH;
        let mut channels = 64;
        let mut blocks = vec![];
        for (place, count) in LAYERS.into_iter().enumerate() {
            let mut layers = vec![];
            for _ in 0..count {
                layers.push([
                    NormConv::new([channels, within], 1, device),
                    NormConv::new([within, growth], 3, device),
                ]);
                channels += growth;
            }
            let is_last = place + 1 == LAYERS.len();
            let narrow = (!is_last).then(|| NormConv::new([channels, channels / 2], 1, device));
            if !is_last {
                channels /= 2;
            }
            blocks.push(Dense { layers, narrow });
        }
        let pad = PaddingConfig2d::Explicit(1, 1, 1, 1);
        Self {
            stem: ConvNorm::new([3, 64], 7, 2, 1, device),
            narrow: MaxPool2dConfig::new([3, 3]).with_strides([2, 2]).with_padding(pad).init(),
            blocks,
            halve: AvgPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            norm: BatchNormConfig::new(channels).init(device),
            pool: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(channels, shape.classes).init(device),
        }
    }

    pub(crate) fn loss(&self, (images, targets): (Tensor<4>, Tensor<1, Int>)) -> Tensor<1> {
        let mut x = self.narrow.forward(activation::relu(self.stem.forward(images)));
        for block in &self.blocks {
            for [within, added] in &block.layers {
                let more = added.forward(within.forward(x.clone()));
                x = Tensor::cat(vec![x, more], 1);
            }
            if let Some(narrow) = &block.narrow {
                x = self.halve.forward(narrow.forward(x));
            }
        }
        let x = self.pool.forward(activation::relu(self.norm.forward(x))).flatten::<2>(1, 3);
        cross_entropy(self.head.forward(x), targets)
    }
}

/// A norm over channels, which lie in the second dimension.
fn norm_of_channels(norm: &LayerNorm, x: Tensor<4>) -> Tensor<4> {
    norm.forward(x.permute([0, 2, 3, 1])).permute([0, 3, 1, 2])
}

/// Single channels over 7 by 7 pixels, and two layers over all channels of each pixel.
#[derive(Module, Debug)]
struct Next {
    apart: Conv2d,
    norm: LayerNorm,
    inner: Linear,
    outer: Linear,
    scale: Param<Tensor<1>>,
}

impl Next {
    fn new(width: usize, device: &Device) -> Self {
        let apart = Conv2dConfig::new([width, width], [7, 7]);
        let apart = apart.with_padding(PaddingConfig2d::Explicit(3, 3, 3, 3)).with_groups(width);
        Self {
            apart: apart.init(device),
            norm: LayerNormConfig::new(width).with_epsilon(1e-6).init(device),
            inner: LinearConfig::new(width, 4 * width).init(device),
            outer: LinearConfig::new(4 * width, width).init(device),
            scale: Param::from_tensor(Tensor::full([width], 1e-6, device)),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = self.norm.forward(self.apart.forward(x.clone()).permute([0, 2, 3, 1]));
        let y = self.outer.forward(activation::gelu(self.inner.forward(y)));
        x + (y * self.scale.val().unsqueeze::<4>()).permute([0, 3, 1, 2])
    }
}

/// `ConvNeXt-T` (Liu et al., "A `ConvNet` for the 2020s", 2022), without its stochastic depth.
#[derive(Module, Debug)]
pub(crate) struct ConvNext {
    narrow: Vec<Conv2d>,
    norms: Vec<LayerNorm>,
    stages: Vec<Vec<Next>>,
    norm: LayerNorm,
    head: Linear,
}

impl ConvNext {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        /// Channels and blocks of each stage.
        const STAGES: [[usize; 2]; 4] = [[96, 3], [192, 3], [384, 9], [768, 3]];
        let norm = |width| LayerNormConfig::new(width).with_epsilon(1e-6).init(device);
        let (mut narrow, mut norms, mut stages, mut from) = (vec![], vec![], vec![], 3);
        for (place, [width, blocks]) in STAGES.into_iter().enumerate() {
            let size = if place == 0 { 4 } else { 2 };
            let conv = Conv2dConfig::new([from, width], [size, size]).with_stride([size, size]);
            narrow.push(conv.init(device));
            // The first one stands behind its convolution.
            norms.push(norm(if place == 0 { width } else { from }));
            stages.push((0..blocks).map(|_| Next::new(width, device)).collect());
            from = width;
        }
        let head = LinearConfig::new(from, shape.classes).init(device);
        Self { narrow, norms, stages, norm: norm(from), head }
    }

    pub(crate) fn loss(&self, (images, targets): (Tensor<4>, Tensor<1, Int>)) -> Tensor<1> {
        let mut x = images;
        let parts = self.narrow.iter().zip(&self.norms).zip(&self.stages);
        for (place, ((narrow, norm), blocks)) in parts.enumerate() {
            x = match place {
                0 => norm_of_channels(norm, narrow.forward(x)),
                _ => narrow.forward(norm_of_channels(norm, x)),
            };
            x = blocks.iter().fold(x, |x, block| block.forward(x));
        }
        let pooled = x.mean_dims(&[2, 3]).flatten::<2>(1, 3);
        cross_entropy(self.head.forward(self.norm.forward(pooled)), targets)
    }
}

/// Two layers over all tokens of a channel, and two over all channels of a token.
#[derive(Module, Debug)]
struct Mixing {
    norms: [LayerNorm; 2],
    inner: [Linear; 2],
    outer: [Linear; 2],
}

/// An MLP mixer over patches of 16 pixels (Tolstikhin et al., "MLP-Mixer", 2021).
#[derive(Module, Debug)]
pub(crate) struct Mixer {
    patches: Conv2d,
    layers: Vec<Mixing>,
    norm: LayerNorm,
    head: Linear,
}

impl Mixer {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        let Shape { width, layers, classes, length, .. } = *shape;
        let tokens = (length / 16).pow(2);
        let norm = || LayerNormConfig::new(width).init(device);
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let layer = |_| Mixing {
            norms: [norm(), norm()],
            inner: [linear(tokens, width / 2), linear(width, 4 * width)],
            outer: [linear(width / 2, tokens), linear(4 * width, width)],
        };
        Self {
            patches: Conv2dConfig::new([3, width], [16, 16]).with_stride([16, 16]).init(device),
            layers: (0..layers).map(layer).collect(),
            norm: norm(),
            head: linear(width, classes),
        }
    }

    pub(crate) fn loss(&self, (images, targets): (Tensor<4>, Tensor<1, Int>)) -> Tensor<1> {
        let mut x = self.patches.forward(images).flatten::<3>(2, 3).swap_dims(1, 2);
        for Mixing { norms, inner, outer } in &self.layers {
            let fed = |part: usize, x: Tensor<3>| {
                outer[part].forward(activation::gelu(inner[part].forward(x)))
            };
            let mixed = fed(0, norms[0].forward(x.clone()).swap_dims(1, 2));
            x = x + mixed.swap_dims(1, 2);
            x = x.clone() + fed(1, norms[1].forward(x));
        }
        let pooled = self.norm.forward(x).mean_dim(1).squeeze_dim::<2>(1);
        cross_entropy(self.head.forward(pooled), targets)
    }
}

/// What lies behind in time, at a growing distance, by a gate.
#[derive(Module, Debug)]
struct Gate {
    value: Conv1d,
    gate: Conv1d,
    on: Conv1d,
    out: Conv1d,
}

/// A network of sound (van den Oord et al., "`WaveNet`", 2016), twice ten layers.
#[derive(Module, Debug)]
pub(crate) struct Wave {
    stem: Conv1d,
    layers: Vec<Gate>,
    head: [Conv1d; 2],
}

impl Wave {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        let Shape { width, layers, classes, .. } = *shape;
        let apart = |from, to, size: usize, distance: usize| {
            let before = PaddingConfig1d::Explicit((size - 1) * distance, 0);
            let conv = Conv1dConfig::new(from, to, size).with_dilation(distance);
            conv.with_padding(before).init(device)
        };
        let layer = |place: usize| Gate {
            value: apart(width, width, 2, 1 << (place % 10)),
            gate: apart(width, width, 2, 1 << (place % 10)),
            on: apart(width, width, 1, 1),
            out: apart(width, 2 * width, 1, 1),
        };
        Self {
            stem: apart(1, width, 2, 1),
            layers: (0..layers).map(layer).collect(),
            head: [apart(2 * width, 2 * width, 1, 1), apart(2 * width, classes, 1, 1)],
        }
    }

    pub(crate) fn loss(&self, (sound, targets): (Tensor<3>, Tensor<1, Int>)) -> Tensor<1> {
        let mut x = self.stem.forward(sound);
        let mut sum: Option<Tensor<3>> = None;
        for layer in &self.layers {
            let value = activation::tanh(layer.value.forward(x.clone()));
            let gated = value * activation::sigmoid(layer.gate.forward(x.clone()));
            let out = layer.out.forward(gated.clone());
            sum = Some(match sum {
                Some(sum) => sum + out,
                None => out,
            });
            x = x + layer.on.forward(gated);
        }
        let y = self.head.iter().fold(sum.unwrap_or(x), |x, conv| conv.forward(activation::relu(x)));
        cross_entropy(y.swap_dims(1, 2), targets)
    }
}
