//! Attention, norms, losses and transformers that keep little for the backward pass and load `burn::nn`
//! checkpoints.
//!
//! Most of what makes a model fast reaches unmodified `burn::nn` modules through fusion, and needs nothing from
//! here. Fusion cannot reach what automatic differentiation decides above it: which tensors are kept for the
//! backward pass. Attention is the largest case, since its matrix of weights grows with the square of the
//! sequence. To keep less, a model has to call an operation with a gradient of its own. There are two ways:
//!
//! | to keep | use |
//! |---|---|
//! | a model of `burn::nn` as it is | [`flash`], [`norm`], [`dropout`], [`embedding`], [`swiglu`] and [`loss`]: functions that run Burn's own modules |
//! | checkpoints, and gain options | [`attention`] and [`transformer`]: modules with Burn's names |
//!
//! The modules have the fields of Burn's, and Burn's records hold parameters by path. So a record of one loads
//! into the other, as long as options leave the shapes alone. All do but shared heads of keys.
//!
//! What fails in 16 bits, since Burn makes tables and states in f32, are [`positions`] (rotary and sinusoidal)
//! and [`recurrent`] layers: functions that run Burn's own modules in any type.
//!
//! # What differs from Burn
//!
//! - `causal` is a flag of the input and costs nothing. A mask tensor has to be read.
//! - A mask leaves pairs out exactly. Burn sets their scores to `min_float`, so a query that sees nothing gets the
//!   mean of all values there, and zero here.
//! - Dropout of weights, and of what layers add to the tokens ([`dropout`]), draws from [`seed`], not from the
//!   device's random numbers: the operation is a function of a number that the host knows.
//! - Weights are returned only if the input asks for them.
//!
//! # What takes the naive path
//!
//! The modules compose attention of Burn's operations, as Burn does, if weights are asked for, with "quiet
//! softmax", and with heads wider than 256. All weights are then held and kept for backward. The rules above hold
//! there too, but dropout draws the device's numbers.

#![deny(missing_docs)]

pub mod attention;
pub mod dropout;
pub mod embedding;
pub mod flash;
pub mod loss;
pub mod norm;
pub mod positions;
pub mod recurrent;
pub mod swiglu;
pub mod transformer;

pub use blackburn_backend::random::seed;

/// Ends with a message that names what was wrong with which argument.
fn refuse(module: &str, argument: &str, expected: &str, got: impl std::fmt::Display) -> ! {
    panic!("{module}: `{argument}`: expected {expected}, got {got}")
}
