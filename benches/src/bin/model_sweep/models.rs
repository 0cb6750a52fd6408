// Models as users write them, of `nn`. What is spelt differently stands in the module that includes this.

use super::Shape;
use blackburn::train::precision::full_precision;
use burn::{
    module::Module,
    nn::loss::CrossEntropyLossConfig,
    tensor::{Device, Int, Tensor, activation},
};
use nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, GroupNorm, GroupNormConfig, Gru,
    GruConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, Lstm, LstmConfig, PaddingConfig2d,
    RmsNorm, RmsNormConfig, RotaryEncoding, RotaryEncodingConfig, SwiGlu, SwiGluConfig,
    attention::generate_autoregressive_mask,
    conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig},
    loss::{MseLoss, Reduction},
    pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig},
    transformer::{
        TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder,
        TransformerEncoderConfig, TransformerEncoderInput,
    },
};

/// The mean over all tokens, or all images.
fn cross_entropy<const D: usize>(logits: Tensor<D>, targets: Tensor<1, Int>) -> Tensor<1> {
    let classes = logits.dims()[D - 1];
    let logits = logits.reshape([targets.dims()[0], classes]);
    criterion(CrossEntropyLossConfig::new(), logits, targets)
}

/// BERT without its segments: norms behind the sums, a head over all words.
#[derive(Module, Debug)]
pub(crate) struct Bert {
    words: Embedding,
    places: Embedding,
    layers: TransformerEncoder,
    head: Linear,
}

impl Bert {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        let Shape { width, layers, classes, length, dropout, .. } = *shape;
        let encoder = TransformerEncoderConfig::new(width, 4 * width, width / 64, layers);
        Self {
            words: EmbeddingConfig::new(classes, width).init(device),
            places: EmbeddingConfig::new(length, width).init(device),
            layers: encoder.with_dropout(dropout).init(device),
            head: LinearConfig::new(width, classes).init(device),
        }
    }

    pub(crate) fn loss(
        &self,
        (ids, places, targets): (Tensor<2, Int>, Tensor<2, Int>, Tensor<1, Int>),
    ) -> Tensor<1> {
        let x = self.words.forward(ids) + self.places.forward(places);
        let x = self.layers.forward(TransformerEncoderInput::new(x));
        cross_entropy(self.head.forward(x), targets)
    }
}

/// GPT-2 of Burn's encoder: norms in front, a mask of what follows, the words' table as head.
#[derive(Module, Debug)]
pub(crate) struct Gpt {
    words: Embedding,
    places: Embedding,
    layers: TransformerEncoder,
    norm: LayerNorm,
}

impl Gpt {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        let Shape { width, layers, classes, length, dropout, .. } = *shape;
        let encoder = TransformerEncoderConfig::new(width, 4 * width, width / 64, layers);
        Self {
            words: EmbeddingConfig::new(classes, width).init(device),
            places: EmbeddingConfig::new(length, width).init(device),
            layers: encoder.with_dropout(dropout).with_norm_first(true).init(device),
            norm: LayerNormConfig::new(width).init(device),
        }
    }

    pub(crate) fn loss(
        &self,
        (ids, places, targets): (Tensor<2, Int>, Tensor<2, Int>, Tensor<1, Int>),
    ) -> Tensor<1> {
        let [batch, length] = ids.dims();
        let mask = generate_autoregressive_mask(batch, length, &ids.device());
        let x = self.words.forward(ids) + self.places.forward(places);
        let x = self.layers.forward(TransformerEncoderInput::new(x).mask_attn(mask));
        let table = self.words.weight.val().transpose().unsqueeze::<3>();
        cross_entropy(self.norm.forward(x).matmul(table), targets)
    }
}

#[derive(Module, Debug)]
struct LlamaLayer {
    norms: [RmsNorm; 2],
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    gate_and_up: SwiGlu,
    down: Linear,
}

/// Sizes of a Llama that follow from its width.
struct LlamaSizes {
    /// Of a head.
    head: usize,
    /// Query heads that share a head of keys.
    shared_by: usize,
    /// Of the feed-forward part.
    hidden: usize,
}

impl LlamaSizes {
    /// As in `TinyLlama`, and from a width of 4096 on as in Llama 3.
    fn of(width: usize) -> Self {
        match width < 4096 {
            true => Self { head: 64, shared_by: 8, hidden: width * 11 / 4 },
            false => Self { head: 128, shared_by: 4, hidden: width * 7 / 2 },
        }
    }
}

