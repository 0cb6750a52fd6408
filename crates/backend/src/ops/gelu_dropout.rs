//! A bias, GELU and dropout, as between the layers of a transformer's feed-forward part, in one pass each way. Backward
//! reads the input again, draws the mask anew, and adds up the gradient of the bias on the way.
//!
//! By operations of their own, dropout moves the widest tensors of a layer once more in either direction.

use super::dropout::{Dropout, DropoutPrimitives, check_rate};
use crate::tensors::{Optional, cast, wide};
#[cfg(feature = "gpu")]
use crate::{
    declined::served,
    tensors::{contiguous_buffer, contiguous_tensor},
};
#[cfg(feature = "gpu")]
use blackburn_kernels::gelu::{GeluCall, gelu_call_backward_sum, gelu_call_forward};
#[cfg(feature = "gpu")]
use burn::backend::fusion::custom::TensorSpec;
use burn::{
    backend::{
        Autodiff, Backend, Dispatch, ExtensionType, TensorMetadata,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients as Registry,
            ops::{Backward, Ops, OpsKind},
        },
        backend_extension,
        tensor::FloatTensor,
    },
    tensor::{DType, Shape, Tensor},
};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

#[cfg(feature = "gpu")]
const OP: &str = "gelu_dropout";

/// The gradients of both operands, in their shape and type.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Gradients<B: Backend> {
    /// Of the input.
    pub dx: FloatTensor<B>,
    /// Of the bias.
    pub dbias: FloatTensor<B>,
}

/// The operation and its gradients by themselves, not differentiable. The bias has the type of x, and as many elements as
/// a row.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait GeluDropoutPrimitives: Backend {
    /// `dropout(gelu(x + bias))`.
    #[fusion(meta = like_x)]
    fn gelu_dropout_forward(
        x: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        dropout: Dropout,
    ) -> FloatTensor<Self>;

    /// The gradients, given that of the result.
    #[fusion(meta = gradients)]
    fn gelu_dropout_backward(
        x: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        dropout: Dropout,
    ) -> Gradients<Self>;
}

#[cfg(feature = "gpu")]
fn like_x(x: &TensorSpec, _bias: &TensorSpec, _dropout: &Dropout) -> TensorSpec {
    x.clone()
}

#[cfg(feature = "gpu")]
fn gradients(
    x: &TensorSpec,
    bias: &TensorSpec,
    _dy: &TensorSpec,
    _dropout: &Dropout,
) -> GradientsMetadata {
    GradientsMetadata { dx: x.clone(), dbias: bias.clone() }
}

#[cfg(feature = "flex")]
impl GeluDropoutPrimitives for burn::backend::Flex {
    fn gelu_dropout_forward(
        x: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        dropout: Dropout,
    ) -> FloatTensor<Self> {
        forward::<Self>(x, bias, dropout)
    }

    fn gelu_dropout_backward(
        x: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        dropout: Dropout,
    ) -> Gradients<Self> {
        backward::<Self>(x, bias, dy, dropout)
    }
}

#[cfg(feature = "gpu")]
impl GeluDropoutPrimitives for CubeBackend {
    fn gelu_dropout_forward(
        x: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        dropout: Dropout,
    ) -> FloatTensor<Self> {
        let call = call(&x, &bias, dropout);
        match served(OP, gelu_call_forward(&x.client, &call)) {
            Some(y) => contiguous_tensor(&x, y, x.shape(), x.dtype),
            None => forward::<Self>(x, bias, dropout),
        }
    }

    fn gelu_dropout_backward(
        x: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        dropout: Dropout,
    ) -> Gradients<Self> {
        let (call, of_dy) = (call(&x, &bias, dropout), contiguous_buffer(dy.clone()));
        let columns = bias.shape()[0];
        match served(OP, gelu_call_backward_sum(&x.client, columns, &call, &of_dy)) {
            Some(gradients) => Gradients {
                dx: contiguous_tensor(&x, gradients.dx, x.shape(), x.dtype),
                dbias: contiguous_tensor(&bias, gradients.db, bias.shape(), bias.dtype),
            },
            None => backward::<Self>(x, bias, dy, dropout),
        }
    }
}

#[cfg(feature = "gpu")]
fn call(
    x: &FloatTensor<CubeBackend>,
    bias: &FloatTensor<CubeBackend>,
    dropout: Dropout,
) -> GeluCall {
    GeluCall {
        x: contiguous_buffer(x.clone()),
        bias: Some(contiguous_buffer(bias.clone())),
        dropout: Some(dropout.mask()),
        kept: None,
    }
}

/// x with the bias in each row, in the type that is computed in.
fn biased<B: Backend>(x: FloatTensor<B>, bias: FloatTensor<B>) -> FloatTensor<B> {
    let mut row = vec![1; x.shape().num_dims()];
    if let Some(columns) = row.last_mut() {
        *columns = bias.shape()[0];
    }
    B::float_add(wide::<B>(x), B::float_reshape(wide::<B>(bias), Shape::from(row)))
}

