// Networks that draw or sharpen images, and one that recommends, included behind the files of other models.

use nn::{
    PixelShuffle, PixelShuffleConfig,
    interpolate::{Interpolate2d, Interpolate2dConfig},
    loss::{BinaryCrossEntropyLossConfig, LpLossConfig},
};

/// Images of twice the height and width, of the nearest pixels.
fn doubled() -> Interpolate2d {
    Interpolate2dConfig::new().with_scale_factor(Some([2.0, 2.0])).init()
}

/// Sines and cosines of times, `[batch, width]`, at rates from 1 down to a ten-thousandth.
fn waves(times: Tensor<1, Int>, width: usize) -> Tensor<2> {
    let half = width / 2;
    let places = Tensor::<1, Int>::arange(0..half as i64, &times.device()).float();
    let rates = (places * (-10_000f64.ln() / half as f64)).exp();
    let angles = times.float().unsqueeze_dim::<2>(1) * rates.unsqueeze::<2>();
    Tensor::cat(vec![angles.clone().cos(), angles.sin()], 1)
}

/// Attention of all pixels.
#[derive(Module, Debug)]
struct PixelAttention {
    norm: GroupNorm,
    attention: MultiHeadAttention,
}

impl PixelAttention {
    fn new(channels: usize, device: &Device) -> Self {
        let attention = MultiHeadAttentionConfig::new(channels, channels / 64).with_dropout(0.0);
        Self {
            norm: GroupNormConfig::new(32, channels).init(device),
            attention: attention.init(device),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = self.norm.forward(x.clone()).flatten::<3>(2, 3).swap_dims(1, 2);
        let y = self.attention.forward(MhaInput::self_attn(y)).context;
        x.clone() + y.swap_dims(1, 2).reshape(x.dims())
    }
}

/// Two convolutions around group norms and a sum, between which each channel is told the time, and attention.
#[derive(Module, Debug)]
struct Denoising {
    residual: Residual,
    time: Linear,
    attention: Option<PixelAttention>,
}

impl Denoising {
    fn new([from, to]: [usize; 2], times: usize, is_attending: bool, device: &Device) -> Self {
        Self {
            residual: Residual::new(from, to, device),
            time: LinearConfig::new(times, to).init(device),
            attention: is_attending.then(|| PixelAttention::new(to, device)),
        }
    }

    fn forward(&self, x: Tensor<4>, times: Tensor<2>) -> Tensor<4> {
        let Residual { norms, convs, shortcut } = &self.residual;
        let part = |at: usize, x| convs[at].forward(activation::silu(norms[at].forward(x)));
        let times = self.time.forward(activation::silu(times));
        let y = part(0, x.clone()) + times.unsqueeze_dims::<4>(&[2, 3]);
        let y = part(1, y);
        let y = match shortcut {
            Some(shortcut) => shortcut.forward(x) + y,
            None => x + y,
        };
        match &self.attention {
            Some(attention) => attention.forward(y),
            None => y,
        }
    }
}

/// A network that removes noise (Ho et al., "Denoising Diffusion Probabilistic Models", 2020) from latents (Rombach et
/// al., "High-Resolution Image Synthesis with Latent Diffusion Models", 2022).
#[derive(Module, Debug)]
pub(crate) struct DiffusionUNet {
    times: [Linear; 2],
    stem: Conv2d,
    down: Vec<Vec<Denoising>>,
    narrow: Vec<Conv2d>,
    middle: [Denoising; 2],
    up: Vec<Vec<Denoising>>,
    doubled: Interpolate2d,
    wide: Vec<Conv2d>,
    norm: GroupNorm,
    head: Conv2d,
}

impl DiffusionUNet {
    /// Of a latent image.
    pub(crate) const CHANNELS: usize = 4;

    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        /// Factors of the width, level by level. All levels but the first have attention.
        const LEVELS: [usize; 3] = [1, 2, 2];
        let Shape { width, layers, .. } = *shape;
        let times = 4 * width;
        let last = LEVELS.len() - 1;
        let (mut down, mut narrow, mut up, mut wide) = (vec![], vec![], vec![], vec![]);
        let (mut channels, mut kept) = (width, vec![width]);
        for (level, factor) in LEVELS.into_iter().enumerate() {
            let to = factor * width;
            let mut blocks = vec![];
            for _ in 0..layers {
                blocks.push(Denoising::new([channels, to], times, level > 0, device));
                channels = to;
                kept.push(channels);
            }
            down.push(blocks);
            if level < last {
                narrow.push(conv([channels, channels], 3, 2, device));
                kept.push(channels);
            }
        }
        let middle = [true, false]
            .map(|is_first| Denoising::new([channels, channels], times, is_first, device));
        let mut kept = kept.into_iter().rev();
        for (level, factor) in LEVELS.into_iter().enumerate().rev() {
            let to = factor * width;
            let mut blocks = vec![];
            for beside in kept.by_ref().take(layers + 1) {
                blocks.push(Denoising::new([channels + beside, to], times, level > 0, device));
                channels = to;
            }
            up.push(blocks);
            if level > 0 {
                wide.push(conv([channels, channels], 3, 1, device));
            }
        }
        Self {
            times: [width, times].map(|from| LinearConfig::new(from, times).init(device)),
            stem: conv([Self::CHANNELS, width], 3, 1, device),
            down,
            narrow,
            middle,
            up,
            doubled: doubled(),
            wide,
            norm: GroupNormConfig::new(32, width).init(device),
            head: conv([width, Self::CHANNELS], 3, 1, device),
        }
    }