#[derive(Module, Debug)]
pub(crate) struct Llama {
    head_size: usize,
    words: Embedding,
    rope: RotaryEncoding,
    layers: Vec<LlamaLayer>,
    norm: RmsNorm,
    head: Linear,
}

impl Llama {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        let Shape { width, layers, classes, length, .. } = *shape;
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        let norm = || RmsNormConfig::new(width).init(device);
        let LlamaSizes { head, shared_by, hidden } = LlamaSizes::of(width);
        let layer = |_| LlamaLayer {
            norms: [norm(), norm()],
            query: linear(width, width),
            key: linear(width, width / shared_by),
            value: linear(width, width / shared_by),
            output: linear(width, width),
            gate_and_up: SwiGluConfig::new(width, hidden).with_bias(false).init(device),
            down: linear(hidden, width),
        };
        Self {
            head_size: head,
            words: EmbeddingConfig::new(classes, width).init(device),
            rope: RotaryEncodingConfig::new(length, head).init(device),
            layers: (0..layers).map(layer).collect(),
            norm: norm(),
            head: linear(width, classes),
        }
    }

    pub(crate) fn loss(&self, (ids, targets): (Tensor<2, Int>, Tensor<1, Int>)) -> Tensor<1> {
        let [batch, length] = ids.dims();
        let mut x = self.words.forward(ids);
        let norm_of = |layer: usize| self.layers.get(layer).map_or(&self.norm, |it| &it.norms[0]);
        let mut normalized = norm_of(0).forward(x.clone());
        for (at, layer) in self.layers.iter().enumerate() {
            let heads = |linear: &Linear| {
                let y = linear.forward(normalized.clone());
                let heads = y.dims()[2] / self.head_size;
                y.reshape([batch, length, heads, self.head_size]).swap_dims(1, 2)
            };
            let q = self.rope.forward(heads(&layer.query));
            let k = self.rope.forward(heads(&layer.key));
            let attended = causal_attention(q, k, heads(&layer.value)).swap_dims(1, 2);
            let attended = layer.output.forward(attended.reshape(x.dims()));
            (x, normalized) = add_rms_norm(&layer.norms[1], x, attended);
            let fed = layer.down.forward(layer.gate_and_up.forward(normalized));
            (x, normalized) = add_rms_norm(norm_of(at + 1), x, fed);
        }
        cross_entropy(self.head.forward(normalized), targets)
    }
}

/// A vision transformer over patches of 16 pixels, with the mean of all patches before its head.
#[derive(Module, Debug)]
pub(crate) struct Vit {
    patches: Conv2d,
    places: Embedding,
    layers: TransformerEncoder,
    norm: LayerNorm,
    head: Linear,
}

impl Vit {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        let Shape { width, layers, classes, length, dropout, .. } = *shape;
        let patches = Conv2dConfig::new([3, width], [16, 16]).with_stride([16, 16]);
        let encoder = TransformerEncoderConfig::new(width, 4 * width, width / 64, layers);
        Self {
            patches: patches.init(device),
            places: EmbeddingConfig::new((length / 16).pow(2), width).init(device),
            layers: encoder.with_dropout(dropout).with_norm_first(true).init(device),
            norm: LayerNormConfig::new(width).init(device),
            head: LinearConfig::new(width, classes).init(device),
        }
    }

    pub(crate) fn loss(
        &self,
        (images, places, targets): (Tensor<4>, Tensor<2, Int>, Tensor<1, Int>),
    ) -> Tensor<1> {
        let x = self.patches.forward(images).flatten::<3>(2, 3).swap_dims(1, 2);
        let x = self.layers.forward(TransformerEncoderInput::new(x + self.places.forward(places)));
        let pooled = self.norm.forward(x).mean_dim(1).squeeze_dim::<2>(1);
        cross_entropy(self.head.forward(pooled), targets)
    }
}

#[derive(Module, Debug)]
struct ConvNorm {
    conv: Conv2d,
    norm: BatchNorm,
}

