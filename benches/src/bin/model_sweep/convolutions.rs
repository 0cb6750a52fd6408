// Convolutional networks, included behind `models.rs` and `networks.rs`.

/// Scales channels by what a small network makes of their means.
#[derive(Module, Debug)]
struct Squeeze {
    pool: AdaptiveAvgPool2d,
    narrow: Conv2d,
    wide: Conv2d,
}

impl Squeeze {
    fn new(channels: usize, within: usize, device: &Device) -> Self {
        Self {
            pool: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            narrow: conv([channels, within], 1, 1, device),
            wide: conv([within, channels], 1, 1, device),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = activation::silu(self.narrow.forward(self.pool.forward(x.clone())));
        x * activation::sigmoid(self.wide.forward(y))
    }
}

/// Wider, by channel, scaled, and narrower, around a sum where the size stays.
#[derive(Module, Debug)]
struct Scaled {
    wide: Option<ConvNorm>,
    apart: ConvNorm,
    squeeze: Squeeze,
    narrow: ConvNorm,
    is_sum: bool,
}

impl Scaled {
    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = match &self.wide {
            Some(wide) => activation::silu(wide.forward(x.clone())),
            None => x.clone(),
        };
        let y = activation::silu(self.apart.forward(y));
        let y = self.narrow.forward(self.squeeze.forward(y));
        if self.is_sum { x + y } else { y }
    }
}

/// `EfficientNet-B0` (Tan and Le, "`EfficientNet`", 2019), without its dropout and stochastic depth.
#[derive(Module, Debug)]
pub(crate) struct EfficientNet {
    stem: ConvNorm,
    blocks: Vec<Scaled>,
    last: ConvNorm,
    pool: AdaptiveAvgPool2d,
    head: Linear,
}

impl EfficientNet {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        // Expansion, channels, blocks, stride and size of each stage.
        const STAGES: [[usize; 5]; 7] = [
            [1, 16, 1, 1, 3],
            [6, 24, 2, 2, 3],
            [6, 40, 2, 2, 5],
            [6, 80, 3, 2, 3],
            [6, 112, 3, 1, 5],
            [6, 192, 4, 2, 5],
            [6, 320, 1, 1, 3],
        ];
        let mut from = 32;
        let mut blocks = vec![];
        for [expansion, channels, count, stride, size] in STAGES {
            for place in 0..count {
                let stride = if place == 0 { stride } else { 1 };
                let within = from * expansion;
                blocks.push(Scaled {
                    wide: (expansion > 1).then(|| ConvNorm::new([from, within], 1, 1, 1, device)),
                    apart: ConvNorm::new([within, within], size, stride, within, device),
                    squeeze: Squeeze::new(within, from / 4, device),
                    narrow: ConvNorm::new([within, channels], 1, 1, 1, device),
                    is_sum: stride == 1 && from == channels,
                });
                from = channels;
            }
        }
        Self {
            stem: ConvNorm::new([3, 32], 3, 2, 1, device),
            blocks,
            last: ConvNorm::new([from, 1280], 1, 1, 1, device),
            pool: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(1280, shape.classes).init(device),
        }
    }

    pub(crate) fn loss(&self, (images, targets): (Tensor<4>, Tensor<1, Int>)) -> Tensor<1> {
        let x = activation::silu(self.stem.forward(images));
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        let x = self.pool.forward(activation::silu(self.last.forward(x))).flatten::<2>(1, 3);
        cross_entropy(self.head.forward(x), targets)
    }
}

/// Narrower, by group of channels, and wider, around a sum.
#[derive(Module, Debug)]
struct Grouped {
    narrow: ConvNorm,
    groups: ConvNorm,
    wide: ConvNorm,
    shortcut: Option<ConvNorm>,
}

impl Grouped {
    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = activation::relu(self.narrow.forward(x.clone()));
        let y = activation::relu(self.groups.forward(y));
        let x = match &self.shortcut {
            Some(shortcut) => shortcut.forward(x),
            None => x,
        };
        activation::relu(self.wide.forward(y) + x)
    }
}

/// `ResNeXt-50` of 32 groups (Xie et al., "Aggregated Residual Transformations for Deep Neural Networks", 2017).
#[derive(Module, Debug)]
pub(crate) struct ResNext {
    stem: ConvNorm,
    narrow: MaxPool2d,
    blocks: Vec<Grouped>,
    pool: AdaptiveAvgPool2d,
    head: Linear,
}

