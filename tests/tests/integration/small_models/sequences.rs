//! Models of sequences.

use super::{Batch, Small, trial};
// Burn's own compute in f32 whatever they are given, and policies refuse them in 16 bits.
use blackburn::nn::{Gru, GruConfig, Lstm, LstmConfig, RotaryEncoding, RotaryEncodingConfig};
use blackburn::train::precision::full_precision;
use burn::{
    module::Module,
    nn::{
        Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
        PaddingConfig1d, RmsNorm, RmsNormConfig, SwiGlu, SwiGluConfig,
        attention::{
            MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask,
        },
        conv::{Conv1d, Conv1dConfig},
        loss::CrossEntropyLossConfig,
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    tensor::{
        Device, Int, Tensor,
        activation::{gelu, log_softmax, relu, sigmoid, softmax},
        s,
    },
};
use libtest_mimic::Trial;

pub(super) fn trials() -> Vec<Trial> {
    vec![
        trial::<Llama>(),
        trial::<Gpt>(),
        trial::<Bert>(),
        trial::<Tagger>(),
        trial::<GruForecast>(),
        trial::<Tcn>(),
        trial::<Scan>(),
        trial::<Translator>(),
    ]
}

const BATCH: usize = 3;
const LENGTH: usize = 12;
const WORDS: usize = 37;
const WIDTH: usize = 32;

fn tokens(whole: Tensor<1, Int>) -> Tensor<2, Int> {
    whole.reshape([BATCH, LENGTH])
}

/// Each position's logits against the token behind it.
fn next_token(logits: Tensor<3>, tokens: Tensor<2, Int>) -> Tensor<1> {
    let seen = (LENGTH - 1) as isize;
    let logits = logits.slice(s![.., ..seen, ..]).reshape([BATCH * (LENGTH - 1), WORDS]);
    let targets = tokens.slice(s![.., 1..]).reshape([BATCH * (LENGTH - 1)]);
    CrossEntropyLossConfig::new().init(&logits.device()).forward(full_precision(logits), targets)
}

/// Turned queries and keys, two queries' heads to each key's, and a gated feed-forward.
#[derive(Module, Debug)]
struct Llama {
    embedding: Embedding,
    norms: Vec<RmsNorm>,
    query: Linear,
    key_value: Linear,
    out: Linear,
    rotary: RotaryEncoding,
    gate: SwiGlu,
    down: Linear,
    head: Linear,
}

impl Small for Llama {
    const NAME: &'static str = "llama";
    const NUMBERS: usize = 1;
    const WHOLE: usize = BATCH * LENGTH;
    const BELOW: i64 = WORDS as i64;

    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        Self {
            embedding: EmbeddingConfig::new(WORDS, WIDTH).init(device),
            norms: (0..3).map(|_| RmsNormConfig::new(WIDTH).init(device)).collect(),
            query: linear(WIDTH, WIDTH),
            key_value: linear(WIDTH, WIDTH),
            out: linear(WIDTH, WIDTH),
            rotary: RotaryEncodingConfig::new(LENGTH, 8).init(device),
            gate: SwiGluConfig::new(WIDTH, 48).init(device),
            down: linear(48, WIDTH),
            head: linear(WIDTH, WORDS),
        }
    }

    fn loss(&self, (_, whole): Batch) -> Tensor<1> {
        let tokens = tokens(whole);
        let mut x = self.embedding.forward(tokens.clone());
        let y = self.norms[0].forward(x.clone());
        let q = self.query.forward(y.clone()).reshape([BATCH, LENGTH, 4, 8]).swap_dims(1, 2);
        let kv = self.key_value.forward(y).reshape([BATCH, LENGTH, 4, 8]).swap_dims(1, 2);
        let [k, v]: [Tensor<4>; 2] = kv.chunk(2, 1).try_into().unwrap();
        let shared = |heads: Tensor<4>| {
            let heads = heads.reshape([BATCH, 2, 1, LENGTH, 8]).repeat_dim(2, 2);
            heads.reshape([BATCH, 4, LENGTH, 8])
        };
        let (q, k) = (self.rotary.forward(q), shared(self.rotary.forward(k)));
        let mask = generate_autoregressive_mask(BATCH, LENGTH, &q.device());
        let scores = q.matmul(k.transpose()) / 8f64.sqrt();
        let scores = scores.mask_fill(mask.unsqueeze_dim::<4>(1), -1.0e4);
        let context = softmax(scores, 3).matmul(shared(v));
        let context = context.swap_dims(1, 2).reshape([BATCH, LENGTH, WIDTH]);
        x = x + self.out.forward(context);
        let y = self.norms[1].forward(x.clone());
        x = x + self.down.forward(self.gate.forward(y));
        next_token(self.head.forward(self.norms[2].forward(x)), tokens)
    }
}

