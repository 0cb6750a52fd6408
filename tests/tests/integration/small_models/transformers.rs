//! Transformers that are not language models, and what else attends.

use super::{Batch, Small, images::classified, trial};
use blackburn::train::precision::full_precision;
use burn::{
    module::{Module, Param},
    nn::{
        BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Initializer, LayerNorm,
        LayerNormConfig, Linear, LinearConfig, PaddingConfig1d, RmsNorm, RmsNormConfig,
        attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
        conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig},
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    tensor::{
        Device, Int, Tensor,
        activation::{gelu, sigmoid, silu, softmax, tanh},
        s,
    },
};
use libtest_mimic::Trial;

pub(super) fn trials() -> Vec<Trial> {
    vec![
        trial::<Vit>(),
        trial::<Speech>(),
        trial::<Conformer>(),
        trial::<Relative>(),
        trial::<Latents>(),
        trial::<Hypernetwork>(),
        trial::<Flow>(),
    ]
}

const BATCH: usize = 3;
const WIDTH: usize = 32;

fn attention(device: &Device) -> MultiHeadAttention {
    MultiHeadAttentionConfig::new(WIDTH, 4).with_dropout(0.0).init(device)
}

/// Patches behind a learned token, with learned places.
#[derive(Module, Debug)]
struct Vit {
    patches: Conv2d,
    class: Param<Tensor<3>>,
    places: Param<Tensor<3>>,
    encoder: TransformerEncoder,
    norm: LayerNorm,
    head: Linear,
}

impl Small for Vit {
    const NAME: &'static str = "vit";
    const NUMBERS: usize = BATCH * 3 * 12 * 12;
    const WHOLE: usize = BATCH;
    const BELOW: i64 = 5;

    fn new(device: &Device) -> Self {
        let drawn = Initializer::Normal { mean: 0.0, std: 0.02 };
        let encoder = TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 4, 2);
        Self {
            patches: Conv2dConfig::new([3, WIDTH], [4, 4]).with_stride([4, 4]).init(device),
            class: drawn.init([1, 1, WIDTH], device),
            places: drawn.init([1, 10, WIDTH], device),
            encoder: encoder.with_dropout(0.0).with_norm_first(true).init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            head: LinearConfig::new(WIDTH, 5).init(device),
        }
    }

    fn loss(&self, (numbers, classes): Batch) -> Tensor<1> {
        let x = self.patches.forward(numbers.reshape([BATCH, 3, 12, 12]));
        let x: Tensor<3> = x.flatten::<3>(2, 3).swap_dims(1, 2);
        let class = self.class.val().expand([BATCH, 1, WIDTH]);
        let x = Tensor::cat(vec![class, x], 1) + self.places.val();
        let y = self.encoder.forward(TransformerEncoderInput::new(x));
        let first: Tensor<2> = self.norm.forward(y).slice(s![.., 0..1, ..]).squeeze_dim(1);
        classified(self.head.forward(first), classes)
    }
}

/// Spectra through two convolutions, then an encoder's block, and a decoder that looks at what comes of it.
#[derive(Module, Debug)]
struct Speech {
    convs: Vec<Conv1d>,
    words: Embedding,
    own: MultiHeadAttention,
    across: MultiHeadAttention,
    norms: Vec<LayerNorm>,
}

impl Small for Speech {
    const NAME: &'static str = "speech";
    const NUMBERS: usize = BATCH * 20 * 24;
    const WHOLE: usize = BATCH * 6;
    const BELOW: i64 = 19;

    fn new(device: &Device) -> Self {
        let conv = |from, stride| {
            Conv1dConfig::new(from, WIDTH, 3)
                .with_stride(stride)
                .with_padding(PaddingConfig1d::Explicit(1, 1))
                .init(device)
        };
        Self {
            convs: vec![conv(20, 1), conv(WIDTH, 2)],
            words: EmbeddingConfig::new(19, WIDTH).init(device),
            own: attention(device),
            across: attention(device),
            norms: (0..3).map(|_| LayerNormConfig::new(WIDTH).init(device)).collect(),
        }
    }

    fn loss(&self, (numbers, words): Batch) -> Tensor<1> {
        let x = gelu(self.convs[0].forward(numbers.reshape([BATCH, 20, 24])));
        let x = gelu(self.convs[1].forward(x)).swap_dims(1, 2);
        let heard =
            x.clone() + self.own.forward(MhaInput::self_attn(self.norms[0].forward(x))).context;
        let words = words.reshape([BATCH, 6]);
        let y = self.words.forward(words.clone());
        let query = self.norms[1].forward(y.clone());
        let y = y + self.across.forward(MhaInput::new(query, heard.clone(), heard)).context;
        let table: Tensor<3> = self.words.weight.val().transpose().unsqueeze();
        let logits = self.norms[2].forward(y).matmul(table);
        classified(logits.reshape([BATCH * 6, 19]), words.reshape([BATCH * 6]))
    }
}

