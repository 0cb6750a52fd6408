//! Burn's `Embedding` under its name, as a module and as a function. On GPUs its gradient is the same as that of Burn's own: a
//! kernel that adds up rows in parallel.
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

use crate::drop_in::{drop_in, same_config};
use burn::{
    config::Config,
    nn::Initializer,
    tensor::{Device, Int, Tensor},
};

/// Looks up `ids`, `[batch, seq]`, like `module.forward(ids)`, and returns `[batch, seq, d_model]`. On GPUs the
/// gradient adds up rows in parallel: see [`blackburn_backend::embedding`].
///
/// # Panics
///
/// If `ids` are on another device than the weights.
pub fn embedding(module: &burn::nn::Embedding, ids: Tensor<2, Int>) -> Tensor<3> {
    blackburn_backend::embedding::embedding(module.weight.val(), ids)
}

/// Configuration of [`Embedding`], as of Burn's.
#[derive(Config, Debug)]
pub struct EmbeddingConfig {
    /// How many rows there are.
    pub n_embedding: usize,
    /// Size of a row.
    pub d_model: usize,
    /// How rows begin. Default: normal numbers of mean 0 and deviation 1
    #[config(default = "Initializer::Normal { mean: 0.0, std: 1.0 }")]
    pub initializer: Initializer,
}

same_config!(EmbeddingConfig, burn::nn::EmbeddingConfig, n_embedding, d_model, initializer);

impl EmbeddingConfig {
    /// Creates the module.
    pub fn init(&self, device: &Device) -> Embedding {
        burn::nn::EmbeddingConfig::from(self.clone()).init(device).into()
    }
}

drop_in! {
    /// Burn's [`Embedding`](burn::nn::Embedding), which refuses ids on other devices; [`EmbeddingConfig`] makes it.
    /// `weight` is `[n_embedding, d_model]`.
    Embedding, burn::nn::Embedding
}

impl Embedding {
    /// Looks up `input`, `[batch, seq]`, and returns `[batch, seq, d_model]`.
    ///
    /// # Panics
    ///
    /// As [`embedding`].
    pub fn forward(&self, input: Tensor<2, Int>) -> Tensor<3> {
        embedding(self, input)
    }
}
