//! Attention composed of Burn's operations, which holds all weights.

use super::heads::Heads;
use burn::tensor::{
    Bool, Tensor,
    activation::{quiet_softmax, softmax},
};

/// What is left out.
pub(super) struct Rules {
    pub(super) mask_pad: Option<Tensor<2, Bool>>,
    pub(super) mask_attn: Option<Tensor<3, Bool>>,
    pub(super) causal: bool,
}

/// The weights `[batch, heads, seq_q, seq_kv]`, as dropout leaves them, and what they find `[batch,
/// heads, seq_q, d_k]`.
pub(super) fn attention(
    heads: &Heads<'_>,
    [q, k, v]: [Tensor<4>; 3],
    rules: Rules,
) -> (Tensor<4>, Tensor<4>) {
    let shared_by = heads.n_heads / heads.n_kv_heads;
    let [k, v] = [k, v].map(|tensor| repeated(tensor, shared_by));
    let scores = q.matmul(k.transpose()).div_scalar((heads.d_k as f32).sqrt());
    let scores = match heads.softcap {
        Some(cap) => scores.div_scalar(cap).tanh().mul_scalar(cap),
        None => scores,
    };
    let mask = left_out(heads, &scores, rules);
    let scores = match &mask {
        Some(mask) => scores.mask_fill(mask.clone(), heads.min_float),
        None => scores,
    };
    let weights = if heads.quiet_softmax { quiet_softmax(scores, 3) } else { softmax(scores, 3) };
    let weights = match mask {
        // Where a query sees nothing, all scores are equal, and would find the mean of all values.
        Some(mask) => weights.mask_fill(mask, 0.0),
        None => weights,
    };
    let weights = heads.dropout.forward(weights);
    let context = weights.clone().matmul(v);
    (weights, context)
}

/// Each head so many times, side by side.
fn repeated(tensor: Tensor<4>, times: usize) -> Tensor<4> {
    if times == 1 {
        return tensor;
    }
    let [batch, heads, seq, d_k] = tensor.dims();
    tensor.unsqueeze_dim::<5>(2).expand([batch, heads, times, seq, d_k]).reshape([
        batch,
        heads * times,
        seq,
        d_k,
    ])
}

/// True for pairs that are left out: a shape that `scores` can be filled by.
fn left_out(heads: &Heads<'_>, scores: &Tensor<4>, rules: Rules) -> Option<Tensor<4, Bool>> {
    let [batch, all_heads, seq_q, seq_kv] = scores.dims();
    let device = scores.device();
    // Query i stands at key `i + ahead`.
    let ahead = seq_kv as i64 - seq_q as i64;
    // No two places are further from each other.
    let window = heads.window.map(|keys| keys.min(seq_q + seq_kv) as i64);
    let right = if rules.causal { Some(0) } else { window };
    let shape = [seq_q, seq_kv];
    let too_late = right.map(|keys| Tensor::<2, Bool>::tril_mask(shape, ahead + keys, &device));
    let too_early = window.map(|keys| Tensor::<2, Bool>::triu_mask(shape, ahead - keys, &device));
    let pairs = [too_late, too_early].into_iter().flatten().map(|mask| mask.unsqueeze::<4>());
    let padding = rules.mask_pad.map(|mask| mask.unsqueeze_dims::<4>(&[1, 1]));
    let given = rules.mask_attn.map(|mask| mask.unsqueeze_dim::<4>(1));
    pairs
        .chain(padding)
        .chain(given)
        .map(|mask| mask.expand([batch, all_heads, seq_q, seq_kv]))
        .reduce(Tensor::bool_or)
}
