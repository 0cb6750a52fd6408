//! Attention in memory that grows with the sequence and not with its square, and its gradient.
//!
//! ```text
//! s[i, j]   = cap(scale q_i . k_j) + bias[i, j]            cap(x) = c tanh(x / c), if asked for
//! p[i, j]   = exp(s[i, j] - lse[i]) where j is visible to i, else 0
//! lse[i]    = log sum_j exp(s[i, j])                        minus infinity where nothing is visible
//!           = top[i] + log sum_j exp(s[i, j] - top[i])      top[i] is the largest s[i, j], or near it
//! out[i]    = sum_j d[i, j] p[i, j] v_j                     d is 0 or 1 / (1 - rate), else 1
//!
//! delta[i]  = dout_i . out_i
//! ds[i, j]  = p[i, j] (d[i, j] dout_i . v_j - delta[i])     the gradient of the bias
//! dq_i      = scale sum_j ds[i, j] cap'[i, j] k_j
//! dk_j      = scale sum_i ds[i, j] cap'[i, j] q_i           over all heads that share the key
//! dv_j      = sum_i d[i, j] p[i, j] dout_i
//! ```
//!
//! | tensor | shape | layout | dtype |
//! |---|---|---|---|
//! | q, out, dout, dq | `[batch, heads_q, seq_q, head_dim]` | [`HeadStrides`], rows contiguous | f32, f16, bf16 |
//! | k, v, dk, dv | `[batch, heads_kv, seq_kv, head_dim]` | as q | that of q |
//! | mask | `[batch, heads_q, seq_q, seq_kv]` | [`Pairs`] | 8- or 32-bit integers, not 0 for pairs left out |
//! | bias | the same | [`Pairs`] | that of q |
//! | lse | `[2, batch, heads_q, seq_q]`: all top, then all logarithms | contiguous | f32 |
//! | delta | `[batch, heads_q, seq_q]` | contiguous | f32 |
//!
//! Scores, weights and sums are f32. Each result is rounded once, and overwrites what its memory held. The
//! backward pass reads q, k, v, out and lse. It computes the weights again, and draws dropout again.
//!
//! # Masks that are added
//!
//! A score is the sum of product and bias, rounded to f32. A score of minus infinity hides its pair, as
//! the mask and the window do. Every finite score counts, however small. A query whose scores are all -1e9
//! or `f32::MIN` so attends to all of its keys alike, because f32 keeps nothing of the products beside such
//! a number. A score that is NaN or plus infinity makes its query's output and gradient NaN, and the
//! gradients of the keys that the query sees.
//!
//! This is why lse is saved in two parts. Beside -1e9 their sum would lose the logarithm, and weights
//! computed from it would add up to the number of keys instead of 1. With a bias top is the largest score. Without
//! one the kernel by `tcgen05` may save one that lies below it by up to 8 powers of two, since it rescales sums late.
//!
//! # NaN in a tensor
//!
//! NaN in q or k makes the output NaN for the queries that see it, and for no other. NaN spreads further from
//! v, and in the backward pass. Kernels multiply whole tiles, and give a pair that is left out a weight of 0.
//! Zero times NaN is NaN. NaN in v may so reach the output of queries that do not see it, and NaN in q, k, v
//! or dout may reach dq, dk and dv of queries and keys that are not paired with it. The tiles decide which.
//! NaN stays within one sequence of the batch, one head of keys and the heads of queries that share it. Only
//! where sequences are packed may it also reach the sequence before it, whose last tile can end in the next
//! one. Infinity does the same, because zero times infinity is NaN.
//!
//! # Positions
//!
//! Query i stands at key `i + seq_kv - seq_q`, so the last query stands at the last key. FlashAttention
//! aligns causal attention and the window in the same way. A query that sees no key has output zero and no
//! gradient. Sequences of different lengths may follow each other in one batch
//! ([`AttentionProblem::packed`]).
//!
//! Sources: Dao et al., "FlashAttention" (2022) and "FlashAttention-2" (2023); Milakov and Gimelshein,
//! "Online normalizer calculation for softmax" (2018). The kernels serve heads of up to 256, and those of v
//! have to be as wide as those of q.
//!
//! | family | instructions | serves |
//! |---|---|---|
//! | [`Family::Portable`](crate::Family::Portable) | multiply-adds in f32 | every runtime; few queries over many keys by plans that [split](AttentionBlueprint::split) |
//! | [`Family::Tcgen05`](crate::Family::Tcgen05) | `tcgen05.mma` fed by TMA, sums in tensor memory | as `wgmma`, on Blackwell's data-center GPUs (`sm_100a`, `sm_103a`), heads up to 128 in both passes |
//! | [`Family::Wgmma`](crate::Family::Wgmma) | `wgmma` fed by TMA | f16 and bf16 on Hopper (`sm_90a`), heads of a multiple of 16; backward above 128 by plans that are [atomic](AttentionBlueprint::atomic), without a cap or a bias |
//! | [`Family::Mma`](crate::Family::Mma) | `mma.sync` fed by `cp.async` | f16, bf16 and f32 as [TF32](AttentionProblem::full_f32), from Ampere on, heads of a multiple of 16; in 16 bits plans that split, too; the gradient of a bias beside the other families of tensor cores |
//!
//! # Few queries over many keys
//!
//! Decoding asks for one query or a few against a cache of keys and values. Plans that
//! [split](AttentionBlueprint::split) divide the keys among cubes, and a second kernel merges what they found.
//! [`attention_append`] puts new keys and values into the cache, and [`attention_decode`] attends to it, both at a
//! position that is a number on the device: recorded launches serve every length. See `decode.rs` for the equations, and
//! `decode_mma.rs` for the kernel on tensor cores.
//!
//! # The same bits each time
//!
//! All kernels give the same bits for the same input, but for one gradient of one of Hopper's and of one of Blackwell's.
//! Their backward passes compute each pair's products once, five in all. Tiles of keys then add to dq in f32 in global
//! memory, in no order: dq may differ by roundings of f32 before its one rounding. With
//! [`deterministic`](AttentionProblem::deterministic) they are not planned. What takes their place has a kernel for tiles
//! of keys and one for tiles of queries, and computes the scores and their gradients in both: seven products.
//!
//! The sums of dq take `4 head_dim` bytes a query while the pass runs, filled up to tiles of 64 queries. The tests'
//! bounds count additions and not their order, so they hold for any.

