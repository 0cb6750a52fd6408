//! Normalization on any backend that has the primitives, and its gradient.

use super::{Inputs, LayerNormPrimitives, Output, Saved, Settings, Wanted};
use crate::{
    ops::dropout::DropoutPrimitives,
    tensors::{Optional, cast},
};
use burn::{
    backend::{
        Autodiff, Backend, ExtensionType, TensorMetadata,
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
use std::sync::{Arc, Mutex, PoisonError};

/// The normalized rows, and what they were made of.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Normalized<B: Backend> {
    /// The normalized rows, in the shape and the type of x.
    pub y: FloatTensor<B>,
    /// The sum of x and the residual, if there is a residual.
    #[extension_type]
    pub sum: Optional<B>,
}

/// Normalization, differentiable in x, the residual and its bias, gamma and beta; the last two and the bias may be of
/// any float type here.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Autodiff,
)]
pub trait LayerNormOps: Backend {
    /// The normalized rows.
    fn layer_norm(#[extension_type] inputs: Inputs<Self>, settings: Settings) -> Normalized<Self>;
}

on_plain_backends! {
    impl LayerNormOps by LayerNormPrimitives {
        fn layer_norm(inputs: Inputs<Self>, settings: Settings) -> Normalized<Self> {
            normalized(inputs, settings)
        }
    }
}

fn normalized<B: LayerNormPrimitives>(inputs: Inputs<B>, settings: Settings) -> Normalized<B> {
    let Output { y, sum, .. } = B::layer_norm_forward(with_parameters_of_x(inputs), settings);
    Normalized { y, sum }
}

impl<B: LayerNormPrimitives + DropoutPrimitives, C: CheckpointStrategy> LayerNormOps
    for Autodiff<B, C>
{
    fn layer_norm(inputs: Inputs<Self>, settings: Settings) -> Normalized<Self> {
        let Inputs { x, residual, residual_bias, gamma, beta } = inputs;
        let ((x, x_node), (gamma, gamma_node)) = (x.into_parts(), gamma.into_parts());
        let ((residual, residual_node), (beta, beta_node)) =
            (residual.into_parts(), beta.into_parts());
        let (residual_bias, bias_node) = residual_bias.into_parts();
        let inputs = Inputs { x, residual, residual_bias, gamma, beta };
        let (x, gamma) = (x_node, gamma_node);
        match (residual_node, beta_node, bias_node) {
            (None, None, _) => record::<B, C, 2>([x, gamma], inputs, settings),
            (None, Some(beta), _) => record::<B, C, 3>([x, gamma, beta], inputs, settings),
            (Some(residual), None, None) => {
                record_join::<B, C, 3>([x, gamma, residual], inputs, settings)
            }
            (Some(residual), Some(last), None) | (Some(residual), None, Some(last)) => {
                record_join::<B, C, 4>([x, gamma, residual, last], inputs, settings)
            }
            (Some(residual), Some(beta), Some(bias)) => {
                record_join::<B, C, 5>([x, gamma, residual, beta, bias], inputs, settings)
            }
        }
    }
}

/// Gamma in f32 or the type of x, and the other parameters in that of gamma: what the primitives take.
fn with_parameters_of_x<B: Backend>(inputs: Inputs<B>) -> Inputs<B> {
    let Inputs { x, residual, residual_bias, gamma, beta } = inputs;
    let dtype = if gamma.dtype() == x.dtype() { x.dtype() } else { wide_type(x.dtype()) };
    let [beta, residual_bias] = [beta, residual_bias]
        .map(|parameter| parameter.into_option().map(|it| cast::<B>(it, dtype)).into());
    Inputs { x, residual, residual_bias, gamma: cast::<B>(gamma, dtype), beta }
}

fn wide_type(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct State<B: Backend> {
    saved: Saved<B>,
    settings: Settings,
    dtypes: Dtypes,
}

/// The types in which parameters came, and so those of their gradients.
#[derive(Clone, Copy, Debug)]
struct Dtypes {
    gamma: DType,
    beta: Option<DType>,
    residual_bias: Option<DType>,
}

/// The nodes of parameters that get a gradient.
#[derive(Clone, Copy)]
struct ParameterNodes {
    gamma: Option<NodeId>,
    beta: Option<NodeId>,
    residual_bias: Option<NodeId>,
}

impl<B: LayerNormPrimitives> State<B> {
    /// The state, and what the forward pass returns.
    fn forward(inputs: Inputs<B>, settings: Settings) -> (Self, Normalized<B>) {
        let dtype_of = |it: &Optional<B>| it.as_option().map(|parameter| parameter.dtype());
        let dtypes = Dtypes {
            gamma: inputs.gamma.dtype(),
            beta: dtype_of(&inputs.beta),
            residual_bias: dtype_of(&inputs.residual_bias),
        };
        let inputs = with_parameters_of_x(inputs);
        let (x, gamma) = (inputs.x.clone(), inputs.gamma.clone());
        let Output { y, sum, mean, rstd } = B::layer_norm_forward(inputs, settings);
        let x = sum.clone().into_option().unwrap_or(x);
        let saved = Saved { x, gamma, mean, rstd };
        (Self { saved, settings, dtypes }, Normalized { y, sum })
    }

    /// Where the nodes of parameters are among the parents: x, gamma, the residual if it is a join, and those of beta and
    /// of the residual's bias that are there.
    fn parameters(&self, parents: &[Option<NodeId>], is_join: bool) -> ParameterNodes {
        let parent = |index: usize| parents.get(index).copied().flatten();
        let beta = if is_join { 3 } else { 2 };
        let bias = beta + usize::from(self.dtypes.beta.is_some());
        ParameterNodes {
            gamma: parent(1),
            beta: self.dtypes.beta.and_then(|_| parent(beta)),
            residual_bias: self.dtypes.residual_bias.and_then(|_| parent(bias)),
        }
    }

    /// Registers the gradients of parameters, and returns those of what was normalized and of the residual.
    fn backward(
        self,
        dy: FloatTensor<B>,
        dsum: Option<FloatTensor<B>>,
        nodes: ParameterNodes,
        grads: &mut Gradients,
    ) -> [FloatTensor<B>; 2] {
        let Self { saved, settings, dtypes } = self;
        let wanted =
            Wanted { beta: nodes.beta.is_some(), residual_bias: nodes.residual_bias.is_some() };
        let gradients = B::layer_norm_backward(saved, dy, dsum.into(), settings, wanted);
        if let Some(node) = nodes.gamma {
            grads.register::<B>(node, cast::<B>(gradients.dgamma, dtypes.gamma));
        }
        for (node, dtype, gradient) in [
            (nodes.beta, dtypes.beta, gradients.dbeta),
            (nodes.residual_bias, dtypes.residual_bias, gradients.dbias),
        ] {
            if let (Some(node), Some(dtype), Some(gradient)) = (node, dtype, gradient.into_option())
            {
                grads.register::<B>(node, cast::<B>(gradient, dtype));
            }
        }
        let super::Gradients { dx, dresidual, .. } = gradients;
        let dresidual = dresidual.into_option().unwrap_or_else(|| dx.clone());
        [dx, dresidual]
    }
}

/// Runs the normalization, and puts it on the graph of gradients if any of `nodes` is on it.
fn record<B: LayerNormPrimitives, C: CheckpointStrategy, const N: usize>(
    nodes: [NodeGuard; N],
    inputs: Inputs<B>,
    settings: Settings,
) -> Normalized<Autodiff<B, C>> {
    let y = match LayerNorm.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let (state, Normalized { y, .. }) = State::forward(inputs, settings);
            prep.finish(state, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(normalized(inputs, settings).y),
    };
    Normalized { y, sum: Optional::Absent }
}

#[derive(Debug)]
struct LayerNorm;

/// The parents are x, gamma and, if there is one, beta.
impl<B: LayerNormPrimitives, const N: usize> Backward<B, N> for LayerNorm {
    type State = State<B>;

    fn backward(self, ops: Ops<State<B>, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let parents = ops.parents.map(|parent| parent.map(|node| node.id));
        let parameters = ops.state.parameters(&parents, false);
        let [dx, _] = ops.state.backward(dy, None, parameters, grads);
        if let Some(node) = parents[0] {
            grads.register::<B>(node, dx);
        }
    }
}

/// The gradients that reached the two results of a [`Join`].
#[derive(Debug)]
struct Arrived<B: Backend> {
    dy: Option<FloatTensor<B>>,
    dsum: Option<FloatTensor<B>>,
}

type Letterbox<B> = Arc<Mutex<Arrived<B>>>;

fn with_arrived<B: Backend, T>(
    letterbox: &Letterbox<B>,
    then: impl FnOnce(&mut Arrived<B>) -> T,
) -> T {
    then(&mut letterbox.lock().unwrap_or_else(PoisonError::into_inner))
}

/// As [`record`], with a residual. An operation of Burn's graph has one result. So the one that computes
/// has none that anybody sees, and two behind it, one for each of its results, leave their gradients in
/// its letterbox. The graph runs it after both of them, and it makes all gradients in one kernel.
fn record_join<B, C: CheckpointStrategy, const N: usize>(
    nodes: [NodeGuard; N],
    inputs: Inputs<B>,
    settings: Settings,
) -> Normalized<Autodiff<B, C>>
where
    B: LayerNormPrimitives + DropoutPrimitives,
{
    let letterbox: Letterbox<B> = Arc::new(Mutex::new(Arrived { dy: None, dsum: None }));
    let (join, y, sum) = match Join.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let (state, Normalized { y, sum }) = State::forward(inputs, settings);
            let sum = sum.into_option().unwrap_or_else(|| y.clone());
            (prep.finish((state, letterbox.clone()), sum.clone()), y, sum)
        }
        OpsKind::UnTracked(prep) => {
            let Normalized { y, sum } = normalized(inputs, settings);
            let sum = sum.into_option().unwrap_or_else(|| y.clone());
            (prep.finish(sum.clone()), y, sum)
        }
    };
    let result = |tensor, which| match Leave.prepare::<C>([join.node()]).compute_bound().stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((which, letterbox.clone()), tensor),
        OpsKind::UnTracked(prep) => prep.finish(tensor),
    };
    Normalized { y: result(y, Which::Normalized), sum: Optional::Present(result(sum, Which::Sum)) }
}

