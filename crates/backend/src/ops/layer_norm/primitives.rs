//! What a backend has to be able to do: normalize rows, and the gradients of that, without a graph.

#[cfg(feature = "gpu")]
use crate::tensors::OptionalMetadata;
use crate::{ops::dropout::Dropout, tensors::Optional};
use burn::backend::{Backend, ExtensionType, backend_extension, tensor::FloatTensor};
#[cfg(feature = "gpu")]
use burn::{
    backend::fusion::custom::TensorSpec,
    tensor::{DType, Shape},
};

/// The kind of normalization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// Layer normalization: rows less their mean, divided by their standard deviation.
    Layer,
    /// RMS normalization: rows divided by the root of the mean of their squares.
    Rms,
}

/// The arguments of a normalization that are not tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The kind of normalization.
    pub norm: Norm,
    /// A number from 0 that is added to the variance.
    pub epsilon: f64,
    /// What leaves out elements of the residual before it is added.
    pub dropout: Option<Dropout>,
}

/// The tensors that the forward pass reads.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Inputs<B: Backend> {
    /// Of any rank; its last dimension is normalized.
    pub x: FloatTensor<B>,
    /// Added to x before the normalization; in the shape and the type of x.
    #[extension_type]
    pub residual: Optional<B>,
    /// Added to the rows of the residual before dropout; in the shape and the type of gamma.
    #[extension_type]
    pub residual_bias: Optional<B>,
    /// Factors of the normalized elements, as many as x has elements in a row.
    pub gamma: FloatTensor<B>,
    /// Added to the result; in the shape and the type of gamma.
    #[extension_type]
    pub beta: Optional<B>,
}

/// What the forward pass returns.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Output<B: Backend> {
    /// The normalized rows, in the shape and the type of x.
    pub y: FloatTensor<B>,
    /// The sum of x and the residual, if there is a residual.
    #[extension_type]
    pub sum: Optional<B>,
    /// The mean of each row, `[rows]`; not for RMS normalization. In f32, or f64 where x is f64.
    #[extension_type]
    pub mean: Optional<B>,
    /// The reciprocal of each row's divisor, `[rows]`. In f32, or f64 where x is f64.
    pub rstd: FloatTensor<B>,
}

/// What the backward pass reads again.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Saved<B: Backend> {
    /// The tensor that was normalized: x, or the sum of x and the residual.
    pub x: FloatTensor<B>,
    /// The factors of the forward pass.
    pub gamma: FloatTensor<B>,
    /// [`Output::mean`].
    #[extension_type]
    pub mean: Optional<B>,
    /// [`Output::rstd`].
    pub rstd: FloatTensor<B>,
}

/// What the backward pass returns.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Gradients<B: Backend> {
    /// The gradient of the tensor that was normalized.
    pub dx: FloatTensor<B>,
    /// The gradient of the residual, where dropout makes it another one.
    #[extension_type]
    pub dresidual: Optional<B>,
    /// The gradient of gamma, in its type.
    pub dgamma: FloatTensor<B>,
    /// The gradient of beta, if it was asked for; in the type of gamma.
    #[extension_type]
    pub dbeta: Optional<B>,
    /// The gradient of the residual's bias, if it was asked for; in the type of gamma.
    #[extension_type]
    pub dbias: Optional<B>,
}

/// Which gradients of parameters are asked for beside that of gamma.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// That of beta.
    pub beta: bool,
    /// That of the residual's bias.
    pub residual_bias: bool,
}

/// The operations under a normalization. They are not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait LayerNormPrimitives: Backend {
    /// The normalized rows.
    #[fusion(meta = output_of)]
    fn layer_norm_forward(
        #[extension_type] inputs: Inputs<Self>,
        settings: Settings,
    ) -> Output<Self>;

    /// The gradients, given that of y; to the first, `dsum` is added, in the shape and the type of x.
    #[fusion(meta = gradients_of)]
    fn layer_norm_backward(
        #[extension_type] saved: Saved<Self>,
        dy: FloatTensor<Self>,
        #[extension_type] dsum: Optional<Self>,
        settings: Settings,
        wanted: Wanted,
    ) -> Gradients<Self>;
}

#[cfg(feature = "gpu")]
fn output_of(inputs: &InputsMetadata, settings: &Settings) -> OutputMetadata {
    let x = &inputs.x;
    let rows = x.shape.iter().rev().skip(1).product::<usize>();
    let dtype = if x.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let statistic = TensorSpec::new(Shape::new([rows]), dtype);
    OutputMetadata {
        y: x.clone(),
        sum: match inputs.residual {
            OptionalMetadata::Absent => OptionalMetadata::Absent,
            OptionalMetadata::Present(_) => OptionalMetadata::Present(x.clone()),
        },
        mean: (settings.norm == Norm::Layer).then(|| statistic.clone()).into(),
        rstd: statistic,
    }
}

#[cfg(feature = "gpu")]
fn gradients_of(
    saved: &SavedMetadata,
    _dy: &TensorSpec,
    _dsum: &OptionalMetadata,
    settings: &Settings,
    wanted: &Wanted,
) -> GradientsMetadata {
    let gamma = &saved.gamma;
    GradientsMetadata {
        dx: saved.x.clone(),
        dresidual: settings.dropout.map(|_| saved.x.clone()).into(),
        dgamma: gamma.clone(),
        dbeta: wanted.beta.then(|| gamma.clone()).into(),
        dbias: wanted.residual_bias.then(|| gamma.clone()).into(),
    }
}
