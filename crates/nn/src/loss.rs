//! Losses of `burn::nn` as they are: functions in the place of `forward`.
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

use blackburn_backend::cross_entropy::{self, CrossEntropyOptions, Reduction};
use burn::{
    nn::loss::CrossEntropyLoss,
    tensor::{DType, Int, Tensor},
};

/// What `module.forward(logits, targets)` gives: the mean of the rows whose target is not padding, one
/// element. It is computed by [`cross_entropy`](cross_entropy::cross_entropy), which makes no copy of the
/// logits `[rows, classes]`.
///
/// What differs from Burn's own:
///
/// - The loss is in f32, and computed there, whatever type logits have (f64 for f64): logits in 16 bits
///   need no cast. Burn computes in the type of the logits.
/// - A target that is no class and no padding makes the loss NaN. Burn reads what is not the row's.
/// - A smoothing of 0 is none: a logit of minus infinity leaves its class out.
///
/// What differs from PyTorch's: there is a list of targets that are padding, empty unless it is given,
/// where PyTorch has one index, -100 unless it is given; the mean is the only reduction.
///
/// With `weights`, with probabilities instead of logits (`logits: false`), with a smoothing of 1 and
/// with padding beyond 32 bits, this is `module.forward`.
///
/// # Panics
///
/// As `module.forward`, and as [`cross_entropy`](cross_entropy::cross_entropy).
pub fn cross_entropy(
    module: &CrossEntropyLoss,
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    let label_smoothing = f64::from(module.smoothing.unwrap_or(0.0));
    let padding: Option<Vec<i64>> =
        module.pad_tokens.iter().flatten().map(|token| within_32_bits(*token)).collect();
    let Some(padding) = padding else { return module.forward(logits, targets) };
    let is_served = module.logits
        && module.weights.is_none()
        && (0.0..1.0).contains(&label_smoothing)
        && can_hold(targets.dtype(), &padding);
    if !is_served {
        return module.forward(logits, targets);
    }
    let mut rest = padding.into_iter();
    let ignore_index = rest.next();
    let targets = match ignore_index {
        // The operation knows one: the others become that one.
        Some(first) => rest.fold(targets, |targets, other| {
            let is_other = targets.clone().equal_scalar(other);
            targets.mask_fill(is_other, first)
        }),
        None => targets,
    };
    let options = CrossEntropyOptions { ignore_index, label_smoothing };
    cross_entropy::cross_entropy(logits, targets, options, Reduction::Mean)
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
