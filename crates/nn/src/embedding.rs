//! A function that runs Burn's `Embedding` with a faster gradient. Call it instead of `forward`.
//!
//! ```
//! use burn::{nn::EmbeddingConfig, prelude::*};
//!
//! let device = Device::flex().autodiff();
//! let words = EmbeddingConfig::new(7, 4).init(&device);
//! let ids = Tensor::<2, Int>::from_data([[1, 6, 1]], &device);
//!
//! // Instead of `words.forward(ids)`:
//! let x = blackburn_nn::embedding::embedding(&words, ids);
//! assert_eq!(x.dims(), [1, 3, 4]);
//! ```

use burn::{
    nn::Embedding,
    tensor::{Int, Tensor},
};

/// Looks up `ids`, `[batch, seq]`, like `module.forward(ids)`, and returns `[batch, seq, d_model]`. On GPUs the
/// gradient adds up rows in parallel: see [`blackburn_backend::embedding`].
///
/// # Panics
///
/// If `ids` are on another device than the weights.
pub fn embedding(module: &Embedding, ids: Tensor<2, Int>) -> Tensor<3> {
    blackburn_backend::embedding::embedding(module.weight.val(), ids)
}
