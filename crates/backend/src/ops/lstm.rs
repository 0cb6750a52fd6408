//! A long short-term memory (LSTM) over a sequence, as one operation with a hand-written gradient.
//!
//! By Burn's operations each time step has eight products forward and sixteen backward, and adds to the gradient of each
//! weight. Here a step has one product each way, and the gradient of the weight is one product over all steps.

use crate::tensors::{cast, wide};
#[cfg(feature = "gpu")]
use crate::{
    declined::served,
    ops::attention::cube::f32_precision,
    tensors::{contiguous_buffer, contiguous_tensor},
};
#[cfg(feature = "gpu")]
use blackburn_kernels::lstm::{LstmProblem, LstmSaved, lstm_backward, lstm_forward};
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
    tensor::{DType, FloatDType, Shape, Slice, Tensor, s},
};
#[cfg(feature = "gpu")]
use burn_backend::cubecl::dtype_to_elem_type;
#[cfg(feature = "gpu")]
use burn_cubecl::{CubeBackend, tensor::CubeTensor};

#[cfg(feature = "gpu")]
const OP: &str = "lstm";
/// Gates of a cell: input, forget, candidate and output.
const GATES: usize = 4;

/// What a sequence makes, and what its gradients need of that.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Sequence<B: Backend> {
    /// The hidden states, and the last cell state behind them: `[steps + 1, batch, hidden]`.
    pub out: FloatTensor<B>,
    /// The gates behind their functions: `[steps, batch, 4 hidden]`.
    pub gates: FloatTensor<B>,
    /// The first cell state and that of each step, in the order of the walk, in f32: `[steps + 1, batch, hidden]`.
    pub cells: FloatTensor<B>,
    /// The hidden state in front of each step: `[steps, batch, hidden]`.
    pub hidden: FloatTensor<B>,
}

/// The gradients.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub struct Gradients<B: Backend> {
    /// Of what the input gives the gates.
    pub dprojected: FloatTensor<B>,
    /// Of the weight.
    pub dweight: FloatTensor<B>,
    /// Of the first hidden state.
    pub dh: FloatTensor<B>,
    /// Of the first cell state, in f32.
    pub dc: FloatTensor<B>,
}

/// An LSTM and its gradients by themselves, not differentiable. Shapes are those of [`lstm`]; the cell state is in f32.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait LstmPrimitives: Backend {
    /// All steps, from the last one on if `reverse`.
    #[fusion(meta = sequence)]
    fn lstm_forward(
        projected: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        h: FloatTensor<Self>,
        c: FloatTensor<Self>,
        reverse: bool,
    ) -> Sequence<Self>;

    /// The gradients, given that of what forward made.
    #[fusion(meta = gradients)]
    fn lstm_backward(
        gates: FloatTensor<Self>,
        cells: FloatTensor<Self>,
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        dout: FloatTensor<Self>,
        reverse: bool,
    ) -> Gradients<Self>;
}

#[cfg(feature = "gpu")]
fn sequence(
    projected: &TensorSpec,
    _weight: &TensorSpec,
    h: &TensorSpec,
    c: &TensorSpec,
    _reverse: &bool,
) -> SequenceMetadata {
    let (steps, [batch, hidden]) = (projected.shape[0], [h.shape[0], h.shape[1]]);
    let states = |steps, dtype| TensorSpec::new(Shape::new([steps, batch, hidden]), dtype);
    SequenceMetadata {
        out: states(steps + 1, projected.dtype),
        gates: projected.clone(),
        cells: states(steps + 1, c.dtype),
        hidden: states(steps, projected.dtype),
    }
}

#[cfg(feature = "gpu")]
fn gradients(
    gates: &TensorSpec,
    cells: &TensorSpec,
    hidden: &TensorSpec,
    weight: &TensorSpec,
    _dout: &TensorSpec,
    _reverse: &bool,
) -> GradientsMetadata {
    let state = Shape::new([hidden.shape[1], hidden.shape[2]]);
    GradientsMetadata {
        dprojected: gates.clone(),
        dweight: weight.clone(),
        dh: TensorSpec::new(state.clone(), hidden.dtype),
        dc: TensorSpec::new(state, cells.dtype),
    }
}

#[cfg(feature = "flex")]
impl LstmPrimitives for burn::backend::Flex {
    fn lstm_forward(
        projected: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        h: FloatTensor<Self>,
        c: FloatTensor<Self>,
        reverse: bool,
    ) -> Sequence<Self> {
        composed::<Self>(projected, weight, h, c, reverse)
    }

    fn lstm_backward(
        gates: FloatTensor<Self>,
        cells: FloatTensor<Self>,
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        dout: FloatTensor<Self>,
        reverse: bool,
    ) -> Gradients<Self> {
        composed_backward::<Self>([gates, cells, hidden], weight, dout, reverse)
    }
}

