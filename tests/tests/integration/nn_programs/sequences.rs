// Attention, transformers, recurrent layers and positions, of `nn`, and models made of them.

use blackburn_tests::programs::{Program, program};
use burn::{
    module::Module,
    tensor::{Device, Int, Tensor},
};
use nn::{
    BiGruConfig, BiLstmConfig, BiRnnConfig, Embedding, EmbeddingConfig, Gru, GruConfig, LayerNorm,
    LayerNormConfig, Linear, LinearConfig, Lstm, LstmConfig, PReluConfig, PositionalEncodingConfig,
    RmsNorm, RmsNormConfig, RnnConfig, RotaryEncoding, RotaryEncodingConfig, SwiGlu, SwiGluConfig,
    attention::{
        CrossAttentionConfig, MhaInput, MultiHeadAttentionConfig, generate_autoregressive_mask,
    },
    transformer::{
        PositionWiseFeedForwardConfig, TransformerDecoderConfig, TransformerDecoderInput,
        TransformerEncoderConfig, TransformerEncoderInput,
    },
};

const WIDTH: usize = 16;
const SEQ: usize = 5;

pub(super) fn programs() -> Vec<Box<dyn Program>> {
    [attention(), transformers(), recurrent(), positions(), models()]
        .into_iter()
        .flatten()
        .collect()
}

fn attention() -> Vec<Box<dyn Program>> {
    vec![
        program(
            "MultiHeadAttention",
            12,
            |device| MultiHeadAttentionConfig::new(WIDTH, 2).with_dropout(0.0).init(device),
            |module, data| {
                let [q, k, v] = [SEQ, 7, 7].map(|seq| data.normal([2, seq, WIDTH]));
                let input = MhaInput::new(q, k, v).mask_pad(data.mask([2, 7]));
                module.forward(input.mask_attn(data.mask([2, SEQ, 7]))).context
            },
        ),
        program(
            "MultiHeadAttention with quiet softmax",
            12,
            |device| {
                let config = MultiHeadAttentionConfig::new(WIDTH, 2).with_dropout(0.0);
                config.with_quiet_softmax(true).init(device)
            },
            |module, data| {
                module.forward(MhaInput::self_attn(data.normal([2, SEQ, WIDTH]))).context
            },
        ),
        program(
            "CrossAttention",
            12,
            |device| CrossAttentionConfig::new(WIDTH, 12, 4, 2, 8).with_dropout(0.0).init(device),
            |module, data| {
                let mask = data.mask([2, 7]);
                module.forward(data.normal([2, SEQ, WIDTH]), data.normal([2, 7, 12]), Some(mask))
            },
        ),
    ]
}

fn transformers() -> Vec<Box<dyn Program>> {
    vec![
        program(
            "PositionWiseFeedForward",
            10,
            |device| PositionWiseFeedForwardConfig::new(WIDTH, 32).with_dropout(0.0).init(device),
            |module, data| module.forward(data.normal([2, SEQ, WIDTH])),
        ),
        program(
            "TransformerEncoder",
            40,
            |device| {
                let config = TransformerEncoderConfig::new(WIDTH, 32, 2, 1).with_dropout(0.0);
                config.with_norm_first(true).init(device)
            },
            |module, data| {
                let mask = generate_autoregressive_mask(2, SEQ, data.device());
                let input = TransformerEncoderInput::new(data.normal([2, SEQ, WIDTH]));
                module.forward(input.mask_attn(mask).mask_pad(data.mask([2, SEQ])))
            },
        ),
        program(
            "TransformerDecoder",
            60,
            |device| {
                let config = TransformerDecoderConfig::new(WIDTH, 32, 2, 1).with_dropout(0.0);
                config.init(device)
            },
            |module, data| {
                let [target, memory] = [SEQ, 7].map(|seq| data.normal([2, seq, WIDTH]));
                let input = TransformerDecoderInput::new(target, memory);
                module.forward(input.memory_mask_pad(data.mask([2, 7])))
            },
        ),
    ]
}

fn recurrent() -> Vec<Box<dyn Program>> {
    // A time step rounds some six times.
    vec![
        program(
            "Rnn",
            20,
            |device| RnnConfig::new(6, WIDTH, true).init(device),
            |module, data| module.forward(data.normal([2, SEQ, 6]), None).0,
        ),
        program(
            "BiRnn",
            20,
            |device| BiRnnConfig::new(6, WIDTH, true).init(device),
            |module, data| module.forward(data.normal([2, SEQ, 6]), None).0,
        ),
        program(
            "Lstm",
            30,
            |device| LstmConfig::new(6, WIDTH, true).init(device),
            |module, data| {
                let (y, state) = module.forward(data.normal([2, SEQ, 6]), None);
                // The last state goes on.
                let (z, _) = module.forward(data.normal([2, 2, 6]), Some(state));
                Tensor::cat(vec![y, z], 1)
            },
        ),
        program(
            "BiLstm",
            30,
            |device| BiLstmConfig::new(6, WIDTH, true).init(device),
            |module, data| module.forward(data.normal([2, SEQ, 6]), None).0,
        ),
        program(
            "Gru",
            30,
            |device| GruConfig::new(6, WIDTH, true).init(device),
            |module, data| module.forward(data.normal([2, SEQ, 6]), None),
        ),
        program(
            "BiGru",
            30,
            |device| BiGruConfig::new(6, WIDTH, true).init(device),
            |module, data| module.forward(data.normal([2, SEQ, 6]), None).0,
        ),
    ]
}

