//! The model: GPT-2's architecture, of standard `burn::nn` modules, or [Llama](crate::llama)'s.

use crate::{
    llama::{self, Llama},
    presets::Family,
    settings::AttentionKind,
};
use blackburn::nn::{
    attention::MhaInput,
    embedding::embedding,
    flash, loss, norm,
    transformer::{TransformerCache, TransformerEncoderInput as FlashInput},
};
use burn::{
    module::{Initializer, Module, Param},
    nn::{
        Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
        LinearConfig,
        attention::generate_autoregressive_mask,
        loss::CrossEntropyLossConfig,
        transformer::{
            TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
            TransformerEncoderLayer,
        },
    },
    tensor::{Bool, Device, FloatDType, Int, Tensor},
};
use serde::{Deserialize, Serialize};

/// Sizes of a model. Two checkpoints fit each other when these are equal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ModelConfig {
    pub(crate) family: Family,
    pub(crate) layers: usize,
    pub(crate) width: usize,
    pub(crate) heads: usize,
    /// Heads of keys and values: as many as `heads`, but for a Llama.
    pub(crate) kv_heads: usize,
    pub(crate) context: usize,
    pub(crate) vocabulary: usize,
    pub(crate) dropout: f64,
}

impl ModelConfig {
    /// Number of parameters, computed from the sizes; sizes beyond any memory saturate.
    pub(crate) fn parameters(&self) -> usize {
        let [l, w, c, v] =
            [self.layers, self.width, self.context, self.vocabulary].map(|size| size as u128);
        let all = match self.family {
            Family::Gpt2 => {
                let attention = 4 * (w * w + w);
                let feed_forward = (4 * w * w + 4 * w) + (4 * w * w + w);
                let norms = 2 * 2 * w;
                l * (attention + feed_forward + norms) + (v + c) * w + 2 * w + w * v
            }
            Family::Llama => {
                // 0 heads are refused later.
                let narrow = w / (self.heads.max(1) as u128) * self.kv_heads as u128;
                let attention = 2 * w * w + 2 * w * narrow;
                let feed_forward = 3 * w * llama::hidden(self.width) as u128;
                l * (attention + feed_forward + 2 * w) + v * w + w + w * v
            }
        };
        usize::try_from(all).unwrap_or(usize::MAX)
    }

    /// A model with fresh weights: normal with deviation 0.02, and the projections that add to the
    /// residual stream divided by sqrt(2 layers), as GPT-2 has it.
    pub(crate) fn init(&self, device: &Device) -> Gpt {
        let normal = Initializer::Normal { mean: 0.0, std: 0.02 };
        let embedding = |rows| {
            EmbeddingConfig::new(rows, self.width).with_initializer(normal.clone()).init(device)
        };
        let residual_scale = 1.0 / (2.0 * self.layers as f64).sqrt();
        let scale = |weight: &mut Param<Tensor<2>>| {
            *weight = weight.clone().map(|w| {
                let scaled = w.mul_scalar(residual_scale);
                // A leaf again; without automatic differentiation it is one already.
                if device.is_autodiff() { scaled.detach().require_grad() } else { scaled }
            });
        };
        let trunk = match self.family {
            Family::Gpt2 => {
                let mut blocks = TransformerEncoderConfig::new(
                    self.width,
                    4 * self.width,
                    self.heads,
                    self.layers,
                )
                .with_dropout(self.dropout)
                .with_norm_first(true)
                .with_initializer(normal.clone())
                .init(device);
                for layer in &mut blocks.layers {
                    scale(&mut layer.mha.output.weight);
                    scale(&mut layer.pwff.linear_outer.weight);
                }
                let positions = embedding(self.context);
                Trunk::Gpt2(Gpt2 {
                    positions,
                    blocks,
                    norm: LayerNormConfig::new(self.width).init(device),
                })
            }
            Family::Llama => {
                let mut llama = Llama::new(self, &normal, device);
                for layer in &mut llama.layers {
                    scale(&mut layer.attention.output.weight);
                    scale(&mut layer.down.weight);
                }
                Trunk::Llama(llama)
            }
        };
        Gpt {
            tokens: embedding(self.vocabulary),
            dropout: DropoutConfig::new(self.dropout).init(),
            trunk,
            head: LinearConfig::new(self.width, self.vocabulary)
                .with_bias(false)
                .with_initializer(normal)
                .init(device),
        }
    }
}