impl ConvNorm {
    fn new(channels: [usize; 2], size: usize, stride: usize, groups: usize, device: &Device) -> Self {
        let pad = size / 2;
        let conv = Conv2dConfig::new(channels, [size, size])
            .with_stride([stride, stride])
            .with_padding(PaddingConfig2d::Explicit(pad, pad, pad, pad))
            .with_groups(groups)
            .with_bias(false);
        let norm = BatchNormConfig::new(channels[1]);
        Self { conv: conv.init(device), norm: norm.init(device) }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.norm.forward(self.conv.forward(x))
    }
}

/// Wider, by channel, and narrower, around a sum where the size stays.
#[derive(Module, Debug)]
struct Inverted {
    parts: Vec<ConvNorm>,
    is_sum: bool,
}

fn relu6(x: Tensor<4>) -> Tensor<4> {
    activation::relu(x).clamp_max(6.0)
}

impl Inverted {
    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let last = self.parts.len() - 1;
        let y = self.parts.iter().enumerate().fold(x.clone(), |x, (place, part)| {
            let y = part.forward(x);
            if place == last { y } else { relu6(y) }
        });
        if self.is_sum { x + y } else { y }
    }
}

/// `MobileNet` v2, whose 3 by 3 convolutions take each channel alone.
#[derive(Module, Debug)]
pub(crate) struct MobileNet {
    stem: ConvNorm,
    blocks: Vec<Inverted>,
    last: ConvNorm,
    pool: AdaptiveAvgPool2d,
    head: Linear,
}

impl MobileNet {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        // Expansion, channels, blocks and stride of each stage.
        const STAGES: [[usize; 4]; 7] = [
            [1, 16, 1, 1],
            [6, 24, 2, 2],
            [6, 32, 3, 2],
            [6, 64, 4, 2],
            [6, 96, 3, 1],
            [6, 160, 3, 2],
            [6, 320, 1, 1],
        ];
        let mut from = 32;
        let mut blocks = Vec::new();
        for [expansion, channels, count, stride] in STAGES {
            for place in 0..count {
                let stride = if place == 0 { stride } else { 1 };
                let wide = from * expansion;
                let mut parts = Vec::new();
                if expansion > 1 {
                    parts.push(ConvNorm::new([from, wide], 1, 1, 1, device));
                }
                parts.push(ConvNorm::new([wide, wide], 3, stride, wide, device));
                parts.push(ConvNorm::new([wide, channels], 1, 1, 1, device));
                blocks.push(Inverted { parts, is_sum: stride == 1 && from == channels });
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
        let x = relu6(self.stem.forward(images));
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        let x = self.pool.forward(relu6(self.last.forward(x))).flatten::<2>(1, 3);
        cross_entropy(self.head.forward(x), targets)
    }
}

/// One recurrent layer, whose outputs are told apart.
#[derive(Module, Debug)]
pub(crate) struct Recurrent {
    lstm: Lstm,
}

impl Recurrent {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        Self { lstm: LstmConfig::new(shape.width, shape.width, true).init(device) }
    }

    pub(crate) fn loss(&self, (x, targets): (Tensor<3>, Tensor<1, Int>)) -> Tensor<1> {
        cross_entropy(self.lstm.forward(x, None).0, targets)
    }
}

/// The same of a layer that has no cell.
#[derive(Module, Debug)]
pub(crate) struct Gated {
    gru: Gru,
}

impl Gated {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        Self { gru: GruConfig::new(shape.width, shape.width, true).init(device) }
    }

    pub(crate) fn loss(&self, (x, targets): (Tensor<3>, Tensor<1, Int>)) -> Tensor<1> {
        cross_entropy(self.gru.forward(x, None), targets)
    }
}

/// An encoder and a decoder that looks at what was encoded, as in translation.
#[derive(Module, Debug)]
pub(crate) struct Seq2seq {
    words: Embedding,
    places: Embedding,
    encoder: TransformerEncoder,
    decoder: TransformerDecoder,
    head: Linear,
}

