//! What a backend has to be able to do: normalize rows, and the gradients of that, without a graph.

use burn::backend::{Backend, ExtensionType, backend_extension, tensor::FloatTensor};
#[cfg(feature = "gpu")]
use burn::{
    backend::fusion::custom::TensorSpec,
    tensor::{DType, Shape},
};

/// A tensor that may be left out.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub enum Optional<B: Backend> {
    /// It is.
    Absent,
    /// It is not.
    Present(FloatTensor<B>),
}

impl<B: Backend> From<Option<FloatTensor<B>>> for Optional<B> {
    fn from(tensor: Option<FloatTensor<B>>) -> Self {
        tensor.map_or(Self::Absent, Self::Present)
    }
}

impl<B: Backend> Optional<B> {
    /// As an option.
    pub fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::Absent => None,
            Self::Present(tensor) => Some(tensor),
        }
    }
}

/// What rows are divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// Their deviation, after their mean was taken off.
    Layer,
    /// The root of the mean of their squares.
    Rms,
}

/// What is asked for that is not a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Which normalization.
    pub norm: Norm,
    /// Is added to the variance: a number from 0.
    pub epsilon: f64,
}

/// The tensors that the forward pass reads.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Inputs<B: Backend> {
    /// Of any rank; its last dimension is normalized.
    pub x: FloatTensor<B>,
    /// Is added to x first; in the shape and the type of x.
    #[extension_type]
    pub residual: Optional<B>,
    /// Factors, as many as x has elements in a row.
    pub gamma: FloatTensor<B>,
    /// Is added last; in the shape and the type of gamma.
    #[extension_type]
    pub beta: Optional<B>,
}

/// What the forward pass returns.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Output<B: Backend> {
    /// In the shape and the type of x.
    pub y: FloatTensor<B>,
    /// x and the residual, if there is one.
    #[extension_type]
    pub sum: Optional<B>,
    /// The mean of each row, one dimension, unless it is the RMS norm; f32, and f64 for f64.
    #[extension_type]
    pub mean: Optional<B>,
    /// 1 / deviation of each row, in the type of the mean.
    pub rstd: FloatTensor<B>,
}

/// What the backward pass reads again.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Saved<B: Backend> {
    /// What was normalized: x, or the sum.
    pub x: FloatTensor<B>,
    /// The factors.
    pub gamma: FloatTensor<B>,
    /// As [`Output`] has it.
    #[extension_type]
    pub mean: Optional<B>,
    /// As [`Output`] has it.
    pub rstd: FloatTensor<B>,
}

/// What the backward pass returns.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Gradients<B: Backend> {
    /// Of what was normalized.
    pub dx: FloatTensor<B>,
    /// Of the factors, in their type.
    pub dgamma: FloatTensor<B>,
    /// Of beta, if it was asked for; in the type of the factors.
    #[extension_type]
    pub dbeta: Optional<B>,
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
        wants_beta: bool,
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
        mean: match settings.norm {
            Norm::Layer => OptionalMetadata::Present(statistic.clone()),
            Norm::Rms => OptionalMetadata::Absent,
        },
        rstd: statistic,
    }
}

#[cfg(feature = "gpu")]
fn gradients_of(
    saved: &SavedMetadata,
    _dy: &TensorSpec,
    _dsum: &OptionalMetadata,
    _settings: &Settings,
    wants_beta: &bool,
) -> GradientsMetadata {
    let gamma = &saved.gamma;
    GradientsMetadata {
        dx: saved.x.clone(),
        dgamma: gamma.clone(),
        dbeta: if *wants_beta {
            OptionalMetadata::Present(gamma.clone())
        } else {
            OptionalMetadata::Absent
        },
    }
}