impl ResNext {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        const GROUPS: usize = 32;
        /// Channels within a block, blocks and stride of each stage.
        const STAGES: [[usize; 3]; 4] = [[128, 3, 1], [256, 4, 2], [512, 6, 2], [1024, 3, 2]];
        let mut from = 64;
        let mut blocks = vec![];
        for [within, count, stride] in STAGES {
            let to = 2 * within;
            for place in 0..count {
                let stride = if place == 0 { stride } else { 1 };
                blocks.push(Grouped {
                    narrow: ConvNorm::new([from, within], 1, 1, 1, device),
                    groups: ConvNorm::new([within, within], 3, stride, GROUPS, device),
                    wide: ConvNorm::new([within, to], 1, 1, 1, device),
                    shortcut: (from != to).then(|| ConvNorm::new([from, to], 1, stride, 1, device)),
                });
                from = to;
            }
        }
        let pad = PaddingConfig2d::Explicit(1, 1, 1, 1);
        Self {
            stem: ConvNorm::new([3, 64], 7, 2, 1, device),
            narrow: MaxPool2dConfig::new([3, 3]).with_strides([2, 2]).with_padding(pad).init(),
            blocks,
            pool: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(from, shape.classes).init(device),
        }
    }

    pub(crate) fn loss(&self, (images, targets): (Tensor<4>, Tensor<1, Int>)) -> Tensor<1> {
        let x = self.narrow.forward(activation::relu(self.stem.forward(images)));
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        cross_entropy(self.head.forward(self.pool.forward(x).flatten::<2>(1, 3)), targets)
    }
}

/// Numbers that an image is drawn from.
pub(crate) const NOISE: usize = 100;

/// Over 4 by 4 pixels: images twice as large, or of 4 pixels from a single one.
fn doubling(channels: [usize; 2], stride: usize, pad: usize, device: &Device) -> ConvTranspose2d {
    ConvTranspose2dConfig::new(channels, [4, 4])
        .with_stride([stride, stride])
        .with_padding([pad, pad])
        .with_bias(false)
        .init(device)
}

/// The same backwards.
fn halving(channels: [usize; 2], stride: usize, pad: usize, device: &Device) -> Conv2d {
    Conv2dConfig::new(channels, [4, 4])
        .with_stride([stride, stride])
        .with_padding(PaddingConfig2d::Explicit(pad, pad, pad, pad))
        .with_bias(false)
        .init(device)
}

/// Draws images of 64 pixels from noise.
#[derive(Module, Debug)]
struct Generator {
    wide: Vec<ConvTranspose2d>,
    norms: Vec<BatchNorm>,
    last: ConvTranspose2d,
}

impl Generator {
    fn new(width: usize, device: &Device) -> Self {
        let widths = [8, 4, 2, 1].map(|factor| factor * width);
        let mut wide = vec![doubling([NOISE, widths[0]], 1, 0, device)];
        wide.extend(widths.windows(2).map(|pair| doubling([pair[0], pair[1]], 2, 1, device)));
        Self {
            wide,
            norms: widths.map(|channels| BatchNormConfig::new(channels).init(device)).into(),
            last: doubling([width, 3], 2, 1, device),
        }
    }

    fn forward(&self, noise: Tensor<4>) -> Tensor<4> {
        let layers = self.wide.iter().zip(&self.norms);
        let x =
            layers.fold(noise, |x, (wide, norm)| activation::relu(norm.forward(wide.forward(x))));
        activation::tanh(self.last.forward(x))
    }
}

/// Tells images that were drawn from real ones.
#[derive(Module, Debug)]
struct Discriminator {
    stem: Conv2d,
    narrow: Vec<Conv2d>,
    norms: Vec<BatchNorm>,
    last: Conv2d,
}

impl Discriminator {
    fn new(width: usize, device: &Device) -> Self {
        let widths = [1, 2, 4, 8].map(|factor| factor * width);
        let narrow = |pair: &[usize]| halving([pair[0], pair[1]], 2, 1, device);
        let norm = |&channels| BatchNormConfig::new(channels).init(device);
        Self {
            stem: halving([3, width], 2, 1, device),
            narrow: widths.windows(2).map(narrow).collect(),
            norms: widths[1..].iter().map(norm).collect(),
            last: halving([8 * width, 1], 1, 0, device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<1> {
        let x = activation::leaky_relu(self.stem.forward(images), 0.2);
        let x = self.narrow.iter().zip(&self.norms).fold(x, |x, (narrow, norm)| {
            activation::leaky_relu(norm.forward(narrow.forward(x)), 0.2)
        });
        full_precision(self.last.forward(x).flatten::<1>(0, 3))
    }
}

/// `DCGAN` (Radford et al., "Unsupervised Representation Learning with Deep Convolutional Generative Adversarial
/// Networks", 2016), whose two halves one step trains together.
#[derive(Module, Debug)]
pub(crate) struct Dcgan {
    generator: Generator,
    discriminator: Discriminator,
}

impl Dcgan {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        Self {
            generator: Generator::new(shape.width, device),
            discriminator: Discriminator::new(shape.width, device),
        }
    }

    pub(crate) fn loss(&self, (noise, images): (Tensor<4>, Tensor<4>)) -> Tensor<1> {
        let drawn = self.discriminator.forward(self.generator.forward(noise));
        let real = self.discriminator.forward(images);
        activation::softplus(drawn, 1.0).mean() + activation::softplus(-real, 1.0).mean()
    }
}
