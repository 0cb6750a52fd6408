//! Batch normalization for training, with what follows it in a network, and a hand-written gradient.
//!
//! ```text
//! y = relu(gamma (x - mean) / sqrt(variance + epsilon) + beta + residual)      over all but the channels
//! ```
//!
//! The residual and the `ReLU` may be left out. By Burn's operations a block of a residual network keeps what is
//! normalized, the result and the sum with the residual for the backward pass, each as large as the image, and moves them
//! through memory once more. Here what was normalized and the result after a `ReLU` are kept.
//!
//! | device | x | computed in |
//! |---|---|---|
//! | GPUs | f32, f16, bf16 | f32, rounded once |
//! | the CPU (Flex) | those and f64 | f32, and f64 for f64 |
//!
//! The kernels, and what they do not serve, are described in `blackburn_kernels::batch_norm`.
//!
//! Source: Ioffe and Szegedy, "Batch Normalization", arXiv:1502.03167.

#[cfg(feature = "gpu")]
mod cube;
mod host;
mod layer;
mod primitives;

#[cfg(feature = "gpu")]
pub(crate) use cube::problem;
pub use layer::BatchNormOps;
pub use primitives::{BatchNormPrimitives, Gradients, Inputs, Output, Running, Saved, Settings};
#[cfg(feature = "gpu")]
pub use primitives::{
    GradientsMetadata, InputsMetadata, OutputMetadata, RunningMetadata, SavedMetadata,
};

use burn::{
    backend::Dispatch,
    tensor::{DType, Tensor},
};

/// What is normalized, and how.
#[derive(Clone, Debug)]
pub struct BatchNormCall<const D: usize> {
    /// `[batch, channels, ..]`, in f32, f16 or bf16; on the CPU f64, too.
    pub x: Tensor<D>,
    /// `[channels]`, of any float type.
    pub gamma: Tensor<1>,
    /// `[channels]`, of any float type.
    pub beta: Tensor<1>,
    /// Added to the normalized channels; in the shape and the type of x.
    pub residual: Option<Tensor<D>>,
    /// A number from 0, added to the variance.
    pub epsilon: f64,
    /// Whether a `ReLU` comes last.
    pub relu: bool,
}

/// What comes of it.
#[derive(Clone, Debug)]
pub struct Normalized<const D: usize> {
    /// In the shape and the type of x; differentiable in all tensors.
    pub y: Tensor<D>,
    /// Of the batch, `[channels]`, in f32, or f64 where x is. Not differentiable.
    pub mean: Tensor<1>,
    /// Biased, likewise.
    pub variance: Tensor<1>,
}

/// Normalizes channels by the statistics of the batch.
///
/// # Panics
///
/// With a message that names the argument, before anything runs: when shapes, dtypes or devices do not go together, x
/// holds nothing, or epsilon is out of its range. While it runs, when a kernel cannot be launched.
pub fn batch_norm<const D: usize>(call: BatchNormCall<D>) -> Normalized<D> {
    check(&call);
    let BatchNormCall { x, gamma, beta, residual, epsilon, relu } = call;
    let inputs = Inputs {
        x: x.into_dispatch(),
        gamma: gamma.into_dispatch(),
        beta: beta.into_dispatch(),
        residual: residual.map(Tensor::into_dispatch).into(),
    };
    let settings = Settings { epsilon, relu };
    let Output { y, mean, variance } = <Dispatch as BatchNormOps>::batch_norm(inputs, settings);
    let [mean, variance] = [mean, variance].map(Tensor::from_dispatch);
    Normalized { y: Tensor::from_dispatch(y), mean, variance }
}

/// Mean and variance over many batches, each in its own type, after a batch with those statistics: `1 - momentum` of
/// what they were, and `momentum` of the batch's. Off the graph of gradients.
///
/// # Panics
///
/// When shapes or devices differ, or momentum is not from 0 to 1.
pub fn running_statistics(
    batch: [Tensor<1>; 2],
    before: [Tensor<1>; 2],
    momentum: f64,
) -> [Tensor<1>; 2] {
    let refuse = |argument: &str, expected: String, actual: String| -> ! {
        panic!("running_statistics: argument `{argument}`: expected {expected}, got {actual}")
    };
    if !(0.0..=1.0).contains(&momentum) {
        refuse("momentum", "a number from 0 to 1".into(), momentum.to_string());
    }
    let [batch, before] = [batch, before].map(|both| both.map(Tensor::without_autodiff));
    for tensor in batch.iter().chain(&before) {
        if tensor.dims() != batch[0].dims() || tensor.device() != batch[0].device() {
            let told = |tensor: &Tensor<1>| format!("{:?} on {:?}", tensor.dims(), tensor.device());
            refuse("before", told(&batch[0]), told(tensor));
        }
    }
    let [mean, variance] = batch.map(Tensor::into_dispatch);
    let [old_mean, old_variance] = before.map(Tensor::into_dispatch);
    let before = Running { mean: old_mean, variance: old_variance };
    let Running { mean, variance } =
        <Dispatch as BatchNormPrimitives>::batch_norm_running(mean, variance, before, momentum);
    [mean, variance].map(Tensor::from_dispatch)
}

fn check<const D: usize>(call: &BatchNormCall<D>) {
    let BatchNormCall { x, gamma, beta, residual, epsilon, .. } = call;
    let refuse = |argument: &str, expected: String, actual: String| -> ! {
        panic!("batch_norm: argument `{argument}`: expected {expected}, got {actual}")
    };
    if D < 2 {
        refuse("x", "a batch of channels: at least 2 dimensions".into(), format!("{D}"));
    }
    if !matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16 | DType::F64) {
        refuse("x", "f32, f16, bf16 or f64".into(), format!("{:?}", x.dtype()));
    }
    if x.dims().contains(&0) {
        refuse("x", "a batch to take the statistics of".into(), format!("{:?}", x.dims()));
    }
    let channels = x.dims()[1];
    for (argument, parameter) in [("gamma", gamma), ("beta", beta)] {
        if parameter.dims() != [channels] {
            let expected = format!("[{channels}], the channels of x, as its shape");
            refuse(argument, expected, format!("{:?}", parameter.dims()));
        }
        if !parameter.dtype().is_float() {
            refuse(argument, "floats".into(), format!("{:?}", parameter.dtype()));
        }
        if parameter.device() != x.device() {
            let expected = format!("{:?}, as x is on", x.device());
            refuse(argument, expected, format!("{:?}", parameter.device()));
        }
    }
    if let Some(residual) = residual {
        let told = |tensor: &Tensor<D>| {
            format!("{:?} of {:?} on {:?}", tensor.dims(), tensor.dtype(), tensor.device())
        };
        if told(residual) != told(x) {
            refuse("residual", format!("{}, as x has", told(x)), told(residual));
        }
    }
    if !(*epsilon >= 0.0 && epsilon.is_finite()) {
        refuse("epsilon", "a number from 0".into(), epsilon.to_string());
    }
}