fn positions() -> Vec<Box<dyn Program>> {
    vec![
        program(
            "RotaryEncoding",
            4,
            |device| RotaryEncodingConfig::new(SEQ + 2, WIDTH).init(device),
            |module, data| {
                let x = data.normal([2, SEQ, WIDTH]);
                module.forward(x.clone()) + module.apply(x, 2)
            },
        ),
        program(
            "PositionalEncoding",
            2,
            |device| PositionalEncodingConfig::new(WIDTH).with_max_sequence_size(9).init(device),
            |module, data| module.forward(data.normal([2, SEQ, WIDTH])),
        ),
    ]
}

/// A decoder's layer as Llama has it.
#[derive(Module, Debug)]
struct Llama {
    words: Embedding,
    norms: [RmsNorm; 2],
    query: Linear,
    key: Linear,
    value: Linear,
    rope: RotaryEncoding,
    swiglu: SwiGlu,
    down: Linear,
}

impl Llama {
    fn new(device: &Device) -> Self {
        let linear = |inputs| LinearConfig::new(inputs, WIDTH).with_bias(false).init(device);
        Self {
            words: EmbeddingConfig::new(11, WIDTH).init(device),
            norms: [0; 2].map(|_| RmsNormConfig::new(WIDTH).init(device)),
            query: linear(WIDTH),
            key: linear(WIDTH),
            value: linear(WIDTH),
            rope: RotaryEncodingConfig::new(SEQ, WIDTH).init(device),
            swiglu: SwiGluConfig::new(WIDTH, 32).init(device),
            down: linear(32),
        }
    }

    fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let x = self.words.forward(ids);
        let normalized = self.norms[0].forward(x.clone());
        let q = self.rope.forward(self.query.forward(normalized.clone()));
        let k = self.rope.forward(self.key.forward(normalized.clone()));
        let scores = q.matmul(k.transpose()).div_scalar((WIDTH as f64).sqrt());
        let weights = burn::tensor::activation::softmax(scores, 2);
        let x = x + weights.matmul(self.value.forward(normalized));
        let fed = self.down.forward(self.swiglu.forward(self.norms[1].forward(x.clone())));
        x + fed
    }
}

#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "a model has few of them")]
enum Memory {
    Long(Lstm),
    Gated(Gru),
}

/// Modules in everything that holds modules.
#[derive(Module, Debug)]
struct Nested {
    first: Option<Linear>,
    missing: Option<Linear>,
    pair: (Linear, LayerNorm),
    layers: Vec<Linear>,
    norms: [LayerNorm; 2],
    memories: Vec<Memory>,
}

impl Nested {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
        let norm = || LayerNormConfig::new(WIDTH).init(device);
        Self {
            first: Some(linear()),
            missing: None,
            pair: (linear(), norm()),
            layers: vec![linear(), linear()],
            norms: [norm(), norm()],
            memories: vec![
                Memory::Long(LstmConfig::new(WIDTH, WIDTH, true).init(device)),
                Memory::Gated(GruConfig::new(WIDTH, WIDTH, true).init(device)),
            ],
        }
    }

    /// The sum of what all of them make of tokens.
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let first = self.first.iter().chain(&self.missing).map(|layer| layer.forward(x.clone()));
        let pair = self.pair.1.forward(self.pair.0.forward(x.clone()));
        let layers = self.layers.iter().map(|layer| layer.forward(x.clone()));
        let norms = self.norms.iter().map(|norm| norm.forward(x.clone()));
        let memories = self.memories.iter().map(|memory| match memory {
            Memory::Long(lstm) => lstm.forward(x.clone(), None).0,
            Memory::Gated(gru) => gru.forward(x.clone(), None),
        });
        first.chain(layers).chain(norms).chain(memories).fold(pair, |sum, y| sum + y)
    }
}

fn models() -> Vec<Box<dyn Program>> {
    vec![
        program("Llama", 40, Llama::new, |module, data| module.forward(data.ids([2, SEQ], 0, 11))),
        program("Nested", 20, Nested::new, |module, data| {
            module.forward(data.normal([2, 3, WIDTH]))
        }),
        program(
            "TransformerEncoder with PRelu",
            40,
            |device| {
                let config = TransformerEncoderConfig::new(WIDTH, 32, 2, 1).with_dropout(0.0);
                let config = config.with_activation(PReluConfig::new().into());
                config.with_norm_first(true).init(device)
            },
            |module, data| {
                module.forward(TransformerEncoderInput::new(data.normal([2, SEQ, WIDTH])))
            },
        ),
    ]
}