/// A decoder-only transformer. Unlike GPT-2's, its head is its own, and not the transposed token embedding.
#[derive(Module, Debug)]
pub(crate) struct Gpt {
    tokens: Embedding,
    dropout: Dropout,
    trunk: Trunk,
    head: Linear,
}

/// All between the tokens and the head.
#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "a model has one of them")]
enum Trunk {
    Gpt2(Gpt2),
    Llama(Llama),
}

/// Pre-norm blocks and learned positions.
#[derive(Module, Debug)]
struct Gpt2 {
    positions: Embedding,
    blocks: TransformerEncoder,
    norm: LayerNorm,
}

impl Gpt2 {
    fn forward(&self, x: Tensor<3>, attention: &Attention) -> Tensor<3> {
        let [batch, length, _] = x.dims();
        match &attention.mask {
            Some(mask) => {
                let mask = mask.clone().slice([0..1, 0..length, 0..length]).repeat_dim(0, batch);
                let x = self.blocks.forward(TransformerEncoderInput::new(x).mask_attn(mask));
                self.norm.forward(x)
            }
            None if attention.is_fused() => {
                let x = flash::transformer_encoder(&self.blocks, FlashInput::new(x).causal());
                norm::layer_norm(&self.norm, x)
            }
            None => self.norm.forward(self.blocks.layers.iter().fold(x, block)),
        }
    }
}

impl Gpt {
    pub(crate) fn layers(&self) -> usize {
        match &self.trunk {
            Trunk::Gpt2(gpt2) => gpt2.blocks.layers.len(),
            Trunk::Llama(llama) => llama.layers.len(),
        }
    }

    /// Logits `[batch, length, vocabulary]` of ids `[batch, length]`.
    fn forward(&self, ids: Tensor<2, Int>, attention: &Attention) -> Tensor<3> {
        self.head.forward(self.hidden(ids, attention))
    }

    /// What the head reads: `[batch, length, width]` of ids `[batch, length]`.
    fn hidden(&self, ids: Tensor<2, Int>, attention: &Attention) -> Tensor<3> {
        let x = self.embed(ids, None, attention.is_fused());
        match &self.trunk {
            Trunk::Gpt2(gpt2) => gpt2.forward(x, attention),
            Trunk::Llama(llama) => llama.forward(x),
        }
    }

    /// Tokens, with their positions where those are learned, the first of which is `start`, or 0; by Blackburn's
    /// operation or by Burn's own.
    fn embed(
        &self,
        ids: Tensor<2, Int>,
        start: Option<&Tensor<1, Int>>,
        is_ours: bool,
    ) -> Tensor<3> {
        let rows = |module: &Embedding, ids| {
            if is_ours { embedding(module, ids) } else { module.forward(ids) }
        };
        let (length, device) = (ids.dims()[1] as i64, ids.device());
        let mut x = rows(&self.tokens, ids);
        if let Trunk::Gpt2(gpt2) = &self.trunk {
            let positions = Tensor::<1, Int>::arange(0..length, &device);
            let positions = match start {
                Some(start) => positions + start.clone(),
                None => positions,
            };
            x = x + rows(&gpt2.positions, positions.unsqueeze::<2>());
        }
        self.dropout.forward(x)
    }

    /// Mean cross-entropy in nats per token, computed in f32: a tensor of one element. With flash
    /// attention the loss is Blackburn's too, which takes logits in 16 bits as they are.
    pub(crate) fn loss(
        &self,
        inputs: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        how: &Computation,
    ) -> Tensor<1> {
        let [batch, length] = inputs.dims();
        let hidden = self.hidden(inputs, &how.attention);
        let width = hidden.dims()[2];
        let hidden = hidden.reshape([batch * length, width]);
        let targets = targets.reshape([batch * length]);
        let criterion = CrossEntropyLossConfig::new().init(&hidden.device());
        if how.chunked_loss {
            return loss::linear_cross_entropy(&criterion, &self.head, hidden, targets);
        }
        let logits = self.head.forward(hidden);
        if how.attention.is_fused() {
            loss::cross_entropy(&criterion, logits, targets)
        } else {
            criterion.forward(logits.cast(FloatDType::F32), targets)
        }
    }