/// By a backend's own operations.
fn forward<B: DropoutPrimitives>(
    x: FloatTensor<B>,
    bias: FloatTensor<B>,
    dropout: Dropout,
) -> FloatTensor<B> {
    let dtype = x.dtype();
    let y = B::gelu(biased::<B>(x, bias));
    cast::<B>(B::dropped(y, Optional::Absent, dropout), dtype)
}

fn backward<B: DropoutPrimitives>(
    x: FloatTensor<B>,
    bias: FloatTensor<B>,
    dy: FloatTensor<B>,
    dropout: Dropout,
) -> Gradients<B> {
    let (dtype, columns) = (x.dtype(), bias.shape()[0]);
    let rows = x.shape().num_elements().checked_div(columns).unwrap_or(0);
    let dy = B::dropped(wide::<B>(dy), Optional::Absent, dropout);
    let dx = B::gelu_backward(biased::<B>(x, bias), dy);
    let by_rows = B::float_reshape(dx.clone(), Shape::new([rows, columns]));
    let dbias = B::float_reshape(B::float_sum_dim(by_rows, 0), Shape::new([columns]));
    Gradients { dx: cast::<B>(dx, dtype), dbias: cast::<B>(dbias, dtype) }
}

/// The operation, differentiable in x and the bias, which may be of any float type here.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Autodiff,
)]
pub trait GeluDropoutOps: Backend {
    /// `dropout(gelu(x + bias))`.
    fn gelu_dropout_of(
        x: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        dropout: Dropout,
    ) -> FloatTensor<Self>;
}

on_plain_backends! {
    impl GeluDropoutOps by GeluDropoutPrimitives {
        fn gelu_dropout_of(
            x: FloatTensor<Self>,
            bias: FloatTensor<Self>,
            dropout: Dropout,
        ) -> FloatTensor<Self> {
            let bias = cast::<Self>(bias, x.dtype());
            Self::gelu_dropout_forward(x, bias, dropout)
        }
    }
}

impl<B: GeluDropoutPrimitives, C: CheckpointStrategy> GeluDropoutOps for Autodiff<B, C> {
    fn gelu_dropout_of(
        x: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        dropout: Dropout,
    ) -> FloatTensor<Self> {
        let ((x, of_x), (bias, of_bias)) = (x.into_parts(), bias.into_parts());
        let bias_type = bias.dtype();
        let bias = cast::<B>(bias, x.dtype());
        let y = B::gelu_dropout_forward(x.clone(), bias.clone(), dropout);
        match GeluDropout.prepare::<C>([of_x, of_bias]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(State { x, bias, bias_type, dropout }, y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct State<B: Backend> {
    x: FloatTensor<B>,
    /// In the type of x.
    bias: FloatTensor<B>,
    /// The type in which it came, and so that of its gradient.
    bias_type: DType,
    dropout: Dropout,
}

#[derive(Debug)]
struct GeluDropout;

/// Of x and the bias.
impl<B: GeluDropoutPrimitives> Backward<B, 2> for GeluDropout {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Registry, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let State { x, bias, bias_type, dropout } = ops.state;
        let Gradients { dx, dbias } = B::gelu_dropout_backward(x, bias, dy, dropout);
        let gradients = [dx, cast::<B>(dbias, bias_type)];
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let Some(node) = parent {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

/// What `dropout` leaves of `gelu(x + bias)`, with GELU in its exact form: computed in f32 and rounded once on GPUs.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | x, result | `[.., columns]` | any float |
/// | bias | `[columns]` | any float |
///
/// Backward computes the gradients of x and the bias in one pass, and keeps both operands alone. The same elements are
/// left out as by [`dropout`](super::dropout::dropout()).
///
/// # Panics
///
/// When the bias has not as many elements as a row of x or is on another device, or the rate is not from 0 to below 1.
pub fn gelu_dropout<const D: usize>(x: Tensor<D>, bias: Tensor<1>, dropout: Dropout) -> Tensor<D> {
    check_rate("gelu_dropout", dropout);
    let columns = x.dims().last().copied().unwrap_or_default();
    assert!(
        bias.dims() == [columns],
        "gelu_dropout: argument `bias`: expected [{columns}], the last dimension of x, as its shape, got {:?}",
        bias.dims()
    );
    assert!(
        bias.device() == x.device(),
        "gelu_dropout: argument `bias`: expected {:?}, as x is on, got {:?}",
        x.device(),
        bias.device()
    );
    Tensor::from_dispatch(<Dispatch as GeluDropoutOps>::gelu_dropout_of(
        x.into_dispatch(),
        bias.into_dispatch(),
        dropout,
    ))
}