mod append;
mod backward;
mod blueprint;
mod call;
mod decode;
mod decode_launch;
mod decode_merge;
#[cfg(feature = "cuda")]
mod decode_mma;
mod decode_plan;
pub mod decode_variants;
mod decode_weights;
mod dropout;
mod forward;
#[cfg(feature = "cuda")]
mod kept_bits;
mod launch;
mod mask_map;
mod mask_maps;
#[cfg(feature = "cuda")]
mod mma_backward;
#[cfg(feature = "cuda")]
mod mma_bias;
#[cfg(feature = "cuda")]
mod mma_forward;
#[cfg(feature = "cuda")]
mod mma_launch;
mod mma_plan;
#[cfg(feature = "cuda")]
mod mma_tiles;
#[cfg(feature = "cuda")]
mod once;
#[cfg(feature = "cuda")]
mod once_backward;
#[cfg(feature = "cuda")]
mod once_fetch;
#[cfg(feature = "cuda")]
mod once_launch;
#[cfg(feature = "cuda")]
mod once_pairs;
#[cfg(feature = "cuda")]
mod once_wide;
#[cfg(feature = "cuda")]
mod pairs;
#[cfg(feature = "cuda")]
mod pipeline;
#[cfg(feature = "cuda")]
mod polynomial;
mod portable_launch;
mod problem;
mod promises;
#[cfg(feature = "cuda")]
mod query_sums;
#[cfg(feature = "cuda")]
mod row_terms;
mod rules;
#[cfg(feature = "cuda")]
mod seen_words;
#[cfg(feature = "cuda")]
mod softmax;
#[cfg(feature = "cuda")]
mod tcgen05_backward;
#[cfg(feature = "cuda")]
mod tcgen05_forward;
#[cfg(feature = "cuda")]
mod tcgen05_gradients;
#[cfg(feature = "cuda")]
mod tcgen05_launch;
#[cfg(feature = "cuda")]
mod tcgen05_once;
#[cfg(feature = "cuda")]
mod tcgen05_weights;
#[cfg(feature = "cuda")]
mod tensor_core;
mod tile;
pub mod variants;
#[cfg(feature = "cuda")]
mod wgmma_backward;
#[cfg(feature = "cuda")]
mod wgmma_forward;
#[cfg(feature = "cuda")]
mod wgmma_launch;

pub use append::{AppendProblem, AppendTensors, attention_append};
pub use blueprint::AttentionBlueprint;
pub use call::{AttentionGradients, AttentionInputs, AttentionOutput, AttentionResult};
pub use decode_launch::{attention_decode, attention_decode_with};
pub use launch::{
    attention_backward, attention_backward_with, attention_forward, attention_forward_with,
};
pub use mask_maps::MaskMaps;
pub use problem::{AttentionProblem, Dropout, HeadStrides, Order, Pairs, Window};
pub(crate) use variants::variants;
