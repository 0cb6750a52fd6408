//! Weights whose products are computed in 8 bits wherever they are multiplied.

#[cfg(feature = "gpu")]
use super::marked;
use super::recipe::Recipe;
use burn::{
    backend::{
        Autodiff, Backend, Dispatch,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
        backend_extension,
        tensor::FloatTensor,
    },
    tensor::{DType, Device, Tensor},
};

/// The mark by itself. It is not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait Fp8MarkPrimitives: Backend {
    /// `weight`, in the same memory, which is marked.
    #[fusion(dtype = weight, shape = weight)]
    fn fp8_mark_memory(weight: FloatTensor<Self>, recipe: Recipe) -> FloatTensor<Self>;
}

/// Nothing is made of marks on the CPU: see [`serves_marks`].
#[cfg(feature = "flex")]
impl Fp8MarkPrimitives for burn::backend::Flex {
    fn fp8_mark_memory(weight: FloatTensor<Self>, _recipe: Recipe) -> FloatTensor<Self> {
        weight
    }
}

#[cfg(feature = "gpu")]
impl Fp8MarkPrimitives for burn_cubecl::CubeBackend {
    fn fp8_mark_memory(weight: FloatTensor<Self>, recipe: Recipe) -> FloatTensor<Self> {
        marked::set_weight(&weight.handle, recipe);
        weight
    }
}

/// The mark, which differentiation passes by.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Autodiff,
)]
pub trait Fp8MarkOps: Backend {
    /// `weight`, marked.
    fn fp8_mark(weight: FloatTensor<Self>, recipe: Recipe) -> FloatTensor<Self>;
}

on_plain_backends! {
    impl Fp8MarkOps by Fp8MarkPrimitives {
        fn fp8_mark(weight: FloatTensor<Self>, recipe: Recipe) -> FloatTensor<Self> {
            Self::fp8_mark_memory(weight, recipe)
        }
    }
}

impl<B: Fp8MarkPrimitives, C: CheckpointStrategy> Fp8MarkOps for Autodiff<B, C> {
    fn fp8_mark(weight: FloatTensor<Self>, recipe: Recipe) -> FloatTensor<Self> {
        let (weight, node) = weight.into_parts();
        let marked = B::fp8_mark_memory(weight, recipe);
        match Passed.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((), marked),
            OpsKind::UnTracked(prep) => prep.finish(marked),
        }
    }
}

#[derive(Debug)]
struct Passed;

impl<B: Backend> Backward<B, 1> for Passed {
    type State = ();

    fn backward(self, ops: Ops<(), 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let [parent] = ops.parents;
        if let Some(node) = parent {
            grads.register::<B>(node.id, gradient);
        }
    }
}

/// Whether marks have an effect on `device`: it is a GPU (or a software device that passes for one), and
/// Blackburn's matrix products are registered with Burn.
pub fn serves_marks(device: &Device) -> bool {
    #[cfg(feature = "gpu")]
    let is_registered = marked::is_served();
    #[cfg(not(feature = "gpu"))]
    let is_registered = false;
    is_registered && crate::tensors::is_gpu(device)
}

/// `weight` `[inputs, outputs]`, in f32, f16 or bf16, whose products are computed in 8 bits by `recipe` from
/// now on: `x W` in unmodified modules as [`linear`](super::linear) computes it, and both gradients.
///
/// The mark is of the memory, not of the tensor. Views of it are marked. Results of operations are not: no
/// operation writes in place where a mark is, except into a parameter, which stays marked.
/// Where x has been multiplied by a marked weight, x is marked too: a product of its transpose is taken for a
/// weight's gradient and computed in 8 bits.
///
/// Marks have no effect where [`serves_marks`] says no.
///
/// # Panics
///
/// On another type, and on a recipe whose margin leaves no number.
pub fn mark(weight: Tensor<2>, recipe: &Recipe) -> Tensor<2> {
    recipe.check("fp8::mark");
    assert!(
        matches!(weight.dtype(), DType::F32 | DType::F16 | DType::BF16),
        "fp8::mark: argument `weight`: expected f32, f16 or bf16, got {:?}",
        weight.dtype()
    );
    Tensor::from_dispatch(<Dispatch as Fp8MarkOps>::fp8_mark(weight.into_dispatch(), *recipe))
}
