//! Rotary position embedding in one pass each way. Backward turns the gradient back, and keeps nothing of the rows.
//!
//! By Burn's operations, rows are multiplied by a matrix of signs, which makes two numbers of each, then by the table,
//! and added up. They fail where rows are in 16 bits and the table is not.

use crate::tensors::{cast, wide};
#[cfg(feature = "gpu")]
use crate::{
    declined::served,
    ops::fp8_linear::magnitudes,
    tensors::{Location, contiguous, rows},
};
#[cfg(feature = "gpu")]
use blackburn_kernels::{
    Pass,
    attention::{HeadStrides, Order},
    buffer::Buffer,
    rotary::{RotaryProblem, rotary as rotary_kernel, rotary_watched},
};
#[cfg(feature = "gpu")]
use burn::{backend::fusion::custom::TensorSpec, tensor::DType};
use burn::{
    backend::{
        Autodiff, Backend, Dispatch, TensorMetadata,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
        backend_extension,
        tensor::FloatTensor,
    },
    tensor::{Shape, Slice, Tensor},
};
#[cfg(feature = "gpu")]
use burn_backend::cubecl::dtype_to_elem_type;
#[cfg(feature = "gpu")]
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
#[cfg(feature = "gpu")]
use burn_std::Metadata;

#[cfg(feature = "gpu")]
const OP: &str = "BlackburnRotary";

/// How rows are turned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Position of the first row.
    pub start: usize,
    /// Whether what comes in is the gradient of turned rows, and that of the rows is asked for.
    pub is_gradient: bool,
}

/// Rows turned by a table. It is not differentiable.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "gpu"),
)]
pub trait RotaryPrimitives: Backend {
    /// `x`, `[.., seq, d_model]`, by a table `[positions, d_model, 2]`.
    #[fusion(meta = like_x)]
    fn rotary_turned(
        x: FloatTensor<Self>,
        table: FloatTensor<Self>,
        turn: Turn,
    ) -> FloatTensor<Self>;
}

#[cfg(feature = "gpu")]
fn like_x(x: &TensorSpec, _table: &TensorSpec, _turn: &Turn) -> TensorSpec {
    x.clone()
}

#[cfg(feature = "flex")]
impl RotaryPrimitives for burn::backend::Flex {
    fn rotary_turned(
        x: FloatTensor<Self>,
        table: FloatTensor<Self>,
        turn: Turn,
    ) -> FloatTensor<Self> {
        composed::<Self>(x, table, turn)
    }
}

#[cfg(feature = "gpu")]
impl RotaryPrimitives for CubeBackend {
    fn rotary_turned(
        x: FloatTensor<Self>,
        table: FloatTensor<Self>,
        turn: Turn,
    ) -> FloatTensor<Self> {
        if x.dtype == DType::F64 {
            return composed::<Self>(x, table, turn);
        }
        let positions = table.shape()[0];
        let by = rows(cast::<Self>(table.clone(), DType::F32));
        let x = with_whole_rows(x);
        let problem = problem(&x, turn.start, positions);
        // Asked first: what is let go of below is not there for Burn's operations.
        if served(OP, problem.check(&span(&x, &problem), &by)).is_none() {
            return composed::<Self>(x, table, turn);
        }
        let pass = if turn.is_gradient { Pass::Backward } else { Pass::Forward };
        let (like, shape, dtype) = (Location::of(&x), x.shape(), x.dtype);
        let memory = span(&x, &problem);
        // The last to hold its memory may have the result there.
        drop(x);
        // Turned rows go to attention, and their gradients to products.
        let turned = match turn.is_gradient && magnitudes::are_wanted() {
            true => rotary_watched(&like.client, &problem, pass, memory, &by),
            false => rotary_kernel(&like.client, &problem, pass, memory, &by).map(|y| (y, None)),
        };
        let (y, of_y) = turned.unwrap_or_else(|error| panic!("{error}"));
        magnitudes::keep(&y, of_y);
        let strides = strides(&shape, problem.out_strides());
        let meta = Metadata::new(shape, &strides[..]);
        CubeTensor::new(like.client, y.handle, meta, like.device, dtype)
    }
}

