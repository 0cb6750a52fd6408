//! One layer of an encoder.

use super::{
    PositionWiseFeedForward, PositionWiseFeedForwardConfig, TransformerEncoderConfig,
    TransformerEncoderLayerAutoregressiveCache, feed_forward::feed_forward,
};
use crate::{
    attention::{Heads, MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, Past},
    dropout::{Dropout, DropoutConfig},
    norm::{Addend, LayerNorm, LayerNormConfig, Stream, normalized_sum},
    positions::RotaryEncoding,
};
use burn::{
    module::Module,
    nn as burns,
    tensor::{Bool, Device, Tensor},
};

/// Self-attention, and a feed-forward part.
#[derive(Module, Debug)]
pub struct TransformerEncoderLayer {
    /// Self-attention.
    pub mha: MultiHeadAttention,
    /// The feed-forward part.
    pub pwff: PositionWiseFeedForward,
    /// The second norm if norms come first, else the first.
    pub norm_1: LayerNorm,
    /// The first norm if norms come first, else the second.
    pub norm_2: LayerNorm,
    /// Dropout of what is added to the tokens.
    pub dropout: Dropout,
    /// Whether norms come before the parts, and not behind what they are added to.
    pub norm_first: bool,
}

impl TransformerEncoderLayer {
    /// A layer with fresh weights.
    ///
    /// # Panics
    ///
    /// As [`MultiHeadAttentionConfig::init`].
    pub fn new(config: &TransformerEncoderConfig, device: &Device) -> Self {
        let rope = config.rope.as_ref().map(|rope| rope.init(device));
        Self::with_rope(config, rope, device)
    }

    pub(super) fn with_rope(
        config: &TransformerEncoderConfig,
        rope: Option<RotaryEncoding>,
        device: &Device,
    ) -> Self {
        let norm = || {
            LayerNormConfig::new(config.d_model).with_epsilon(config.layer_norm_eps).init(device)
        };
        Self {
            mha: MultiHeadAttentionConfig::new(config.d_model, config.n_heads)
                .with_initializer(config.initializer.clone())
                .with_dropout(config.dropout)
                .with_quiet_softmax(config.quiet_softmax)
                .with_n_kv_heads(config.n_kv_heads)
                .with_window(config.window)
                .with_softcap(config.softcap)
                .init_with_rope(rope, device),
            pwff: PositionWiseFeedForwardConfig::new(config.d_model, config.d_ff)
                .with_initializer(config.initializer.clone())
                .with_dropout(config.dropout)
                .with_activation(config.activation.clone())
                .init(device),
            norm_1: norm(),
            norm_2: norm(),
            dropout: DropoutConfig::new(config.dropout).init(),
            norm_first: config.norm_first,
        }
    }

    /// Runs the layer on tokens `[batch, seq, d_model]`, and returns as many. Masks are true for tokens that are
    /// padding, `[batch, seq]`, and for pairs that are left out, `[batch, seq, seq]`.
    ///
    /// # Panics
    ///
    /// As [`MultiHeadAttention::forward`].
    pub fn forward(
        &self,
        input: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
    ) -> Tensor<3> {
        let masks = Masks { pad: mask_pad, attn: mask_attn, causal: false };
        EncoderLayer::from(self).forward(Stream::new(input), &masks, None).into_tokens()
    }

    /// Burn's decoding: the input holds all tokens so far, and those that are new since the last call are computed.
    ///
    /// # Panics
    ///
    /// As [`MultiHeadAttention::forward_cache`].
    pub fn forward_autoregressive_inference(
        &self,
        input: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
        cache: &mut TransformerEncoderLayerAutoregressiveCache,
    ) -> Tensor<3> {
        self.as_burns().forward_autoregressive_inference(input, mask_pad, mask_attn, cache)
    }

    /// Burn's layer with the same parameters.
    pub(super) fn as_burns(&self) -> burns::transformer::TransformerEncoderLayer {
        burns::transformer::TransformerEncoderLayer {
            mha: self.mha.as_burns(),
            pwff: self.pwff.clone().into(),
            norm_1: self.norm_1.clone().into(),
            norm_2: self.norm_2.clone().into(),
            dropout: self.dropout.clone().into(),
            norm_first: self.norm_first,
        }
    }
}

/// What a forward pass reads of a layer, of Burn's or of ours.
pub(crate) struct EncoderLayer<'a> {
    heads: Heads<'a>,
    pwff: &'a burns::transformer::PositionWiseFeedForward,
    norm_1: &'a burns::LayerNorm,
    norm_2: &'a burns::LayerNorm,
    dropout: &'a burns::Dropout,
    norm_first: bool,
}

impl<'a> From<&'a TransformerEncoderLayer> for EncoderLayer<'a> {
    fn from(layer: &'a TransformerEncoderLayer) -> Self {
        Self {
            heads: Heads::from(&layer.mha),
            pwff: &layer.pwff,
            norm_1: &layer.norm_1,
            norm_2: &layer.norm_2,
            dropout: &layer.dropout,
            norm_first: layer.norm_first,
        }
    }
}

impl<'a> From<&'a burns::transformer::TransformerEncoderLayer> for EncoderLayer<'a> {
    fn from(layer: &'a burns::transformer::TransformerEncoderLayer) -> Self {
        Self {
            heads: Heads::from(&layer.mha),
            pwff: &layer.pwff,
            norm_1: &layer.norm_1,
            norm_2: &layer.norm_2,
            dropout: &layer.dropout,
            norm_first: layer.norm_first,
        }
    }
}

/// What is left out.
#[derive(Clone, Debug, Default)]
pub(crate) struct Masks {
    pub(crate) pad: Option<Tensor<2, Bool>>,
    pub(crate) attn: Option<Tensor<3, Bool>>,
    pub(crate) causal: bool,
}

impl EncoderLayer<'_> {
    pub(crate) fn forward(&self, stream: Stream, masks: &Masks, past: Option<Past<'_>>) -> Stream {
        let attention = |x| {
            let (heads, bias) = self.heads.without_output_bias();
            let input = MhaInput::self_attn(x)
                .with_masks(masks.pad.clone(), masks.attn.clone())
                .with_causal(masks.causal);
            Addend { rows: heads.forward(input, past).context, bias }
        };
        let fed = |x| feed_forward(self.pwff, x);
        if self.norm_first {
            let (x, normalized) = stream.normalized(self.norm_2);
            let stream = Stream::with(x, attention(normalized), self.dropout);
            let (x, normalized) = stream.normalized(self.norm_1);
            Stream::with(x, fed(normalized), self.dropout)
        } else {
            let x = stream.into_tokens();
            let added = |norm: &burns::LayerNorm, x: Tensor<3>, addend| {
                normalized_sum(norm, self.dropout, x, addend)
            };
            let x = added(self.norm_1, x.clone(), attention(x));
            Stream::new(added(self.norm_2, x.clone(), fed(x)))
        }
    }
}