/// A gated convolution for each channel between attention and a feed-forward that counts half.
#[derive(Module, Debug)]
struct Conformer {
    norms: Vec<LayerNorm>,
    attention: MultiHeadAttention,
    gated: Conv1d,
    depthwise: Conv1d,
    batch_norm: BatchNorm,
    out: Conv1d,
    up: Linear,
    down: Linear,
}

impl Small for Conformer {
    const NAME: &'static str = "conformer";
    const NUMBERS: usize = BATCH * 14 * WIDTH;
    const WHOLE: usize = 0;

    fn new(device: &Device) -> Self {
        Self {
            norms: (0..4).map(|_| LayerNormConfig::new(WIDTH).init(device)).collect(),
            attention: attention(device),
            gated: Conv1dConfig::new(WIDTH, 2 * WIDTH, 1).init(device),
            depthwise: Conv1dConfig::new(WIDTH, WIDTH, 5)
                .with_groups(WIDTH)
                .with_padding(PaddingConfig1d::Explicit(2, 2))
                .init(device),
            batch_norm: BatchNormConfig::new(WIDTH).init(device),
            out: Conv1dConfig::new(WIDTH, WIDTH, 1).init(device),
            up: LinearConfig::new(WIDTH, 4 * WIDTH).init(device),
            down: LinearConfig::new(4 * WIDTH, WIDTH).init(device),
        }
    }

    fn loss(&self, (numbers, _): Batch) -> Tensor<1> {
        let input = numbers.reshape([BATCH, 14, WIDTH]);
        let forward = |x: Tensor<3>| self.down.forward(silu(self.up.forward(x)));
        let x = input.clone() + forward(self.norms[0].forward(input.clone())) * 0.5;
        let attended = MhaInput::self_attn(self.norms[1].forward(x.clone()));
        let x = x + self.attention.forward(attended).context;
        let y = self.gated.forward(self.norms[2].forward(x.clone()).swap_dims(1, 2));
        let [y, gate] = y.chunk(2, 1).try_into().unwrap();
        let y = self.batch_norm.forward(self.depthwise.forward(y * sigmoid(gate)));
        let x = x + self.out.forward(silu(y)).swap_dims(1, 2);
        let x = self.norms[3].forward(x);
        (full_precision(x) - full_precision(input)).powi_scalar(2).mean()
    }
}

/// Scores that depend on how far apart tokens are, by a learned number of each head.
#[derive(Module, Debug)]
struct Relative {
    query_key_value: Linear,
    distances: Embedding,
    out: Linear,
    norms: Vec<RmsNorm>,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Small for Relative {
    const NAME: &'static str = "relative_places";
    const NUMBERS: usize = BATCH * 16 * WIDTH;
    const WHOLE: usize = 0;

    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        Self {
            query_key_value: linear(WIDTH, 3 * WIDTH),
            distances: EmbeddingConfig::new(31, 4).init(device),
            out: linear(WIDTH, WIDTH),
            norms: (0..2).map(|_| RmsNormConfig::new(WIDTH).init(device)).collect(),
            gate: linear(WIDTH, 48),
            up: linear(WIDTH, 48),
            down: linear(48, WIDTH),
        }
    }

    fn loss(&self, (numbers, _): Batch) -> Tensor<1> {
        let input = numbers.reshape([BATCH, 16, WIDTH]);
        let device = input.device();
        let all = self.query_key_value.forward(self.norms[0].forward(input.clone()));
        let all = all.reshape([BATCH, 16, 3, 4, 8]).permute([2, 0, 3, 1, 4]);
        let [q, k, v] = [0, 1, 2]
            .map(|part| -> Tensor<4> { all.clone().slice(s![part..part + 1]).squeeze_dim(0) });
        let places = Tensor::<1, Int>::arange(0..16, &device);
        let rows = places.clone().reshape([16, 1]).expand([16, 16]);
        let apart = rows - places.reshape([1, 16]).expand([16, 16]) + 15;
        let bias: Tensor<3> = self.distances.forward(apart).permute([2, 0, 1]);
        let scores = q.matmul(k.transpose()) + bias.unsqueeze_dim::<4>(0);
        let context = softmax(scores, 3).matmul(v).swap_dims(1, 2).reshape([BATCH, 16, WIDTH]);
        let x = input.clone() + self.out.forward(context);
        let y = self.norms[1].forward(x.clone());
        let x = x + self.down.forward(gelu(self.gate.forward(y.clone())) * self.up.forward(y));
        (full_precision(x) - full_precision(input) - 0.1).powi_scalar(2).mean()
    }
}

/// A few learned vectors that look at many, twice with the same weights.
#[derive(Module, Debug)]
struct Latents {
    latents: Param<Tensor<2>>,
    into: Linear,
    attention: MultiHeadAttention,
    norms: Vec<LayerNorm>,
    pool: Linear,
    head: Linear,
}