/// Pre-norm blocks of Burn's attention, whose head shares the embedding's weights.
#[derive(Module, Debug)]
struct Gpt {
    words: Embedding,
    places: Embedding,
    norms: Vec<LayerNorm>,
    attention: MultiHeadAttention,
    up: Linear,
    down: Linear,
}

impl Small for Gpt {
    const NAME: &'static str = "gpt_with_tied_weights";
    const NUMBERS: usize = 1;
    const WHOLE: usize = BATCH * LENGTH;
    const BELOW: i64 = WORDS as i64;

    fn new(device: &Device) -> Self {
        Self {
            words: EmbeddingConfig::new(WORDS, WIDTH).init(device),
            places: EmbeddingConfig::new(LENGTH, WIDTH).init(device),
            norms: (0..3).map(|_| LayerNormConfig::new(WIDTH).init(device)).collect(),
            attention: MultiHeadAttentionConfig::new(WIDTH, 4).with_dropout(0.0).init(device),
            up: LinearConfig::new(WIDTH, 2 * WIDTH).init(device),
            down: LinearConfig::new(2 * WIDTH, WIDTH).init(device),
        }
    }

    fn loss(&self, (_, whole): Batch) -> Tensor<1> {
        let tokens = tokens(whole);
        let device = tokens.device();
        let places = Tensor::arange(0..LENGTH as i64, &device).unsqueeze();
        let mut x = self.words.forward(tokens.clone()) + self.places.forward(places);
        let mask = generate_autoregressive_mask(BATCH, LENGTH, &device);
        let input = MhaInput::self_attn(self.norms[0].forward(x.clone())).mask_attn(mask);
        x = x + self.attention.forward(input).context;
        x = x.clone() + self.down.forward(gelu(self.up.forward(self.norms[1].forward(x))));
        let head: Tensor<3> = self.words.weight.val().transpose().unsqueeze();
        next_token(self.norms[2].forward(x).matmul(head), tokens)
    }
}

/// Burn's encoder over sequences that are padded, classified by their first token.
#[derive(Module, Debug)]
struct Bert {
    words: Embedding,
    encoder: TransformerEncoder,
    head: Linear,
}

impl Small for Bert {
    const NAME: &'static str = "bert_of_padded_sequences";
    const NUMBERS: usize = 1;
    const WHOLE: usize = BATCH * LENGTH;
    const BELOW: i64 = WORDS as i64;

    fn new(device: &Device) -> Self {
        let encoder = TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 2, 2).with_dropout(0.0);
        Self {
            words: EmbeddingConfig::new(WORDS, WIDTH).init(device),
            encoder: encoder.init(device),
            head: LinearConfig::new(WIDTH, 2).init(device),
        }
    }

    fn loss(&self, (_, whole): Batch) -> Tensor<1> {
        let tokens = tokens(whole);
        let is_padding = tokens.clone().lower_elem(9);
        let input = TransformerEncoderInput::new(self.words.forward(tokens.clone()));
        let encoded = self.encoder.forward(input.mask_pad(is_padding));
        let first: Tensor<2> = encoded.slice(s![.., 0..1, ..]).squeeze_dim(1);
        let classes = tokens.slice(s![.., 0..1]).squeeze_dim::<1>(1).remainder_scalar(2);
        let logits = full_precision(self.head.forward(first));
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, classes)
    }
}

