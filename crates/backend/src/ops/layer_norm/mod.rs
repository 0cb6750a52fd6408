//! Layer and RMS normalization for training, with a hand-written gradient: one kernel a pass, where
//! Burn's decomposes into some ten operations forward and as many backward, and keeps several tensors.
//!
//! ```text
//! y = gamma (x - mean) / sqrt(variance + epsilon) + beta        over the last dimension
//! y = gamma x / sqrt(mean of squares + epsilon)                 the RMS norm
//! ```
//!
//! With a residual, the sum `x + residual` is a second result, and what is normalized: a transformer's
//! residual stream costs no pass of its own, forward or backward. The layer whose output the residual is may leave its
//! bias to the norm: [`layer_norm_of_sum`] adds it, and makes its gradient.
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
pub use primitives::{
    Gradients, Inputs, LayerNormPrimitives, Norm, Output, Saved, Settings, Wanted,
};
#[cfg(feature = "gpu")]
pub use primitives::{GradientsMetadata, InputsMetadata, OutputMetadata, SavedMetadata};

use crate::ops::dropout::{Dropout, check_rate};
use burn::{
    backend::Dispatch,
    tensor::{DType, FloatDType, Tensor},
};

/// Elements of the widest rows that kernels take with a bias of the residual: `LayerNormProblem::WIDEST_WITH_BIAS`.
const WIDEST_WITH_BIAS: usize = 4096;

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
    run("layer_norm", x, None, (gamma, beta), (Norm::Layer, epsilon)).1
}

/// Rows of x divided by the root of the mean of their squares, times gamma. As [`layer_norm`]
/// otherwise.
///
/// # Panics
///
/// As [`layer_norm`].
pub fn rms_norm<const D: usize>(x: Tensor<D>, gamma: Tensor<1>, epsilon: f64) -> Tensor<D> {
    run("rms_norm", x, None, (gamma, None), (Norm::Rms, epsilon)).1
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
    let addend = Addend { residual, bias: None, dropout: None };
    run("add_layer_norm", x, Some(addend), (gamma, beta), (Norm::Layer, epsilon))
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
    let addend = Addend { residual, bias: None, dropout: Some(dropout) };
    run("add_dropout_layer_norm", x, Some(addend), (gamma, beta), (Norm::Layer, epsilon))
}

/// What is added to the tokens of a transformer: the output of a layer that ends with a linear one.
#[derive(Clone, Debug)]
pub struct Addend<const D: usize> {
    /// The output, in the shape and the dtype of what it is added to.
    pub residual: Tensor<D>,
    /// The bias of the linear layer, `[width]`, of any float type, if it has not been added yet.
    pub bias: Option<Tensor<1>>,
    /// What leaves out elements of the output with its bias.
    pub dropout: Option<Dropout>,
}

/// `x + dropout(residual + bias)`, and its rows normalized as by [`layer_norm`], in one pass over memory. Backward, the
/// gradient of the bias comes from the pass that makes that of the residual; a linear layer would read that once more.
/// Rows of more than 4096 elements have a pass of its own for the bias.
///
/// # Panics
///
/// As [`layer_norm`], and when the rate of dropout is not from 0 to below 1.
pub fn layer_norm_of_sum<const D: usize>(
    x: Tensor<D>,
    addend: Addend<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    epsilon: f64,
) -> (Tensor<D>, Tensor<D>) {
    const OP: &str = "layer_norm_of_sum";
    if let Some(dropout) = addend.dropout {
        check_rate(OP, dropout);
    }
    run(OP, x, Some(addend), (gamma, beta), (Norm::Layer, epsilon))
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
    let addend = Addend { residual, bias: None, dropout: None };
    run("add_rms_norm", x, Some(addend), (gamma, None), (Norm::Rms, epsilon))
}

/// The sum, x itself without a residual, and the result.
fn run<const D: usize>(
    op: &str,
    x: Tensor<D>,
    addend: Option<Addend<D>>,
    (gamma, beta): (Tensor<1>, Option<Tensor<1>>),
    (norm, epsilon): (Norm, f64),
) -> (Tensor<D>, Tensor<D>) {
    let (residual, bias, dropout) = match addend {
        Some(Addend { residual, bias, dropout }) => (Some(residual), bias, dropout),
        None => (None, None, None),
    };
    let parameters = [("gamma", Some(&gamma)), ("beta", beta.as_ref()), ("bias", bias.as_ref())];
    check(op, &x, residual.as_ref(), parameters, epsilon);
    let (residual, bias) = match bias {
        Some(bias) if bias.dims()[0] > WIDEST_WITH_BIAS => {
            let bias = bias.cast(FloatDType::from(x.dtype())).unsqueeze();
            (residual.map(|residual| residual + bias), None)
        }
        bias => (residual, bias),
    };
    let settings = Settings { norm, epsilon, dropout };
    let inputs = Inputs {
        x: x.clone().into_dispatch(),
        residual: residual.map(Tensor::into_dispatch).into(),
        residual_bias: bias.map(Tensor::into_dispatch).into(),
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
    parameters: [(&str, Option<&Tensor<1>>); 3],
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
    for (argument, parameter) in parameters {
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