impl Small for Latents {
    const NAME: &'static str = "latents";
    const NUMBERS: usize = BATCH * 40 * 6;
    const WHOLE: usize = BATCH;
    const BELOW: i64 = 4;

    fn new(device: &Device) -> Self {
        Self {
            latents: Initializer::Normal { mean: 0.0, std: 0.5 }.init([5, WIDTH], device),
            into: LinearConfig::new(6, WIDTH).init(device),
            attention: attention(device),
            norms: (0..2).map(|_| LayerNormConfig::new(WIDTH).init(device)).collect(),
            pool: LinearConfig::new(WIDTH, 1).init(device),
            head: LinearConfig::new(WIDTH, 4).init(device),
        }
    }

    fn loss(&self, (numbers, classes): Batch) -> Tensor<1> {
        let seen = self.norms[0].forward(self.into.forward(numbers.reshape([BATCH, 40, 6])));
        let mut x = self.latents.val().unsqueeze_dim::<3>(0).repeat_dim(0, BATCH);
        for _ in 0..2 {
            let query = self.norms[1].forward(x.clone());
            let input = MhaInput::new(query, seen.clone(), seen.clone());
            x = x + self.attention.forward(input).context;
        }
        let weights = softmax(self.pool.forward(tanh(x.clone())), 1);
        let pooled: Tensor<2> = (x * weights).sum_dim(1).squeeze_dim(1);
        classified(self.head.forward(pooled), classes)
    }
}

/// Weights that another network makes for each example, at unit length.
#[derive(Module, Debug)]
struct Hypernetwork {
    maker: Linear,
    scale: Param<Tensor<1>>,
    direction: Param<Tensor<2>>,
}

impl Small for Hypernetwork {
    const NAME: &'static str = "hypernetwork";
    const NUMBERS: usize = BATCH * (8 + 7 * 12);
    const WHOLE: usize = 0;

    fn new(device: &Device) -> Self {
        Self {
            maker: LinearConfig::new(8, 12 * 16).init(device),
            scale: Initializer::Ones.init([9], device),
            direction: Initializer::Uniform { min: -1.0, max: 1.0 }.init([16, 9], device),
        }
    }

    fn loss(&self, (numbers, _): Batch) -> Tensor<1> {
        let given = (BATCH * 8) as isize;
        let what = numbers.clone().slice(s![..given]).reshape([BATCH, 8]);
        let x = numbers.slice(s![given..]).reshape([BATCH, 7, 12]);
        let made = self.maker.forward(what).reshape([BATCH, 12, 16]);
        let made = full_precision(made);
        let length = made.clone().powi_scalar(2).sum_dim(1).sqrt();
        let made = (made / (length + 1e-3)).cast(x.dtype());
        let hidden = tanh(x.matmul(made));
        let direction = full_precision(self.direction.val());
        let length = direction.clone().powi_scalar(2).sum_dim(0).sqrt();
        let scale = full_precision(self.scale.val()).unsqueeze_dim::<2>(0);
        let weight = (direction / length * scale).cast(hidden.dtype());
        let y = hidden.matmul(weight.unsqueeze_dim::<3>(0).expand([BATCH, 16, 9]));
        (full_precision(y) - 0.5).powi_scalar(2).mean()
    }
}

/// A field that is followed in four steps of Runge and Kutta: one network, sixteen times.
#[derive(Module, Debug)]
struct Flow {
    first: Linear,
    second: Linear,
}

impl Small for Flow {
    const NAME: &'static str = "flow";
    const NUMBERS: usize = 2 * 10 * 6;
    const WHOLE: usize = 0;

    fn new(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(7, WIDTH).init(device),
            second: LinearConfig::new(WIDTH, 6).init(device),
        }
    }

    fn loss(&self, (numbers, _): Batch) -> Tensor<1> {
        const STEP: f64 = 0.25;
        let [mut x, end] = numbers.reshape([2, 10, 6]).chunk(2, 0).try_into().unwrap();
        let field = |x: Tensor<3>, time: f64| {
            let time = Tensor::full([1, 10, 1], time, (&x.device(), x.dtype()));
            self.second.forward(tanh(self.first.forward(Tensor::cat(vec![x, time], 2))))
        };
        for step in 0..4 {
            let time = f64::from(step) * STEP;
            let a = field(x.clone(), time);
            let b = field(x.clone() + a.clone() * (STEP / 2.0), time + STEP / 2.0);
            let c = field(x.clone() + b.clone() * (STEP / 2.0), time + STEP / 2.0);
            let d = field(x.clone() + c.clone() * STEP, time + STEP);
            x = x + (a + (b + c) * 2.0 + d) * (STEP / 6.0);
        }
        (full_precision(x) - full_precision(end)).powi_scalar(2).mean()
    }
}