/// A tag for each token, by an LSTM in both directions of time.
#[derive(Module, Debug)]
struct Tagger {
    words: Embedding,
    lstm: Lstm,
    back: Lstm,
    head: Linear,
}

impl Small for Tagger {
    const NAME: &'static str = "lstm_tagger";
    const NUMBERS: usize = 1;
    const WHOLE: usize = BATCH * LENGTH;
    const BELOW: i64 = WORDS as i64;

    fn new(device: &Device) -> Self {
        Self {
            words: EmbeddingConfig::new(WORDS, 16).init(device),
            lstm: LstmConfig::new(16, 16, true).init(device),
            back: LstmConfig::new(16, 16, true).with_reverse(true).init(device),
            head: LinearConfig::new(32, 5).init(device),
        }
    }

    fn loss(&self, (_, whole): Batch) -> Tensor<1> {
        let tokens = tokens(whole);
        let x = self.words.forward(tokens.clone());
        let (ahead, _) = self.lstm.forward(x.clone(), None);
        let (back, _) = self.back.forward(x, None);
        let logits = self.head.forward(Tensor::cat(vec![ahead, back], 2));
        let logits = full_precision(logits.reshape([BATCH * LENGTH, 5]));
        let tags = tokens.reshape([BATCH * LENGTH]).remainder_scalar(5);
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, tags)
    }
}

/// The next value of a series, by a GRU, with a Huber loss written out.
#[derive(Module, Debug)]
struct GruForecast {
    gru: Gru,
    head: Linear,
}

impl Small for GruForecast {
    const NAME: &'static str = "gru_forecast";
    const NUMBERS: usize = BATCH * (LENGTH + 1) * 4;
    const WHOLE: usize = 0;

    fn new(device: &Device) -> Self {
        Self {
            gru: GruConfig::new(4, 24, true).init(device),
            head: LinearConfig::new(24, 4).init(device),
        }
    }

    fn loss(&self, (numbers, _): Batch) -> Tensor<1> {
        let series = numbers.reshape([BATCH, LENGTH + 1, 4]).cumsum(1) * 0.3;
        let states = self.gru.forward(series.clone().slice(s![.., ..LENGTH as isize, ..]), None);
        let error = full_precision(self.head.forward(states))
            - full_precision(series.slice(s![.., 1.., ..]));
        let size = error.abs();
        let quadratic = size.clone().clamp_max(1.0);
        let linear = size - quadratic.clone();
        (quadratic.powi_scalar(2) * 0.5 + linear).mean()
    }
}

/// Causal convolutions that reach further with each layer.
#[derive(Module, Debug)]
struct Tcn {
    layers: Vec<Conv1d>,
    head: Conv1d,
}

impl Small for Tcn {
    const NAME: &'static str = "temporal_convolutions";
    const NUMBERS: usize = BATCH * 8 * 40;
    const WHOLE: usize = 0;

    fn new(device: &Device) -> Self {
        let layer = |at: usize| {
            let channels = if at == 0 { 8 } else { 16 };
            Conv1dConfig::new(channels, 16, 3)
                .with_dilation(1 << at)
                .with_padding(PaddingConfig1d::Explicit(2 << at, 0))
                .init(device)
        };
        Self { layers: (0..3).map(layer).collect(), head: Conv1dConfig::new(16, 8, 1).init(device) }
    }

