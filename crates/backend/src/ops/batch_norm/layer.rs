//! Normalization on any backend that has the primitives, and its gradient.

use super::{BatchNormPrimitives, Gradients, Inputs, Output, Saved, Settings};
use crate::tensors::{Optional, cast};
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

/// Normalization of channels, differentiable in x, gamma, beta and the residual. Gamma and beta may be of any float
/// type here. The statistics are not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Autodiff,
)]
pub trait BatchNormOps: Backend {
    /// The normalized channels, and the statistics of the batch.
    fn batch_norm(#[extension_type] inputs: Inputs<Self>, settings: Settings) -> Output<Self>;
}

on_plain_backends! {
    impl BatchNormOps by BatchNormPrimitives {
        fn batch_norm(inputs: Inputs<Self>, settings: Settings) -> Output<Self> {
            Self::batch_norm_forward(with_parameters_of_x(inputs), settings)
        }
    }
}

/// Gamma and beta in f32 or the type of x, both in the same: what the primitives take.
fn with_parameters_of_x<B: Backend>(inputs: Inputs<B>) -> Inputs<B> {
    let Inputs { x, gamma, beta, residual } = inputs;
    let dtype = match x.dtype() {
        same if gamma.dtype() == same && beta.dtype() == same => same,
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    Inputs { x, gamma: cast::<B>(gamma, dtype), beta: cast::<B>(beta, dtype), residual }
}

impl<B: BatchNormPrimitives, C: CheckpointStrategy> BatchNormOps for Autodiff<B, C> {
    fn batch_norm(inputs: Inputs<Self>, settings: Settings) -> Output<Self> {
        let Inputs { x, gamma, beta, residual } = inputs;
        let ((x, of_x), (gamma, of_gamma), (beta, of_beta)) =
            (x.into_parts(), gamma.into_parts(), beta.into_parts());
        let (residual, of_residual) = residual.into_parts();
        let inputs = Inputs { x, gamma, beta, residual };
        match of_residual {
            None => record::<B, C, 3>([of_x, of_gamma, of_beta], inputs, settings),
            Some(of_residual) => {
                record::<B, C, 4>([of_x, of_gamma, of_beta, of_residual], inputs, settings)
            }
        }
    }
}

/// Runs the normalization, and puts it on the graph of gradients if any of `nodes` is on it.
fn record<B: BatchNormPrimitives, C: CheckpointStrategy, const N: usize>(
    nodes: [NodeGuard; N],
    inputs: Inputs<B>,
    settings: Settings,
) -> Output<Autodiff<B, C>> {
    let dtypes = [inputs.gamma.dtype(), inputs.beta.dtype()];
    let inputs = with_parameters_of_x(inputs);
    let (x, gamma) = (inputs.x.clone(), inputs.gamma.clone());
    let Output { y, mean, variance } = B::batch_norm_forward(inputs, settings);
    let y = match BatchNorm.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let saved = Saved {
                x,
                gamma,
                mean: mean.clone(),
                variance: variance.clone(),
                y: settings.relu.then(|| y.clone()).into(),
            };
            prep.finish(State { saved, settings, dtypes }, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(y),
    };
    let untracked = FloatTensor::<Autodiff<B, C>>::new;
    Output { y, mean: untracked(mean), variance: untracked(variance) }
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct State<B: Backend> {
    saved: Saved<B>,
    settings: Settings,
    /// The types in which gamma and beta came, and so those of their gradients.
    dtypes: [DType; 2],
}

#[derive(Debug)]
struct BatchNorm;

/// The parents are x, gamma, beta and, if there is one, the residual.
impl<B: BatchNormPrimitives, const N: usize> Backward<B, N> for BatchNorm {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, N>, grads: &mut Registry, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let State { saved, settings, dtypes: [gamma, beta] } = ops.state;
        let has_residual = ops.parents.get(3).is_some_and(Option::is_some);
        let gradients = B::batch_norm_backward(saved, dy.clone(), settings, has_residual);
        let Gradients { dx, dgamma, dbeta, dresidual } = gradients;
        let dresidual = match dresidual {
            Optional::Present(masked) => masked,
            Optional::Absent => dy,
        };
        let all = [dx, cast::<B>(dgamma, gamma), cast::<B>(dbeta, beta), dresidual];
        for (parent, gradient) in ops.parents.into_iter().zip(all) {
            if let Some(node) = parent {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}
