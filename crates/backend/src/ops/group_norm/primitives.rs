//! What a backend has to be able to do: normalize groups of channels, and the gradients of that, without a graph.

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
    /// Groups, which divide the channels.
    pub groups: usize,
    /// A number from 0 that is added to the variance.
    pub epsilon: f64,
}

/// The tensors that the forward pass reads. Gamma and beta are both there, or neither is.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Inputs<B: Backend> {
    /// `[batch, channels, ..]`.
    pub x: FloatTensor<B>,
    /// Factors of the channels, in f32 or the type of x; f64 where x is.
    #[extension_type]
    pub gamma: Optional<B>,
    /// Added to the channels; in the type of gamma.
    #[extension_type]
    pub beta: Optional<B>,
}

/// What the forward pass returns.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Output<B: Backend> {
    /// In the shape and the type of x.
    pub y: FloatTensor<B>,
    /// Of each group of each sample, `[batch, groups]`, in f32; f64 where x is.
    pub mean: FloatTensor<B>,
    /// 1 / deviation, likewise.
    pub rstd: FloatTensor<B>,
}

/// What the backward pass reads again.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Saved<B: Backend> {
    /// As the forward pass had it.
    pub x: FloatTensor<B>,
    /// As the forward pass had it.
    #[extension_type]
    pub gamma: Optional<B>,
    /// [`Output::mean`].
    pub mean: FloatTensor<B>,
    /// [`Output::rstd`].
    pub rstd: FloatTensor<B>,
}

/// What the backward pass returns.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Gradients<B: Backend> {
    /// In the shape and the type of x.
    pub dx: FloatTensor<B>,
    /// In the type of gamma, where there is one.
    #[extension_type]
    pub dgamma: Optional<B>,
    /// Likewise.
    #[extension_type]
    pub dbeta: Optional<B>,
}

/// The operations under a normalization. They are not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait GroupNormPrimitives: Backend {
    /// What is normalized, and what backward reads.
    #[fusion(meta = output_of)]
    fn group_norm_forward(
        #[extension_type] inputs: Inputs<Self>,
        settings: Settings,
    ) -> Output<Self>;

    /// The gradients, given that of y.
    #[fusion(meta = gradients_of)]
    fn group_norm_backward(
        #[extension_type] saved: Saved<Self>,
        dy: FloatTensor<Self>,
        settings: Settings,
    ) -> Gradients<Self>;
}

#[cfg(feature = "gpu")]
fn output_of(inputs: &InputsMetadata, settings: &Settings) -> OutputMetadata {
    let x = &inputs.x;
    let dtype = if x.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let statistic = TensorSpec::new(Shape::new([x.shape[0], settings.groups]), dtype);
    OutputMetadata { y: x.clone(), mean: statistic.clone(), rstd: statistic }
}

#[cfg(feature = "gpu")]
fn gradients_of(
    saved: &SavedMetadata,
    _dy: &TensorSpec,
    _settings: &Settings,
) -> GradientsMetadata {
    let parameter = || match &saved.gamma {
        OptionalMetadata::Absent => OptionalMetadata::Absent,
        OptionalMetadata::Present(gamma) => OptionalMetadata::Present(gamma.clone()),
    };
    GradientsMetadata { dx: saved.x.clone(), dgamma: parameter(), dbeta: parameter() }
}
