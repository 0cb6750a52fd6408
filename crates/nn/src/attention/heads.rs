//! The forward pass, over the parts of Burn's module as well as of ours.

use super::{
    KvCache, MhaInput, MhaOutput, MultiHeadAttention,
    naive::{self, Rules},
};
use crate::{dropout::drawn, positions, refuse};
use blackburn_backend::attention::{self, AttentionOptions, Window};
use burn::{
    nn::{Dropout, Linear, RotaryEncoding},
    tensor::Tensor,
};

const MODULE: &str = "multi_head_attention";

/// The widest heads that the operation takes on every device.
const WIDEST: usize = 256;

/// What attention reads of a module.
pub(crate) struct Heads<'a> {
    query: &'a Linear,
    key: &'a Linear,
    value: &'a Linear,
    output: &'a Linear,
    pub(super) dropout: &'a Dropout,
    d_model: usize,
    pub(super) n_heads: usize,
    pub(super) n_kv_heads: usize,
    pub(super) d_k: usize,
    pub(super) min_float: f64,
    pub(super) quiet_softmax: bool,
    pub(super) window: Option<usize>,
    pub(super) softcap: Option<f64>,
    rope: Option<&'a RotaryEncoding>,
}

impl<'a> From<&'a MultiHeadAttention> for Heads<'a> {
    fn from(module: &'a MultiHeadAttention) -> Self {
        Self {
            query: &module.query,
            key: &module.key,
            value: &module.value,
            output: &module.output,
            dropout: &module.dropout,
            d_model: module.d_model,
            n_heads: module.n_heads,
            n_kv_heads: module.n_kv_heads,
            d_k: module.d_k,
            min_float: module.min_float,
            quiet_softmax: module.quiet_softmax,
            window: module.window,
            softcap: module.softcap,
            rope: module.rope.as_ref(),
        }
    }
}

impl<'a> From<&'a burn::nn::attention::MultiHeadAttention> for Heads<'a> {
    fn from(module: &'a burn::nn::attention::MultiHeadAttention) -> Self {
        Self {
            query: &module.query,
            key: &module.key,
            value: &module.value,
            output: &module.output,
            dropout: &module.dropout,
            d_model: module.d_model,
            n_heads: module.n_heads,
            n_kv_heads: module.n_heads,
            d_k: module.d_k,
            min_float: module.min_float,
            quiet_softmax: module.quiet_softmax,
            window: None,
            softcap: None,
            rope: None,
        }
    }
}

impl Heads<'_> {
    /// With a cache, keys and values are added to it, and those in it are seen, too.
    pub(crate) fn forward(&self, input: MhaInput, cache: Option<&mut KvCache>) -> MhaOutput {
        let cached = cache.as_ref().map_or(0, |cache| cache.len());
        let [batch, seq_q, seq_kv] = self.check(&input, cached);
        let MhaInput { query, key, value, mask_pad, mask_attn, causal, weights } = input;
        let causal = causal || cache.is_some();
        let q = split(self.query.forward(query), self.n_heads, self.d_k);
        let k = split(self.key.forward(key), self.n_kv_heads, self.d_k);
        let v = split(self.value.forward(value), self.n_kv_heads, self.d_k);
        // The last query stands at the last key, and positions begin with 0.
        let q = self.rotated(q, seq_kv.saturating_sub(seq_q));
        let k = self.rotated(k, cached + seq_q.saturating_sub(seq_kv));
        let [k, v] = match cache {
            Some(cache) => cache.append([k, v]),
            None => [k, v],
        };
        let (weights, context) = if weights || self.quiet_softmax || self.d_k > WIDEST {
            let rules = Rules { mask_pad, mask_attn, causal };
            let (all, context) = naive::attention(self, [q, k, v], rules);
            (weights.then_some(all), context)
        } else {
            let options = AttentionOptions {
                causal,
                window: self.window.map(|keys| Window { left: Some(keys), right: Some(keys) }),
                softcap: self.softcap,
                dropout: drawn(self.dropout, &q.device()),
                mask: mask_attn.map(|mask| mask.unsqueeze_dim(1)),
                key_padding: mask_pad.map(|mask| mask.expand([batch, seq_kv])),
                ..AttentionOptions::default()
            };
            (None, attention::attention(q, k, v, options))
        };
        let joined = context.swap_dims(1, 2).reshape([batch, seq_q, self.n_heads * self.d_k]);
        MhaOutput { weights, context: self.output.forward(joined) }
    }

    fn rotated(&self, heads: Tensor<4>, start: usize) -> Tensor<4> {
        let Some(rope) = self.rope else { return heads };
        let (end, positions) = (start + heads.dims()[2], rope.freq_complex.dims()[0]);
        if end > positions {
            refuse(MODULE, "rope", &format!("at least {end} positions"), positions);
        }
        positions::rotary(rope, heads, start)
    }

    /// Batch, queries, and keys with those of the cache.
    fn check(&self, input: &MhaInput, cached: usize) -> [usize; 3] {
        let [batch, seq_q, _] = input.query.dims();
        let [_, seq, _] = input.key.dims();
        let seq_kv = cached + seq;
        let tensors = [
            ("query", input.query.dims(), [batch, seq_q, self.d_model]),
            ("key", input.key.dims(), [batch, seq, self.d_model]),
            ("value", input.value.dims(), [batch, seq, self.d_model]),
        ];
        for (name, got, expected) in tensors {
            check_shape(name, &got, &expected);
        }
        // One mask for all sequences will do, as it does for Burn.
        let masks_of = |sequences: usize| if sequences == 1 { 1 } else { batch };
        if let Some(mask) = &input.mask_pad {
            let got = mask.dims();
            check_shape("mask_pad", &got, &[masks_of(got[0]), seq_kv]);
        }
        if let Some(mask) = &input.mask_attn {
            let got = mask.dims();
            check_shape("mask_attn", &got, &[masks_of(got[0]), seq_q, seq_kv]);
        }
        [batch, seq_q, seq_kv]
    }
}

fn check_shape(argument: &str, got: &[usize], expected: &[usize]) {
    if got != expected {
        refuse(MODULE, argument, &format!("shape {expected:?}"), format!("{got:?}"));
    }
}

/// `[batch, seq, heads * d_k]` as `[batch, heads, seq, d_k]`: a view.
fn split(tensor: Tensor<3>, heads: usize, d_k: usize) -> Tensor<4> {
    let [batch, seq, _] = tensor.dims();
    tensor.reshape([batch, seq, heads, d_k]).swap_dims(1, 2)
}
