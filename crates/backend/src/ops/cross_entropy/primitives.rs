//! What a backend has to be able to do: losses, what they are reduced to, and their gradient, without a
//! graph.

use super::Reduction;
use crate::tensors::Optional;
#[cfg(feature = "gpu")]
use crate::tensors::OptionalMetadata;
use burn::backend::{
    Backend, ExtensionType, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
#[cfg(feature = "gpu")]
use burn::{
    backend::fusion::custom::TensorSpec,
    tensor::{DType, Shape},
};

/// The arguments of a cross-entropy that are not tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The target of rows that do not count.
    pub ignore_index: Option<i32>,
    /// The share of the target that is spread over all classes, from 0 to below 1.
    pub smoothing: f64,
}

/// Losses, and what the backward pass reads again; f32, and f64 for f64.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Output<B: Backend> {
    /// The loss of each row, `[rows]`.
    pub loss: FloatTensor<B>,
    /// The logarithm of each row's sum of exponentials, `[rows]`.
    pub lse: FloatTensor<B>,
}

/// The losses of all rows as one number, and the factor of its gradient, both in the type of the losses.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Reduced<B: Backend> {
    /// The mean or the sum of the losses.
    pub loss: FloatTensor<B>,
    /// The factor that turns the gradient of that number into the gradient of each row's loss.
    pub factor: FloatTensor<B>,
}

/// The losses of all rows as one number, in the type of the losses, and its gradient.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct AtOnce<B: Backend> {
    /// The mean or the sum of the losses.
    pub loss: FloatTensor<B>,
    /// The gradient of the logits where that of the number is 1, in the shape and type of the logits.
    pub dlogits: FloatTensor<B>,
}

/// The operations under cross-entropy. They are not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait CrossEntropyPrimitives: Backend {
    /// The loss of each row; targets are i32.
    #[fusion(meta = output_of)]
    fn cross_entropy_forward(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        settings: Settings,
    ) -> Output<Self>;

    /// The mean or the sum of the losses, which [`Reduction::None`] is not.
    #[fusion(meta = reduced)]
    fn cross_entropy_reduce(
        loss: FloatTensor<Self>,
        targets: IntTensor<Self>,
        settings: Settings,
        reduction: Reduction,
    ) -> Reduced<Self>;

    /// The losses, reduced, which [`Reduction::None`] does not, and their gradient.
    #[fusion(meta = at_once)]
    fn cross_entropy_at_once(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        settings: Settings,
        reduction: Reduction,
    ) -> AtOnce<Self>;

    /// [`AtOnce::dlogits`], times the gradient of the number.
    #[fusion(meta = same)]
    fn cross_entropy_rescale(
        dlogits: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// The gradient of the logits. `grad` is that of each row's loss, or with a factor one for all, to be
    /// multiplied by [`Reduced::factor`].
    #[fusion(meta = gradient_of)]
    fn cross_entropy_backward(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        lse: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        #[extension_type] factor: Optional<Self>,
        settings: Settings,
    ) -> FloatTensor<Self>;
}

#[cfg(feature = "gpu")]
fn output_of(logits: &TensorSpec, _targets: &TensorSpec, _settings: &Settings) -> OutputMetadata {
    let dtype = if logits.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let spec = TensorSpec::new(Shape::new([logits.shape[0]]), dtype);
    OutputMetadata { loss: spec.clone(), lse: spec }
}

#[cfg(feature = "gpu")]
fn reduced(
    loss: &TensorSpec,
    _targets: &TensorSpec,
    _settings: &Settings,
    _reduction: &Reduction,
) -> ReducedMetadata {
    let spec = TensorSpec::new(Shape::new([1]), loss.dtype);
    ReducedMetadata { loss: spec.clone(), factor: spec }
}

#[cfg(feature = "gpu")]
fn at_once(
    logits: &TensorSpec,
    _targets: &TensorSpec,
    _settings: &Settings,
    _reduction: &Reduction,
) -> AtOnceMetadata {
    let dtype = if logits.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    AtOnceMetadata { loss: TensorSpec::new(Shape::new([1]), dtype), dlogits: logits.clone() }
}

#[cfg(feature = "gpu")]
fn same(dlogits: &TensorSpec, _grad: &TensorSpec) -> TensorSpec {
    dlogits.clone()
}

#[cfg(feature = "gpu")]
fn gradient_of(
    logits: &TensorSpec,
    _targets: &TensorSpec,
    _lse: &TensorSpec,
    _grad: &TensorSpec,
    _factor: &OptionalMetadata,
    _settings: &Settings,
) -> TensorSpec {
    logits.clone()
}
