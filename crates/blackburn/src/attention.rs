//! Attention that trains in memory that grows with the sequence, not with its square.
//!
//! Burn's own attention keeps several tensors of all pairs of queries and keys for the backward pass. This one
//! keeps its inputs, its output and one number a query, and computes the rest again. It runs on every device. GPUs
//! hold the pairs only to sum the gradient of a bias.
//!
//! ```
//! use blackburn::{attention::AttentionOptions, prelude::*};
//! use burn::{nn::LinearConfig, tensor::Distribution};
//!
//! # fn main() -> Result<(), blackburn::Error> {
//! let device = blackburn::device()?.autodiff();
//! let [batch, seq, heads, head_dim] = [2, 16, 4, 8];
//! let projection = LinearConfig::new(heads * head_dim, heads * head_dim).init(&device);
//! let x = Tensor::<3>::random([batch, seq, heads * head_dim], Distribution::Default, &device);
//!
//! // `[batch, heads, seq, head_dim]`: a view, which attention reads where it lies.
//! let split = |x: Tensor<3>| x.reshape([batch, seq, heads, head_dim]).swap_dims(1, 2);
//! let q = split(projection.forward(x.clone()));
//! let (k, v) = (split(x.clone()), split(x));
//!
//! let causal = AttentionOptions { causal: true, ..Default::default() };
//! let out = blackburn::attention(q, k, v, causal);
//! let joined = out.swap_dims(1, 2).reshape([batch, seq, heads * head_dim]);
//!
//! let gradients = joined.sum().backward();
//! assert!(projection.weight.grad(&gradients).is_some());
//! # Ok(())
//! # }
//! ```
//!
//! [`AttentionOptions`] has causal masks, sliding [windows](Window), soft caps, [dropout](Dropout), masks, padding
//! and differentiable biases, in any combination. Heads of keys may be shared (GQA). [`attention_packed`] takes
//! sequences of different lengths without padding, and [`cached_attention`] decodes over a cache that it writes in place.

pub use blackburn_backend::attention::{
    AttentionOptions, Dropout, Window, attention, attention_packed, cached_attention,
};
