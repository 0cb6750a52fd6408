//! The forward pass, over the parts of Burn's module as well as of ours.

use super::{
    KvCache, MhaInput, MhaOutput, MultiHeadAttention,
    naive::{self, Rules},
};
use crate::{dropout::drawn, positions, refuse};
use blackburn_backend::{
    attention::{self, AttentionOptions, Window},
    rotary,
};
use burn::{
    module::Param,
    nn::{self as burns, Linear},
    tensor::{Int, Tensor, module::linear},
};

const MODULE: &str = "multi_head_attention";

/// The widest heads that the operation takes on every device.
const WIDEST: usize = 256;

/// What attention reads of a module.
#[derive(Clone, Copy)]
pub(crate) struct Heads<'a> {
    pub(super) query: &'a Linear,
    pub(super) key: &'a Linear,
    pub(super) value: &'a Linear,
    pub(super) output: &'a Linear,
    /// None where somebody else adds it.
    pub(super) output_bias: Option<&'a Param<Tensor<1>>>,
    pub(super) dropout: &'a burns::Dropout,
    /// Size of a token.
    pub(super) d_model: usize,
    /// Size of a token that keys and values are made of.
    pub(super) d_context: usize,
    pub(super) n_heads: usize,
    pub(super) n_kv_heads: usize,
    pub(super) d_k: usize,
    pub(super) min_float: f64,
    pub(super) quiet_softmax: bool,
    pub(super) window: Option<usize>,
    pub(super) softcap: Option<f64>,
    pub(super) rope: Option<&'a burns::RotaryEncoding>,
}

impl<'a> From<&'a MultiHeadAttention> for Heads<'a> {
    fn from(module: &'a MultiHeadAttention) -> Self {
        Self {
            query: &module.query,
            key: &module.key,
            value: &module.value,
            output: &module.output,
            output_bias: module.output.bias.as_ref(),
            dropout: &module.dropout,
            d_model: module.d_model,
            d_context: module.d_model,
            n_heads: module.n_heads,
            n_kv_heads: module.n_kv_heads,
            d_k: module.d_k,
            min_float: module.min_float,
            quiet_softmax: module.quiet_softmax,
            window: module.window,
            softcap: module.softcap,
            rope: module.rope.as_deref(),
        }
    }
}

