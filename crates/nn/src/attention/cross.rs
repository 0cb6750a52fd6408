//! Attention of tokens to those of another size.

use super::{MhaInput, heads::Heads, naive::Rules};
use crate::{
    dropout::{Dropout, DropoutConfig},
    refuse,
};
use burn::{
    config::Config,
    module::Module,
    nn::{Initializer, Linear, LinearConfig},
    tensor::{Bool, Device, Tensor},
};

const MODULE: &str = "cross_attention";

/// Configuration of [`CrossAttention`], as of Burn's.
#[derive(Config, Debug)]
pub struct CrossAttentionConfig {
    /// Size of a token that queries.
    pub d_model: usize,
    /// Size of a token that is looked at.
    pub d_context: usize,
    /// Heads of queries.
    pub n_heads: usize,
    /// Heads of keys and values; they divide `n_heads`.
    pub n_heads_kv: usize,
    /// Size of a head.
    pub d_head: usize,
    /// Share of the weights that is left out in training. Default: 0.1
    #[config(default = 0.1)]
    pub dropout: f64,
    /// What the naive path sets scores to that are left out. Default: -1.0e4
    #[config(default = -1.0e4)]
    pub min_float: f64,
    /// Whether weights may add up to less than 1. Takes the naive path. Default: false
    #[config(default = false)]
    pub quiet_softmax: bool,
}

/// Burn's [`CrossAttention`](burn::nn::attention::CrossAttention) on flash attention; [`CrossAttentionConfig`]
/// makes it. Records go both ways.
#[derive(Module, Debug)]
pub struct CrossAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    dropout: Dropout,
    n_heads: usize,
    n_heads_kv: usize,
    d_head: usize,
    min_float: f64,
    quiet_softmax: bool,
}

/// Keys and values of a context that stays the same.
#[derive(Clone, Debug, Default)]
pub struct CrossAttentionCache {
    keys_values: Option<[Tensor<4>; 2]>,
}

impl CrossAttentionCache {
    /// Creates an empty cache.
    pub fn new() -> Self {
        Self::default()
    }
}

impl CrossAttentionConfig {
    /// Creates the module with fresh weights.
    ///
    /// # Panics
    ///
    /// With a message that names the option, if `n_heads_kv` does not divide `n_heads`, or the dropout is not at least
    /// 0 and below 1.
    pub fn init(&self, device: &Device) -> CrossAttention {
        if !self.n_heads.is_multiple_of(self.n_heads_kv) {
            let expected = format!("a divisor of n_heads ({})", self.n_heads);
            refuse(MODULE, "n_heads_kv", &expected, self.n_heads_kv);
        }
        let gain = 1.0 / (self.d_head as f64).sqrt();
        let linear = |inputs, outputs| {
            LinearConfig::new(inputs, outputs)
                .with_initializer(Initializer::KaimingUniform { gain, fan_out_only: false })
                .init(device)
        };
        CrossAttention {
            query: linear(self.d_model, self.n_heads * self.d_head),
            key: linear(self.d_context, self.n_heads_kv * self.d_head),
            value: linear(self.d_context, self.n_heads_kv * self.d_head),
            output: linear(self.n_heads * self.d_head, self.d_model),
            dropout: DropoutConfig::new(self.dropout).init(),
            n_heads: self.n_heads,
            n_heads_kv: self.n_heads_kv,
            d_head: self.d_head,
            min_float: self.min_float,
            quiet_softmax: self.quiet_softmax,
        }
    }
}

impl<'a> From<&'a CrossAttention> for Heads<'a> {
    fn from(module: &'a CrossAttention) -> Self {
        let [d_model, _] = module.query.weight.shape().dims();
        let [d_context, _] = module.key.weight.shape().dims();
        Self {
            query: &module.query,
            key: &module.key,
            value: &module.value,
            output: &module.output,
            output_bias: module.output.bias.as_ref(),
            dropout: &module.dropout,
            d_model,
            d_context,
            n_heads: module.n_heads,
            n_kv_heads: module.n_heads_kv,
            d_k: module.d_head,
            min_float: module.min_float,
            quiet_softmax: module.quiet_softmax,
            window: None,
            softcap: None,
            rope: None,
        }
    }
}

impl CrossAttention {
    /// What `query`, `[batch, seq_q, d_model]`, finds in `context`, `[batch, seq_kv, d_context]`, as `[batch, seq_q,
    /// d_model]`. `mask`, `[batch, seq_kv]`, is true for tokens that are left out.
    ///
    /// # Panics
    ///
    /// With a message that names the argument, if a shape is another.
    pub fn forward(
        &self,
        query: Tensor<3>,
        context: Tensor<3>,
        mask: Option<Tensor<2, Bool>>,
    ) -> Tensor<3> {
        let input = MhaInput::new(query, context.clone(), context).with_masks(mask, None);
        Heads::from(self).forward(input, None).context
    }

    /// [`forward`](Self::forward) with keys and values of the context that the cache was first used with. Of a later
    /// context nothing but its batch is read.
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward).
    pub fn forward_cache(
        &self,
        query: Tensor<3>,
        context: Tensor<3>,
        mask: Option<Tensor<2, Bool>>,
        cache: &mut CrossAttentionCache,
    ) -> Tensor<3> {
        let heads = Heads::from(self);
        let made = || heads.keys_values(context.clone(), context.clone());
        let [k, v] = cache.keys_values.get_or_insert_with(made).clone();
        let [batch, _, seq_kv, _] = k.dims();
        for (argument, got) in [("query", query.dims()[0]), ("context", context.dims()[0])] {
            if got != batch {
                refuse(MODULE, argument, &format!("{batch} sequences, as cached"), got);
            }
        }
        let mask_pad = mask.map(|mask| mask.expand([batch, seq_kv]));
        let rules = Rules { mask_pad, mask_attn: None, causal: false };
        heads.attend([heads.queries(query), k, v], rules, false).context
    }
}
