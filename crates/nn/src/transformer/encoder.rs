//! The encoder, which with causal attention is a decoder-only language model's trunk.

use super::{
    TransformerEncoderAutoregressiveCache,
    encoder_layer::{EncoderLayer, Masks, TransformerEncoderLayer},
};
use crate::{
    attention::{KvCache, Past, masked},
    norm::Stream,
    positions::RotaryEncodingConfig,
    refuse,
};
use burn::{
    config::Config,
    module::{Content, DisplaySettings, Module, ModuleDisplay},
    nn::{Initializer, activation::ActivationConfig, transformer as burns},
    tensor::{Bool, Device, Int, Tensor},
};

/// Configuration of [`TransformerEncoder`]: that of `burn::nn`'s, and the fields behind `layer_norm_eps`.
#[derive(Config, Debug)]
pub struct TransformerEncoderConfig {
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
    /// How many keys to either side of its own place a query sees. Default: all
    #[config(default = "None")]
    pub window: Option<usize>,
    /// Bounds scores smoothly to plus and minus this, above zero. Default: none
    #[config(default = "None")]
    pub softcap: Option<f64>,
    /// Rotary positions, shared by all layers; their `d_model` is the size of a head. Default: none
    #[config(default = "None")]
    pub rope: Option<RotaryEncodingConfig>,
}

/// Layers of self-attention and feed-forward parts; [`TransformerEncoderConfig`] makes it.
///
/// Records go both ways between it and `burn::nn::transformer::TransformerEncoder`.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct TransformerEncoder {
    /// The layers, in order.
    pub layers: Vec<TransformerEncoderLayer>,
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

impl ModuleDisplay for TransformerEncoder {
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

/// Input of [`TransformerEncoder`].
#[derive(Clone, Debug)]
pub struct TransformerEncoderInput {
    tensor: Tensor<3>,
    masks: Masks,
}

impl TransformerEncoderInput {
    /// Tokens `[batch, seq, d_model]`.
    pub fn new(tensor: Tensor<3>) -> Self {
        Self { tensor, masks: Masks::default() }
    }

    /// Masks padding: `[batch, seq]`, true for tokens that are padding.
    pub fn mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.masks.pad = Some(mask_pad);
        self
    }

    /// Masks pairs of tokens: `[batch, seq, seq]`, true for pairs that are left out.
    pub fn mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.masks.attn = Some(mask_attn);
        self
    }

    /// Hides from each token those behind it.
    pub fn causal(mut self) -> Self {
        self.masks.causal = true;
        self
    }

    /// Burn's input, with a mask where this one is causal.
    fn into_burns(self) -> burns::TransformerEncoderInput {
        let [batch, seq, _] = self.tensor.dims();
        let Masks { pad, attn, causal } = self.masks;
        let attn = masked(attn, causal, [batch, seq], &self.tensor);
        let mut input = burns::TransformerEncoderInput::new(self.tensor);
        if let Some(mask) = pad {
            input = input.mask_pad(mask);
        }
        if let Some(mask) = attn {
            input = input.mask_attn(mask);
        }
        input
    }
}

