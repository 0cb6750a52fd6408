//! Llama's architecture, of `blackburn::nn`'s modules.

use crate::model::ModelConfig;
use blackburn::nn::{
    Dropout, DropoutConfig, RmsNorm, RmsNormConfig, RotaryEncodingConfig, SwiGlu, SwiGluConfig,
    attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
    transformer::TransformerCache,
};
use burn::{
    module::{Initializer, Module},
    nn::{Linear, LinearConfig},
    tensor::{Device, Int, Tensor},
};

/// Width between the two parts of the feed-forward: 8/3 of the model's, up to a multiple of 256, as Llama has it
/// (arXiv:2302.13971, section 2.2, and its code).
pub(crate) fn hidden(width: usize) -> usize {
    width.saturating_mul(8).div_ceil(3).next_multiple_of(256)
}

#[derive(Module, Debug)]
pub(crate) struct LlamaLayer {
    norm_1: RmsNorm,
    pub(crate) attention: MultiHeadAttention,
    norm_2: RmsNorm,
    gate_and_up: SwiGlu,
    pub(crate) down: Linear,
    dropout: Dropout,
}

impl LlamaLayer {
    /// The layer, with what `attend` makes of its attention.
    fn forward(
        &self,
        x: Tensor<3>,
        attend: impl FnOnce(&MultiHeadAttention, Tensor<3>) -> Tensor<3>,
    ) -> Tensor<3> {
        let attended = attend(&self.attention, self.norm_1.forward(x.clone()));
        let x = x + self.dropout.forward(attended);
        let gated = self.gate_and_up.forward(self.norm_2.forward(x.clone()));
        x + self.dropout.forward(self.down.forward(gated))
    }
}

/// All layers, and the norm behind them.
#[derive(Module, Debug)]
pub(crate) struct Llama {
    pub(crate) layers: Vec<LlamaLayer>,
    norm: RmsNorm,
}

impl Llama {
    /// With fresh weights.
    pub(crate) fn new(config: &ModelConfig, initializer: &Initializer, device: &Device) -> Self {
        let ModelConfig { width, heads, kv_heads, context, dropout, .. } = *config;
        let rope = RotaryEncodingConfig::new(context, width / heads).init(device);
        let attention = MultiHeadAttentionConfig::new(width, heads)
            .with_n_kv_heads(Some(kv_heads))
            .with_dropout(dropout)
            .with_initializer(initializer.clone())
            .with_query_bias(false)
            .with_key_bias(false)
            .with_value_bias(false)
            .with_output_bias(false);
        let hidden = hidden(width);
        let norm = || RmsNormConfig::new(width).init(device);
        let layer = |_| LlamaLayer {
            norm_1: norm(),
            attention: attention.init_with_rope(Some(rope.clone()), device),
            norm_2: norm(),
            gate_and_up: SwiGluConfig::new(width, hidden)
                .with_initializer(initializer.clone())
                .init(device),
            down: LinearConfig::new(hidden, width)
                .with_bias(false)
                .with_initializer(initializer.clone())
                .init(device),
            dropout: DropoutConfig::new(dropout).init(),
        };
        Self { layers: (0..config.layers).map(layer).collect(), norm: norm() }
    }

    /// `[batch, length, width]` of as much.
    pub(crate) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let attend = |module: &MultiHeadAttention, x| {
            module.forward(MhaInput::self_attn(x).causal()).context
        };
        self.norm.forward(self.layers.iter().fold(x, |x, layer| layer.forward(x, attend)))
    }

    /// What the layers make, before the norm, of tokens that stand at `position`, `[1]`, behind those in the cache, which
    /// has them afterwards.
    pub(crate) fn forward_placed(
        &self,
        x: Tensor<3>,
        cache: &mut TransformerCache,
        position: &Tensor<1, Int>,
    ) -> Tensor<3> {
        let layers = self.layers.iter().zip(cache.layers_mut());
        layers.fold(x, |x, (layer, cache)| {
            layer.forward(x, |module, x| module.forward_placed(x, cache, position))
        })
    }

    /// The norm behind the layers.
    pub(crate) fn norm(&self, x: Tensor<3>) -> Tensor<3> {
        self.norm.forward(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_are_those_of_published_models() {
        // TinyLlama's and Llama 7B's.
        assert_eq!([2048, 4096].map(hidden), [5632, 11008]);
    }
}