#[cfg(feature = "gpu")]
impl LstmPrimitives for CubeBackend {
    fn lstm_forward(
        projected: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        h: FloatTensor<Self>,
        c: FloatTensor<Self>,
        reverse: bool,
    ) -> Sequence<Self> {
        let problem = problem(&projected, reverse);
        let [of_input, by, first_h, first_c] =
            [&projected, &weight, &h, &c].map(|tensor| contiguous_buffer(tensor.clone()));
        let made = lstm_forward(&h.client, &problem, &of_input, &by, [&first_h, &first_c]);
        let Some(made) = served(OP, made) else {
            return composed::<Self>(projected, weight, h, c, reverse);
        };
        let LstmProblem { steps, batch, hidden, .. } = problem;
        let states = |buffer, steps, dtype| {
            contiguous_tensor(&h, buffer, Shape::new([steps, batch, hidden]), dtype)
        };
        let LstmSaved { gates, cells, hidden: before } = made.saved;
        Sequence {
            out: states(made.out, steps + 1, h.dtype),
            gates: contiguous_tensor(&h, gates, projected.shape(), h.dtype),
            cells: states(cells, steps + 1, DType::F32),
            hidden: states(before, steps, h.dtype),
        }
    }

    fn lstm_backward(
        gates: FloatTensor<Self>,
        cells: FloatTensor<Self>,
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        dout: FloatTensor<Self>,
        reverse: bool,
    ) -> Gradients<Self> {
        let problem = problem(&gates, reverse);
        let [of_gates, of_cells, before, by, of_out] = [&gates, &cells, &hidden, &weight, &dout]
            .map(|tensor| contiguous_buffer(tensor.clone()));
        let saved = LstmSaved { gates: of_gates, cells: of_cells, hidden: before };
        let made = lstm_backward(&dout.client, &problem, &saved, &by, &of_out);
        let Some(made) = served(OP, made) else {
            return composed_backward::<Self>([gates, cells, hidden], weight, dout, reverse);
        };
        let state = Shape::new([problem.batch, problem.hidden]);
        Gradients {
            dprojected: contiguous_tensor(&dout, made.dprojected, gates.shape(), gates.dtype),
            dweight: contiguous_tensor(&dout, made.dweight, weight.shape(), weight.dtype),
            dh: contiguous_tensor(&dout, made.dh, state.clone(), dout.dtype),
            dc: contiguous_tensor(&dout, made.dc, state, DType::F32),
        }
    }
}

/// What is asked of gates `[steps, batch, 4 hidden]`.
#[cfg(feature = "gpu")]
fn problem(gates: &CubeTensor, reverse: bool) -> LstmProblem {
    let shape = gates.shape();
    LstmProblem {
        steps: shape[0],
        batch: shape[1],
        hidden: shape[2] / GATES,
        reverse,
        dtype: dtype_to_elem_type(gates.dtype),
        f32_precision: f32_precision(),
    }
}

/// The places of steps in the order of the walk.
fn walk(steps: usize, reverse: bool) -> Vec<usize> {
    if reverse { (0..steps).rev().collect() } else { (0..steps).collect() }
}

/// A step of `[steps, batch, width]`, as `[batch, width]`.
fn step_of<B: Backend>(all: &FloatTensor<B>, step: usize) -> FloatTensor<B> {
    let shape = all.shape();
    let slices = [Slice::from(step..step + 1), Slice::full(), Slice::full()];
    let step = B::float_slice(all.clone(), &slices);
    B::float_reshape(step, Shape::new([shape[1], shape[2]]))
}

/// Steps `[batch, width]` as one tensor.
fn stacked<B: Backend>(steps: Vec<FloatTensor<B>>) -> FloatTensor<B> {
    let one = |step: FloatTensor<B>| {
        let shape = step.shape();
        B::float_reshape(step, Shape::new([1, shape[0], shape[1]]))
    };
    B::float_cat(steps.into_iter().map(one).collect(), 0)
}

/// The gates of `[batch, 4 hidden]`.
fn gates_of<B: Backend>(all: &FloatTensor<B>) -> [FloatTensor<B>; GATES] {
    let hidden = all.shape()[1] / GATES;
    [0, 1, 2, 3].map(|gate| {
        let columns = Slice::from(gate * hidden..(gate + 1) * hidden);
        B::float_slice(all.clone(), &[Slice::full(), columns])
    })
}

/// `1 - x`.
fn rest<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_add_scalar(B::float_neg(x), 1f32.into())
}