impl Seq2seq {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        let Shape { width, layers, classes, length, dropout, .. } = *shape;
        let encoder = TransformerEncoderConfig::new(width, 4 * width, width / 64, layers);
        let decoder = TransformerDecoderConfig::new(width, 4 * width, width / 64, layers);
        Self {
            words: EmbeddingConfig::new(classes, width).init(device),
            places: EmbeddingConfig::new(length, width).init(device),
            encoder: encoder.with_dropout(dropout).init(device),
            decoder: decoder.with_dropout(dropout).init(device),
            head: LinearConfig::new(width, classes).init(device),
        }
    }

    pub(crate) fn loss(
        &self,
        (source, ids, places, targets): (
            Tensor<2, Int>,
            Tensor<2, Int>,
            Tensor<2, Int>,
            Tensor<1, Int>,
        ),
    ) -> Tensor<1> {
        let [batch, length] = ids.dims();
        let places = self.places.forward(places);
        let source = self.words.forward(source) + places.clone();
        let memory = self.encoder.forward(TransformerEncoderInput::new(source));
        let mask = generate_autoregressive_mask(batch, length, &ids.device());
        let x = self.words.forward(ids) + places;
        let input = TransformerDecoderInput::new(x, memory).target_mask_attn(mask);
        cross_entropy(self.head.forward(self.decoder.forward(input)), targets)
    }
}

/// Two convolutions around group norms, and a sum.
#[derive(Module, Debug)]
struct Residual {
    norms: [GroupNorm; 2],
    convs: [Conv2d; 2],
    shortcut: Option<Conv2d>,
}

fn conv(channels: [usize; 2], size: usize, stride: usize, device: &Device) -> Conv2d {
    let pad = size / 2;
    Conv2dConfig::new(channels, [size, size])
        .with_stride([stride, stride])
        .with_padding(PaddingConfig2d::Explicit(pad, pad, pad, pad))
        .init(device)
}

impl Residual {
    fn new(from: usize, to: usize, device: &Device) -> Self {
        Self {
            norms: [from, to].map(|channels| GroupNormConfig::new(32, channels).init(device)),
            convs: [from, to].map(|channels| conv([channels, to], 3, 1, device)),
            shortcut: (from != to).then(|| conv([from, to], 1, 1, device)),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let parts = self.norms.iter().zip(&self.convs);
        let y = parts.fold(x.clone(), |x, (norm, conv)| {
            conv.forward(activation::silu(norm.forward(x)))
        });
        match &self.shortcut {
            Some(shortcut) => shortcut.forward(x) + y,
            None => x + y,
        }
    }
}

/// The network of a diffusion model without its time: images narrow, and widen again beside what they were.
#[derive(Module, Debug)]
pub(crate) struct UNet {
    stem: Conv2d,
    down: Vec<Residual>,
    narrow: Vec<Conv2d>,
    middle: Residual,
    wide: Vec<ConvTranspose2d>,
    up: Vec<Residual>,
    norm: GroupNorm,
    head: Conv2d,
}

impl UNet {
    pub(crate) fn new(shape: &Shape, device: &Device) -> Self {
        let Shape { width, layers, .. } = *shape;
        let levels: Vec<usize> = (0..layers).map(|level| width << level).collect();
        let (mut down, mut narrow, mut wide, mut up) = (vec![], vec![], vec![], vec![]);
        for &channels in &levels {
            down.push(Residual::new(channels, channels, device));
            narrow.push(conv([channels, 2 * channels], 3, 2, device));
            let doubled = ConvTranspose2dConfig::new([2 * channels, channels], [2, 2]);
            wide.push(doubled.with_stride([2, 2]).init(device));
            up.push(Residual::new(2 * channels, channels, device));
        }
        let deepest = width << layers;
        Self {
            stem: conv([3, width], 3, 1, device),
            down,
            narrow,
            middle: Residual::new(deepest, deepest, device),
            wide,
            up,
            norm: GroupNormConfig::new(32, width).init(device),
            head: conv([width, 3], 3, 1, device),
        }
    }

    pub(crate) fn loss(&self, (images, noise): (Tensor<4>, Tensor<4>)) -> Tensor<1> {
        let mut x = self.stem.forward(images);
        let mut kept = vec![];
        for (block, narrow) in self.down.iter().zip(&self.narrow) {
            x = block.forward(x);
            kept.push(x.clone());
            x = narrow.forward(x);
        }
        x = self.middle.forward(x);
        for ((block, wide), kept) in self.up.iter().zip(&self.wide).zip(kept).rev() {
            x = block.forward(Tensor::cat(vec![wide.forward(x), kept], 1));
        }
        let y = self.head.forward(activation::silu(self.norm.forward(x)));
        MseLoss::new().forward(full_precision(y), full_precision(noise), Reduction::Mean)
    }
}