    /// Of latents with noise, how much they have of it as steps of time, and the noise.
    pub(crate) fn loss(
        &self,
        (latents, times, noise): (Tensor<4>, Tensor<1, Int>, Tensor<4>),
    ) -> Tensor<1> {
        let waves = waves(times, self.stem.weight.dims()[0]).cast(latents.dtype());
        let times = self.times[1].forward(activation::silu(self.times[0].forward(waves)));
        let mut x = self.stem.forward(latents);
        let mut kept = vec![x.clone()];
        for (level, blocks) in self.down.iter().enumerate() {
            for block in blocks {
                x = block.forward(x, times.clone());
                kept.push(x.clone());
            }
            if let Some(narrow) = self.narrow.get(level) {
                x = narrow.forward(x);
                kept.push(x.clone());
            }
        }
        x = self.middle.iter().fold(x, |x, block| block.forward(x, times.clone()));
        let mut kept = kept.into_iter().rev();
        for (level, blocks) in self.up.iter().enumerate() {
            for (block, beside) in blocks.iter().zip(&mut kept) {
                x = block.forward(Tensor::cat(vec![x, beside], 1), times.clone());
            }
            if let Some(wide) = self.wide.get(level) {
                x = wide.forward(self.doubled.forward(x));
            }
        }
        let y = self.head.forward(activation::silu(self.norm.forward(x)));
        MseLoss::new().forward(full_precision(y), full_precision(noise), Reduction::Mean)
    }
}

/// The small `EDSR` (Lim et al., "Enhanced Deep Residual Networks for Single Image Super-Resolution", 2017): images of
/// twice the height and width, by blocks without norms.
#[derive(Module, Debug)]
pub(crate) struct Edsr {
    stem: Conv2d,
    blocks: Vec<[Conv2d; 2]>,
    last: Conv2d,
    wide: Conv2d,
    shuffle: PixelShuffle,
    head: Conv2d,
}

impl Edsr {
    /// Of an image's height and width.
    pub(crate) const FACTOR: usize = 2;

    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        let Shape { width, layers, .. } = *shape;
        let conv = |from, to| conv([from, to], 3, 1, device);
        Self {
            stem: conv(3, width),
            blocks: (0..layers).map(|_| [conv(width, width), conv(width, width)]).collect(),
            last: conv(width, width),
            wide: conv(width, Self::FACTOR.pow(2) * width),
            shuffle: PixelShuffleConfig::new(Self::FACTOR).init(),
            head: conv(width, 3),
        }
    }

    pub(crate) fn loss(&self, (images, targets): (Tensor<4>, Tensor<4>)) -> Tensor<1> {
        let stem = self.stem.forward(images);
        let x = self.blocks.iter().fold(stem.clone(), |x, [first, second]| {
            let y = second.forward(activation::relu(first.forward(x.clone())));
            x + y
        });
        let x = stem + self.last.forward(x);
        let y = self.head.forward(self.shuffle.forward(self.wide.forward(x)));
        LpLossConfig::l1().forward(full_precision(y), full_precision(targets), Reduction::Mean)
    }
}

/// `DLRM` (Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019):
/// products of all pairs of what is known of a sample.
#[derive(Module, Debug)]
pub(crate) struct Dlrm {
    tables: Vec<Embedding>,
    bottom: Vec<Linear>,
    /// Of products of all with all, each pair once.
    pairs: Tensor<1, Int>,
    top: Vec<Linear>,
    head: Linear,
}

impl Dlrm {
    /// Numbers of a sample, besides its ids.
    pub(crate) const NUMBERS: usize = 13;

    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        let Shape { width, length, classes, .. } = *shape;
        let layers = |sizes: &[usize]| {
            let layer = |pair: &[usize]| LinearConfig::new(pair[0], pair[1]).init(device);
            sizes.windows(2).map(layer).collect()
        };
        let parts = length + 1;
        let pairs = (0..parts).flat_map(|row| (0..row).map(move |column| row * parts + column));
        let pairs: Vec<i64> = pairs.map(|pair| pair as i64).collect();
        Self {
            tables: (0..length)
                .map(|_| EmbeddingConfig::new(classes, width).init(device))
                .collect(),
            bottom: layers(&[Self::NUMBERS, 512, 256, width]),
            top: layers(&[width + pairs.len(), 1024, 1024, 512, 256]),
            pairs: Tensor::from_ints(pairs.as_slice(), device),
            head: LinearConfig::new(256, 1).init(device),
        }
    }

    /// Of numbers, an id for each table, and whether a sample was clicked at.
    pub(crate) fn loss(
        &self,
        (numbers, ids, targets): (Tensor<2>, Tensor<2, Int>, Tensor<1, Int>),
    ) -> Tensor<1> {
        let forward = |layers: &[Linear], x| {
            layers.iter().fold(x, |x, layer| activation::relu(layer.forward(x)))
        };
        let numbers = forward(&self.bottom, numbers);
        let mut parts = vec![numbers.clone().unsqueeze_dim::<3>(1)];
        for (table, ids) in self.tables.iter().zip(ids.chunk(self.tables.len(), 1)) {
            parts.push(table.forward(ids));
        }
        let parts = Tensor::cat(parts, 1);
        let products = parts.clone().matmul(parts.swap_dims(1, 2)).flatten::<2>(1, 2);
        let products = products.select(1, self.pairs.clone());
        let x = forward(&self.top, Tensor::cat(vec![numbers, products], 1));
        let logits = full_precision(self.head.forward(x)).squeeze_dim::<1>(1);
        let loss = BinaryCrossEntropyLossConfig::new().with_logits(true).init(&logits.device());
        loss.forward(logits, targets)
    }
}
