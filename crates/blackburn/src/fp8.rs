//! Linear layers that multiply 8-bit floats, forward and backward.
//!
//! GPUs with 8-bit tensor cores (Hopper, Ada, workstation Blackwell) multiply them at up to twice the rate of
//! 16-bit floats, and the tensors saved for backward take half the memory. Rounding costs a pass over each tensor,
//! which only large products make up for. Every other device, the CPU included, computes with the same 8-bit
//! values, only not faster. So you can try a model anywhere.
//!
//! Parameters, optimizer and everything else stay as they are. [`linear_forward`] takes any
//! `burn::nn::Linear`:
//!
//! ```
//! use blackburn::{
//!     fp8::{self, Recipe},
//!     prelude::*,
//! };
//! use burn::{nn::LinearConfig, tensor::Distribution};
//!
//! # fn main() -> Result<(), blackburn::Error> {
//! let device = blackburn::device()?.autodiff();
//! let layer = LinearConfig::new(64, 32).init(&device);
//! let x = Tensor::<3>::random([2, 8, 64], Distribution::Default, &device).require_grad();
//!
//! let recipe = Recipe::hybrid();
//! let y = fp8::linear_forward(&layer, x.clone(), &recipe);
//! assert_eq!(y.dims(), [2, 8, 32]);
//!
//! let gradients = y.sum().backward();
//! assert_eq!(x.grad(&gradients).map(|dx| dx.dims()), Some([2, 8, 64]));
//! assert_eq!(layer.weight.grad(&gradients).map(|dw| dw.dims()), Some([64, 32]));
//! # Ok(())
//! # }
//! ```
//!
//! `Precision::Fp8` of `blackburn::train::precision` does this for a whole model: it [marks](mark) the weights of
//! linear layers, and the modules stay as they are.
//!
//! A layer's input, weight and output gradient are cast once each, to rows and to their transpose in one pass, and the
//! three products share the codes. Layers that read the same input share them, too. [`Tally`] tells how many casts
//! there were, and which share of all products' arithmetic ran in 8 bits.
//!
//! Each tensor is scaled by its own largest number, found on the device in the same step ("current scaling"). There
//! is no history to keep, to save or to warm up. By [`Recipe::mxfp8`] each 32 numbers have a scale (MXFP8), which
//! Blackwell's tensor cores multiply by; elsewhere that is slower than 16 bits. You decide what stays in 16 bits. Recipes usually leave there the
//! first and the last layer of a language model, normalization, and attention's own products.

pub use blackburn_backend::fp8_linear::{
    Format, Promotion, Recipe, Scaling, Tally, linear, linear_forward, mark, serves_marks,
};