/// The tensor, copied unless the elements of its rows lie side by side, and all dimensions but the last three are
/// walked by one stride.
#[cfg(feature = "gpu")]
fn with_whole_rows(x: CubeTensor) -> CubeTensor {
    let (shape, strides) = (x.shape(), x.meta.strides());
    let rank = shape.num_dims();
    let is_whole = shape[rank - 1] == 1 || strides[rank - 1] == 1;
    let leading = rank.saturating_sub(3);
    let is_even = |stride: usize| stride.is_multiple_of(2);
    let are_even = (0..rank - 1).all(|dim| shape[dim] == 1 || is_even(strides[dim]));
    let is_plain = !x.meta.is_tiled() && x.qparams.is_none();
    if is_plain
        && is_whole
        && are_even
        && one_stride(&shape[..leading], &strides[..leading]).is_some()
    {
        x
    } else {
        contiguous(x)
    }
}

/// The stride by which these dimensions are walked in order, if there is one. One of size 1 has no say.
#[cfg(feature = "gpu")]
fn one_stride(shape: &[usize], strides: &[usize]) -> Option<usize> {
    let mut dims = shape.iter().zip(strides).rev().filter(|(size, _)| **size != 1);
    let Some((size, stride)) = dims.next() else { return Some(0) };
    let mut next = size * stride;
    for (size, stride) in dims {
        if *stride != next {
            return None;
        }
        next = size * stride;
    }
    Some(*stride)
}

/// What is asked of rows that [`with_whole_rows`] gave: its last three dimensions are heads, rows and columns.
#[cfg(feature = "gpu")]
fn problem(x: &CubeTensor, start: usize, positions: usize) -> RotaryProblem {
    let (shape, strides) = (x.shape(), x.meta.strides());
    let rank = shape.num_dims();
    let leading = rank.saturating_sub(3);
    let [heads, head] = if rank > 2 { [shape[leading], strides[leading]] } else { [1, 0] };
    let [seq, row] = [shape[rank - 2], strides[rank - 2]];
    let batch = one_stride(&shape[..leading], &strides[..leading]).unwrap_or_default();
    RotaryProblem {
        batch: shape[..leading].iter().product(),
        heads,
        seq,
        head_dim: shape[rank - 1],
        dtype: dtype_to_elem_type(x.dtype),
        strides: HeadStrides { batch, head, row },
        order: if heads > 1 && seq > 1 && head < row {
            Order::PositionsFirst
        } else {
            Order::HeadsFirst
        },
        start,
        positions,
    }
}

/// The memory that its elements span.
#[cfg(feature = "gpu")]
fn span(x: &CubeTensor, problem: &RotaryProblem) -> Buffer {
    Buffer { handle: x.handle.clone(), elements: problem.span(), dtype: problem.dtype }
}

/// Strides of a tensor of that shape, of which those of the last dimensions are known.
#[cfg(feature = "gpu")]
fn strides(shape: &Shape, of: HeadStrides) -> Vec<usize> {
    let mut next = of.batch;
    let known = [1, of.row, of.head];
    let mut strides: Vec<usize> = (0..shape.num_dims())
        .map(|from_last| {
            let dim = shape.num_dims() - 1 - from_last;
            known.get(from_last).copied().unwrap_or_else(|| {
                let stride = next;
                next *= shape[dim];
                stride
            })
        })
        .collect();
    strides.reverse();
    strides
}

/// By a backend's own operations, with one rounding as the kernel has.
fn composed<B: Backend>(x: FloatTensor<B>, table: FloatTensor<B>, turn: Turn) -> FloatTensor<B> {
    let (shape, dtype) = (x.shape(), x.dtype());
    if shape.num_elements() == 0 {
        return x;
    }
    let rank = shape.num_dims();
    let [seq, d_model] = [shape[rank - 2], shape[rank - 1]];
    let outer = shape.num_elements() / (seq * d_model);
    let x = B::float_reshape(wide::<B>(x), Shape::new([outer, seq, d_model / 2, 2]));
    let part = |tensor: &FloatTensor<B>, dim: usize, index: usize| {
        let mut slices = vec![Slice::full(); tensor.shape().num_dims()];
        slices[dim] = Slice::from(index..index + 1);
        B::float_slice(tensor.clone(), &slices)
    };
    let table = cast::<B>(table, x.dtype());
    let rows = [Slice::from(turn.start..turn.start + seq), Slice::full(), Slice::full()];
    let table = B::float_slice(table, &rows);
    let table = B::float_reshape(table, Shape::new([seq, d_model / 2, 2, 2]));
    let of = |column: usize, which: usize| {
        let one = part(&part(&table, 2, column), 3, which);
        B::float_reshape(one, Shape::new([1, seq, d_model / 2, 1]))
    };
    let [even, odd] = [0, 1].map(|column| part(&x, 3, column));
    // A matrix [[c0, -s0], [s1, c1]] for each pair, or its transpose.
    let [of_odd, of_even] = match turn.is_gradient {
        false => [B::float_neg(of(0, 1)), of(1, 1)],
        true => [of(1, 1), B::float_neg(of(0, 1))],
    };
    let sum = |own: (FloatTensor<B>, FloatTensor<B>), partner: (FloatTensor<B>, FloatTensor<B>)| {
        B::float_add(B::float_mul(own.0, own.1), B::float_mul(partner.0, partner.1))
    };
    let turned = [
        sum((even.clone(), of(0, 0)), (odd.clone(), of_odd)),
        sum((odd, of(1, 0)), (even, of_even)),
    ];
    cast::<B>(B::float_reshape(B::float_cat(turned.into(), 3), shape), dtype)
}

