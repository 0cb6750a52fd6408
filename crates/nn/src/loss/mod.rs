//! The losses of `burn::nn`: cross-entropy without copies of the logits, and those that fail in 16 bits in f32.
//!
//! Functions run Burn's own [`CrossEntropyLoss`](burns::CrossEntropyLoss) as the module of this crate does. Call them
//! instead of `forward`:
//!
//! ```
//! use blackburn_nn::loss;
//! use burn::{nn::loss::CrossEntropyLossConfig, prelude::*};
//!
//! let device = Device::flex();
//! let criterion = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![0])).init(&device);
//! let logits = Tensor::<2>::zeros([3, 7], &device);
//! let targets = Tensor::<1, Int>::from_data([4, 0, 6], &device);
//!
//! // Instead of `criterion.forward(logits, targets)`:
//! let loss = loss::cross_entropy(&criterion, logits, targets);
//! assert!((loss.into_scalar::<f32>() - 7f32.ln()).abs() < 1e-6);
//! ```
//!
//! [`linear_cross_entropy()`] also takes the layer that makes the logits, and never holds all of them.

mod modules;

pub use burn::nn::loss::*;
pub use modules::{
    BinaryCrossEntropyLoss, BinaryCrossEntropyLossConfig, CTCLoss, CTCLossConfig, CrossEntropyLoss,
    CrossEntropyLossConfig, RNNTLoss, RNNTLossConfig,
};

use blackburn_backend::{
    cross_entropy::{self as op, CrossEntropyOptions},
    linear_cross_entropy::{self as linear_op, LinearCrossEntropyOptions},
};
use burn::{
    nn::{Linear, loss as burns},
    tensor::{DType, FloatDType, Int, Tensor},
};

/// Computes `module.forward(logits, targets)`: the mean over the rows whose target is not padding, one element.
/// [`cross_entropy`](op::cross_entropy) does it, which makes no copy of the logits `[rows, classes]`.
///
/// It differs from Burn's own:
///
/// - The loss is computed in f32, whatever type the logits have (f64 for f64), so logits in 16 bits need no
///   cast. Burn computes in the type of the logits.
/// - A target that is no class and no padding makes the loss NaN. Burn reads another row's logit.
/// - A smoothing of 0 is no smoothing: a logit of minus infinity leaves its class out.
///
/// It differs from PyTorch's: padding is a list of targets, empty by default, where PyTorch has one index, -100 by
/// default. The mean is the only reduction.
///
/// It calls `module.forward` with `weights`, with probabilities instead of logits (`logits: false`), with a
/// smoothing of 1, and with padding beyond 32 bits, on logits in f32 where they have 16 bits.
///
/// # Panics
///
/// As `module.forward`, and as [`cross_entropy`](op::cross_entropy).
pub fn cross_entropy(
    module: &burns::CrossEntropyLoss,
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    let served = options_of(module, &targets).filter(|_| module.weights.is_none());
    let Some((options, others)) = served else {
        return module.forward(widened(logits), targets);
    };
    let targets = joined(targets, &options, others);
    op::cross_entropy(logits, targets, options, op::Reduction::Mean)
}

/// Computes `module.forward(linear.forward(x), targets)` of rows `x`, `[rows, width]`, without ever holding all
/// logits. [`linear_cross_entropy`](linear_op::linear_cross_entropy) makes them in chunks of rows, and
/// the gradients with them. This saves memory where the logits are a model's largest tensor. Each chunk reads the
/// weight again, so it costs time.
///
/// The loss is that of [`cross_entropy()`]: in f32, and NaN for targets that are no class. Weights of classes are
/// served here. It calls `module.forward(linear.forward(x), targets)` with weights and a smoothing, with
/// probabilities instead of logits, with a smoothing of 1, and with padding beyond 32 bits.
///
/// # Panics
///
/// As `module.forward`, and as
/// [`linear_cross_entropy`](linear_op::linear_cross_entropy).
pub fn linear_cross_entropy(
    module: &burns::CrossEntropyLoss,
    linear: &Linear,
    x: Tensor<2>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    linear_cross_entropy_in_chunks(module, linear, x, targets, None)
}

