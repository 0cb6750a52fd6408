//! One layer of a decoder.

use super::{
    PositionWiseFeedForward, PositionWiseFeedForwardConfig, TransformerDecoderConfig,
    TransformerDecoderInput, TransformerDecoderLayerAutoregressiveCache, decoder::decoder_of,
    feed_forward::feed_forward,
};
use crate::{
    attention::{Heads, MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
    dropout::{Dropout, DropoutConfig},
    norm::{Addend, LayerNorm, LayerNormConfig, Stream, normalized_sum},
};
use burn::{
    module::Module,
    nn::transformer as burns,
    tensor::{Device, Tensor},
};

/// Self-attention, attention to a memory, and a feed-forward part.
#[derive(Module, Debug)]
pub struct TransformerDecoderLayer {
    /// Attention to the memory.
    pub cross_attn: MultiHeadAttention,
    /// Self-attention.
    pub self_attn: MultiHeadAttention,
    /// The feed-forward part.
    pub pwff: PositionWiseFeedForward,
    /// That of attention to the memory if norms come first, else that of self-attention.
    pub norm_1: LayerNorm,
    /// That of the feed-forward part if norms come first, else that of attention to the memory.
    pub norm_2: LayerNorm,
    /// That of self-attention if norms come first, else that of the feed-forward part.
    pub norm_3: LayerNorm,
    /// Dropout of what is added to the tokens.
    pub dropout: Dropout,
    /// Whether norms come before the parts, and not behind what they are added to.
    pub norm_first: bool,
}

impl TransformerDecoderLayer {
    /// A layer with fresh weights.
    ///
    /// # Panics
    ///
    /// As [`MultiHeadAttentionConfig::init`].
    pub fn new(config: &TransformerDecoderConfig, device: &Device) -> Self {
        let attention = || {
            MultiHeadAttentionConfig::new(config.d_model, config.n_heads)
                .with_initializer(config.initializer.clone())
                .with_dropout(config.dropout)
                .with_quiet_softmax(config.quiet_softmax)
                .with_n_kv_heads(config.n_kv_heads)
                .init(device)
        };
        let norm = || {
            LayerNormConfig::new(config.d_model).with_epsilon(config.layer_norm_eps).init(device)
        };
        Self {
            self_attn: attention(),
            cross_attn: attention(),
            norm_1: norm(),
            norm_2: norm(),
            norm_3: norm(),
            dropout: DropoutConfig::new(config.dropout).init(),
            pwff: PositionWiseFeedForwardConfig::new(config.d_model, config.d_ff)
                .with_initializer(config.initializer.clone())
                .with_dropout(config.dropout)
                .with_activation(config.activation.clone())
                .init(device),
            norm_first: config.norm_first,
        }
    }

    /// The input with the target `[batch, seq, d_model]` replaced by what the layer makes of it.
    ///
    /// # Panics
    ///
    /// As [`MultiHeadAttention::forward`].
    pub fn forward(&self, mut input: TransformerDecoderInput) -> TransformerDecoderInput {
        let look_around = |x: Tensor<3>| {
            let masks = input.target_masks.clone();
            let input =
                MhaInput::self_attn(x).with_masks(masks.pad, masks.attn).with_causal(masks.causal);
            attended(&self.self_attn, input)
        };
        let look_back = |x: Tensor<3>| {
            let (memory, masks) = (&input.memory, input.memory_masks.clone());
            let input =
                MhaInput::new(x, memory.clone(), memory.clone()).with_masks(masks.pad, masks.attn);
            attended(&self.cross_attn, input)
        };
        let x = input.target.clone();
        let x = if self.norm_first {
            let (x, normalized) = Stream::new(x).normalized(&self.norm_3);
            let stream = Stream::with(x, look_around(normalized), &self.dropout);
            let (x, normalized) = stream.normalized(&self.norm_1);
            let stream = Stream::with(x, look_back(normalized), &self.dropout);
            let (x, normalized) = stream.normalized(&self.norm_2);
            Stream::with(x, feed_forward(&self.pwff, normalized), &self.dropout).into_tokens()
        } else {
            let added = |norm: &LayerNorm, x: Tensor<3>, addend| {
                normalized_sum(norm, &self.dropout, x, addend)
            };
            let x = added(&self.norm_1, x.clone(), look_around(x));
            let x = added(&self.norm_2, x.clone(), look_back(x));
            added(&self.norm_3, x.clone(), feed_forward(&self.pwff, x))
        };
        input.target = x;
        input
    }

    /// Burn's decoding: the target holds all tokens so far, and those that are new since the last call are computed.
    ///
    /// # Panics
    ///
    /// As [`MultiHeadAttention::forward_cache`].
    pub fn forward_autoregressive_inference(
        &self,
        mut input: TransformerDecoderInput,
        cache: &mut TransformerDecoderLayerAutoregressiveCache,
    ) -> TransformerDecoderInput {
        let burns = input.clone().into_burns();
        let output = self.as_burns().forward_autoregressive_inference(burns, cache);
        // Burn's input keeps its target to itself; a decoder without layers gives it back.
        input.target = decoder_of(Vec::new()).forward(output);
        input
    }

    /// Burn's layer with the same parameters.
    pub(super) fn as_burns(&self) -> burns::TransformerDecoderLayer {
        burns::TransformerDecoderLayer {
            cross_attn: self.cross_attn.as_burns(),
            self_attn: self.self_attn.as_burns(),
            pwff: self.pwff.clone().into(),
            norm_1: self.norm_1.clone().into(),
            norm_2: self.norm_2.clone().into(),
            norm_3: self.norm_3.clone().into(),
            dropout: self.dropout.clone().into(),
            norm_first: self.norm_first,
        }
    }
}

fn attended(module: &MultiHeadAttention, input: MhaInput) -> Addend {
    let (heads, bias) = Heads::from(module).without_output_bias();
    Addend { rows: heads.forward(input, None).context, bias }
}