/// By a backend's own operations.
fn composed<B: Backend>(
    projected: FloatTensor<B>,
    weight: FloatTensor<B>,
    h: FloatTensor<B>,
    c: FloatTensor<B>,
    reverse: bool,
) -> Sequence<B> {
    let (dtype, steps) = (projected.dtype(), projected.shape()[0]);
    let (mut h, mut c) = (h, c);
    let mut cells = vec![c.clone()];
    let mut at = vec![None; steps];
    for step in walk(steps, reverse) {
        let product = B::float_matmul(h.clone(), weight.clone());
        let [of_input, product] = [step_of::<B>(&projected, step), product].map(wide::<B>);
        let [taken, kept, candidate, shown] = gates_of::<B>(&B::float_add(of_input, product));
        let [taken, kept, shown] = [taken, kept, shown].map(B::sigmoid);
        let candidate = B::float_tanh(candidate);
        let before = h;
        c = B::float_add(
            B::float_mul(kept.clone(), wide::<B>(c)),
            B::float_mul(taken.clone(), candidate.clone()),
        );
        h = cast::<B>(B::float_mul(shown.clone(), B::float_tanh(c.clone())), dtype);
        cells.push(c.clone());
        let gates = B::float_cat(vec![taken, kept, candidate, shown], 1);
        at[step] = Some((h.clone(), cast::<B>(gates, dtype), before));
    }
    let (mut out, mut gates, mut hidden) = (Vec::new(), Vec::new(), Vec::new());
    for (made, of_step, before) in at.into_iter().flatten() {
        out.push(made);
        gates.push(of_step);
        hidden.push(before);
    }
    out.push(cast::<B>(c, dtype));
    let [out, gates, cells, hidden] = [out, gates, cells, hidden].map(stacked::<B>);
    Sequence { out, gates, cells, hidden }
}

fn composed_backward<B: Backend>(
    [gates, cells, hidden]: [FloatTensor<B>; 3],
    weight: FloatTensor<B>,
    dout: FloatTensor<B>,
    reverse: bool,
) -> Gradients<B> {
    let (dtype, steps) = (gates.dtype(), gates.shape()[0]);
    let turned = B::float_swap_dims(weight, 0, 1);
    let mut dc = wide::<B>(step_of::<B>(&dout, steps));
    let mut behind: Option<FloatTensor<B>> = None;
    let mut at = vec![None; steps];
    for (walked, step) in walk(steps, reverse).into_iter().enumerate().rev() {
        let [taken, kept, candidate, shown] = gates_of::<B>(&wide::<B>(step_of::<B>(&gates, step)));
        let before = wide::<B>(step_of::<B>(&cells, walked));
        let c = B::float_tanh(wide::<B>(step_of::<B>(&cells, walked + 1)));
        let mut dh = wide::<B>(step_of::<B>(&dout, step));
        if let Some(da) = behind.take() {
            dh = B::float_add(dh, wide::<B>(B::float_matmul(da, turned.clone())));
        }
        let flat = |x: &FloatTensor<B>| rest::<B>(B::float_mul(x.clone(), x.clone()));
        let slope = |x: &FloatTensor<B>| B::float_mul(x.clone(), rest::<B>(x.clone()));
        let through = B::float_mul(B::float_mul(dh.clone(), shown.clone()), flat(&c));
        dc = B::float_add(dc, through);
        let all = vec![
            B::float_mul(B::float_mul(dc.clone(), candidate.clone()), slope(&taken)),
            B::float_mul(B::float_mul(dc.clone(), before), slope(&kept)),
            B::float_mul(B::float_mul(dc.clone(), taken), flat(&candidate)),
            B::float_mul(B::float_mul(dh, c), slope(&shown)),
        ];
        dc = B::float_mul(dc, kept);
        let da = cast::<B>(B::float_cat(all, 1), dtype);
        at[step] = Some(da.clone());
        behind = Some(da);
    }
    let [batch, width] = [hidden.shape()[1], hidden.shape()[2]];
    let dh = match behind {
        Some(da) => B::float_matmul(da, turned),
        None => step_of::<B>(&dout, 0),
    };
    let dprojected = stacked::<B>(at.into_iter().flatten().collect());
    let rows = |x: FloatTensor<B>, width| B::float_reshape(x, Shape::new([steps * batch, width]));
    let of_states = B::float_swap_dims(rows(hidden, width), 0, 1);
    let dweight = B::float_matmul(of_states, rows(dprojected.clone(), GATES * width));
    Gradients { dprojected, dweight, dh, dc }
}

/// An LSTM, differentiable in all it reads.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Autodiff,
)]
pub trait LstmOps: Backend {
    /// The hidden states, and the last cell state behind them.
    fn lstm_of(
        projected: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        h: FloatTensor<Self>,
        c: FloatTensor<Self>,
        reverse: bool,
    ) -> FloatTensor<Self>;
}

