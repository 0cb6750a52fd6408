//! The decoder, which looks at a memory, too.

use super::{
    TransformerDecoderAutoregressiveCache, decoder_layer::TransformerDecoderLayer,
    encoder_layer::Masks,
};
use crate::attention::masked;
use burn::{
    config::Config,
    module::{Content, DisplaySettings, Module, ModuleDisplay},
    nn::{Initializer, activation::ActivationConfig, transformer as burns},
    tensor::{Bool, Device, Tensor},
};

/// Configuration of [`TransformerDecoder`]: that of `burn::nn`'s, and `n_kv_heads`.
#[derive(Config, Debug)]
pub struct TransformerDecoderConfig {
    /// Size of a token.
    pub d_model: usize,
    /// Size of the feed-forward parts' middle.
    pub d_ff: usize,
    /// Heads of attention; they divide `d_model`.
    pub n_heads: usize,
    /// Layers.
    pub n_layers: usize,
    /// Share of weights and activations that dropout leaves out in training. Default: 0.1
    #[config(default = 0.1)]
    pub dropout: f64,
    /// Whether norms come before the parts of a layer. Default: false
    #[config(default = false)]
    pub norm_first: bool,
    /// As [`MultiHeadAttentionConfig`](crate::attention::MultiHeadAttentionConfig) has it. Default:
    /// false
    #[config(default = false)]
    pub quiet_softmax: bool,
    /// Initializer of the weights.
    #[config(
        default = "Initializer::KaimingUniform { gain: 1.0 / 3f64.sqrt(), fan_out_only: false }"
    )]
    pub initializer: Initializer,
    /// Activation in the middle of the feed-forward parts. Default: GELU
    #[config(default = "ActivationConfig::Gelu")]
    pub activation: ActivationConfig,
    /// The norms' epsilon, added to variances. Default: 1e-5
    #[config(default = 1e-5)]
    pub layer_norm_eps: f64,
    /// Heads of keys and values, which divide `n_heads`. Default: `n_heads`. With fewer, records do
    /// not fit those of Burn.
    #[config(default = "None")]
    pub n_kv_heads: Option<usize>,
}

/// Layers of self-attention, attention to a memory and feed-forward parts;
/// [`TransformerDecoderConfig`] makes it.
///
/// Records go both ways between it and `burn::nn::transformer::TransformerDecoder`.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct TransformerDecoder {
    /// The layers, in order.
    pub layers: Vec<TransformerDecoderLayer>,
    /// Size of a token.
    pub d_model: usize,
    /// Size of the feed-forward parts' middle.
    pub d_ff: usize,
    /// Heads of attention.
    pub n_heads: usize,
    /// Layers.
    pub n_layers: usize,
    /// Share of weights and activations that dropout leaves out in training.
    pub dropout: f64,
    /// Whether norms come before the parts of a layer.
    pub norm_first: bool,
    /// Whether weights may add up to less than 1.
    pub quiet_softmax: bool,
}

impl ModuleDisplay for TransformerDecoder {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content
            .add("d_model", &self.d_model)
            .add("d_ff", &self.d_ff)
            .add("n_heads", &self.n_heads)
            .add("n_layers", &self.n_layers)
            .add("dropout", &self.dropout)
            .add("norm_first", &self.norm_first)
            .add("quiet_softmax", &self.quiet_softmax)
            .optional()
    }
}

/// Input of [`TransformerDecoder`].
#[derive(Clone, Debug)]
pub struct TransformerDecoderInput {
    pub(super) target: Tensor<3>,
    pub(super) target_masks: Masks,
    pub(super) memory: Tensor<3>,
    pub(super) memory_masks: Masks,
}

impl TransformerDecoderInput {
    /// Tokens `[batch, seq, d_model]`, and a memory `[batch, seq_memory, d_model]`.
    pub fn new(target: Tensor<3>, memory: Tensor<3>) -> Self {
        let (target_masks, memory_masks) = (Masks::default(), Masks::default());
        Self { target, target_masks, memory, memory_masks }
    }

