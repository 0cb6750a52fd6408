// Transformers that are not plain stacks of Burn's layers, included behind `models.rs` and `networks.rs`.

use burn::tensor::s;
use nn::{
    Initializer,
    attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
};

/// What attention makes of products of queries and keys, in front of their softmax.
struct Scores {
    /// Added to those of each head: `[1, heads, queries, keys]`.
    bias: Option<Tensor<4>>,
    /// Added to those of each window of an image: `[windows, 1, queries, keys]`.
    mask: Option<Tensor<4>>,
    /// Divided by the root of a head's size.
    is_scaled: bool,
    is_causal: bool,
}

/// Pixels of a window's side.
const WINDOW: usize = 7;

/// Where pairs of tokens in a window find their bias: by the distance in both directions.
fn distances(device: &Device) -> Tensor<1, Int> {
    let tokens = WINDOW * WINDOW;
    let apart = |from: usize, to: usize| from + WINDOW - 1 - to;
    let pairs = (0..tokens * tokens).map(|pair| {
        let (from, to) = (pair / tokens, pair % tokens);
        let rows = apart(from / WINDOW, to / WINDOW);
        let columns = apart(from % WINDOW, to % WINDOW);
        (rows * (2 * WINDOW - 1) + columns) as i64
    });
    Tensor::from_ints(pairs.collect::<Vec<_>>().as_slice(), device)
}

/// Keeps tokens apart that lie in a shifted window though they come from opposite sides:
/// `[windows, 1, tokens, tokens]`.
fn mask_of(side: usize, shift: usize, device: &Device) -> Tensor<4> {
    let part =
        |place: usize| usize::from(place >= side - WINDOW) + usize::from(place >= side - shift);
    let (across, tokens) = (side / WINDOW, WINDOW * WINDOW);
    let region = |window: usize, token: usize| {
        let row = window / across * WINDOW + token / WINDOW;
        let column = window % across * WINDOW + token % WINDOW;
        3 * part(row) + part(column)
    };
    let mut mask = Vec::new();
    for window in 0..across * across {
        for pair in 0..tokens * tokens {
            let is_one = region(window, pair / tokens) == region(window, pair % tokens);
            mask.push(if is_one { 0.0f32 } else { -100.0 });
        }
    }
    Tensor::<1>::from_floats(mask.as_slice(), device).reshape([across * across, 1, tokens, tokens])
}

/// Attention within windows, and two layers over each token.
#[derive(Module, Debug)]
struct Windowed {
    heads: usize,
    shift: usize,
    norms: [LayerNorm; 2],
    projected: Linear,
    biases: Param<Tensor<2>>,
    distances: Tensor<1, Int>,
    mask: Option<Tensor<4>>,
    output: Linear,
    inner: Linear,
    outer: Linear,
}

impl Windowed {
    fn new(width: usize, heads: usize, side: usize, is_shifted: bool, device: &Device) -> Self {
        let norm = || LayerNormConfig::new(width).init(device);
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        // A single window has nothing to be shifted.
        let shift = if is_shifted && side > WINDOW { WINDOW / 2 } else { 0 };
        let biases = [(2 * WINDOW - 1).pow(2), heads];
        Self {
            heads,
            shift,
            norms: [norm(), norm()],
            projected: linear(width, 3 * width),
            biases: Initializer::Normal { mean: 0.0, std: 0.02 }.init(biases, device),
            distances: distances(device),
            mask: (shift > 0).then(|| mask_of(side, shift, device)),
            output: linear(width, width),
            inner: linear(width, 4 * width),
            outer: linear(4 * width, width),
        }
    }

    /// Of windows `[all windows, tokens, width]`.
    fn attended(&self, x: Tensor<3>) -> Tensor<3> {
        let [windows, tokens, width] = x.dims();
        let size = width / self.heads;
        let projected = self.projected.forward(x);
        let projected = projected.reshape([windows, tokens, 3, self.heads, size]);
        let projected = projected.permute([2, 0, 3, 1, 4]);
        let part = |place: usize| projected.clone().slice(s![place]).squeeze_dim::<4>(0);
        let biases = self.biases.val().select(0, self.distances.clone());
        let biases = biases.reshape([tokens, tokens, self.heads]).permute([2, 0, 1]);
        let mask = self.mask.clone().map(|mask| mask.cast(projected.dtype()));
        let bias = Some(biases.unsqueeze());
        let scores = Scores { bias, mask, is_scaled: true, is_causal: false };
        let attended = biased_attention(part(0), part(1), part(2), scores);
        self.output.forward(attended.swap_dims(1, 2).reshape([windows, tokens, width]))
    }