on_plain_backends! {
    impl LstmOps by LstmPrimitives {
        fn lstm_of(
            projected: FloatTensor<Self>,
            weight: FloatTensor<Self>,
            h: FloatTensor<Self>,
            c: FloatTensor<Self>,
            reverse: bool,
        ) -> FloatTensor<Self> {
            Self::lstm_forward(projected, weight, h, c, reverse).out
        }
    }
}

impl<B: LstmPrimitives, C: CheckpointStrategy> LstmOps for Autodiff<B, C> {
    fn lstm_of(
        projected: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        h: FloatTensor<Self>,
        c: FloatTensor<Self>,
        reverse: bool,
    ) -> FloatTensor<Self> {
        let ((projected, of_projected), (weight, of_weight)) =
            (projected.into_parts(), weight.into_parts());
        let ((h, of_h), (c, of_c)) = (h.into_parts(), c.into_parts());
        let made = B::lstm_forward(projected, weight.clone(), h, c, reverse);
        let Sequence { out, gates, cells, hidden } = made;
        let nodes = [of_projected, of_weight, of_h, of_c];
        match LstmStep.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(([gates, cells, hidden], weight, reverse), out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }
}

#[derive(Debug)]
struct LstmStep;

/// Of what the input gives, the weight and the first states.
impl<B: LstmPrimitives> Backward<B, 4> for LstmStep {
    type State = ([FloatTensor<B>; 3], FloatTensor<B>, bool);

    fn backward(self, ops: Ops<Self::State, 4>, grads: &mut Registry, _: &mut Checkpointer) {
        let dout = grads.consume::<B>(&ops.node);
        let ([gates, cells, hidden], weight, reverse) = ops.state;
        let Gradients { dprojected, dweight, dh, dc } =
            B::lstm_backward(gates, cells, hidden, weight, dout, reverse);
        for (parent, gradient) in ops.parents.into_iter().zip([dprojected, dweight, dh, dc]) {
            if let Some(node) = parent {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

/// The hidden states of an LSTM, and its last cell state.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | projected: what the input and the biases give the gates | `[steps, batch, 4 hidden]` | any float |
/// | weight of the hidden state | `[hidden, 4 hidden]` | that of projected |
/// | h, c: the first states | `[batch, hidden]` | any float |
/// | hidden states | `[steps, batch, hidden]` | that of projected |
/// | last cell state | `[batch, hidden]` | that of projected |
///
/// The gates lie side by side: input, forget, candidate and output. With `reverse` the last step comes first. Cell states
/// are kept in f32 between steps. All four are differentiable.
///
/// # Panics
///
/// When shapes, dtypes or devices do not go together, or there are no steps.
pub fn lstm(
    projected: Tensor<3>,
    weight: Tensor<2>,
    h: Tensor<2>,
    c: Tensor<2>,
    reverse: bool,
) -> (Tensor<3>, Tensor<2>) {
    let [steps, batch, width] = projected.dims();
    let hidden = width / GATES;
    let dtype = projected.dtype();
    assert!(
        steps > 0 && width == GATES * hidden,
        "lstm: argument `projected`: expected at least one step, and a multiple of 4 columns, got {:?}",
        projected.dims()
    );
    let expected = |argument: &str, shape: [usize; 2], tensor: &Tensor<2>| {
        assert!(
            tensor.dims() == shape,
            "lstm: argument `{argument}`: expected {shape:?} for gates of {:?}, got {:?}",
            [steps, batch, width],
            tensor.dims()
        );
        let device = tensor.device().without_autodiff();
        let of_gates = projected.device().without_autodiff();
        assert!(
            device == of_gates,
            "lstm: argument `{argument}`: expected a tensor on {of_gates:?}, got one on {device:?}"
        );
    };
    expected("weight", [hidden, width], &weight);
    expected("h", [batch, hidden], &h);
    expected("c", [batch, hidden], &c);
    assert!(
        weight.dtype() == dtype,
        "lstm: argument `weight`: expected {dtype:?}, as the gates are, got {:?}",
        weight.dtype()
    );
    let of_cells = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let [h, c] =
        [(h, dtype), (c, of_cells)].map(|(state, dtype)| state.cast(FloatDType::from(dtype)));
    let out = <Dispatch as LstmOps>::lstm_of(
        projected.into_dispatch(),
        weight.into_dispatch(),
        h.into_dispatch(),
        c.into_dispatch(),
        reverse,
    );
    let out = Tensor::<3>::from_dispatch(out);
    let last = out.clone().slice(s![steps..steps + 1, .., ..]).squeeze_dim::<2>(0);
    (out.slice(s![..steps, .., ..]), last)
}