/// Computes [`linear_cross_entropy()`] in chunks of the given number of rows, by default of
/// [`chunk_rows`](linear_op::chunk_rows).
///
/// # Panics
///
/// As [`linear_cross_entropy()`], and if chunks have no rows.
pub fn linear_cross_entropy_in_chunks(
    module: &burns::CrossEntropyLoss,
    linear: &Linear,
    x: Tensor<2>,
    targets: Tensor<1, Int>,
    chunk_rows: Option<usize>,
) -> Tensor<1> {
    let served = options_of(module, &targets)
        .filter(|(options, _)| module.weights.is_none() || options.label_smoothing == 0.0);
    let Some((options, others)) = served else {
        return module.forward(widened(linear.forward(x)), targets);
    };
    let targets = joined(targets, &options, others);
    let share = shares(module, &targets, &options);
    linear_op::linear_cross_entropy(
        x,
        linear.weight.val(),
        linear.bias.as_ref().map(|bias| bias.val()),
        targets,
        share,
        LinearCrossEntropyOptions { cross_entropy: options, chunk_rows },
    )
}

/// The tensor in f32 where it has 16 bits. Burn's losses multiply by weights and lengths in f32, and sum in the type of
/// what they get.
fn widened<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 => tensor.cast(FloatDType::F32),
        _ => tensor,
    }
}

/// What each row counts in the mean, in f32: nothing where its target is padding, and the weight of its
/// class where there are some.
fn shares(
    module: &burns::CrossEntropyLoss,
    targets: &Tensor<1, Int>,
    options: &CrossEntropyOptions,
) -> Tensor<1> {
    let ignored = options.ignore_index.map(|index| targets.clone().equal_scalar(index));
    let weights = match &module.weights {
        Some(weights) => {
            let [classes] = weights.dims();
            // What is no class is NaN in the loss; here it must not be read.
            let class = targets.clone().clamp(0, classes as i64 - 1);
            weights.clone().cast(FloatDType::F32).gather(0, class)
        }
        None => {
            let options = (&targets.device(), DType::F32);
            Tensor::ones(targets.dims(), options)
        }
    };
    let weights = match ignored {
        Some(ignored) => weights.mask_fill(ignored, 0.0),
        None => weights,
    };
    weights.clone() / weights.sum()
}

/// The options of the module, with what else of its padding than the first is to be ignored; none where the
/// operations do not serve it.
fn options_of(
    module: &burns::CrossEntropyLoss,
    targets: &Tensor<1, Int>,
) -> Option<(CrossEntropyOptions, Vec<i64>)> {
    let label_smoothing = f64::from(module.smoothing.unwrap_or(0.0));
    let padding: Option<Vec<i64>> =
        module.pad_tokens.iter().flatten().map(|token| within_32_bits(*token)).collect();
    let mut padding = padding.filter(|padding| {
        let is_in_range = (0.0..1.0).contains(&label_smoothing);
        module.logits && is_in_range && can_hold(targets.dtype(), padding)
    })?;
    let others = padding.split_off(padding.len().min(1));
    let ignore_index = padding.pop();
    Some((CrossEntropyOptions { ignore_index, label_smoothing }, others))
}

/// The operations know one target that is padding: the others become that one.
fn joined(
    targets: Tensor<1, Int>,
    options: &CrossEntropyOptions,
    others: Vec<i64>,
) -> Tensor<1, Int> {
    let Some(first) = options.ignore_index else { return targets };
    others.into_iter().fold(targets, |targets, other| {
        let is_other = targets.clone().equal_scalar(other);
        targets.mask_fill(is_other, first)
    })
}

/// The token, unless it is what targets beyond 32 bits become.
fn within_32_bits(token: usize) -> Option<i64> {
    i32::try_from(token).ok().filter(|token| *token < i32::MAX).map(i64::from)
}

/// Whether targets of that type can be compared with the padding.
fn can_hold(dtype: DType, padding: &[i64]) -> bool {
    let most = match dtype {
        DType::I8 => i64::from(i8::MAX),
        DType::U8 => i64::from(u8::MAX),
        DType::I16 => i64::from(i16::MAX),
        DType::U16 => i64::from(u16::MAX),
        _ => i64::MAX,
    };
    padding.iter().all(|token| *token <= most)
}
