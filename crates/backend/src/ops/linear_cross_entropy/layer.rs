//! The layer and its loss on any backend that has the primitives of cross-entropy, and its gradients.

use crate::{
    ops::cross_entropy::{self, CrossEntropyPrimitives, Output},
    tensors::{Optional, cast, wide},
};
use burn::{
    backend::{
        Autodiff, Backend, ExtensionType, TensorMetadata,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, NodeGuard, Ops, OpsKind},
        },
        backend_extension,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Shape, Slice},
};

/// The arguments that are tensors of floats.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Inputs<B: Backend> {
    /// `[rows, width]`.
    pub x: FloatTensor<B>,
    /// `[width, classes]`.
    pub weight: FloatTensor<B>,
    /// `[classes]`, if there is one.
    #[extension_type]
    pub bias: Optional<B>,
    /// `[rows]`: what the loss of each row is multiplied by.
    pub share: FloatTensor<B>,
}

/// The arguments that are not tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The arguments of the cross-entropy.
    pub cross_entropy: cross_entropy::Settings,
    /// Rows whose logits exist at a time, at least 1.
    pub chunk_rows: usize,
}

/// A linear layer with the cross-entropy of its outputs, differentiable in x, weight and bias.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Autodiff,
)]
pub trait LinearCrossEntropyOps: Backend {
    /// The sum of the losses times their shares, one element; targets are i32.
    fn linear_cross_entropy(
        #[extension_type] inputs: Inputs<Self>,
        targets: IntTensor<Self>,
        settings: Settings,
    ) -> FloatTensor<Self>;
}

on_plain_backends! {
    impl LinearCrossEntropyOps by CrossEntropyPrimitives {
        fn linear_cross_entropy(
            inputs: Inputs<Self>,
            targets: IntTensor<Self>,
            settings: Settings,
        ) -> FloatTensor<Self> {
            forward::<Self>(inputs, targets, settings, Wanted::default()).0
        }
    }
}

impl<B: CrossEntropyPrimitives, C: CheckpointStrategy> LinearCrossEntropyOps for Autodiff<B, C> {
    fn linear_cross_entropy(
        inputs: Inputs<Self>,
        targets: IntTensor<Self>,
        settings: Settings,
    ) -> FloatTensor<Self> {
        let Inputs { x, weight, bias, share } = inputs;
        let wanted = Wanted {
            x: x.is_tracked(),
            weight: weight.is_tracked(),
            bias: bias.as_option().is_some_and(|bias| bias.is_tracked()),
        };
        let ((x, x_node), (weight, weight_node)) = (x.into_parts(), weight.into_parts());
        let (bias, bias_node) = bias.into_parts();
        let inputs = Inputs { x, weight, bias, share: share.into_primitive() };
        match bias_node {
            Some(bias) => {
                record::<B, C, 3>([x_node, weight_node, bias], inputs, targets, settings, wanted)
            }
            None => record::<B, C, 2>([x_node, weight_node], inputs, targets, settings, wanted),
        }
    }
}

/// Which gradients are asked for.
#[derive(Clone, Copy, Debug, Default)]
struct Wanted {
    x: bool,
    weight: bool,
    bias: bool,
}

/// Gradients of the loss times `scale`, as far as they are asked for: of x in its type, of weight and bias
/// in the type that is computed in.
#[derive(Clone, Debug)]
struct State<B: Backend> {
    dx: Option<FloatTensor<B>>,
    dweight: Option<FloatTensor<B>>,
    dbias: Option<FloatTensor<B>>,
    scale: f64,
    dtype: DType,
}

