//! Softmax cross-entropy for large vocabularies, without copies of the logits.
//!
//! Composed of Burn's operations, the loss keeps several tensors as large as the logits for the backward
//! pass, and needs logits in f32 to be exact. This one takes them as they come, computes in f32, keeps one
//! number a row, and writes the gradient over the logits where nobody else holds them. It runs on every
//! device.
//!
//! ```
//! use blackburn::{
//!     cross_entropy::{CrossEntropyOptions, Reduction, cross_entropy},
//!     prelude::*,
//! };
//!
//! # fn main() -> Result<(), blackburn::Error> {
//! let device = blackburn::device()?.autodiff();
//! let logits = Tensor::<2>::from_data([[2.0, 0.5, -1.0], [0.0, 0.0, 0.0]], &device).require_grad();
//! let targets = Tensor::<1, Int>::from_data([0, -100], &device);
//!
//! // As PyTorch has it: rows with target -100 do not count.
//! let options = CrossEntropyOptions { ignore_index: Some(-100), label_smoothing: 0.0 };
//! let loss = cross_entropy(logits.clone(), targets, options, Reduction::Mean);
//! let gradients = loss.backward();
//! assert!(logits.grad(&gradients).is_some());
//! # Ok(())
//! # }
//! ```
//!
//! [`nn::loss`](crate::nn::loss) runs Burn's own `CrossEntropyLoss` on it.
//!
//! [`linear_cross_entropy`] has the layer that makes the logits with it, and makes them in chunks of rows, of
//! which never more than one is there.

pub use blackburn_backend::cross_entropy::{CrossEntropyOptions, Reduction, cross_entropy};
pub use blackburn_backend::linear_cross_entropy::{
    LinearCrossEntropyOptions, chunk_rows, linear_cross_entropy,
};
