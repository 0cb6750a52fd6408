//! Attention for training, in memory that grows with the sequence and not with its square, with a
//! hand-written gradient.
//!
//! ```text
//! s[i, j]  = cap(scale q_i . k_j) + bias[i, j]      cap(x) = c tanh(x / c), if asked for
//! p[i, :]  = softmax(s[i, :]) over the keys j that query i sees
//! out[i]   = sum_j d[i, j] p[i, j] v_j              d is 0 or 1 / (1 - rate) with dropout, else 1
//! ```
//!
//! The backward pass reads q, k, v, the mask and the bias, the output, and each query's largest score and
//! logarithm of its sum. It computes the weights again, and draws dropout again. Only the gradient of a
//! bias takes memory for all pairs, while it is summed, and only where it is asked for.
//!
//! Query i stands at key `i + seq_kv - seq_q`: causal attention and windows are aligned at the
//! lower right. A query that sees no key has output zero, and gives no gradient to anything.
//!
//! A bias of minus infinity hides its pair, and so does the mask. Every other bias counts as the number it
//! is: a query whose keys all have a bias of -1e9 attends to all of them alike, because f32 keeps nothing
//! of the products beside such a number. Its output is not zero; use the mask for that.
//!
//! | device | q, k, v | computed in | memory beside the tensors |
//! |---|---|---|---|
//! | GPUs | f32, f16, bf16; heads of up to 256 | f32, rounded once | two f32 a query |
//! | the CPU (Flex) | those and f64; any heads | f32, and f64 for f64 | all pairs, for the while |
//!
//! On tensor cores f32 is multiplied as TF32, which keeps 11 of 24 bits, unless the providers were told to keep all.
//!
//! On GPUs q, k, v and the gradient of the output are read where they lie, as long as the elements
//! of a row do: heads that were split off a linear layer's output and brought forward by
//! `swap_dims(1, 2)` are not copied. The output and the gradients then have their heads side by
//! side in memory, so swapping back and joining them copies nothing either.
//!
//! Sources: Dao et al., "FlashAttention" (2022) and "FlashAttention-2" (2023); Milakov and
//! Gimelshein, "Online normalizer calculation for softmax" (2018); Ainslie et al., "GQA" (2023) for
//! shared heads; Beltagy et al., "Longformer" (2020) for windows; Gemma Team, "Gemma 2" (2024) for
//! the soft cap; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011) for dropout.

mod cached;
mod checks;
#[cfg(feature = "gpu")]
pub(crate) mod cube;
#[cfg(feature = "flex")]
mod dropout;
#[cfg(feature = "flex")]
mod host;
mod layer;
#[cfg(feature = "gpu")]
pub(crate) mod mask_maps;
mod options;
mod primitives;

pub use crate::ops::dropout::Dropout;
pub use cached::{CachedAttentionPrimitives, CachedInputs, CachedOutput, cached_attention};
#[cfg(feature = "gpu")]
pub use cached::{CachedInputsMetadata, CachedOutputMetadata};
pub use layer::AttentionOps;
pub use options::{AttentionOptions, Window};
pub use primitives::{AttentionPrimitives, Gradients, Inputs, Mask, Output, Sequences, Settings};
#[cfg(feature = "gpu")]
pub use primitives::{GradientsMetadata, InputsMetadata, MaskMetadata, OutputMetadata};

use burn::{
    backend::Dispatch,
    tensor::{Bool, Tensor},
};
use checks::Operands;
use std::sync::Arc;

