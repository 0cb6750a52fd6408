//! Attention on any backend that has the primitives, and its gradient.

use super::{AttentionPrimitives, Inputs, Mask, Output, Settings};
use crate::tensors::cast;
use burn::{
    backend::{
        Autodiff, Backend, TensorMetadata,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, NodeGuard, Ops, OpsKind},
        },
        backend_extension,
        tensor::FloatTensor,
    },
    tensor::{DType, Shape},
};

/// Attention, differentiable in q, k, v and the bias, which may be of any float type here.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Autodiff,
)]
pub trait AttentionOps: Backend {
    /// The output, in the shape and the type of q.
    fn attention(#[extension_type] inputs: Inputs<Self>, settings: Settings) -> FloatTensor<Self>;
}

on_plain_backends! {
    impl AttentionOps by AttentionPrimitives {
        fn attention(inputs: Inputs<Self>, settings: Settings) -> FloatTensor<Self> {
            Self::attention_forward(with_bias_of_q(inputs), settings).out
        }
    }
}

impl<B: AttentionPrimitives, C: CheckpointStrategy> AttentionOps for Autodiff<B, C> {
    fn attention(inputs: Inputs<Self>, settings: Settings) -> FloatTensor<Self> {
        let Inputs { q, k, v, mask, bias } = inputs;
        let ((q, q_node), (k, k_node), (v, v_node)) =
            (q.into_parts(), k.into_parts(), v.into_parts());
        let mask = match mask {
            Mask::Absent => Mask::Absent,
            Mask::Present(mask) => Mask::Present(mask),
        };
        let (bias, bias_node) = bias.into_parts();
        let inputs = Inputs { q, k, v, mask, bias };
        match bias_node {
            None => record::<B, C, 3>([q_node, k_node, v_node], inputs, settings),
            Some(bias) => record::<B, C, 4>([q_node, k_node, v_node, bias], inputs, settings),
        }
    }
}

/// The inputs, the bias in the type of q.
fn with_bias_of_q<B: Backend>(inputs: Inputs<B>) -> Inputs<B> {
    let dtype = inputs.q.dtype();
    let bias = inputs.bias.into_option().map(|bias| cast::<B>(bias, dtype));
    Inputs { bias: bias.into(), ..inputs }
}

/// What the backward pass reads. For each pair it keeps only what the caller gave.
#[derive(Clone, Debug)]
struct Saved<B: Backend> {
    inputs: Inputs<B>,
    output: Output<B>,
    settings: Settings,
    /// The shape and the type in which the bias came, and so those of its gradient.
    bias: Option<(Shape, DType)>,
}

/// Runs attention, and puts it on the graph of gradients if any of `nodes` is on it.
fn record<B: AttentionPrimitives, C: CheckpointStrategy, const N: usize>(
    nodes: [NodeGuard; N],
    inputs: Inputs<B>,
    settings: Settings,
) -> FloatTensor<Autodiff<B, C>> {
    let bias = inputs.bias.as_option().map(|bias| (bias.shape(), bias.dtype()));
    let inputs = with_bias_of_q(inputs);
    match Attention.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let output = B::attention_forward(inputs.clone(), settings.clone());
            let out = output.out.clone();
            prep.finish(Saved { inputs, output, settings, bias }, out)
        }
        OpsKind::UnTracked(prep) => prep.finish(B::attention_forward(inputs, settings).out),
    }
}

#[derive(Debug)]
struct Attention;

/// The parents are q, k, v and, if there is one, the bias.
impl<B: AttentionPrimitives, const N: usize> Backward<B, N> for Attention {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Saved<B>, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dout = grads.consume::<B>(&ops.node);
        let parents = ops.parents.map(|parent| parent.map(|node| node.id));
        let Saved { inputs, output, settings, bias } = ops.state;
        let parent = |index: usize| parents.get(index).copied().flatten();
        let bias_node = parent(3);
        let gradients = B::attention_backward(inputs, output, dout, settings, bias_node.is_some());
        let products = [gradients.dq, gradients.dk, gradients.dv];
        for (index, gradient) in products.into_iter().enumerate() {
            if let Some(node) = parent(index) {
                grads.register::<B>(node, gradient);
            }
        }
        if let (Some(node), Some((shape, dtype)), Some(pairs)) =
            (bias_node, bias, gradients.dbias.into_option())
        {
            grads.register::<B>(node, cast::<B>(summed::<B>(pairs, &shape), dtype));
        }
    }
}

/// Sums over the dimensions that are 1 in `shape`.
fn summed<B: Backend>(mut pairs: FloatTensor<B>, shape: &Shape) -> FloatTensor<B> {
    let whole = pairs.shape();
    for dim in 0..whole.num_dims() {
        if shape[dim] != whole[dim] {
            pairs = B::float_sum_dim(pairs, dim);
        }
    }
    pairs
}
