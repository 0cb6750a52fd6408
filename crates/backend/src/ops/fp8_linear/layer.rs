//! The layer on any backend that has the primitives, and its gradient.

use super::{Fp8Matrix, Fp8Primitives, Layout, Product, Promotion, Recipe};
use crate::tensors::Optional;
use burn::{
    backend::{
        Autodiff, Backend, TensorMetadata,
        autodiff::{
            NodeId,
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, NodeGuard, Ops, OpsKind},
        },
        backend_extension,
        tensor::FloatTensor,
    },
    tensor::DType,
};

/// A linear layer in 8 bits, differentiable in x, weight and bias.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Autodiff,
)]
pub trait Fp8LinearOps: Backend {
    /// `x W + b`; x is `[rows, inputs]`.
    fn fp8_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: Optional<Self>,
        recipe: Recipe,
    ) -> FloatTensor<Self>;
}

on_plain_backends! {
    impl Fp8LinearOps by Fp8Primitives {
        fn fp8_linear(
            x: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            bias: Optional<Self>,
            recipe: Recipe,
        ) -> FloatTensor<Self> {
            forward(x, weight, bias, recipe, KEEP_NOTHING).0
        }
    }
}

impl<B: Fp8Primitives, C: CheckpointStrategy> Fp8LinearOps for Autodiff<B, C> {
    fn fp8_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Optional<Self>,
        recipe: Recipe,
    ) -> FloatTensor<Self> {
        // x is read by the gradient of the weight, and the other way around.
        let keep = Keep { x: weight.is_tracked(), weight: x.is_tracked() };
        let dtypes = [x.dtype(), weight.dtype()];
        let ((x, x_node), (weight, weight_node)) = (x.into_parts(), weight.into_parts());
        let (bias, bias_node) = bias.into_parts();
        let run = |keep| {
            let (y, x, weight) = forward::<B>(x, weight, bias, recipe, keep);
            (y, Saved { x, weight, dtypes, recipe })
        };
        match bias_node {
            None => record::<B, C, 2>([x_node, weight_node], keep, run),
            Some(node) => record::<B, C, 3>([x_node, weight_node, node], keep, run),
        }
    }
}

/// Which operands stay in 8 bits for the backward pass.
#[derive(Clone, Copy)]
struct Keep {
    x: bool,
    weight: bool,
}

const KEEP_NOTHING: Keep = Keep { x: false, weight: false };

/// The output, `q(x)^T` and `q(W)`.
type Forward<B> = (FloatTensor<B>, Option<Fp8Matrix<B>>, Option<Fp8Matrix<B>>);

fn forward<B: Fp8Primitives>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Optional<B>,
    recipe: Recipe,
    keep: Keep,
) -> Forward<B> {
    let rounding = recipe.forward_rounding();
    let how = Product { out: x.dtype(), promoted: recipe.promotion == Promotion::Always };
    let (x, kept_x) = if keep.x {
        let (rows, transposed) = B::fp8_quantize_both(x, rounding);
        (rows, Some(transposed))
    } else {
        (B::fp8_quantize(x, rounding, Layout::Rows), None)
    };
    let (weight, kept_weight) = if keep.weight {
        let (rows, transposed) = B::fp8_quantize_both(weight, rounding);
        (transposed, Some(rows))
    } else {
        (B::fp8_quantize(weight, rounding, Layout::Transposed), None)
    };
    (B::fp8_matmul(x, weight, bias, how), kept_x, kept_weight)
}

/// What backward reads.
#[derive(Clone, Debug)]
struct Saved<B: Backend> {
    /// `q(x)^T`, if the gradient of the weight is asked for.
    x: Option<Fp8Matrix<B>>,
    /// `q(W)`, if the gradient of x is asked for.
    weight: Option<Fp8Matrix<B>>,
    /// The types of x and weight, and so of their gradients.
    dtypes: [DType; 2],
    recipe: Recipe,
}

/// Runs the layer, and puts it on the graph of gradients if any of `nodes` is on it.
fn record<B: Fp8Primitives, C: CheckpointStrategy, const N: usize>(
    nodes: [NodeGuard; N],
    keep: Keep,
    run: impl FnOnce(Keep) -> (FloatTensor<B>, Saved<B>),
) -> FloatTensor<Autodiff<B, C>> {
    match Fp8Linear.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let (y, saved) = run(keep);
            prep.finish(saved, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(run(KEEP_NOTHING).0),
    }
}

#[derive(Debug)]
struct Fp8Linear;

/// The parents are x, weight and, if there is one, the bias.
impl<B: Fp8Primitives, const N: usize> Backward<B, N> for Fp8Linear {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Saved<B>, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let parents = ops.parents.map(|parent| parent.map(|node| node.id));
        let parent = |index: usize| parents.get(index).copied().flatten();
        if let Some(bias) = parent(2) {
            let outputs = dy.shape()[1];
            let sum = B::float_sum_dim(dy.clone(), 0);
            grads.register::<B>(bias, B::float_reshape(sum, [outputs].into()));
        }
        register_products::<B>(dy, [parent(0), parent(1)], ops.state, grads);
    }
}

/// `dx = q'(dy) q(W)^T` and `dW = q(x)^T q'(dy)`, each if asked for.
fn register_products<B: Fp8Primitives>(
    dy: FloatTensor<B>,
    [x, weight]: [Option<NodeId>; 2],
    saved: Saved<B>,
    grads: &mut Gradients,
) {
    let Saved { x: kept_x, weight: kept_weight, dtypes: [x_dtype, weight_dtype], recipe } = saved;
    let rounding = recipe.backward_rounding();
    let promoted = recipe.promotion != Promotion::Never;
    let for_x = x.zip(kept_weight);
    let for_weight = weight.zip(kept_x);
    let (rows, transposed) = match (&for_x, &for_weight) {
        (Some(_), Some(_)) => {
            let (rows, transposed) = B::fp8_quantize_both(dy, rounding);
            (Some(rows), Some(transposed))
        }
        (Some(_), None) => (Some(B::fp8_quantize(dy, rounding, Layout::Rows)), None),
        (None, Some(_)) => (None, Some(B::fp8_quantize(dy, rounding, Layout::Transposed))),
        (None, None) => return,
    };
    if let (Some((node, weight)), Some(dy)) = (for_x, rows) {
        let how = Product { out: x_dtype, promoted };
        grads.register::<B>(node, B::fp8_matmul(dy, weight, Optional::Absent, how));
    }
    if let (Some((node, x)), Some(dy)) = (for_weight, transposed) {
        let how = Product { out: weight_dtype, promoted };
        grads.register::<B>(node, B::fp8_matmul(x, dy, Optional::Absent, how));
    }
}
