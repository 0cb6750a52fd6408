//! Softmax cross-entropy for training over large vocabularies, with a hand-written gradient.
//!
//! ```text
//! loss[r] = (1 - eps) (-log p[r, t]) + eps mean_j (-log p[r, j])       p[r, :] = softmax(logits[r, :])
//! ```
//!
//! with target `t[r]` and label smoothing `eps`, as PyTorch defines it. Composed of Burn's operations, it
//! keeps several tensors as large as the logits, in f32 if it is to be exact. This keeps one: the gradient of the mean
//! or the sum, which is written over the logits where nobody else holds them, together with the losses. It is finished
//! unless the loss is multiplied by something afterwards, and rounded once more then.
//!
//! Losses of f16, whose gradients are too small for it before they are scaled, and losses of rows, of which each has a
//! gradient of its own, keep the logits and one number a row. They write the gradient in the backward pass.
//!
//! | device | logits | computed in | memory beside the logits |
//! |---|---|---|---|
//! | GPUs | f32, f16, bf16 | f32; the gradient is rounded once | two f32 a row |
//! | the CPU (Flex) | those and f64 | f32, and f64 for f64 | several copies of the logits, for the while |
//!
//! Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Szegedy et al.,
//! "Rethinking the Inception Architecture for Computer Vision" (2016) for smoothing.

#[cfg(feature = "gpu")]
mod cube;
#[cfg(any(feature = "gpu", feature = "flex"))]
mod host;
mod layer;
mod primitives;

pub use layer::CrossEntropyOps;
pub use primitives::{AtOnce, CrossEntropyPrimitives, Output, Reduced, Settings};
#[cfg(feature = "gpu")]
pub use primitives::{AtOnceMetadata, OutputMetadata, ReducedMetadata};

use burn::{
    backend::Dispatch,
    tensor::{DType, Int, IntDType, Tensor},
};

/// Options of [`cross_entropy`]; the default is plain cross-entropy of every row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CrossEntropyOptions {
    /// The target of rows that do not count, within 32 bits and not their ends. It need not be a class.
    pub ignore_index: Option<i64>,
    /// The share of the target that is spread evenly over all classes, from 0 to below 1.
    pub label_smoothing: f64,
}

/// What becomes of the losses of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Their mean over the rows that are not ignored: one element, NaN if all are.
    #[default]
    Mean,
    /// Their sum: one element.
    Sum,
    /// Nothing: one element a row.
    None,
}

/// The cross-entropy of `softmax(logits)` with `targets`.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | logits | `[rows, classes]` | f32, f16, bf16, f64 |
/// | targets | `[rows]` | any integer |
/// | result | `[1]`, or `[rows]` without a reduction | f32; f64 for f64 |
///
/// The result is differentiable in the logits. A row whose target is
/// [`ignore_index`](CrossEntropyOptions::ignore_index) has loss and gradient zero, whatever its logits
/// hold. A row with another target that is no class has loss and gradient NaN, and so has the mean: the
/// targets are on the device, where nothing can be refused. Logits of minus infinity are classes that are
/// left out.
///
/// # Panics
///
/// With a message that names the argument: when a dimension is zero, there is not one target for each
/// row, logits are of another type or on another device than the targets, or an option is out of its
/// range.
pub fn cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    options: CrossEntropyOptions,
    reduction: Reduction,
) -> Tensor<1> {
    let settings = checked(&logits, &targets, options);
    let loss = <Dispatch as CrossEntropyOps>::cross_entropy(
        logits.into_dispatch(),
        narrowed(targets).into_dispatch(),
        settings,
        reduction,
    );
    Tensor::from_dispatch(loss)
}

fn checked(logits: &Tensor<2>, targets: &Tensor<1, Int>, options: CrossEntropyOptions) -> Settings {
    let [rows, classes] = logits.dims();
    if rows == 0 || classes == 0 {
        refuse("logits", "at least 1 in every dimension", format!("shape {:?}", logits.dims()));
    }
    if !matches!(logits.dtype(), DType::F64 | DType::F32 | DType::F16 | DType::BF16) {
        refuse("logits", "f32, f16, bf16 or f64", format!("{:?}", logits.dtype()));
    }
    if targets.dims() != [rows] {
        let expected = format!("shape [{rows}], one for each row of logits");
        refuse("targets", &expected, format!("shape {:?}", targets.dims()));
    }
    let device = logits.device().without_autodiff();
    if targets.device().without_autodiff() != device {
        refuse(
            "targets",
            &format!("{device:?}, as logits are on"),
            format!("{:?}", targets.device()),
        );
    }
    checked_options(options)
}

/// The options, as the primitives take them.
pub(crate) fn checked_options(options: CrossEntropyOptions) -> Settings {
    let smoothing = options.label_smoothing;
    // What kernels compute with.
    if !(0.0..1.0).contains(&smoothing) || !(0.0..1.0).contains(&(smoothing as f32)) {
        refuse("label_smoothing", "a number from 0 to below 1", smoothing.to_string());
    }
    let ignore_index = options.ignore_index.map(|index| match i32::try_from(index) {
        Ok(index) if index > i32::MIN && index < i32::MAX => index,
        _ => refuse(
            "ignore_index",
            "a number within 32 bits, and not an end of them",
            index.to_string(),
        ),
    });
    Settings { ignore_index, smoothing }
}

/// Targets in 32 bits. What does not fit was no class, and is none afterwards.
pub(crate) fn narrowed(targets: Tensor<1, Int>) -> Tensor<1, Int> {
    let targets = match targets.dtype() {
        DType::I32 => return targets,
        DType::I64 => targets.clamp(i64::from(i32::MIN), i64::from(i32::MAX)),
        DType::U32 | DType::U64 => targets.clamp_max(i64::from(i32::MAX)),
        _ => targets,
    };
    targets.cast(IntDType::I32)
}

fn refuse(argument: &str, expected: &str, actual: String) -> ! {
    panic!("cross_entropy: argument `{argument}`: expected {expected}, got {actual}")
}
