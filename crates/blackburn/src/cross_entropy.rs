//! Softmax cross-entropy for large vocabularies, without copies of the logits.
//!
//! The loss of Burn's operations keeps several tensors as large as the logits for the backward pass, and needs
//! logits in f32 to be exact. This one takes logits as they come, computes in f32 and keeps one number a row. If
//! nobody else holds the logits, it writes the gradient over them. It runs on every device.
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
//! [`linear_cross_entropy`] also takes the layer that makes the logits. It makes them in chunks of rows, and never
//! holds more than one chunk.

pub use blackburn_backend::cross_entropy::{CrossEntropyOptions, Reduction, cross_entropy};
pub use blackburn_backend::linear_cross_entropy::{
    LinearCrossEntropyOptions, chunk_rows, linear_cross_entropy,
};
