//! One layer of an encoder.

use super::TransformerEncoderConfig;
use crate::{
    attention::{Heads, KvCache, MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
    dropout::dropout,
    norm::{Stream, add_layer_norm},
};
use burn::{
    module::Module,
    nn::{
        Dropout, DropoutConfig, LayerNorm, LayerNormConfig, RotaryEncoding,
        transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig},
    },
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
}

/// What a forward pass reads of a layer, of Burn's or of ours.
pub(crate) struct EncoderLayer<'a> {
    heads: Heads<'a>,
    pwff: &'a PositionWiseFeedForward,
    norm_1: &'a LayerNorm,
    norm_2: &'a LayerNorm,
    dropout: &'a Dropout,
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

impl<'a> From<&'a burn::nn::transformer::TransformerEncoderLayer> for EncoderLayer<'a> {
    fn from(layer: &'a burn::nn::transformer::TransformerEncoderLayer) -> Self {
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
    pub(crate) fn forward(
        &self,
        stream: Stream,
        masks: &Masks,
        cache: Option<&mut KvCache>,
    ) -> Stream {
        let attention = |x| {
            let input = MhaInput::self_attn(x)
                .with_masks(masks.pad.clone(), masks.attn.clone())
                .with_causal(masks.causal);
            dropout(self.dropout, self.heads.forward(input, cache).context)
        };
        let feed_forward = |x| dropout(self.dropout, self.pwff.forward(x));
        if self.norm_first {
            let (x, normalized) = stream.normalized(self.norm_2);
            let (x, normalized) = Stream::with(x, attention(normalized)).normalized(self.norm_1);
            Stream::with(x, feed_forward(normalized))
        } else {
            let x = stream.into_tokens();
            let (_, x) = add_layer_norm(self.norm_1, x.clone(), attention(x));
            let (_, x) = add_layer_norm(self.norm_2, x.clone(), feed_forward(x));
            Stream::new(x)
        }
    }
}
