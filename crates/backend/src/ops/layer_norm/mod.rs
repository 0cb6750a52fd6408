//! Layer and RMS normalization for training, with a hand-written gradient: one kernel a pass, where
//! Burn's decomposes into some ten operations forward and as many backward, and keeps several tensors.
//!
//! ```text
//! y = gamma (x - mean) / sqrt(variance + epsilon) + beta        over the last dimension
//! y = gamma x / sqrt(mean of squares + epsilon)                 the RMS norm
//! ```
//!
//! With a residual, the sum `x + residual` is a second result, and what is normalized: a transformer's
//! residual stream costs no pass of its own, forward or backward.
//!
//! Saved for backward are what was normalized, gamma and one or two f32 a row.
//!
//! | device | x | computed in |
//! |---|---|---|
//! | GPUs | f32, f16, bf16 | f32, rounded once |
//! | the CPU (Flex) | those and f64 | f32, and f64 for f64 |
//!
//! Gamma and beta may be of any float type; in f32 or the type of x they are read as they are. What the
//! kernels do not serve, such as rows wider than `blackburn_kernels::layer_norm` says, is left to Burn's
//! own operations, here, too, with one entry in the graph of gradients.
//!
//! Sources: Ba et al., "Layer Normalization", arXiv:1607.06450; Zhang and Sennrich, "Root Mean Square
//! Layer Normalization", arXiv:1910.07467.

#[cfg(feature = "gpu")]
mod cube;
mod host;
mod layer;
mod primitives;

#[cfg(feature = "gpu")]
pub use layer::NormalizedMetadata;
pub use layer::{LayerNormOps, Normalized};
pub use primitives::{Gradients, Inputs, LayerNormPrimitives, Norm, Output, Saved, Settings};
#[cfg(feature = "gpu")]
pub use primitives::{GradientsMetadata, InputsMetadata, OutputMetadata, SavedMetadata};

use crate::ops::dropout::{Dropout, check_rate};
use burn::{
    backend::Dispatch,
    tensor::{DType, Tensor},
};

/// Rows of x, the last dimension, without their mean and divided by their deviation, times gamma, plus
/// beta.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | x, result | `[.., width]` | f32, f16, bf16; on the CPU f64, too |
/// | gamma, beta | `[width]` | any float |
///
/// `epsilon`, a number from 0, is added to the variance. The result is differentiable in all tensors.
///
/// # Panics
///
/// With a message that names the argument, before anything runs: when shapes, dtypes or devices do not
/// go together, or epsilon is out of its range. While it runs, when a kernel cannot be launched.
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    epsilon: f64,
) -> Tensor<D> {
    let settings = Settings { norm: Norm::Layer, epsilon, dropout: None };
    run("layer_norm", x, None, gamma, beta, settings).1
}

/// Rows of x divided by the root of the mean of their squares, times gamma. As [`layer_norm`]
/// otherwise.
///
/// # Panics
///
/// As [`layer_norm`].
pub fn rms_norm<const D: usize>(x: Tensor<D>, gamma: Tensor<1>, epsilon: f64) -> Tensor<D> {
    run("rms_norm", x, None, gamma, None, Settings { norm: Norm::Rms, epsilon, dropout: None }).1
}

/// `x + residual`, and its rows normalized as by [`layer_norm`]: in one pass over memory, and the two
/// gradients of the sum are added in the one of the backward pass. The residual has the shape and the
/// dtype of x.
///
/// # Panics
///
/// As [`layer_norm`].
pub fn add_layer_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    epsilon: f64,
) -> (Tensor<D>, Tensor<D>) {
    let settings = Settings { norm: Norm::Layer, epsilon, dropout: None };
    run("add_layer_norm", x, Some(residual), gamma, beta, settings)
}

/// `x` and what `dropout` leaves of the residual, added up, and the rows of that normalized as by [`layer_norm`], like
/// [`add_layer_norm`]: dropout has no pass over memory of its own, forward or backward. The same elements are left out as
/// by [`dropout`](crate::dropout::dropout()).
///
/// # Panics
///
/// As [`layer_norm`], and when the rate of dropout is not from 0 to below 1.
pub fn add_dropout_layer_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    dropout: Dropout,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    epsilon: f64,
) -> (Tensor<D>, Tensor<D>) {
    check_rate("add_dropout_layer_norm", dropout);
    let settings = Settings { norm: Norm::Layer, epsilon, dropout: Some(dropout) };
    run("add_dropout_layer_norm", x, Some(residual), gamma, beta, settings)
}

/// `x + residual`, and its rows normalized as by [`rms_norm`]; see [`add_layer_norm`].
///
/// # Panics
///
/// As [`layer_norm`].
pub fn add_rms_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    gamma: Tensor<1>,
    epsilon: f64,
) -> (Tensor<D>, Tensor<D>) {
    let settings = Settings { norm: Norm::Rms, epsilon, dropout: None };
    run("add_rms_norm", x, Some(residual), gamma, None, settings)
}

/// The sum, x itself without a residual, and the result.
fn run<const D: usize>(
    op: &str,
    x: Tensor<D>,
    residual: Option<Tensor<D>>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    settings: Settings,
) -> (Tensor<D>, Tensor<D>) {
    check(op, &x, residual.as_ref(), &gamma, beta.as_ref(), settings.epsilon);
    let inputs = Inputs {
        x: x.clone().into_dispatch(),
        residual: residual.map(Tensor::into_dispatch).into(),
        gamma: gamma.into_dispatch(),
        beta: beta.map(Tensor::into_dispatch).into(),
    };
    let Normalized { y, sum } = <Dispatch as LayerNormOps>::layer_norm(inputs, settings);
    (sum.into_option().map_or(x, Tensor::from_dispatch), Tensor::from_dispatch(y))
}

fn check<const D: usize>(
    op: &str,
    x: &Tensor<D>,
    residual: Option<&Tensor<D>>,
    gamma: &Tensor<1>,
    beta: Option<&Tensor<1>>,
    epsilon: f64,
) {
    let refuse = |argument: &str, expected: String, actual: String| -> ! {
        panic!("{op}: argument `{argument}`: expected {expected}, got {actual}")
    };
    if !matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16 | DType::F64) {
        refuse("x", "f32, f16, bf16 or f64".into(), format!("{:?}", x.dtype()));
    }
    if let Some(residual) = residual
        && (residual.dims(), residual.dtype()) != (x.dims(), x.dtype())
    {
        let expected = format!("{:?} of {:?}, as x has", x.dims(), x.dtype());
        refuse("residual", expected, format!("{:?} of {:?}", residual.dims(), residual.dtype()));
    }
    let width = x.dims().last().copied().unwrap_or_default();
    for (argument, parameter) in [("gamma", Some(gamma)), ("beta", beta)] {
        let Some(parameter) = parameter else { continue };
        if parameter.dims() != [width] {
            let expected = format!("[{width}], the last dimension of x, as its shape");
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
    if let Some(residual) = residual
        && residual.device() != x.device()
    {
        let expected = format!("{:?}, as x is on", x.device());
        refuse("residual", expected, format!("{:?}", residual.device()));
    }
    if !(epsilon >= 0.0 && epsilon.is_finite()) {
        refuse("epsilon", "a number from 0".into(), epsilon.to_string());
    }
}
