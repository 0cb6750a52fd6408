//! Dropout that keeps nothing for its gradient: what it leaves out is a function of a seed and of where an
//! element is, and backward computes it again.
//!
//! Burn's own draws a tensor of random numbers as large as its input, keeps it, and reads it in both passes.

mod random;

pub use random::Dropout;
#[cfg(feature = "flex")]
pub(super) use random::philox;

use crate::tensors::{Optional, cast, wide};
#[cfg(feature = "gpu")]
use crate::{
    declined::served,
    random::KeyId,
    tensors::{contiguous_buffer, contiguous_tensor},
};
#[cfg(feature = "gpu")]
use blackburn_kernels::dropout::{DropoutProblem, dropout as dropout_kernel};
#[cfg(feature = "gpu")]
use burn::{backend::fusion::custom::TensorSpec, tensor::DType};
use burn::{
    backend::{
        Autodiff, Backend, Dispatch, TensorMetadata,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, NodeGuard, Ops, OpsKind},
        },
        backend_extension,
        tensor::FloatTensor,
    },
    tensor::{Tensor, TensorData},
};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

/// Dropout by itself. It is not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait DropoutPrimitives: Backend {
    /// x with elements left out, added to the residual if there is one.
    #[fusion(meta = like_x)]
    fn dropped(
        x: FloatTensor<Self>,
        #[extension_type] residual: Optional<Self>,
        dropout: Dropout,
    ) -> FloatTensor<Self>;
}

#[cfg(feature = "gpu")]
fn like_x(
    x: &TensorSpec,
    _residual: &crate::tensors::OptionalMetadata,
    _dropout: &Dropout,
) -> TensorSpec {
    x.clone()
}

#[cfg(feature = "flex")]
impl DropoutPrimitives for burn::backend::Flex {
    fn dropped(
        x: FloatTensor<Self>,
        residual: Optional<Self>,
        dropout: Dropout,
    ) -> FloatTensor<Self> {
        by_mask::<Self>(x, residual, dropout)
    }
}

#[cfg(feature = "gpu")]
impl DropoutPrimitives for CubeBackend {
    fn dropped(
        x: FloatTensor<Self>,
        residual: Optional<Self>,
        dropout: Dropout,
    ) -> FloatTensor<Self> {
        if x.dtype == DType::F64 {
            return by_mask::<Self>(x, residual, dropout);
        }
        let of_x = contiguous_buffer(x.clone());
        let of_residual = residual.clone().into_option().map(contiguous_buffer);
        let Dropout { rate, seed, key } = dropout;
        let problem = DropoutProblem { elements: of_x.elements, dtype: of_x.dtype, rate, seed };
        let key = key.and_then(KeyId::words);
        let y = dropout_kernel(&x.client, &problem, &of_x, of_residual.as_ref(), key.as_ref());
        match served("BlackburnDropout", y) {
            Some(y) => contiguous_tensor(&x, y, x.shape(), x.dtype),
            None => by_mask::<Self>(x, residual, dropout),
        }
    }
}

/// By a backend's own operations, with what elements are multiplied by made here.
fn by_mask<B: Backend>(
    x: FloatTensor<B>,
    residual: Optional<B>,
    dropout: Dropout,
) -> FloatTensor<B> {
    let (shape, dtype, device) = (x.shape(), x.dtype(), x.device());
    let factors: Vec<f32> = dropout.factors(shape.num_elements());
    let factors = B::float_from_data(TensorData::new(factors, shape), &device);
    let x = wide::<B>(x);
    let factors = cast::<B>(factors, x.dtype());
    let out = B::float_equal_elem(
        factors.clone(),
        0f32.into(),
        burn::backend::get_or_init_device_settings::<B>(&device).bool_dtype,
    );
    // What is left out is nothing, whatever it was.
    let kept = B::float_mask_fill(B::float_mul(x, factors), out, 0f32.into());
    let y = match residual.into_option() {
        Some(residual) => B::float_add(kept, wide::<B>(residual)),
        None => kept,
    };
    cast::<B>(y, dtype)
}