    fn loss(&self, (numbers, _): Batch) -> Tensor<1> {
        let series = numbers.reshape([BATCH, 8, 40]);
        let mut x = series.clone();
        for layer in &self.layers {
            x = relu(layer.forward(x));
        }
        let made = self.head.forward(x).slice(s![.., .., ..39]);
        let target = series.slice(s![.., .., 1..]);
        (full_precision(made) - full_precision(target)).abs().mean()
    }
}

/// A gated recurrence without steps in time: sums of what gates let through, over sums of the gates.
#[derive(Module, Debug)]
struct Scan {
    words: Embedding,
    gates: Linear,
    values: Linear,
    norm: RmsNorm,
    head: Linear,
}

impl Small for Scan {
    const NAME: &'static str = "gated_scan";
    const NUMBERS: usize = 1;
    const WHOLE: usize = BATCH * LENGTH;
    const BELOW: i64 = WORDS as i64;

    fn new(device: &Device) -> Self {
        Self {
            words: EmbeddingConfig::new(WORDS, WIDTH).init(device),
            gates: LinearConfig::new(WIDTH, WIDTH).init(device),
            values: LinearConfig::new(WIDTH, WIDTH).init(device),
            norm: RmsNormConfig::new(WIDTH).init(device),
            head: LinearConfig::new(WIDTH, WORDS).init(device),
        }
    }

    fn loss(&self, (_, whole): Batch) -> Tensor<1> {
        let tokens = tokens(whole);
        let x = self.words.forward(tokens.clone());
        let gates = sigmoid(self.gates.forward(x.clone()));
        let let_through = (gates.clone() * self.values.forward(x.clone())).cumsum(1);
        let mean = let_through / (gates.cumsum(1) + 1e-2);
        next_token(self.head.forward(self.norm.forward(x + mean)), tokens)
    }
}

/// An encoder and a decoder that looks at it, with smoothed labels written out.
#[derive(Module, Debug)]
struct Translator {
    words: Embedding,
    encoder: MultiHeadAttention,
    own: MultiHeadAttention,
    across: MultiHeadAttention,
    norms: Vec<LayerNorm>,
    head: Linear,
}

impl Small for Translator {
    const NAME: &'static str = "translator";
    const NUMBERS: usize = 1;
    const WHOLE: usize = BATCH * LENGTH;
    const BELOW: i64 = WORDS as i64;
    const IS_RECORDED: bool = false;

    fn new(device: &Device) -> Self {
        let attention = || MultiHeadAttentionConfig::new(WIDTH, 2).with_dropout(0.0).init(device);
        Self {
            words: EmbeddingConfig::new(WORDS, WIDTH).init(device),
            encoder: attention(),
            own: attention(),
            across: attention(),
            norms: (0..3).map(|_| LayerNormConfig::new(WIDTH).init(device)).collect(),
            head: LinearConfig::new(WIDTH, WORDS).init(device),
        }
    }

    fn loss(&self, (_, whole): Batch) -> Tensor<1> {
        let tokens = tokens(whole);
        let (source, target) =
            (tokens.clone().slice(s![.., ..5]), tokens.clone().slice(s![.., 5..]));
        let source = self.words.forward(source);
        let memory = self.encoder.forward(MhaInput::self_attn(source.clone())).context + source;
        let memory = self.norms[0].forward(memory);
        let made = self.words.forward(target.clone());
        let mask = generate_autoregressive_mask(BATCH, 7, &made.device());
        let own = self.own.forward(MhaInput::self_attn(made.clone()).mask_attn(mask)).context;
        let made = self.norms[1].forward(made + own);
        let input = MhaInput::new(made.clone(), memory.clone(), memory);
        let made = self.norms[2].forward(made + self.across.forward(input).context);
        let scores = log_softmax(full_precision(self.head.forward(made)), 2);
        let right: Tensor<3> = target.one_hot(WORDS).float();
        let wanted = full_precision(right) * 0.9 + 0.1 / WORDS as f64;
        (wanted * scores).sum_dim(2).mean().neg()
    }
}
