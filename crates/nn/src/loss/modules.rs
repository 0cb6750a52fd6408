//! The losses of `burn::nn` that have an operation of their own, or fail in 16 bits.

use super::{cross_entropy, widened};
use crate::drop_in::{drop_in, same_config};
use burn::{
    config::Config,
    nn::loss::{self as burns, Reduction},
    tensor::{Device, Int, Tensor},
};

/// Configuration of [`CrossEntropyLoss`], as of Burn's.
#[derive(Config, Debug)]
pub struct CrossEntropyLossConfig {
    /// Targets that do not count. Default: none
    pub pad_tokens: Option<Vec<usize>>,
    /// What each class counts, above zero. Default: 1
    pub weights: Option<Vec<f32>>,
    /// Share of a target that is spread over all classes, from 0 to 1. Default: none
    pub smoothing: Option<f32>,
    /// Whether the input is logits, and not probabilities. Default: true
    #[config(default = true)]
    pub logits: bool,
}

same_config!(
    CrossEntropyLossConfig,
    burns::CrossEntropyLossConfig,
    pad_tokens,
    weights,
    smoothing,
    logits
);

impl CrossEntropyLossConfig {
    /// Creates the module.
    ///
    /// # Panics
    ///
    /// If a weight is not above zero, or the smoothing is not between 0 and 1.
    pub fn init(&self, device: &Device) -> CrossEntropyLoss {
        burns::CrossEntropyLossConfig::from(self.clone()).init(device).into()
    }
}

drop_in! {
    /// Burn's [`CrossEntropyLoss`](burns::CrossEntropyLoss) by [`cross_entropy`](super::cross_entropy());
    /// [`CrossEntropyLossConfig`] makes it.
    CrossEntropyLoss, burns::CrossEntropyLoss
}

impl CrossEntropyLoss {
    /// Creates the module, with a target that does not count, if any.
    pub fn new(pad_index: Option<usize>, device: &Device) -> Self {
        burns::CrossEntropyLoss::new(pad_index, device).into()
    }

    /// The mean loss, one element in f32 (f64 for f64), of `logits`, `[rows, classes]`, and `targets`, `[rows]`.
    ///
    /// # Panics
    ///
    /// As [`cross_entropy`](super::cross_entropy()).
    pub fn forward(&self, logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        cross_entropy(self, logits, targets)
    }
}

/// Configuration of [`BinaryCrossEntropyLoss`], as of Burn's.
#[derive(Config, Debug)]
pub struct BinaryCrossEntropyLossConfig {
    /// What each class counts, above zero. Default: 1
    pub weights: Option<Vec<f32>>,
    /// Share of a target that is spread over all classes, from 0 to 1. Default: none
    pub smoothing: Option<f32>,
    /// Whether the input is logits, and not probabilities. Default: false
    #[config(default = false)]
    pub logits: bool,
}

same_config!(
    BinaryCrossEntropyLossConfig,
    burns::BinaryCrossEntropyLossConfig,
    weights,
    smoothing,
    logits
);

impl BinaryCrossEntropyLossConfig {
    /// Creates the module.
    ///
    /// # Panics
    ///
    /// If a weight is not above zero, or the smoothing is not between 0 and 1.
    pub fn init(&self, device: &Device) -> BinaryCrossEntropyLoss {
        burns::BinaryCrossEntropyLossConfig::from(self.clone()).init(device).into()
    }
}

drop_in! {
    /// Burn's [`BinaryCrossEntropyLoss`](burns::BinaryCrossEntropyLoss) of logits in any type, computed in f32;
    /// [`BinaryCrossEntropyLossConfig`] makes it.
    BinaryCrossEntropyLoss, burns::BinaryCrossEntropyLoss
}

impl BinaryCrossEntropyLoss {
    /// The mean loss, one element in f32 (f64 for f64), of `logits` and `targets` of one shape.
    ///
    /// # Panics
    ///
    /// As Burn's, if shapes or the number of weights do not fit.
    pub fn forward<const D: usize>(&self, logits: Tensor<D>, targets: Tensor<D, Int>) -> Tensor<1> {
        self.0.forward(widened(logits), targets)
    }
}