/// The loss, and the gradients of it.
fn forward<B: CrossEntropyPrimitives>(
    inputs: Inputs<B>,
    targets: IntTensor<B>,
    settings: Settings,
    wanted: Wanted,
) -> (FloatTensor<B>, State<B>) {
    let Inputs { x, weight, bias, share } = inputs;
    let (rows, classes, dtype) = (x.shape()[0], weight.shape()[1], x.dtype());
    let bias = bias.into_option();
    let bias = bias.map(|bias| B::float_reshape(bias, Shape::new([1, classes])));
    let share = match dtype {
        DType::F64 => cast::<B>(share, DType::F64),
        _ => cast::<B>(share, DType::F32),
    };
    let scale = scale_of(rows);
    let mut loss: Option<FloatTensor<B>> = None;
    let mut dx = Vec::new();
    let (mut dweight, mut dbias) = (None, None);
    for start in (0..rows).step_by(settings.chunk_rows) {
        let part = start..rows.min(start + settings.chunk_rows);
        let x = B::float_slice(x.clone(), &[Slice::from(part.clone())]);
        let targets = B::int_slice(targets.clone(), &[Slice::from(part.clone())]);
        let share = B::float_slice(share.clone(), &[Slice::from(part)]);
        let product = B::float_matmul(x.clone(), weight.clone());
        let logits = match &bias {
            Some(bias) => B::float_add(product, bias.clone()),
            None => product,
        };
        let Output { loss: losses, lse } =
            B::cross_entropy_forward(logits.clone(), targets.clone(), settings.cross_entropy);
        let of_chunk = B::float_sum_dim(B::float_mul(losses, share.clone()), 0);
        loss = Some(added::<B>(loss, of_chunk));
        if !(wanted.x || wanted.weight || wanted.bias) {
            continue;
        }
        let grad = B::float_mul_scalar(share, scale.into());
        // Nobody else holds the logits: their gradient is written over them.
        let dlogits = B::cross_entropy_backward(
            logits,
            targets,
            lse,
            grad,
            Optional::Absent,
            settings.cross_entropy,
        );
        if wanted.x {
            let transposed = B::float_swap_dims(weight.clone(), 0, 1);
            dx.push(B::float_matmul(dlogits.clone(), transposed));
        }
        if wanted.weight {
            let product = B::float_matmul(B::float_swap_dims(x, 0, 1), dlogits.clone());
            dweight = Some(added::<B>(dweight, wide::<B>(product)));
        }
        if wanted.bias {
            dbias = Some(added::<B>(dbias, B::float_sum_dim(wide::<B>(dlogits), 0)));
        }
    }
    let dx = wanted.x.then(|| match dx.len() {
        1 => dx.remove(0),
        _ => B::float_cat(dx, 0),
    });
    let loss = loss.expect("at least one row was checked for");
    (loss, State { dx, dweight, dbias, scale, dtype })
}

fn added<B: Backend>(sum: Option<FloatTensor<B>>, term: FloatTensor<B>) -> FloatTensor<B> {
    match sum {
        Some(sum) => B::float_add(sum, term),
        None => term,
    }
}

/// A power of two, so that nothing is rounded for it.
fn scale_of(rows: usize) -> f64 {
    const MOST: usize = 1024;
    rows.next_power_of_two().min(MOST) as f64
}

/// Runs the layer and its loss, and puts it on the graph of gradients if any of `nodes` is on it.
fn record<B: CrossEntropyPrimitives, C: CheckpointStrategy, const N: usize>(
    nodes: [NodeGuard; N],
    inputs: Inputs<B>,
    targets: IntTensor<B>,
    settings: Settings,
    wanted: Wanted,
) -> FloatTensor<Autodiff<B, C>> {
    match LinearCrossEntropy.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let (loss, state) = forward::<B>(inputs, targets, settings, wanted);
            prep.finish(state, loss)
        }
        OpsKind::UnTracked(prep) => {
            prep.finish(forward::<B>(inputs, targets, settings, Wanted::default()).0)
        }
    }
}

#[derive(Debug)]
struct LinearCrossEntropy;

/// The parents are x, weight and, if there is one, the bias.
impl<B: CrossEntropyPrimitives, const N: usize> Backward<B, N> for LinearCrossEntropy {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let State { dx, dweight, dbias, scale, dtype } = ops.state;
        let grad = B::float_mul_scalar(grad, (1.0 / scale).into());
        let classes = dbias.as_ref().map(|dbias| Shape::new([dbias.shape().num_elements()]));
        let times_grad = |gradient: FloatTensor<B>| {
            let factor = B::float_reshape(grad.clone(), Shape::new([1, 1]));
            cast::<B>(B::float_mul(wide::<B>(gradient), factor), dtype)
        };
        let dbias =
            dbias.zip(classes).map(|(dbias, classes)| B::float_reshape(times_grad(dbias), classes));
        let gradients = [dx.map(times_grad), dweight.map(times_grad), dbias];
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let (Some(node), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}
