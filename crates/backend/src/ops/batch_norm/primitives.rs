//! What a backend has to be able to do: normalize channels, and the gradients of that, without a graph.

use crate::tensors::Optional;
#[cfg(feature = "gpu")]
use crate::tensors::OptionalMetadata;
use burn::backend::{Backend, ExtensionType, backend_extension, tensor::FloatTensor};
#[cfg(feature = "gpu")]
use burn::{
    backend::fusion::custom::TensorSpec,
    tensor::{DType, Shape},
};

/// The arguments of a normalization that are not tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// A number from 0 that is added to the variance.
    pub epsilon: f64,
    /// Whether a `ReLU` comes last.
    pub relu: bool,
}

/// The tensors that the forward pass reads.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Inputs<B: Backend> {
    /// `[batch, channels, ..]`.
    pub x: FloatTensor<B>,
    /// Factors of the channels, in f32 or the type of x; f64 where x is.
    pub gamma: FloatTensor<B>,
    /// Added to the channels; in the type of gamma.
    pub beta: FloatTensor<B>,
    /// Added to what is normalized; in the shape and the type of x.
    #[extension_type]
    pub residual: Optional<B>,
}

/// What the forward pass returns.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Output<B: Backend> {
    /// In the shape and the type of x.
    pub y: FloatTensor<B>,
    /// The batch's mean of each channel, in f32; f64 where x is.
    pub mean: FloatTensor<B>,
    /// The batch's biased variance of each channel, likewise.
    pub variance: FloatTensor<B>,
}

/// What the backward pass reads again.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Saved<B: Backend> {
    /// As the forward pass had it.
    pub x: FloatTensor<B>,
    /// As the forward pass had it.
    pub gamma: FloatTensor<B>,
    /// [`Output::mean`].
    pub mean: FloatTensor<B>,
    /// [`Output::variance`].
    pub variance: FloatTensor<B>,
    /// [`Output::y`], where a `ReLU` came last.
    #[extension_type]
    pub y: Optional<B>,
}

/// What the backward pass returns.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Gradients<B: Backend> {
    /// In the shape and the type of x.
    pub dx: FloatTensor<B>,
    /// In the type of gamma.
    pub dgamma: FloatTensor<B>,
    /// In the type of gamma.
    pub dbeta: FloatTensor<B>,
    /// Of the residual, where it is asked for after a `ReLU`. Without one it is dy.
    #[extension_type]
    pub dresidual: Optional<B>,
}

/// Mean and variance of each channel over many batches.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Running<B: Backend> {
    /// Of any float type.
    pub mean: FloatTensor<B>,
    /// In the type of the mean.
    pub variance: FloatTensor<B>,
}

/// The operations under a normalization. They are not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait BatchNormPrimitives: Backend {
    /// The normalized channels, and the statistics of the batch.
    #[fusion(meta = output_of)]
    fn batch_norm_forward(
        #[extension_type] inputs: Inputs<Self>,
        settings: Settings,
    ) -> Output<Self>;

    /// The gradients, given that of y.
    #[fusion(meta = gradients_of)]
    fn batch_norm_backward(
        #[extension_type] saved: Saved<Self>,
        dy: FloatTensor<Self>,
        settings: Settings,
        wants_residual: bool,
    ) -> Gradients<Self>;

    /// The running statistics after a batch: `1 - momentum` of what they were, and `momentum` of the batch's.
    #[fusion(meta = running_of)]
    fn batch_norm_running(
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        #[extension_type] before: Running<Self>,
        momentum: f64,
    ) -> Running<Self>;
}

#[cfg(feature = "gpu")]
fn output_of(inputs: &InputsMetadata, _settings: &Settings) -> OutputMetadata {
    let (x, gamma) = (&inputs.x, &inputs.gamma);
    let dtype = if x.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let statistic = TensorSpec::new(Shape::new([gamma.shape[0]]), dtype);
    OutputMetadata { y: x.clone(), mean: statistic.clone(), variance: statistic }
}

#[cfg(feature = "gpu")]
fn gradients_of(
    saved: &SavedMetadata,
    _dy: &TensorSpec,
    settings: &Settings,
    wants_residual: &bool,
) -> GradientsMetadata {
    let (x, gamma) = (&saved.x, &saved.gamma);
    GradientsMetadata {
        dx: x.clone(),
        dgamma: gamma.clone(),
        dbeta: gamma.clone(),
        dresidual: OptionalMetadata::from((settings.relu && *wants_residual).then(|| x.clone())),
    }
}

#[cfg(feature = "gpu")]
fn running_of(
    _mean: &TensorSpec,
    _variance: &TensorSpec,
    before: &RunningMetadata,
    _momentum: &f64,
) -> RunningMetadata {
    before.clone()
}
