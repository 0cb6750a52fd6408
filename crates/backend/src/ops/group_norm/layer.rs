//! Normalization on any backend that has the primitives, and its gradient.

use super::{Gradients, GroupNormPrimitives, Inputs, Output, Saved, Settings};
use crate::tensors::cast;
use burn::{
    backend::{
        Autodiff, Backend, TensorMetadata,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients as Registry,
            ops::{Backward, NodeGuard, Ops, OpsKind},
        },
        backend_extension,
        tensor::FloatTensor,
    },
    tensor::DType,
};

/// Normalization of groups of channels, differentiable in x, gamma and beta, of which the last two may be of any float
/// type here.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Autodiff,
)]
pub trait GroupNormOps: Backend {
    /// What is normalized.
    fn group_norm(#[extension_type] inputs: Inputs<Self>, settings: Settings) -> FloatTensor<Self>;
}

on_plain_backends! {
    impl GroupNormOps by GroupNormPrimitives {
        fn group_norm(inputs: Inputs<Self>, settings: Settings) -> FloatTensor<Self> {
            Self::group_norm_forward(with_parameters_of_x(inputs), settings).y
        }
    }
}

/// Gamma and beta in f32 or the type of x, both in the same: what the primitives take.
fn with_parameters_of_x<B: Backend>(inputs: Inputs<B>) -> Inputs<B> {
    let Inputs { x, gamma, beta } = inputs;
    let both = [gamma.into_option(), beta.into_option()];
    let dtype = match x.dtype() {
        same if both.iter().flatten().all(|parameter| parameter.dtype() == same) => same,
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let [gamma, beta] = both.map(|parameter| parameter.map(|it| cast::<B>(it, dtype)).into());
    Inputs { x, gamma, beta }
}

impl<B: GroupNormPrimitives, C: CheckpointStrategy> GroupNormOps for Autodiff<B, C> {
    fn group_norm(inputs: Inputs<Self>, settings: Settings) -> FloatTensor<Self> {
        let Inputs { x, gamma, beta } = inputs;
        let (x, of_x) = x.into_parts();
        let ((gamma, of_gamma), (beta, of_beta)) = (gamma.into_parts(), beta.into_parts());
        let inputs = Inputs { x, gamma, beta };
        match (of_gamma, of_beta) {
            (Some(of_gamma), Some(of_beta)) => {
                record::<B, C, 3>([of_x, of_gamma, of_beta], inputs, settings)
            }
            _ => record::<B, C, 1>([of_x], inputs, settings),
        }
    }
}

/// Runs the normalization, and puts it on the graph of gradients if any of `nodes` is on it.
fn record<B: GroupNormPrimitives, C: CheckpointStrategy, const N: usize>(
    nodes: [NodeGuard; N],
    inputs: Inputs<B>,
    settings: Settings,
) -> FloatTensor<Autodiff<B, C>> {
    let parameters = [&inputs.gamma, &inputs.beta];
    let dtypes = parameters.map(|parameter| parameter.as_option().map(|it| it.dtype()));
    let inputs = with_parameters_of_x(inputs);
    let (x, gamma) = (inputs.x.clone(), inputs.gamma.clone());
    let Output { y, mean, rstd } = B::group_norm_forward(inputs, settings);
    match GroupNorm.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let saved = Saved { x, gamma, mean, rstd };
            prep.finish(State { saved, settings, dtypes }, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct State<B: Backend> {
    saved: Saved<B>,
    settings: Settings,
    /// The types in which gamma and beta came, and so those of their gradients.
    dtypes: [Option<DType>; 2],
}

#[derive(Debug)]
struct GroupNorm;

/// The parents are x, and if they are there gamma and beta.
impl<B: GroupNormPrimitives, const N: usize> Backward<B, N> for GroupNorm {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, N>, grads: &mut Registry, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let State { saved, settings, dtypes } = ops.state;
        let Gradients { dx, dgamma, dbeta } = B::group_norm_backward(saved, dy, settings);
        let of_parameters = [dgamma, dbeta].into_iter().zip(dtypes).map(|(gradient, dtype)| {
            let (gradient, dtype) = (gradient.into_option()?, dtype?);
            Some(cast::<B>(gradient, dtype))
        });
        let all = std::iter::once(Some(dx)).chain(of_parameters);
        for (parent, gradient) in ops.parents.into_iter().zip(all) {
            if let (Some(node), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}