/// Rows turned by a table, differentiable in the rows.
#[backend_extension(
    Cube: cfg(feature = "gpu"),
    Flex: cfg(feature = "flex"),
    Autodiff,
)]
pub trait RotaryOps: Backend {
    /// `x`, `[.., seq, d_model]`, by a table `[positions, d_model, 2]`.
    fn rotary_of(x: FloatTensor<Self>, table: FloatTensor<Self>, start: usize)
    -> FloatTensor<Self>;
}

on_plain_backends! {
    impl RotaryOps by RotaryPrimitives {
        fn rotary_of(
            x: FloatTensor<Self>,
            table: FloatTensor<Self>,
            start: usize,
        ) -> FloatTensor<Self> {
            Self::rotary_turned(x, table, Turn { start, is_gradient: false })
        }
    }
}

impl<B: RotaryPrimitives, C: CheckpointStrategy> RotaryOps for Autodiff<B, C> {
    fn rotary_of(
        x: FloatTensor<Self>,
        table: FloatTensor<Self>,
        start: usize,
    ) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let (table, _) = table.into_parts();
        let y = B::rotary_turned(x, table.clone(), Turn { start, is_gradient: false });
        match RotaryStep.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((table, start), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

#[derive(Debug)]
struct RotaryStep;

/// Of the rows. The state is the table, and the position of the first row.
impl<B: RotaryPrimitives> Backward<B, 1> for RotaryStep {
    type State = (FloatTensor<B>, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let ((table, start), [parent]) = (ops.state, ops.parents);
        if let Some(node) = parent {
            let turn = Turn { start, is_gradient: true };
            grads.register::<B>(node.id, B::rotary_turned(dy, table, turn));
        }
    }
}

/// The rows of `x`, of which the first stands at position `start`, turned by `table`: columns 2i and 2i + 1 of the row
/// at position p, as a point of the plane, by the angle with `table[p, 2i]` as cosine and sine. Computed in f32 and
/// rounded once. The result lies in memory as `x` does.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | x, result | `[.., seq, d_model]` | any float |
/// | table | `[positions, d_model, 2]`, both columns of a pair alike: `freq_complex` of `burn::nn::RotaryEncoding` | any float |
///
/// Backward turns the gradient back by the table, and nothing of `x` is kept for it. The table has no gradient.
///
/// # Panics
///
/// When `x` has fewer than two dimensions or is on another device than the table, when `d_model` is odd or differs
/// between the two, and when the table ends before the last row.
pub fn rotary<const D: usize>(x: Tensor<D>, table: Tensor<3>, start: usize) -> Tensor<D> {
    let [positions, d_model, two] = table.dims();
    let dims = x.dims();
    assert!(D >= 2, "rotary: argument `x`: expected at least 2 dimensions, got {D}");
    assert!(
        two == 2 && d_model.is_multiple_of(2),
        "rotary: argument `table`: expected [positions, d_model, 2] with an even d_model, got \
         [{positions}, {d_model}, {two}]"
    );
    assert!(
        dims[D - 1] == d_model,
        "rotary: argument `x`: expected {d_model} columns, as the table has, got {dims:?}"
    );
    let seq = dims[D - 2];
    assert!(
        start.checked_add(seq).is_some_and(|end| end <= positions),
        "rotary: argument `start`: expected at most {}, for {seq} rows and a table of {positions} positions, got \
         {start}",
        positions.saturating_sub(seq)
    );
    let [expected, actual] = [table.device(), x.device()].map(|device| device.without_autodiff());
    assert!(
        expected == actual,
        "rotary: argument `x`: expected {expected:?}, where the table is, got {actual:?}"
    );
    Tensor::from_dispatch(<Dispatch as RotaryOps>::rotary_of(
        x.into_dispatch(),
        table.into_dispatch(),
        start,
    ))
}
