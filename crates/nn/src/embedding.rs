//! Embeddings of `burn::nn` as they are: a function in the place of `forward`.
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

/// What `module.forward(ids)` gives for ids `[batch, seq]`: `[batch, seq, d_model]`. On GPUs the gradient
/// adds up rows in parallel: see [`blackburn_backend::embedding`].
///
/// # Panics
///
/// When ids are on another device than the weights.
pub fn embedding(module: &Embedding, ids: Tensor<2, Int>) -> Tensor<3> {
    blackburn_backend::embedding::embedding(module.weight.val(), ids)
}
