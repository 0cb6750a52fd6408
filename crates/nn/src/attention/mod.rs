//! All of `burn::nn::attention`, with its two modules on flash attention.
//!
//! ```text
//! q, k, v  = heads of query(x_q), key(x_k), value(x_v)
//! context  = output(joined heads of attention(rope(q), rope(k), v))
//! ```
//!
//! Heads are split by a reshape and `swap_dims(1, 2)`, and joined likewise: the operation reads and
//! writes them where they lie.
//!
//! Sources: Vaswani et al., "Attention is all you need" (2017); Ainslie et al., "GQA" (2023) for
//! shared heads; Su et al., "`RoFormer`" (2021) for rotary positions.

mod cache;
mod config;
mod cross;
mod heads;
mod input;
mod naive;

pub use burn::nn::attention::*;
pub use cache::KvCache;
pub use config::MultiHeadAttentionConfig;
pub use cross::{CrossAttention, CrossAttentionCache, CrossAttentionConfig};
pub(crate) use heads::{Heads, Past};
pub(crate) use input::masked;
pub use input::{MhaInput, MhaOutput};

use crate::{dropout::Dropout, positions::RotaryEncoding, refuse};
use burn::{
    module::{Content, DisplaySettings, Module, ModuleDisplay},
    nn::{self as burns, Linear, activation::Gelu},
    tensor::{Int, Tensor},
};

/// Multi-head attention; [`MultiHeadAttentionConfig`] makes it.
///
/// Records go both ways between it and `burn::nn::attention::MultiHeadAttention`: they hold weights
/// and biases of `query`, `key`, `value` and `output`, and nothing else.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct MultiHeadAttention {
    /// From `d_model` to `n_heads * d_k`, which is `d_model`.
    pub query: Linear,
    /// From `d_model` to `n_kv_heads * d_k`.
    pub key: Linear,
    /// From `d_model` to `n_kv_heads * d_k`.
    pub value: Linear,
    /// From `n_heads * d_k` to `d_model`.
    pub output: Linear,
    /// Dropout of the weights.
    pub dropout: Dropout,
    /// Not used, there as in Burn's.
    pub activation: Gelu,
    /// Size of a token.
    pub d_model: usize,
    /// Heads of queries.
    pub n_heads: usize,
    /// Heads of keys and values, each of which neighboring heads of queries share.
    pub n_kv_heads: usize,
    /// Size of a head.
    pub d_k: usize,
    /// What the naive path sets scores to that are left out.
    pub min_float: f64,
    /// Weights of a query add up to less than 1: `exp(s) / (1 + sum exp(s))`. Takes the naive path.
    pub quiet_softmax: bool,
    /// How many keys to either side of its own place a query sees; all if none.
    pub window: Option<usize>,
    /// Scores are bounded smoothly to plus and minus this.
    pub softcap: Option<f64>,
    /// Rotates queries and keys by their positions.
    pub rope: Option<RotaryEncoding>,
}

impl ModuleDisplay for MultiHeadAttention {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content
            .add("d_model", &self.d_model)
            .add("n_heads", &self.n_heads)
            .add("n_kv_heads", &self.n_kv_heads)
            .add("d_k", &self.d_k)
            .add("dropout", &self.dropout.prob)
            .add("min_float", &self.min_float)
            .add("quiet_softmax", &self.quiet_softmax)
            .optional()
    }
}

impl MultiHeadAttention {
    /// What the queries find among the keys.
    ///
    /// | tensor | shape |
    /// |---|---|
    /// | query, context | `[batch, seq_q, d_model]` |
    /// | key, value | `[batch, seq_kv, d_model]` |
    /// | weights, if asked for | `[batch, n_heads, seq_q, seq_kv]` |
    ///
    /// # Panics
    ///
    /// With a message that names the argument, when a shape is another.
    pub fn forward(&self, input: MhaInput) -> MhaOutput {
        Heads::from(self).forward(input, None)
    }

    /// As [`forward`](Self::forward), for the tokens that follow those in `cache`, which takes
    /// their keys and values up: each sees itself and all before it, whether or not the input is
    /// causal. Results `[batch, seq, d_model]` are those of one causal forward over all tokens.
    ///
    /// Masks cover what is in the cache, too: `seq_kv` of theirs is the cache's length afterwards.
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward), and when the cache is full.
    pub fn forward_cached(&self, input: MhaInput, cache: &mut KvCache) -> Tensor<3> {
        Heads::from(self).forward(input, Some(Past { cache, position: None })).context
    }

    /// As [`forward_cached`](Self::forward_cached), for tokens `[batch, seq, d_model]` that stand at a position on the
    /// device: `[1]`, or without rotations `[batch]`. Keys and values are put there in the cache's own memory, so a
    /// step can be recorded once and replayed at other positions. Only tokens before the position and the new ones
    /// are seen. The cache's length stays as it was. `position + seq` has to be within the capacity.
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward), with masks, and where the module has a quiet softmax or heads of more than 256
    /// elements.
    pub fn forward_placed(
        &self,
        tokens: Tensor<3>,
        cache: &mut KvCache,
        position: &Tensor<1, Int>,
    ) -> Tensor<3> {
        let past = Past { cache, position: Some(position) };
        Heads::from(self).forward(MhaInput::self_attn(tokens), Some(past)).context
    }

    /// Burn's decoding: the input holds all tokens so far, and those that are new since the last call are computed.
    /// The weights are returned, so that all of them are computed. [`forward_cached`](Self::forward_cached) needs
    /// neither.
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward), and where the module has options that Burn's lacks.
    pub fn forward_cache(&self, input: MhaInput, cache: &mut MhaCache) -> MhaOutput {
        let output = self.as_burns().forward_cache(input.into_burns(), cache);
        MhaOutput { weights: Some(output.weights), context: output.context }
    }

    /// Burn's module with the same parameters.
    pub(crate) fn as_burns(&self) -> burns::attention::MultiHeadAttention {
        let has_more = self.n_kv_heads != self.n_heads
            || self.window.is_some()
            || self.softcap.is_some()
            || self.rope.is_some();
        if has_more {
            let expected = "a module without the options that Burn's lacks, or a KvCache";
            refuse("multi_head_attention", "cache", expected, "one of Burn's");
        }
        burns::attention::MultiHeadAttention {
            query: self.query.clone(),
            key: self.key.clone(),
            value: self.value.clone(),
            output: self.output.clone(),
            dropout: self.dropout.clone().into(),
            activation: self.activation.clone(),
            d_model: self.d_model,
            n_heads: self.n_heads,
            d_k: self.d_k,
            min_float: self.min_float,
            quiet_softmax: self.quiet_softmax,
        }
    }
}