    /// Logits of the token after position `at` of `ids` `[1, context]`, in f32. Ids behind it are
    /// padding, which a causal model does not see; one shape for every length means that kernels
    /// are compiled once.
    pub(crate) fn next_logits(
        &self,
        ids: Tensor<2, Int>,
        at: usize,
        attention: &Attention,
    ) -> Tensor<1> {
        row(self.forward(ids, attention), at)
    }

    /// Logits `[vocabulary]` of the token after `ids` `[1, length]`, in f32. The first of these stands at `position`,
    /// `[1]`, behind those in the cache, which has them afterwards.
    pub(crate) fn next_logits_cached(
        &self,
        ids: Tensor<2, Int>,
        position: &Tensor<1, Int>,
        cache: &mut TransformerCache,
    ) -> Tensor<1> {
        let [_, length] = ids.dims();
        let x = self.embed(ids, Some(position), true);
        // Of a prompt, the last token alone is asked for.
        let last = |x: Tensor<3>| {
            let width = x.dims()[2];
            x.slice([0..1, length - 1..length, 0..width])
        };
        let hidden = match &self.trunk {
            Trunk::Gpt2(Gpt2 { blocks, norm, .. }) => {
                let input = FlashInput::new(x);
                let x = flash::transformer_encoder_placed(blocks, input, cache, position);
                norm::layer_norm(norm, last(x))
            }
            Trunk::Llama(llama) => llama.norm(last(llama.forward_placed(x, cache, position))),
        };
        row(self.head.forward(hidden), 0)
    }
}

/// A block of standard modules, but for its attention.
fn block(x: Tensor<3>, layer: &TransformerEncoderLayer) -> Tensor<3> {
    // Where norms come first, Burn numbers them the other way around.
    let input = MhaInput::self_attn(layer.norm_2.forward(x.clone())).causal();
    let x = x + layer.dropout.forward(flash::multi_head_attention(&layer.mha, input));
    let fed = layer.pwff.forward(layer.norm_1.forward(x.clone()));
    x + layer.dropout.forward(fed)
}

fn row(logits: Tensor<3>, at: usize) -> Tensor<1> {
    let vocabulary = logits.dims()[2];
    logits.slice([0..1, at..at + 1, 0..vocabulary]).reshape([vocabulary]).cast(FloatDType::F32)
}

/// How a loss is computed.
#[derive(Clone, Debug)]
pub(crate) struct Computation {
    pub(crate) attention: Attention,
    /// Whether logits are made in chunks of rows, with the loss, and never all at once.
    pub(crate) chunked_loss: bool,
}

/// How attention is computed, with what that needs.
#[derive(Clone, Debug)]
pub(crate) struct Attention {
    kind: AttentionKind,
    /// The causal mask of a context, made once: `[1, context, context]`, true above the diagonal.
    /// Flash attention needs none.
    mask: Option<Tensor<3, Bool>>,
}

impl Attention {
    pub(crate) fn new(kind: AttentionKind, context: usize, device: &Device) -> Self {
        let mask = (kind == AttentionKind::Naive)
            .then(|| generate_autoregressive_mask(1, context, &device.clone().without_autodiff()));
        Self { kind, mask }
    }

