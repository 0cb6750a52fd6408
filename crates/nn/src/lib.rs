//! Attention and transformers that train in memory that grows with the sequence and not with its
//! square, and load `burn::nn` checkpoints.
//!
//! Most of what makes a model fast reaches unmodified `burn::nn` modules through fusion, and needs
//! nothing from here. What fusion cannot reach is what automatic differentiation decides above it:
//! which tensors are kept for the backward pass. Attention is the case in point, whose matrix of
//! weights grows with the square of the sequence. What keeps less has to call an operation with a
//! gradient of its own, [`blackburn_backend::attention`] or [`blackburn_backend::layer_norm`], in one of
//! two ways:
//!
//! | to keep | use |
//! |---|---|
//! | a model of `burn::nn` as it is | [`flash`] and [`norm`]: functions that run Burn's own modules |
//! | checkpoints, and gain options | [`attention`] and [`transformer`]: modules with Burn's names |
//!
//! Burn's records hold parameters by path, and the modules have the fields of Burn's: a record of
//! one loads into the other, as long as options leave the shapes alone, as all do but shared heads
//! of keys.
//!
//! The loss over a large vocabulary is another: [`loss`] runs Burn's own on an operation that keeps no
//! copies of the logits. [`embedding`] runs Burn's with a gradient that adds up rows in parallel.
//!
//! What fails in 16 bits, since Burn makes tables and states in f32, are [`positions`] (rotary and sinusoidal)
//! and [`recurrent`] layers: functions that run Burn's own modules in any type.
//!
//! # What differs from Burn
//!
//! - `causal` is a flag of the input and costs nothing; a mask tensor has to be read.
//! - What a mask leaves out is left out exactly. Burn sets scores to `min_float` instead, so that
//!   a query that sees nothing finds the mean of all values; here it finds zero.
//! - Dropout of weights, and of what layers add to the tokens ([`dropout`]), draws from [`seed`], not from
//!   the device's random numbers: the operation is a function of a number that the host knows.
//! - Weights are returned only when asked for.
//!
//! # What takes the naive path
//!
//! With weights asked for, with "quiet softmax", and with heads wider than 256, the modules compose
//! attention of Burn's operations, as Burn does: all weights are held, and kept for backward. The
//! rules above hold there, too, but for dropout, which is the device's.

#![deny(missing_docs)]

pub mod attention;
pub mod dropout;
pub mod embedding;
pub mod flash;
pub mod loss;
pub mod norm;
pub mod positions;
pub mod recurrent;
mod seed;
pub mod transformer;

pub use seed::seed;

/// Ends with a message that names what was wrong with which argument.
fn refuse(module: &str, argument: &str, expected: &str, got: impl std::fmt::Display) -> ! {
    panic!("{module}: `{argument}`: expected {expected}, got {got}")
}
