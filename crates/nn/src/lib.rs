//! `burn::nn` under the same names, whose modules keep little for the backward pass and take any type.
//!
//! Everything of `burn::nn` is here, at the same paths. A model changes one line, `use blackburn::nn` in the place of
//! `use burn::nn`, and keeps its configurations, its code and its checkpoints. Most of what makes it fast reaches
//! unmodified modules through fusion. What automatic differentiation decides above fusion, which tensors are kept for
//! the backward pass, takes modules that call operations with gradients of their own:
//!
//! | module | differs from Burn's |
//! |---|---|
//! | [`attention::MultiHeadAttention`], [`attention::CrossAttention`] | flash attention: no matrix of weights is kept |
//! | [`transformer`] | that, norms with the sum in front of them, and dropout that keeps nothing |
//! | [`LayerNorm`], [`RmsNorm`], [`norm::Normalization`] | one kernel forward and two backward |
//! | [`GroupNorm`], [`InstanceNorm`] | their input alone is kept, as it lies |
//! | [`Embedding`] | rows of its gradient are added up in parallel, in a fixed order |
//! | [`Dropout`] | nothing is kept for its gradient; draws from [`seed`] |
//! | [`loss::CrossEntropyLoss`] | no copies of the logits; computed in f32 |
//! | [`SwiGlu`] | one kernel forward and one backward; the sigmoid is not kept |
//! | [`RotaryEncoding`] | one kernel forward and one backward, in any type: Burn's fails in 16 bits |
//! | [`PositionalEncoding`], [`GaussianNoise`] | take any type: Burn's fail in 16 bits |
//! | [`Lstm`], [`BiLstm`], [`Gru`], [`BiGru`], [`Rnn`], [`BiRnn`] | the same |
//! | [`loss::BinaryCrossEntropyLoss`], [`loss::CTCLoss`], [`loss::RNNTLoss`] | the same, computed in f32 |
//! | [`interpolate`] | gradients in every mode: without a provider Burn's fail on GPUs but for `Nearest`, and that of `Lanczos` fails with it |
//! | [`conv::DeformConv2d`] | gradients of offsets and mask: Burn's are wrong on GPUs |
//!
//! All else is Burn's own. Records go both ways: they hold parameters by path, and the paths are Burn's. Shared heads of
//! keys, an option that Burn lacks, are the exception.
//!
//! ```
//! use blackburn_nn as nn;
//! use burn::prelude::*;
//!
//! let device = Device::flex().autodiff();
//! let words = nn::EmbeddingConfig::new(7, 16).init(&device);
//! let encoder = nn::transformer::TransformerEncoderConfig::new(16, 64, 2, 1).init(&device);
//! let ids = Tensor::<2, Int>::from_data([[1, 6, 1]], &device);
//! let input = nn::transformer::TransformerEncoderInput::new(words.forward(ids));
//! assert_eq!(encoder.forward(input).dims(), [1, 3, 16]);
//! ```
//!
//! # Functions over Burn's modules
//!
//! A model of `burn::nn` that stays as it is calls functions instead of `forward`: [`flash`], [`norm`],
//! [`dropout`], [`embedding`], [`swiglu`], [`vision`], [`loss`], [`positions`], [`recurrent`] and [`noise`]. They take the
//! modules of this crate as well, and some do more: [`norm::add_layer_norm`], [`norm::add_dropout_layer_norm`],
//! [`dropout::add_dropout`], [`loss::linear_cross_entropy`].
//!
//! # What differs from Burn
//!
//! - `causal` is a flag of the input and costs nothing. A mask tensor has to be read.
//! - A mask leaves pairs out exactly. Burn sets their scores to `min_float`, so a query that sees nothing gets the
//!   mean of all values there, and zero here.
//! - Dropout of weights, and of what layers add to the tokens ([`dropout`]), draws from [`seed`], not from the
//!   device's random numbers: the operation is a function of a number that the host knows.
//! - [`attention::MhaOutput::weights`] is an `Option`: weights are returned if the input asks for them by
//!   [`return_weights`](attention::MhaInput::return_weights).
//! - A module of one line in the table holds Burn's, whose fields it gives by `Deref`. It is made by its configuration
//!   or `From` Burn's, not by listing its fields. Where other code wants Burn's own, `into()` gives it.
//! - [`attention::CrossAttentionCache`] hides its tensors.
//!
//! # What takes the naive path
//!
//! The modules compose attention of Burn's operations, as Burn does, if weights are asked for, with "quiet
//! softmax", and with heads wider than 256. All weights are then held and kept for backward. The rules above hold
//! there too, but dropout draws the device's numbers.
//!
//! # What has to wait for Burn 0.23
//!
//! A model that changes nothing at all keeps what Burn's automatic differentiation keeps: attention's weights, a norm's
//! intermediate tensors. It is above everything that a backend can be extended by in 0.22. From 0.23 on, the attention of
//! `burn::tensor::module` is one operation in both passes, which a provider can take; Burn's own
//! `MultiHeadAttention` does not call it there either. And tensors that a module holds but does not declare as
//! parameters stay as they were made: visitors are not shown them, so that a `PrecisionPolicy` refuses Burn's modules
//! that have such tensors, and cannot see those of yours. Cast a table of your own where it is read:
//! `table.cast(x.dtype())`.

#![deny(missing_docs)]

pub mod attention;
pub mod conv;
mod drop_in;
pub mod dropout;
pub mod embedding;
pub mod flash;
pub mod interpolate;
pub mod loss;
pub mod noise;
pub mod norm;
pub mod positions;
pub mod recurrent;
pub mod swiglu;
pub mod transformer;
pub mod vision;

pub use blackburn_backend::random::seed;
pub use burn::nn::*;
pub use dropout::{Dropout, DropoutConfig};
pub use embedding::{Embedding, EmbeddingConfig};
pub use noise::{GaussianNoise, GaussianNoiseConfig};
pub use norm::{
    GroupNorm, GroupNormConfig, InstanceNorm, InstanceNormConfig, LayerNorm, LayerNormConfig,
    RmsNorm, RmsNormConfig,
};
pub use positions::{
    PositionalEncoding, PositionalEncodingConfig, RotaryEncoding, RotaryEncodingConfig,
};
pub use recurrent::{
    BiGru, BiGruConfig, BiLstm, BiLstmConfig, BiRnn, BiRnnConfig, Gru, GruConfig, Lstm, LstmConfig,
    Rnn, RnnConfig,
};
pub use swiglu::{SwiGlu, SwiGluConfig};

/// All of `burn::nn::activation`.
pub mod activation {
    pub use crate::swiglu::{SwiGlu, SwiGluConfig};
    pub use burn::nn::activation::*;
}

/// All of `burn::nn::basic`.
pub mod basic {
    pub use crate::recurrent::{BiRnn, BiRnnConfig, Rnn, RnnConfig};
    pub use burn::nn::basic::*;
}

/// All of `burn::nn::gru`.
pub mod gru {
    pub use crate::recurrent::{BiGru, BiGruConfig, Gru, GruConfig};
}

/// All of `burn::nn::lstm`.
pub mod lstm {
    pub use crate::recurrent::{BiLstm, BiLstmConfig, Lstm, LstmConfig};
    pub use burn::nn::lstm::*;
}

/// All of `burn::nn::modules`: what is here, too.
pub mod modules {
    pub use crate::*;
}

/// Ends with a message that names what was wrong with which argument.
fn refuse(module: &str, argument: &str, expected: &str, got: impl std::fmt::Display) -> ! {
    panic!("{module}: `{argument}`: expected {expected}, got {got}")
}