    /// Whether norms, embeddings and loss are Blackburn's.
    fn is_fused(&self) -> bool {
        self.kind == AttentionKind::Flash
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets::{Defaults, Preset};
    use burn::tensor::Distribution;

    const TINY: ModelConfig = ModelConfig {
        family: Family::Gpt2,
        layers: 2,
        width: 16,
        heads: 2,
        kv_heads: 2,
        context: 8,
        vocabulary: 11,
        dropout: 0.0,
    };
    const LLAMA: ModelConfig = ModelConfig { family: Family::Llama, kv_heads: 1, ..TINY };

    #[test]
    fn the_number_of_parameters_is_computed_right() {
        for config in [TINY, LLAMA] {
            assert_eq!(config.init(&Device::flex()).num_params(), config.parameters());
        }
    }

    /// The presets' models, with the tokens that their names promise.
    #[test]
    fn llamas_have_the_sizes_of_their_names() {
        let parameters = |preset: Preset, vocabulary| {
            let Defaults { family, layers, width, heads, kv_heads, context, .. } =
                preset.defaults();
            let dropout = 0.0;
            ModelConfig { family, layers, width, heads, kv_heads, context, vocabulary, dropout }
                .parameters()
        };
        assert_eq!(parameters(Preset::Llama300m, 50257), 305_863_680);
        // TinyLlama's own number.
        assert_eq!(parameters(Preset::Llama1b, 32000), 1_100_048_384);
    }

    #[test]
    fn gpt2_has_its_163_million_parameters() {
        let gpt2 = ModelConfig {
            layers: 12,
            width: 768,
            heads: 12,
            context: 1024,
            vocabulary: 50257,
            ..TINY
        };
        assert_eq!(gpt2.parameters(), 163_037_184);
    }

    /// All ways to compute attention, naive first.
    fn all(device: &Device) -> [Attention; 3] {
        [AttentionKind::Naive, AttentionKind::Flash, AttentionKind::FlashOnly]
            .map(|kind| Attention::new(kind, TINY.context, device))
    }

    #[test]
    fn no_token_sees_the_ones_after_it() {
        let device = Device::flex();
        for model in [TINY, LLAMA].map(|config| config.init(&device)) {
            for attention in all(&device) {
                let logits = |last: i32| -> Vec<f32> {
                    let ids = Tensor::<2, Int>::from_data([[1, 2, 3, 4, last]], &device);
                    let logits = model.forward(ids, &attention).slice([0..1, 0..4, 0..11]);
                    logits.into_data().try_to_vec().expect("logits are f32")
                };
                assert_eq!(logits(5), logits(9));
            }
        }
    }

    #[test]
    fn flash_attention_gives_the_logits_of_burns() {
        let device = Device::flex();
        let model = TINY.init(&device);
        let ids = Tensor::<2, Int>::from_data([[1, 2, 3, 4, 5], [9, 0, 9, 7, 7]], &device);
        let [naive, others @ ..] =
            all(&device).map(|attention| model.forward(ids.clone(), &attention));
        for other in others {
            let distance: f32 = (naive.clone() - other).abs().max().into_scalar();
            assert!(distance < 1e-5, "{distance}");
        }
    }

    #[test]
    fn losses_and_their_gradients_are_the_same() {
        let device = Device::flex().autodiff();
        let model = TINY.init(&device);
        let ids = || Tensor::<2, Int>::from_data([[1, 2, 3, 4, 5], [9, 0, 9, 7, 7]], &device);
        let losses = |chunked_loss| {
            all(&device).map(|attention| {
                let how = Computation { attention, chunked_loss };
                let loss = model.loss(ids(), ids(), &how);
                let gradients = loss.backward();
                let gradient = model.head.weight.grad(&gradients).expect("the head has a gradient");
                (loss.into_scalar::<f32>(), gradient)
            })
        };
        let [(naive, naive_gradient), others @ ..] = losses(false);
        for (loss, gradient) in others.into_iter().chain(losses(true)) {
            assert!((naive - loss).abs() < 1e-5, "{naive}, {loss}");
            let distance: f32 = (naive_gradient.clone() - gradient).abs().max().into_scalar();
            assert!(distance < 1e-5, "{distance}");
        }
    }

    #[test]
    fn an_untrained_model_guesses_evenly() {
        let device = Device::flex();
        let ids = || Tensor::<2, Int>::random([4, 8], Distribution::Uniform(0.0, 11.0), &device);
        for model in [TINY, LLAMA].map(|config| config.init(&device)) {
            for attention in all(&device) {
                let how = Computation { attention, chunked_loss: false };
                let loss: f32 = model.loss(ids(), ids(), &how).into_scalar();
                assert!((loss - 11f32.ln()).abs() < 0.05, "{loss}");
            }
        }
    }

    #[test]
    fn residual_projections_start_smaller() {
        let wide = ModelConfig { layers: 8, width: 64, ..TINY };
        let model = wide.init(&Device::flex());
        let Trunk::Gpt2(Gpt2 { blocks, .. }) = &model.trunk else { panic!("not GPT-2's") };
        let deviation = |layer: &TransformerEncoderLayer| -> (f32, f32) {
            let output = layer.mha.output.weight.val().powi_scalar(2).mean().sqrt();
            let query = layer.mha.query.weight.val().powi_scalar(2).mean().sqrt();
            (output.into_scalar(), query.into_scalar())
        };
        let (output, query) = deviation(&blocks.layers[0]);
        assert!((query / output - 4.0).abs() < 0.4, "{query} / {output}");
    }
}
