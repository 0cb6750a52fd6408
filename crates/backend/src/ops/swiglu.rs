//! `SwiGLU`, `silu(gate) up`, in one pass each way. Backward reads gate and up again, and computes the sigmoid
//! anew.
//!
//! By Burn's operations, autodiff keeps the gate, its sigmoid and the product of both.

use crate::tensors::{cast, wide};
#[cfg(feature = "gpu")]
use crate::{
    declined::served,
    ops::fp8_linear::magnitudes,
    tensors::{contiguous_buffer, contiguous_tensor},
};
#[cfg(feature = "gpu")]
use blackburn_kernels::{
    buffer::Buffer,
    swiglu::{
        SwigluGradients, swiglu_backward, swiglu_backward_watched, swiglu_forward,
        swiglu_forward_watched,
    },
};
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
    tensor::Tensor,
};
#[cfg(feature = "gpu")]
use burn_cubecl::{CubeBackend, tensor::CubeTensor};

#[cfg(feature = "gpu")]
const OP: &str = "swiglu";

/// The gradients of both operands, in their shape and type.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Gradients<B: Backend> {
    /// Of the gate.
    pub dgate: FloatTensor<B>,
    /// Of what the gate is multiplied by.
    pub dup: FloatTensor<B>,
}

/// `SwiGLU` and its gradients by themselves, not differentiable. All tensors have one shape and type.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait SwigluPrimitives: Backend {
    /// `silu(gate) up`.
    #[fusion(meta = product)]
    fn swiglu_forward(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;

    /// The gradients, given that of the product.
    #[fusion(meta = gradients)]
    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> Gradients<Self>;
}

#[cfg(feature = "gpu")]
fn product(gate: &TensorSpec, _up: &TensorSpec) -> TensorSpec {
    gate.clone()
}

#[cfg(feature = "gpu")]
fn gradients(gate: &TensorSpec, up: &TensorSpec, _dy: &TensorSpec) -> GradientsMetadata {
    GradientsMetadata { dgate: gate.clone(), dup: up.clone() }
}

#[cfg(feature = "flex")]
impl SwigluPrimitives for burn::backend::Flex {
    fn swiglu_forward(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        forward::<Self>(gate, up)
    }

    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> Gradients<Self> {
        backward::<Self>(gate, up, dy)
    }
}

#[cfg(feature = "gpu")]
impl SwigluPrimitives for CubeBackend {
    fn swiglu_forward(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let [g, u] = [&gate, &up].map(|tensor| contiguous_buffer(tensor.clone()));
        let y = if magnitudes::are_wanted() && g.elements > 0 {
            swiglu_forward_watched(&gate.client, &g, &u).map(|(y, of_y)| {
                magnitudes::keep(&y, Some(of_y));
                y
            })
        } else {
            swiglu_forward(&gate.client, &g, &u)
        };
        match served(OP, y) {
            Some(y) => like(&gate, y),
            None => forward::<Self>(gate, up),
        }
    }

    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> Gradients<Self> {
        let [g, u, d] = [&gate, &up, &dy].map(|tensor| contiguous_buffer(tensor.clone()));
        let gradients = if magnitudes::are_wanted() && g.elements > 0 {
            swiglu_backward_watched(&gate.client, &g, &u, &d).map(|(gradients, [gate, up])| {
                magnitudes::keep(&gradients.dgate, Some(gate));
                magnitudes::keep(&gradients.dup, Some(up));
                gradients
            })
        } else {
            swiglu_backward(&gate.client, &g, &u, &d)
        };
        match served(OP, gradients) {
            Some(SwigluGradients { dgate, dup }) => {
                Gradients { dgate: like(&gate, dgate), dup: like(&up, dup) }
            }
            None => backward::<Self>(gate, up, dy),
        }
    }
}

#[cfg(feature = "gpu")]
fn like(model: &CubeTensor, buffer: Buffer) -> CubeTensor {
    contiguous_tensor(model, buffer, model.shape(), model.dtype)
}

/// By a backend's own operations, with one rounding as the kernel has.
fn forward<B: Backend>(gate: FloatTensor<B>, up: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = gate.dtype();
    let [gate, up] = [gate, up].map(wide::<B>);
    let silu = B::float_mul(gate.clone(), B::sigmoid(gate));
    cast::<B>(B::float_mul(silu, up), dtype)
}

fn backward<B: Backend>(
    gate: FloatTensor<B>,
    up: FloatTensor<B>,
    dy: FloatTensor<B>,
) -> Gradients<B> {
    let dtype = gate.dtype();
    let [gate, up, dy] = [gate, up, dy].map(wide::<B>);
    let s = B::sigmoid(gate.clone());
    let silu = B::float_mul(gate, s.clone());
    let shut = B::float_add_scalar(B::float_neg(s.clone()), 1f32.into());
    let slope = B::float_add(s, B::float_mul(silu.clone(), shut));
    let dgate = B::float_mul(B::float_mul(dy.clone(), up), slope);
    Gradients { dgate: cast::<B>(dgate, dtype), dup: cast::<B>(B::float_mul(dy, silu), dtype) }
}

/// `SwiGLU`, differentiable in both operands.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Autodiff,
)]
pub trait SwigluOps: Backend {
    /// `silu(gate) up`.
    fn swiglu_of(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;
}

on_plain_backends! {
    impl SwigluOps by SwigluPrimitives {
        fn swiglu_of(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
            Self::swiglu_forward(gate, up)
        }
    }
}

impl<B: SwigluPrimitives, C: CheckpointStrategy> SwigluOps for Autodiff<B, C> {
    fn swiglu_of(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let ((gate, of_gate), (up, of_up)) = (gate.into_parts(), up.into_parts());
        let y = B::swiglu_forward(gate.clone(), up.clone());
        match SwigluStep.prepare::<C>([of_gate, of_up]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((gate, up), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

#[derive(Debug)]
struct SwigluStep;

/// Of gate and up.
impl<B: SwigluPrimitives> Backward<B, 2> for SwigluStep {
    type State = (FloatTensor<B>, FloatTensor<B>);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Registry, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let (gate, up) = ops.state;
        let Gradients { dgate, dup } = B::swiglu_backward(gate, up, dy);
        for (parent, gradient) in ops.parents.into_iter().zip([dgate, dup]) {
            if let Some(node) = parent {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

/// `silu(gate) * up`, computed in f32 and rounded once.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | gate, up, result | any, all the same | any float, all the same |
///
/// Backward computes both gradients in one pass, and reads gate and up again: nothing else is kept for it.
///
/// # Panics
///
/// When the two differ in shape, dtype or device.
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    let told = |tensor: &Tensor<D>| {
        let device = tensor.device().without_autodiff();
        format!("{:?} of {:?} on {device:?}", tensor.dims(), tensor.dtype())
    };
    let (expected, actual) = (told(&gate), told(&up));
    assert!(
        expected == actual,
        "swiglu: argument `up`: expected {expected}, as the gate is, got {actual}"
    );
    Tensor::from_dispatch(<Dispatch as SwigluOps>::swiglu_of(
        gate.into_dispatch(),
        up.into_dispatch(),
    ))
}
