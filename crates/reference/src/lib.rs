//! What is right, and how far off a device may be.
//!
//! Tests and benches share this crate. It has no GPU dependency and computes in `f64` by the
//! textbook formula, never by a kernel's own tiling.
//!
//! | module | gives |
//! |---|---|
//! | [`storage`] | f32, f16 and bf16 as storage: rounding, bytes, unit roundoff |
//! | [`fp8`] | the two 8-bit types: rounding, codes, scales |
//! | [`fp4`] | the 4-bit type: rounding, codes |
//! | [`mx`] | matrices of 8-bit and 4-bit elements that share scales, powers of two |
//! | [`nvfp4`] | matrices of 4-bit elements that share scales in 8 bits, and one in f32 |
//! | [`random`] | seeded inputs, rounded to the storage type before anyone sees them |
//! | [`random_signs`] | how large sums are whose terms have random signs |
//! | [`tolerance`] | per-element bounds, a comparison that names the worst element, noise in dB |
//! | [`shapes`] | the catalogue of matrix products |
//! | [`gradcheck`] | central differences, for gradients of the references themselves |
//! | [`column_sum`] | sums of columns, with their bounds |
//! | [`conv`] | convolutions of images and their gradients, with their bounds |
//! | [`cross_entropy`] | softmax cross-entropy of a row and its gradient, with their bounds |
//! | [`gelu`] | GELU and its gradient, with their bounds |
//! | [`gelu_steps`] | how far GELU's gradient may be off that Burn computes step by step |
//! | [`swiglu`] | a gate's `SiLU` times another tensor, and the gradients, with their bounds |
//! | [`lstm`] | a long short-term memory over a sequence and its gradients, with their bounds |
//! | [`rotary`] | rotary position embedding and its gradient, with their bounds |
//! | [`softmax`] | the steps of softmax's logarithm, and the gradient of one element, with their bounds |
//! | [`softmax_rows`] | softmax of a row and its gradient, with their bounds |
//! | [`batch_norm`] | batch normalization of channels, with what follows it, and the gradients, with their bounds |
//! | [`layer_norm`] | layer and RMS normalization and their gradients, with their bounds |
//! | [`interpolate`] | resized images, and the gradient with its bounds |
//! | [`scan`] | cumulative sums, products, maxima and minima, with their bounds |
//! | [`pool`] | pools of images by maxima and averages, and the gradients, with their bounds |
//! | [`activation`] | what may follow a linear layer, with its bounds |
//! | [`adamw`] | a step of AdamW, with its bounds, and rounding by chance |
//! | [`sgd`] | a step of gradient descent with momentum, with its bounds |
//! | [`attention`] | attention and its gradients, with their bounds and the catalogue of cases |
//! | [`matmul`] | products of matrices, whole or at single elements, with their bounds |
//! | [`linear`] | linear layers with an activation, and their gradients, with their bounds |
//!
//! ```
//! use blackburn_reference::{gelu, random::normal, storage::Storage, tolerance::compare};
//!
//! let x = normal(7, 1000, 1.0, Storage::Bf16);
//! let expected: Vec<f64> = x.iter().map(|x| gelu::gelu(*x)).collect();
//! let bounds: Vec<f64> =
//!     x.iter().map(|x| gelu::forward_bound(*x, Storage::Bf16, gelu::PORTABLE_ERF_ERROR)).collect();
//! // A device that rounds the exact result once is within bounds.
//! let device: Vec<f64> = expected.iter().map(|y| Storage::Bf16.round(*y)).collect();
//! compare(&device, &expected, &bounds).expect("rounding once is allowed");
//! ```

pub mod activation;
pub mod adamw;
pub mod attention;
pub mod batch_norm;
pub mod column_sum;
pub mod conv;
pub mod cross_entropy;
pub mod fp4;
pub mod fp8;
pub mod gelu;
pub mod gelu_steps;
pub mod gradcheck;
pub mod group_norm;
pub mod interpolate;
pub mod layer_norm;
pub mod linear;
pub mod lstm;
pub mod matmul;
pub mod mx;
pub mod nvfp4;
pub mod pool;
pub mod random;
pub mod random_signs;
pub mod rotary;
pub mod scan;
pub mod sgd;
pub mod shapes;
mod small_float;
pub mod softmax;
pub mod softmax_rows;
pub mod storage;
pub mod swiglu;
pub mod tolerance;