/// Configuration of [`CTCLoss`], as of Burn's.
#[derive(Config, Debug)]
pub struct CTCLossConfig {
    /// The class that stands for no label. Default: 0
    #[config(default = 0)]
    pub blank: usize,
    /// Whether an infinite loss counts as zero. Default: false
    #[config(default = false)]
    pub zero_infinity: bool,
}

same_config!(CTCLossConfig, burns::CTCLossConfig, blank, zero_infinity);

impl CTCLossConfig {
    /// Creates the module.
    pub fn init(&self) -> CTCLoss {
        burns::CTCLossConfig::from(self.clone()).init().into()
    }
}

drop_in! {
    /// Burn's [`CTCLoss`](burns::CTCLoss) of logarithms in any type, computed in f32; [`CTCLossConfig`] makes it.
    CTCLoss, burns::CTCLoss
}

impl CTCLoss {
    /// The loss of each sequence, `[batch]` in f32 (f64 for f64), of logarithms of probabilities `[seq, batch,
    /// classes]`, targets `[batch, labels]`, and how many of `seq` and of the labels count, `[batch]` each.
    ///
    /// # Panics
    ///
    /// As Burn's, if shapes do not fit or the blank is no class.
    pub fn forward(
        &self,
        log_probs: Tensor<3>,
        targets: Tensor<2, Int>,
        input_lengths: Tensor<1, Int>,
        target_lengths: Tensor<1, Int>,
    ) -> Tensor<1> {
        self.0.forward(widened(log_probs), targets, input_lengths, target_lengths)
    }

    /// [`forward`](Self::forward), reduced to one element. A mean divides each loss by its number of labels first.
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward), and for `Reduction::BatchMean`.
    pub fn forward_with_reduction(
        &self,
        log_probs: Tensor<3>,
        targets: Tensor<2, Int>,
        input_lengths: Tensor<1, Int>,
        target_lengths: Tensor<1, Int>,
        reduction: Reduction,
    ) -> Tensor<1> {
        self.0.forward_with_reduction(
            widened(log_probs),
            targets,
            input_lengths,
            target_lengths,
            reduction,
        )
    }
}

/// Configuration of [`RNNTLoss`], as of Burn's.
#[derive(Config, Debug)]
pub struct RNNTLossConfig {
    /// The class that stands for no label. Default: 0
    #[config(default = 0)]
    pub blank: usize,
    /// Whether the input is logits, and not logarithms of probabilities. Default: true
    #[config(default = true)]
    pub logits: bool,
}

same_config!(RNNTLossConfig, burns::RNNTLossConfig, blank, logits);

impl RNNTLossConfig {
    /// Creates the module.
    pub fn init(&self) -> RNNTLoss {
        burns::RNNTLossConfig::from(self.clone()).init().into()
    }
}

drop_in! {
    /// Burn's [`RNNTLoss`](burns::RNNTLoss) of logits in any type, computed in f32; [`RNNTLossConfig`] makes it.
    RNNTLoss, burns::RNNTLoss
}

impl RNNTLoss {
    /// The loss of each sequence, `[batch]` in f32 (f64 for f64), of logits `[batch, seq, labels + 1, classes]`, targets
    /// `[batch, labels]`, and how many of `seq` and of the labels count, `[batch]` each.
    ///
    /// # Panics
    ///
    /// As Burn's, if shapes do not fit or the blank is no class.
    pub fn forward(
        &self,
        logits: Tensor<4>,
        targets: Tensor<2, Int>,
        logit_lengths: Tensor<1, Int>,
        target_lengths: Tensor<1, Int>,
    ) -> Tensor<1> {
        self.0.forward(widened(logits), targets, logit_lengths, target_lengths)
    }

    /// [`forward`](Self::forward), reduced to one element.
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward), and for `Reduction::BatchMean`.
    pub fn forward_with_reduction(
        &self,
        logits: Tensor<4>,
        targets: Tensor<2, Int>,
        logit_lengths: Tensor<1, Int>,
        target_lengths: Tensor<1, Int>,
        reduction: Reduction,
    ) -> Tensor<1> {
        self.0.forward_with_reduction(
            widened(logits),
            targets,
            logit_lengths,
            target_lengths,
            reduction,
        )
    }
}
