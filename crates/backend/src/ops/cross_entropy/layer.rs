//! Cross-entropy on any backend that has the primitives, and its gradient.

use super::{AtOnce, CrossEntropyPrimitives, Output, Reduced, Reduction, Settings};
use crate::tensors::Optional;
use burn::backend::{
    Autodiff, Backend, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::DType;

/// Cross-entropy, differentiable in the logits.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Autodiff,
)]
pub trait CrossEntropyOps: Backend {
    /// The losses, reduced; targets are i32.
    fn cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        settings: Settings,
        reduction: Reduction,
    ) -> FloatTensor<Self>;
}

on_plain_backends! {
    impl CrossEntropyOps by CrossEntropyPrimitives {
        fn cross_entropy(
            logits: FloatTensor<Self>,
            targets: IntTensor<Self>,
            settings: Settings,
            reduction: Reduction,
        ) -> FloatTensor<Self> {
            forward::<Self>(logits, targets, settings, reduction).0
        }
    }
}

impl<B: CrossEntropyPrimitives, C: CheckpointStrategy> CrossEntropyOps for Autodiff<B, C> {
    fn cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        settings: Settings,
        reduction: Reduction,
    ) -> FloatTensor<Self> {
        let (logits, node) = logits.into_parts();
        match CrossEntropy.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) if is_made_at_once(logits.dtype(), reduction) => {
                let AtOnce { loss, dlogits } =
                    B::cross_entropy_at_once(logits, targets, settings, reduction);
                prep.finish(Saved::Gradient(dlogits), loss)
            }
            OpsKind::Tracked(prep) => {
                let (loss, lse, factor) =
                    forward::<B>(logits.clone(), targets.clone(), settings, reduction);
                prep.finish(Saved::Logits { logits, targets, lse, factor, settings }, loss)
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(forward::<B>(logits, targets, settings, reduction).0)
            }
        }
    }
}

/// Whether the gradient is made with the losses: of one number, and in a type that holds it whatever it is multiplied by
/// later.
fn is_made_at_once(dtype: DType, reduction: Reduction) -> bool {
    reduction != Reduction::None && dtype != DType::F16
}

/// The reduced losses, and what the gradient needs: `lse` and what the losses were multiplied by.
fn forward<B: CrossEntropyPrimitives>(
    logits: FloatTensor<B>,
    targets: IntTensor<B>,
    settings: Settings,
    reduction: Reduction,
) -> (FloatTensor<B>, FloatTensor<B>, Optional<B>) {
    let Output { loss, lse } = B::cross_entropy_forward(logits, targets.clone(), settings);
    if reduction == Reduction::None {
        return (loss, lse, Optional::Absent);
    }
    let Reduced { loss, factor } = B::cross_entropy_reduce(loss, targets, settings, reduction);
    (loss, lse, Optional::Present(factor))
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
enum Saved<B: Backend> {
    /// The gradient of the logits where that of the loss is 1.
    Gradient(FloatTensor<B>),
    /// What it is made of.
    Logits {
        logits: FloatTensor<B>,
        targets: IntTensor<B>,
        lse: FloatTensor<B>,
        factor: Optional<B>,
        settings: Settings,
    },
}

#[derive(Debug)]
struct CrossEntropy;

impl<B: CrossEntropyPrimitives> Backward<B, 1> for CrossEntropy {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Saved<B>, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let [parent] = ops.parents;
        let Some(node) = parent else { return };
        let dlogits = match ops.state {
            Saved::Gradient(dlogits) => B::cross_entropy_rescale(dlogits, grad),
            Saved::Logits { logits, targets, lse, factor, settings } => {
                B::cross_entropy_backward(logits, targets, lse, grad, factor, settings)
            }
        };
        grads.register::<B>(node.id, dlogits);
    }
}