impl<'a> From<&'a burns::attention::MultiHeadAttention> for Heads<'a> {
    fn from(module: &'a burns::attention::MultiHeadAttention) -> Self {
        Self {
            query: &module.query,
            key: &module.key,
            value: &module.value,
            output: &module.output,
            output_bias: module.output.bias.as_ref(),
            dropout: &module.dropout,
            d_model: module.d_model,
            d_context: module.d_model,
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

/// Tokens before those of a forward pass.
#[derive(Debug)]
pub(crate) struct Past<'a> {
    pub(crate) cache: &'a mut KvCache,
    /// Where the first new token stands, on the device. Without it new tokens follow those in the cache.
    pub(crate) position: Option<&'a Tensor<1, Int>>,
}

impl Heads<'_> {
    /// Leaves the output's bias, if it has one, to the caller.
    pub(crate) fn without_output_bias(self) -> (Self, Option<Tensor<1>>) {
        (Self { output_bias: None, ..self }, self.output_bias.map(|bias| bias.val()))
    }

    /// With a cache, keys and values are added to it, and those in it are seen, too.
    pub(crate) fn forward(&self, input: MhaInput, past: Option<Past<'_>>) -> MhaOutput {
        let cache = match past {
            Some(Past { cache, position: Some(position) }) => {
                return self.placed(input, cache, position);
            }
            past => past.map(|past| past.cache),
        };
        let cached = cache.as_ref().map_or(0, |cache| cache.len());
        let [batch, seq_q, seq_kv] = self.check(&input, cached);
        let MhaInput { query, key, value, mask_pad, mask_attn, causal, weights } = input;
        let causal = causal || cache.is_some();
        let q = self.queries(query);
        let [k, v] = self.keys_values(key, value);
        // The last query stands at the last key, and positions begin with 0.
        let q = self.rotated(q, seq_kv.saturating_sub(seq_q));
        let k = self.rotated(k, cached + seq_q.saturating_sub(seq_kv));
        let [k, v] = match cache {
            Some(cache) => cache.append([k, v]),
            None => [k, v],
        };
        let mask_pad = mask_pad.map(|mask| mask.expand([batch, seq_kv]));
        self.attend([q, k, v], Rules { mask_pad, mask_attn, causal }, weights)
    }

    /// As [`forward`](Self::forward), causal, of tokens that stand at a position on the device.
    fn placed(&self, input: MhaInput, cache: &mut KvCache, position: &Tensor<1, Int>) -> MhaOutput {
        let [_, seq, _] = self.check(&input, 0);
        let MhaInput { query, key, value, mask_pad, mask_attn, causal: _, weights } = input;
        for (argument, is_given) in [
            ("mask_pad", mask_pad.is_some()),
            ("mask_attn", mask_attn.is_some()),
            ("weights", weights),
            ("quiet_softmax", self.quiet_softmax),
        ] {
            if is_given {
                refuse(MODULE, argument, "none with a position on the device", "one");
            }
        }
        let q = self.queries(query);
        let [k, v] = self.keys_values(key, value);
        let [q, k] = match self.rope {
            None => [q, k],
            Some(rope) => {
                let table = positions::rotations_at(rope, position, seq);
                [q, k].map(|heads| rotary::rotary(heads, table.clone(), 0))
            }
        };
        let options = AttentionOptions { causal: true, ..self.options() };
        let context = cache.attend(q, [k, v], position.clone(), options);
        MhaOutput { weights: None, context: self.joined(context) }
    }

    /// Queries `[batch, n_heads, seq_q, d_k]` of tokens `[batch, seq_q, d_model]`.
    pub(super) fn queries(&self, tokens: Tensor<3>) -> Tensor<4> {
        split(self.query.forward(tokens), self.n_heads, self.d_k)
    }

    /// Keys and values `[batch, n_kv_heads, seq_kv, d_k]` of tokens `[batch, seq_kv, d_context]`.
    pub(super) fn keys_values(&self, keys: Tensor<3>, values: Tensor<3>) -> [Tensor<4>; 2] {
        [
            split(self.key.forward(keys), self.n_kv_heads, self.d_k),
            split(self.value.forward(values), self.n_kv_heads, self.d_k),
        ]
    }

    /// What queries find among keys and values; and the weights, if they are asked for.
    pub(super) fn attend(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        rules: Rules,
        weights: bool,
    ) -> MhaOutput {
        let (weights, context) = if weights || self.quiet_softmax || self.d_k > WIDEST {
            let (all, context) = naive::attention(self, [q, k, v], rules);
            (weights.then_some(all), context)
        } else {
            let Rules { mask_pad, mask_attn, causal } = rules;
            let options = AttentionOptions {
                causal,
                dropout: drawn(self.dropout, &q.device()),
                mask: mask_attn.map(|mask| mask.unsqueeze_dim(1)),
                key_padding: mask_pad,
                ..self.options()
            };
            (None, attention::attention(q, k, v, options))
        };
        MhaOutput { weights, context: self.joined(context) }
    }

    /// What the module itself says of a score.
    fn options(&self) -> AttentionOptions {
        AttentionOptions {
            window: self.window.map(|keys| Window { left: Some(keys), right: Some(keys) }),
            softcap: self.softcap,
            ..AttentionOptions::default()
        }
    }

    /// Tokens `[batch, seq, d_model]` of what queries `[batch, n_heads, seq, d_k]` found.
    fn joined(&self, context: Tensor<4>) -> Tensor<3> {
        let [batch, _, seq, _] = context.dims();
        let joined = context.swap_dims(1, 2).reshape([batch, seq, self.n_heads * self.d_k]);
        linear(joined, self.output.weight.val(), self.output_bias.map(|bias| bias.val()))
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
            ("key", input.key.dims(), [batch, seq, self.d_context]),
            ("value", input.value.dims(), [batch, seq, self.d_context]),
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
