//! Functions that run Burn's own attention and transformers with flash attention. Call them instead of
//! `forward`.
//!
//! One line of a model changes; its parameters and records do not. Inputs are types of this crate, because the
//! fields of Burn's are private:
//!
//! ```
//! use blackburn_nn::{flash, transformer::TransformerEncoderInput};
//! use burn::{nn::transformer::TransformerEncoderConfig, prelude::*};
//!
//! let device = Device::flex();
//! let encoder = TransformerEncoderConfig::new(16, 64, 2, 1).init(&device);
//! let x = Tensor::<3>::ones([2, 5, 16], &device);
//!
//! // Instead of a mask tensor and `encoder.forward(input)`:
//! let y = flash::transformer_encoder(&encoder, TransformerEncoderInput::new(x).causal());
//! assert_eq!(y.dims(), [2, 5, 16]);
//! ```

use crate::{
    attention::{Heads, KvCache, MhaInput, Past},
    transformer::{TransformerCache, TransformerEncoderInput, encode},
};
use burn::{
    nn::{attention::MultiHeadAttention, transformer::TransformerEncoder},
    tensor::{Int, Tensor},
};

/// Runs `module` and returns its context, `[batch, seq_q, d_model]`. Weights are not returned, even if the input
/// asks for them.
///
/// # Panics
///
/// As [`forward`](crate::attention::MultiHeadAttention::forward) of this crate's module.
pub fn multi_head_attention(module: &MultiHeadAttention, input: MhaInput) -> Tensor<3> {
    Heads::from(module).forward(input, None).context
}

/// Runs [`multi_head_attention`] on tokens that follow those in the cache, like
/// [`forward_cached`](crate::attention::MultiHeadAttention::forward_cached).
///
/// # Panics
///
/// As [`multi_head_attention`], and if the cache is full.
pub fn multi_head_attention_cached(
    module: &MultiHeadAttention,
    input: MhaInput,
    cache: &mut KvCache,
) -> Tensor<3> {
    Heads::from(module).forward(input, Some(Past { cache, position: None })).context
}

/// Runs `module` on tokens `[batch, seq, d_model]`, and returns as many.
///
/// # Panics
///
/// As [`multi_head_attention`].
pub fn transformer_encoder(
    module: &TransformerEncoder,
    input: TransformerEncoderInput,
) -> Tensor<3> {
    encode(module.layers.iter().map(Into::into), input, None)
}

/// Runs [`transformer_encoder`], causal, on tokens that follow those in the cache. A further token costs a look
/// at each before it, and not a forward pass over all of them. The cache needs as many layers as the encoder.
///
/// # Panics
///
/// As [`transformer_encoder`], and if the cache is full or has another number of layers.
pub fn transformer_encoder_cached(
    module: &TransformerEncoder,
    input: TransformerEncoderInput,
    cache: &mut TransformerCache,
) -> Tensor<3> {
    encode(module.layers.iter().map(Into::into), input, Some((cache, None)))
}

/// Runs [`transformer_encoder_cached`] on tokens whose first stands at a position on the device, `[1]` or `[batch]`.
/// The cache is written in its own memory, and its length stays as it was: see
/// [`forward_placed`](crate::attention::MultiHeadAttention::forward_placed).
///
/// # Panics
///
/// As there, and if the cache has another number of layers.
pub fn transformer_encoder_placed(
    module: &TransformerEncoder,
    input: TransformerEncoderInput,
    cache: &mut TransformerCache,
    position: &Tensor<1, Int>,
) -> Tensor<3> {
    encode(module.layers.iter().map(Into::into), input, Some((cache, Some(position))))
}