/// Which result of a [`Join`].
#[derive(Clone, Copy, Debug)]
enum Which {
    Normalized,
    Sum,
}

#[derive(Debug)]
struct Leave;

impl<B: LayerNormPrimitives> Backward<B, 1> for Leave {
    type State = (Which, Letterbox<B>);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (which, letterbox) = ops.state;
        with_arrived(&letterbox, |arrived| match which {
            Which::Normalized => arrived.dy = Some(gradient),
            Which::Sum => arrived.dsum = Some(gradient),
        });
    }
}

#[derive(Debug)]
struct Join;

/// The parents are x, gamma, the residual and, if they are there, beta and the residual's bias.
impl<B: LayerNormPrimitives + DropoutPrimitives, const N: usize> Backward<B, N> for Join {
    type State = (State<B>, Letterbox<B>);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let parents = ops.parents.map(|parent| parent.map(|node| node.id));
        let (state, letterbox) = ops.state;
        let parameters = state.parameters(&parents, true);
        let (dy, dsum) =
            with_arrived(&letterbox, |arrived| (arrived.dy.take(), arrived.dsum.take()));
        let gradients = match (dy, dsum) {
            (Some(dy), dsum) => state.backward(dy, dsum, parameters, grads),
            (None, Some(dsum)) => {
                let dresidual = match state.settings.dropout {
                    Some(dropout) => B::dropped(dsum.clone(), Optional::Absent, dropout),
                    None => dsum.clone(),
                };
                if let (Some(node), Some(dtype)) =
                    (parameters.residual_bias, state.dtypes.residual_bias)
                {
                    grads.register::<B>(node, cast::<B>(sum_of_rows::<B>(&dresidual), dtype));
                }
                [dsum, dresidual]
            }
            (None, None) => return,
        };
        for (node, gradient) in [parents[0], parents[2]].into_iter().zip(gradients) {
            if let Some(node) = node {
                grads.register::<B>(node, gradient);
            }
        }
    }
}

/// The sum of all rows, as long as the last dimension.
fn sum_of_rows<B: Backend>(tensor: &FloatTensor<B>) -> FloatTensor<B> {
    let shape = tensor.shape();
    let width = shape[shape.num_dims() - 1];
    let rows = shape.num_elements() / width.max(1);
    let sum = B::float_sum_dim(B::float_reshape(tensor.clone(), [rows, width].into()), 0);
    B::float_reshape(sum, [width].into())
}