    /// Of an image's tokens, `[batch, height, width, channels]`.
    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let [batch, height, width, channels] = x.dims();
        let (rows, columns, shift) = (height / WINDOW, width / WINDOW, self.shift as i64);
        let y = self.norms[0].forward(x.clone());
        let y = if shift > 0 { y.roll(&[-shift, -shift], &[1, 2]) } else { y };
        let y = y.reshape([batch, rows, WINDOW, columns, WINDOW, channels]);
        let windows = y.permute([0, 1, 3, 2, 4, 5]);
        let windows = windows.reshape([batch * rows * columns, WINDOW * WINDOW, channels]);
        let y = self.attended(windows);
        let y = y.reshape([batch, rows, columns, WINDOW, WINDOW, channels]);
        let y = y.permute([0, 1, 3, 2, 4, 5]).reshape([batch, height, width, channels]);
        let x = x + if shift > 0 { y.roll(&[shift, shift], &[1, 2]) } else { y };
        let y = activation::gelu(self.inner.forward(self.norms[1].forward(x.clone())));
        x + self.outer.forward(y)
    }
}

/// Four neighbors become one token.
#[derive(Module, Debug)]
struct Merging {
    norm: LayerNorm,
    narrow: Linear,
}

impl Merging {
    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let parts = [
            x.clone().slice(s![.., ..;2, ..;2]),
            x.clone().slice(s![.., 1..;2, ..;2]),
            x.clone().slice(s![.., ..;2, 1..;2]),
            x.slice(s![.., 1..;2, 1..;2]),
        ];
        self.narrow.forward(self.norm.forward(Tensor::cat(parts.into(), 3)))
    }
}

/// `Swin-T` (Liu et al., "Swin Transformer", 2021), without its stochastic depth.
#[derive(Module, Debug)]
pub(crate) struct Swin {
    patches: Conv2d,
    norm_of_patches: LayerNorm,
    stages: Vec<Vec<Windowed>>,
    merging: Vec<Merging>,
    norm: LayerNorm,
    head: Linear,
}

impl Swin {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        /// Layers and heads of each stage.
        const STAGES: [[usize; 2]; 4] = [[2, 3], [2, 6], [6, 12], [2, 24]];
        let Shape { width, length, classes, .. } = *shape;
        let norm = |width| LayerNormConfig::new(width).init(device);
        let (mut stages, mut merging) = (vec![], vec![]);
        for (place, [layers, heads]) in STAGES.into_iter().enumerate() {
            let (width, side) = (width << place, (length / 4) >> place);
            let layer = |layer| Windowed::new(width, heads, side, layer % 2 == 1, device);
            stages.push((0..layers).map(layer).collect());
            if place + 1 < STAGES.len() {
                let narrow = LinearConfig::new(4 * width, 2 * width).with_bias(false);
                merging.push(Merging { norm: norm(4 * width), narrow: narrow.init(device) });
            }
        }
        let last = width << merging.len();
        Self {
            patches: Conv2dConfig::new([3, width], [4, 4]).with_stride([4, 4]).init(device),
            norm_of_patches: norm(width),
            stages,
            merging,
            norm: norm(last),
            head: LinearConfig::new(last, classes).init(device),
        }
    }

    pub(crate) fn loss(&self, (images, targets): (Tensor<4>, Tensor<1, Int>)) -> Tensor<1> {
        let x = self.patches.forward(images).permute([0, 2, 3, 1]);
        let mut x = self.norm_of_patches.forward(x);
        for (place, layers) in self.stages.iter().enumerate() {
            x = layers.iter().fold(x, |x, layer| layer.forward(x));
            if let Some(merging) = self.merging.get(place) {
                x = merging.forward(x);
            }
        }
        let pooled = self.norm.forward(x).mean_dims(&[1, 2]).flatten::<2>(1, 3);
        cross_entropy(self.head.forward(pooled), targets)
    }
}

/// Two layers over each token behind a norm, of which half is added.
#[derive(Module, Debug)]
struct HalfStep {
    norm: LayerNorm,
    inner: Linear,
    outer: Linear,
}

impl HalfStep {
    fn new(width: usize, device: &Device) -> Self {
        Self {
            norm: LayerNormConfig::new(width).init(device),
            inner: LinearConfig::new(width, 4 * width).init(device),
            outer: LinearConfig::new(4 * width, width).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let y = activation::silu(self.inner.forward(self.norm.forward(x.clone())));
        x + self.outer.forward(y) * 0.5
    }
}

/// Single channels over 31 frames, between gates and a layer over all channels.
#[derive(Module, Debug)]
struct Frames {
    norm: LayerNorm,
    gates: Conv1d,
    apart: Conv1d,
    norm_of_channels: BatchNorm,
    last: Conv1d,
}

impl Frames {
    fn new(width: usize, device: &Device) -> Self {
        const SIZE: usize = 31;
        let pad = PaddingConfig1d::Explicit(SIZE / 2, SIZE / 2);
        let apart = Conv1dConfig::new(width, width, SIZE).with_groups(width).with_padding(pad);
        Self {
            norm: LayerNormConfig::new(width).init(device),
            gates: Conv1dConfig::new(width, 2 * width, 1).init(device),
            apart: apart.init(device),
            norm_of_channels: BatchNormConfig::new(width).init(device),
            last: Conv1dConfig::new(width, width, 1).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let y = self.gates.forward(self.norm.forward(x.clone()).swap_dims(1, 2));
        let y = self.apart.forward(activation::glu(y, 1));
        let y = self.last.forward(activation::silu(self.norm_of_channels.forward(y)));
        x + y.swap_dims(1, 2)
    }
}

#[derive(Module, Debug)]
struct ConformerLayer {
    before: HalfStep,
    norm_of_attention: LayerNorm,
    attention: MultiHeadAttention,
    frames: Frames,
    behind: HalfStep,
    norm: LayerNorm,
}

/// An encoder of speech (Gulati et al., "Conformer", 2020), whose attention knows no places.
#[derive(Module, Debug)]
pub(crate) struct Conformer {
    layers: Vec<ConformerLayer>,
    head: Linear,
}

impl Conformer {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        let Shape { width, layers, classes, .. } = *shape;
        let norm = || LayerNormConfig::new(width).init(device);
        let attention = MultiHeadAttentionConfig::new(width, width / 64).with_dropout(0.0);
        let layer = |_| ConformerLayer {
            before: HalfStep::new(width, device),
            norm_of_attention: norm(),
            attention: attention.init(device),
            frames: Frames::new(width, device),
            behind: HalfStep::new(width, device),
            norm: norm(),
        };
        Self {
            layers: (0..layers).map(layer).collect(),
            head: LinearConfig::new(width, classes).init(device),
        }
    }