    /// Masks padding in the memory: `[batch, seq_memory]`, true for padding.
    pub fn memory_mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.memory_masks.pad = Some(mask_pad);
        self
    }

    /// Masks pairs of tokens and memory: `[batch, seq, seq_memory]`, true for pairs that are left out.
    pub fn memory_mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.memory_masks.attn = Some(mask_attn);
        self
    }

    /// Masks padding: `[batch, seq]`, true for tokens that are padding.
    pub fn target_mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.target_masks.pad = Some(mask_pad);
        self
    }

    /// Masks pairs of tokens: `[batch, seq, seq]`, true for pairs that are left out.
    pub fn target_mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.target_masks.attn = Some(mask_attn);
        self
    }

    /// Hides from each token those behind it. Of the memory, each sees all.
    pub fn causal(mut self) -> Self {
        self.target_masks.causal = true;
        self
    }

    /// Burn's input, with a mask where this one is causal.
    pub(super) fn into_burns(self) -> burns::TransformerDecoderInput {
        let [batch, seq, _] = self.target.dims();
        let Masks { pad, attn, causal } = self.target_masks;
        let attn = masked(attn, causal, [batch, seq], &self.target);
        let mut input = burns::TransformerDecoderInput::new(self.target, self.memory);
        if let Some(mask) = pad {
            input = input.target_mask_pad(mask);
        }
        if let Some(mask) = attn {
            input = input.target_mask_attn(mask);
        }
        if let Some(mask) = self.memory_masks.pad {
            input = input.memory_mask_pad(mask);
        }
        if let Some(mask) = self.memory_masks.attn {
            input = input.memory_mask_attn(mask);
        }
        input
    }
}

impl TransformerDecoderConfig {
    /// Creates the module with fresh weights.
    ///
    /// # Panics
    ///
    /// As [`MultiHeadAttentionConfig::init`](crate::attention::MultiHeadAttentionConfig::init).
    pub fn init(&self, device: &Device) -> TransformerDecoder {
        TransformerDecoder {
            layers: (0..self.n_layers)
                .map(|_| TransformerDecoderLayer::new(self, device))
                .collect(),
            d_model: self.d_model,
            d_ff: self.d_ff,
            n_heads: self.n_heads,
            n_layers: self.n_layers,
            dropout: self.dropout,
            norm_first: self.norm_first,
            quiet_softmax: self.quiet_softmax,
        }
    }
}

impl TransformerDecoder {
    /// Runs the layers on the target and returns `[batch, seq, d_model]`.
    ///
    /// # Panics
    ///
    /// As [`MultiHeadAttention::forward`](crate::attention::MultiHeadAttention::forward).
    pub fn forward(&self, input: TransformerDecoderInput) -> Tensor<3> {
        self.layers.iter().fold(input, |input, layer| layer.forward(input)).target
    }

    /// Burn's decoding: the target holds all tokens so far, and those that are new since the last call are computed.
    ///
    /// # Panics
    ///
    /// As [`MultiHeadAttention::forward_cache`](crate::attention::MultiHeadAttention::forward_cache).
    pub fn forward_autoregressive_inference(
        &self,
        input: TransformerDecoderInput,
        cache: &mut TransformerDecoderAutoregressiveCache,
    ) -> Tensor<3> {
        let layers = self.layers.iter().map(TransformerDecoderLayer::as_burns).collect();
        decoder_of(layers).forward_autoregressive_inference(input.into_burns(), cache)
    }

    /// An empty cache for [`forward_autoregressive_inference`](Self::forward_autoregressive_inference).
    pub fn new_autoregressive_cache(&self) -> TransformerDecoderAutoregressiveCache {
        let layers = self.layers.iter().map(TransformerDecoderLayer::as_burns).collect();
        decoder_of(layers).new_autoregressive_cache()
    }
}

/// Burn's decoder of these layers. It computes by them alone: its other fields describe it.
pub(super) fn decoder_of(layers: Vec<burns::TransformerDecoderLayer>) -> burns::TransformerDecoder {
    burns::TransformerDecoder {
        n_layers: layers.len(),
        layers,
        d_model: 0,
        d_ff: 0,
        n_heads: 0,
        dropout: 0.0,
        norm_first: false,
        quiet_softmax: false,
    }
}