/// Dropout, differentiable in x and the residual.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Autodiff,
)]
pub trait DropoutOps: Backend {
    /// x with elements left out, added to the residual if there is one.
    fn dropout_of(
        x: FloatTensor<Self>,
        #[extension_type] residual: Optional<Self>,
        dropout: Dropout,
    ) -> FloatTensor<Self>;
}

on_plain_backends! {
    impl DropoutOps by DropoutPrimitives {
        fn dropout_of(
            x: FloatTensor<Self>,
            residual: Optional<Self>,
            dropout: Dropout,
        ) -> FloatTensor<Self> {
            Self::dropped(x, residual, dropout)
        }
    }
}

impl<B: DropoutPrimitives, C: CheckpointStrategy> DropoutOps for Autodiff<B, C> {
    fn dropout_of(
        x: FloatTensor<Self>,
        residual: Optional<Self>,
        dropout: Dropout,
    ) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let (residual, of_residual) = residual.into_parts();
        match of_residual {
            Some(of_residual) => record::<B, C, 2>([node, of_residual], x, residual, dropout),
            None => record::<B, C, 1>([node], x, residual, dropout),
        }
    }
}

fn record<B: DropoutPrimitives, C: CheckpointStrategy, const N: usize>(
    nodes: [NodeGuard; N],
    x: FloatTensor<B>,
    residual: Optional<B>,
    dropout: Dropout,
) -> FloatTensor<Autodiff<B, C>> {
    let y = B::dropped(x, residual, dropout);
    match DropoutStep.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(dropout, y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}

#[derive(Debug)]
struct DropoutStep;

/// The parents are x and, if there is one, the residual.
impl<B: DropoutPrimitives, const N: usize> Backward<B, N> for DropoutStep {
    type State = Dropout;

    fn backward(self, ops: Ops<Dropout, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let parent = |index: usize| ops.parents.get(index).and_then(|parent| parent.as_ref());
        if let Some(node) = parent(1) {
            grads.register::<B>(node.id, dy.clone());
        }
        if let Some(node) = parent(0) {
            grads.register::<B>(node.id, B::dropped(dy, Optional::Absent, ops.state));
        }
    }
}

/// What `dropout` leaves of `x`: each element is zero with the probability of its rate, and else multiplied
/// by `1 / (1 - rate)`. The same seed leaves out the same elements on every device.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | x, result | any | any float |
///
/// # Panics
///
/// When the rate is not from 0 to below 1.
pub fn dropout<const D: usize>(x: Tensor<D>, dropout: Dropout) -> Tensor<D> {
    check_rate("dropout", dropout);
    Tensor::from_dispatch(<Dispatch as DropoutOps>::dropout_of(
        x.into_dispatch(),
        Optional::Absent,
        dropout,
    ))
}

/// `residual` and what [`dropout`] leaves of `x`, added up in f32 and rounded once.
///
/// # Panics
///
/// As [`dropout`], and when the two differ in shape, dtype or device.
pub fn add_dropout<const D: usize>(
    residual: Tensor<D>,
    x: Tensor<D>,
    dropout: Dropout,
) -> Tensor<D> {
    check_rate("dropout", dropout);
    let told = |tensor: &Tensor<D>| {
        let device = tensor.device().without_autodiff();
        format!("{:?} of {:?} on {device:?}", tensor.dims(), tensor.dtype())
    };
    let (expected, actual) = (told(&x), told(&residual));
    assert!(
        expected == actual,
        "dropout: argument `residual`: expected {expected}, as x is, got {actual}"
    );
    Tensor::from_dispatch(<Dispatch as DropoutOps>::dropout_of(
        x.into_dispatch(),
        Optional::Present(residual.into_dispatch()),
        dropout,
    ))
}

pub(super) fn check_rate(op: &str, dropout: Dropout) {
    let rate = dropout.rate;
    assert!(
        (0.0..1.0).contains(&rate),
        "{op}: argument `rate`: expected a number from 0 to below 1, got {rate}"
    );
}