impl TransformerEncoderConfig {
    /// Creates the module with fresh weights.
    ///
    /// # Panics
    ///
    /// As [`MultiHeadAttentionConfig::init`](crate::attention::MultiHeadAttentionConfig::init).
    pub fn init(&self, device: &Device) -> TransformerEncoder {
        let rope = self.rope.as_ref().map(|rope| rope.init(device));
        let layer = |_| TransformerEncoderLayer::with_rope(self, rope.clone(), device);
        TransformerEncoder {
            layers: (0..self.n_layers).map(layer).collect(),
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

impl TransformerEncoder {
    /// Runs the layers on tokens `[batch, seq, d_model]`, and returns as many.
    ///
    /// # Panics
    ///
    /// As [`MultiHeadAttention::forward`](crate::attention::MultiHeadAttention::forward).
    pub fn forward(&self, input: TransformerEncoderInput) -> Tensor<3> {
        encode(self.layers.iter().map(Into::into), input, None)
    }

    /// Runs [`forward`](Self::forward), causal, on tokens that follow those in the cache. The results are those of
    /// one causal forward over all tokens, and a further token costs a look at each before it. Masks cover the
    /// tokens in the cache too.
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward), and if the cache is full or has another number of layers.
    pub fn forward_cached(
        &self,
        input: TransformerEncoderInput,
        cache: &mut TransformerCache,
    ) -> Tensor<3> {
        encode(self.layers.iter().map(Into::into), input, Some((cache, None)))
    }

    /// Runs [`forward_cached`](Self::forward_cached) on tokens whose first stands at a position on the device: `[1]`,
    /// or without rotations `[batch]`. The cache is written in its own memory, and its length stays as it was: see
    /// [`MultiHeadAttention::forward_placed`](crate::attention::MultiHeadAttention::forward_placed).
    ///
    /// # Panics
    ///
    /// As there, and if the cache has another number of layers.
    pub fn forward_placed(
        &self,
        input: TransformerEncoderInput,
        cache: &mut TransformerCache,
        position: &Tensor<1, Int>,
    ) -> Tensor<3> {
        encode(self.layers.iter().map(Into::into), input, Some((cache, Some(position))))
    }

    /// Burn's decoding: the input holds all tokens so far, and those that are new since the last call are computed.
    /// [`forward_cached`](Self::forward_cached) takes the new tokens alone, and is faster.
    ///
    /// # Panics
    ///
    /// As [`MultiHeadAttention::forward_cache`](crate::attention::MultiHeadAttention::forward_cache).
    pub fn forward_autoregressive_inference(
        &self,
        input: TransformerEncoderInput,
        cache: &mut TransformerEncoderAutoregressiveCache,
    ) -> Tensor<3> {
        self.as_burns().forward_autoregressive_inference(input.into_burns(), cache)
    }

    /// An empty cache for [`forward_autoregressive_inference`](Self::forward_autoregressive_inference).
    pub fn new_autoregressive_cache(&self) -> TransformerEncoderAutoregressiveCache {
        self.as_burns().new_autoregressive_cache()
    }

    /// Burn's encoder with the same parameters.
    fn as_burns(&self) -> burns::TransformerEncoder {
        burns::TransformerEncoder {
            layers: self.layers.iter().map(TransformerEncoderLayer::as_burns).collect(),
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

/// A [`KvCache`] for each layer of an encoder.
#[derive(Clone, Debug)]
pub struct TransformerCache {
    layers: Vec<KvCache>,
}

impl TransformerCache {
    /// Creates an empty cache for the given number of layers, with room for so many tokens.
    pub fn new(layers: usize, capacity: usize) -> Self {
        Self { layers: vec![KvCache::new(capacity); layers] }
    }

    /// Tokens in it.
    pub fn len(&self) -> usize {
        self.layers.first().map_or(0, KvCache::len)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The cache of each layer, in order: for models whose layers are their own.
    pub fn layers_mut(&mut self) -> &mut [KvCache] {
        &mut self.layers
    }

    /// Forgets all tokens, and keeps the memory.
    pub fn clear(&mut self) {
        self.layers.iter_mut().for_each(KvCache::clear);
    }
}

/// Runs layers one after the other. Tokens stand behind those in a cache, or where the position says.
pub(crate) fn encode<'a>(
    layers: impl ExactSizeIterator<Item = EncoderLayer<'a>>,
    input: TransformerEncoderInput,
    past: Option<(&mut TransformerCache, Option<&Tensor<1, Int>>)>,
) -> Tensor<3> {
    let TransformerEncoderInput { tensor, masks } = input;
    let stream = Stream::new(tensor);
    let stream = match past {
        None => layers.fold(stream, |stream, layer| layer.forward(stream, &masks, None)),
        Some((cache, position)) => {
            if cache.layers.len() != layers.len() {
                let expected = format!("{} layers", layers.len());
                refuse("transformer_encoder", "cache", &expected, cache.layers.len());
            }
            let layers = layers.zip(&mut cache.layers);
            layers.fold(stream, |stream, (layer, cache)| {
                layer.forward(stream, &masks, Some(Past { cache, position }))
            })
        }
    };
    stream.into_tokens()
}