/// What the queries find among the keys: the mean of the values, weighted by how well each key
/// matches.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | q, result | `[batch, heads_q, seq_q, head_dim]` | f32, f16, bf16; on the CPU f64, too |
/// | k, v | `[batch, heads_kv, seq_kv, head_dim]` | that of q |
/// | mask, bias | `[batch, heads_q, seq_q, seq_kv]`, each of the first three or 1 | see below |
/// | padding of keys | `[batch, seq_kv]` | bool, true for padding |
///
/// A mask is bool, and true for what is left out; a bias is any float, and cast to the type of q.
/// `heads_q` is a multiple of `heads_kv`: neighboring heads of queries share one of keys and of
/// values. The result is differentiable in q, k, v and the bias. [`AttentionOptions`] has what else
/// there is.
///
/// # Panics
///
/// With a message that names the argument, before anything runs: when heads do not divide, shapes,
/// dtypes or devices do not go together, a dimension is zero, an option is out of its range, or a
/// GPU is given heads of more than 256 or f64. While it runs, when a GPU is given a tensor that
/// spans 2^32 elements or more.
pub fn attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: AttentionOptions) -> Tensor<4> {
    let operands = Operands { tensors: [&q, &k, &v], shapes: [q.dims(), k.dims(), v.dims()] };
    operands.check();
    operands.check_options(&options);
    let settings = options.settings(&operands, None);
    let AttentionOptions { mask, key_padding, bias, .. } = options;
    run([q, k, v], combined(mask, key_padding), bias, settings)
}

/// As [`attention()`], over sequences of different lengths without padding, one behind the other:
/// each attends to itself alone.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | q, result | `[total_q, heads_q, head_dim]` | f32, f16, bf16; on the CPU f64, too |
/// | k, v | `[total_kv, heads_kv, head_dim]` | that of q |
///
/// Sequence `i` has rows `starts_q[i]` to before `starts_q[i + 1]` of q, and those of `starts_kv`
/// of k and v: both begin with 0 and end with the total, one number more than there are sequences.
/// A sequence may be empty. There is no mask, no padding and no bias; causal attention, windows and
/// dropout are those of each sequence, dropout as if sequences were a batch.
///
/// # Panics
///
/// As [`attention()`]; and when `starts_q` or `starts_kv` do not ascend from 0 to the total, differ
/// in number, or a mask, padding or bias is given.
pub fn attention_packed(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    starts_q: &[usize],
    starts_kv: &[usize],
    options: AttentionOptions,
) -> Tensor<3> {
    let shape = |tensor: &Tensor<3>| {
        let [total, heads, head_dim] = tensor.dims();
        [1, heads, total, head_dim]
    };
    let operands = Operands { tensors: [&q, &k, &v], shapes: [shape(&q), shape(&k), shape(&v)] };
    operands.check();
    operands.check_packed(&options, starts_q, starts_kv);
    let sequences = Sequences { q: starts_q.to_vec(), kv: starts_kv.to_vec() };
    let settings = options.settings(&operands, Some(Arc::new(sequences)));
    let heads_first = |tensor: Tensor<3>| tensor.unsqueeze_dim::<4>(0).swap_dims(1, 2);
    let out = run([q, k, v].map(heads_first), None, None, settings);
    // Swapped first, it is contiguous, and dropping a dimension copies nothing.
    out.swap_dims(1, 2).squeeze_dim(0)
}

fn run(
    qkv: [Tensor<4>; 3],
    mask: Option<Tensor<4, Bool>>,
    bias: Option<Tensor<4>>,
    settings: Settings,
) -> Tensor<4> {
    let [q, k, v] = qkv.map(Tensor::into_dispatch);
    let inputs = Inputs {
        q,
        k,
        v,
        mask: mask.map_or(Mask::Absent, |mask| Mask::Present(mask.into_dispatch())),
        bias: bias.map(Tensor::into_dispatch).into(),
    };
    Tensor::from_dispatch(<Dispatch as AttentionOps>::attention(inputs, settings))
}

/// What either leaves out. Dimensions that neither differs along stay 1.
fn combined(
    mask: Option<Tensor<4, Bool>>,
    key_padding: Option<Tensor<2, Bool>>,
) -> Option<Tensor<4, Bool>> {
    let padding = key_padding.map(|padding| {
        let [batch, keys] = padding.dims();
        padding.reshape([batch, 1, 1, keys])
    });
    match (mask, padding) {
        (Some(mask), Some(padding)) => {
            let [_, heads, rows, keys] = mask.dims();
            let shape = [padding.dims()[0], heads, rows, keys];
            Some(mask.expand(shape).bool_or(padding.expand(shape)))
        }
        (mask, padding) => mask.or(padding),
    }
}