    pub(crate) fn loss(&self, (frames, targets): (Tensor<3>, Tensor<1, Int>)) -> Tensor<1> {
        let x = self.layers.iter().fold(frames, |x, layer| {
            let x = layer.before.forward(x);
            let input = MhaInput::self_attn(layer.norm_of_attention.forward(x.clone()));
            let x = x + layer.attention.forward(input).context;
            layer.norm.forward(layer.behind.forward(layer.frames.forward(x)))
        });
        cross_entropy(self.head.forward(x), targets)
    }
}

/// Attention and two layers over each token, scaled, shifted and gated by what an image is to be.
#[derive(Module, Debug)]
struct Conditioned {
    norms: [LayerNorm; 2],
    attention: MultiHeadAttention,
    inner: Linear,
    outer: Linear,
    modulation: Linear,
}

/// As scale and shift say, which are the same for all tokens.
fn modulated(x: Tensor<3>, shift: &Tensor<3>, scale: &Tensor<3>) -> Tensor<3> {
    x * (scale.clone() + 1.0) + shift.clone()
}

impl Conditioned {
    fn forward(&self, x: Tensor<3>, condition: Tensor<3>) -> Tensor<3> {
        let parts = self.modulation.forward(condition).chunk(6, 2);
        let y = modulated(self.norms[0].forward(x.clone()), &parts[0], &parts[1]);
        let y = self.attention.forward(MhaInput::self_attn(y)).context;
        let x = x + parts[2].clone() * y;
        let y = modulated(self.norms[1].forward(x.clone()), &parts[3], &parts[4]);
        let y = self.outer.forward(activation::gelu(self.inner.forward(y)));
        x + parts[5].clone() * y
    }
}

/// `DiT-B` (Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023), without what embeds times and
/// classes.
#[derive(Module, Debug)]
pub(crate) struct Dit {
    patches: Linear,
    places: Embedding,
    layers: Vec<Conditioned>,
    norm: LayerNorm,
    modulation: Linear,
    head: Linear,
}

impl Dit {
    /// Numbers of a patch: 2 by 2 of 4 channels.
    pub(crate) const PATCH: usize = 16;

    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        let Shape { width, layers, length, .. } = *shape;
        let norm = || LayerNormConfig::new(width).with_epsilon(1e-6).init(device);
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        // At first layers change nothing.
        let zeros = |from, to| {
            LinearConfig::new(from, to).with_initializer(Initializer::Zeros).init(device)
        };
        let attention = MultiHeadAttentionConfig::new(width, width / 64).with_dropout(0.0);
        let layer = |_| Conditioned {
            norms: [norm(), norm()],
            attention: attention.init(device),
            inner: linear(width, 4 * width),
            outer: linear(4 * width, width),
            modulation: zeros(width, 6 * width),
        };
        Self {
            patches: linear(Self::PATCH, width),
            places: EmbeddingConfig::new(length, width).init(device),
            layers: (0..layers).map(layer).collect(),
            norm: norm(),
            modulation: zeros(width, 2 * width),
            head: zeros(width, Self::PATCH),
        }
    }

    pub(crate) fn loss(
        &self,
        (patches, places, condition, targets): (Tensor<3>, Tensor<2, Int>, Tensor<2>, Tensor<3>),
    ) -> Tensor<1> {
        let condition = activation::silu(condition).unsqueeze_dim::<3>(1);
        let x = self.patches.forward(patches) + self.places.forward(places);
        let x = self.layers.iter().fold(x, |x, layer| layer.forward(x, condition.clone()));
        let parts = self.modulation.forward(condition).chunk(2, 2);
        let y = self.head.forward(modulated(self.norm.forward(x), &parts[0], &parts[1]));
        MseLoss::new().forward(full_precision(y), full_precision(targets), Reduction::Mean)
    }
}
