//! Reductions that Burn fused with element-wise operations, run one after the other.
//!
//! A fused reduction of Burn's gives each output one unit, which walks through all that the output is made of: other
//! routines are for its autotuner, which is left out. Where outputs are few, that takes up to a thousand times as long as
//! the memory does. [`Apart`] runs the same operations with the element-wise ones fused among themselves and each
//! reduction on the kernels that take it where it is alone. That is more launches and more passes over memory, so sizes
//! decide when they are known. The variance of rows runs apart at any size. Squares of a variance are summed as they are made.

use super::prepare;
use crate::{
    declined::unsupported,
    fused::{
        column_sum::Sum,
        reduce::{Reduction, suits_units},
        row_sum::RowSum,
    },
    stream::{Done, Part, Replacement, SingleOperation, is_last},
    tensors::{
        Input, Tensors, consume, contiguous_buffer, contiguous_tensor, cube_tensor, known_output,
        register_cube_tensor, rows_of,
    },
};
use blackburn_kernels::{
    DeviceProfile, KernelError,
    buffer::{Buffer, Rows},
    column_sum::{ColumnSumProblem, column_squares},
    row_sum::row_squares,
};
use burn_backend::cubecl::dtype_to_elem_type;
use burn_cubecl::{CubeDevice, tensor::CubeTensor};
use burn_cubecl_fusion::{
    FallbackOperation,
    optim::{
        CubeOptimization, CubeOptimizationState,
        elemwise::{ElementWiseFuser, ElemwiseOptimization},
    },
};
use burn_fusion::{NumOperations, OperationFuser};
use burn_ir::{NumericOperationIr, OperationIr, TensorIr, TensorStatus};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What an output is made of that one unit walks through in the time of the launches that running apart adds.
const FEW_ELEMENTS: usize = 128;

/// A reduction on the kernels that take it where it is alone.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Alone {
    Columns(Sum),
    Rows(RowSum),
    Squares(CenteredSquares),
    Other(Reduction),
}

/// The sum, along a dimension, of squared distances from means.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct CenteredSquares {
    x: TensorIr,
    means: TensorIr,
    out: TensorIr,
    axis: usize,
}

impl CenteredSquares {
    const OP: &'static str = "variance";
    /// A difference, its product with itself, and a sum.
    const OPERATIONS: usize = 3;

    /// At the beginning of `operations`, where nobody else reads what is made in between.
    fn at(operations: &[OperationIr]) -> Option<Self> {
        use NumericOperationIr::{Mul, Sub, SumDim};
        use OperationIr::NumericFloat;
        let [
            NumericFloat(_, Sub(centered)),
            NumericFloat(_, Mul(squared)),
            NumericFloat(_, SumDim(sum)),
            ..,
        ] = operations
        else {
            return None;
        };
        let is_square = [&squared.lhs, &squared.rhs].iter().all(|of| of.id == centered.out.id);
        let is_last_use = |tensor: &TensorIr| tensor.status == TensorStatus::ReadWrite;
        let is_dead =
            [&squared.lhs, &squared.rhs].into_iter().any(is_last_use) && is_last_use(&sum.input);
        let suits = is_square
            && is_dead
            && sum.input.id == squared.out.id
            && centered.rhs.shape == sum.out.shape
            && [&centered.lhs, &centered.rhs].iter().all(|of| of.dtype == sum.out.dtype);
        suits.then(|| Self {
            x: centered.lhs.clone(),
            means: centered.rhs.clone(),
            out: sum.out.clone(),
            axis: sum.axis,
        })
    }

    fn is_of_rows(&self) -> bool {
        is_last(self.axis, &self.x)
    }

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        let Self { x, means, out, axis } = self;
        let shape = known_output(tensors, out, Self::OP)?.shape.clone();
        let [of_x, of_means] = [x, means].map(|tensor| cube_tensor(tensors, tensor, Self::OP));
        let (of_x, of_means) = (of_x?, contiguous_buffer(of_means?));
        let lie_side_by_side = of_x.meta.shape()[axis + 1..].iter().all(|size| *size == 1);
        let y = match lie_side_by_side {
            true => squares_of_rows(&of_x, *axis, &of_means)?,
            false => squares_of_columns(&Input::of(tensors, x, Self::OP)?, *axis, &of_means)?,
        };
        register_cube_tensor(
            tensors,
            out,
            contiguous_tensor(&of_x, y, shape, out.dtype),
            Self::OP,
        )?;
        consume(tensors, x);
        consume(tensors, means);
        Ok(Done::All)
    }
}

/// Along the last dimension, or one that none but dimensions of one element follow.
fn squares_of_rows(x: &CubeTensor, axis: usize, means: &Buffer) -> Result<Buffer, KernelError> {
    let sizes = x.meta.shape();
    let columns = sizes[axis];
    let rows = match rows_of(x) {
        Some(all) if all.is_contiguous() => {
            let rows = sizes.num_elements() / columns.max(1);
            Rows { rows, columns, pitch: columns, ..all }
        }
        Some(rows) if axis + 1 == sizes.num_dims() => rows,
        _ => return Err(unsupported(CenteredSquares::OP, "rows that do not follow each other")),
    };
    row_squares(&x.client, &rows, means, 1.0)
}

fn squares_of_columns(x: &Input, axis: usize, means: &Buffer) -> Result<Buffer, KernelError> {
    let problem = ColumnSumProblem::new(&x.shape, &x.strides, axis..axis + 1, x.dtype)?;
    column_squares(&x.client, &problem, &x.buffer(problem.span()), means, 1.0)
}

impl Alone {
    fn of(operation: &OperationIr) -> Option<Self> {
        let columns = Sum::of(operation, &()).map(Self::Columns);
        columns
            .or_else(|| RowSum::of(operation, &()).map(Self::Rows))
            .or_else(|| Reduction::of(operation, &()).map(Self::Other))
    }
}

impl Replacement for Alone {
    const NAME: &'static str = Reduction::NAME;

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        match self {
            Self::Columns(sum) => sum.launch(tensors),
            Self::Rows(sum) => sum.launch(tensors),
            Self::Squares(sum) => sum.launch(tensors),
            Self::Other(reduction) => reduction.launch(tensors),
        }
    }
}

/// Some of the operations of a fusion that follow each other.
enum Piece {
    /// Element-wise operations from that one on, which are fused.
    Fused(usize, CubeOptimization),
    /// A reduction, or operations that run as Burn runs them alone.
    Part(Box<Part<Alone>>),
}

/// The operations of a fusion, in pieces.
pub(super) struct Apart {
    pieces: Vec<Piece>,
    /// What each reduction reads and makes.
    reductions: Vec<[TensorIr; 2]>,
    /// What the operations read and do not make.
    inputs: Vec<TensorIr>,
    /// Whether all they do is to find the variance of rows.
    is_variance: bool,
    multiprocessors: usize,
}

/// [`Apart`], as it is written down.
#[derive(Serialize, Deserialize)]
pub(super) struct ApartState {
    pieces: Vec<PieceState>,
    reductions: Vec<[TensorIr; 2]>,
    inputs: Vec<TensorIr>,
    is_variance: bool,
}

#[derive(Serialize, Deserialize)]
enum PieceState {
    Fused(usize, CubeOptimizationState),
    Part(Box<Part<Alone>>),
}

impl Apart {
    /// The pieces of `operations`.
    pub(super) fn of(operations: &[OperationIr], device: &CubeDevice) -> Self {
        let (mut pieces, mut reductions) = (Vec::new(), Vec::new());
        let (mut begun, mut place) = (0, 0);
        let mut is_variance = false;
        while place < operations.len() {
            let squares = CenteredSquares::at(&operations[place..]);
            let (alone, count) = match (squares, Alone::of(&operations[place])) {
                (Some(squares), _) => {
                    let of_rows = |operation: &OperationIr| {
                        operation.outputs().all(|made| made.shape == squares.out.shape)
                    };
                    let behind = place + CenteredSquares::OPERATIONS;
                    let mut others = operations[..place].iter().chain(&operations[behind..]);
                    is_variance = squares.is_of_rows() && others.all(of_rows);
                    (Alone::Squares(squares), CenteredSquares::OPERATIONS)
                }
                (None, Some(alone)) => (alone, 1),
                (None, None) => {
                    place += 1;
                    continue;
                }
            };
            pieces.extend(elementwise(begun, &operations[begun..place], device));
            let places = (place..place + count).collect();
            pieces.push(Piece::Part(Box::new(Part::Replaced(places, alone))));
            let last = &operations[place + count - 1];
            reductions.extend(last.inputs().next().zip(last.outputs().next()));
            place += count;
            begun = place;
        }
        pieces.extend(elementwise(begun, &operations[begun..], device));
        let reductions = reductions.into_iter().map(|(x, y)| [x.clone(), y.clone()]).collect();
        let made: BTreeSet<_> =
            operations.iter().flat_map(|operation| operation.outputs()).map(|out| out.id).collect();
        let read = operations.iter().flat_map(|operation| operation.inputs());
        let inputs = read.filter(|input| !made.contains(&input.id)).cloned().collect();
        Self { pieces, reductions, inputs, is_variance, multiprocessors: multiprocessors(device) }
    }

    /// Whether the fusion would be slower: that of a variance, and one that would leave most of the device idle.
    ///
    /// Inputs whose dimensions lie in another order in memory stay with it. Element-wise operations by themselves would
    /// hand that order on to whatever reads them, and units that reduce along an outer dimension read side by side.
    pub(super) fn is_faster(&self, tensors: &Tensors) -> bool {
        self.inputs.iter().all(|input| is_in_order(tensors, input))
            && (self.is_variance || self.has_idle_units(tensors))
    }

    fn has_idle_units(&self, tensors: &Tensors) -> bool {
        self.reductions.iter().any(|[input, out]| {
            let shapes = [input, out].map(|tensor| tensors.tensors.get(&tensor.id));
            let [Some(known), Some(made)] = shapes else { return false };
            let [elements, outputs] = [known, made].map(|tensor| tensor.shape.num_elements());
            if outputs == 0 || elements / outputs < FEW_ELEMENTS {
                return false;
            }
            let is_of_rows = known.shape.last() != made.shape.last();
            let bytes = dtype_to_elem_type(input.dtype).size();
            !suits_units([outputs, elements / outputs], bytes, is_of_rows, self.multiprocessors)
        })
    }

    /// Runs the pieces.
    pub(super) fn run(
        &mut self,
        tensors: &mut Tensors,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        for piece in &mut self.pieces {
            match piece {
                Piece::Fused(first, operation) => {
                    prepare(tensors);
                    operation.run(tensors, &|place| fallback(*first + place));
                }
                Piece::Part(part) => part.run(tensors, fallback),
            }
        }
    }

    pub(super) fn max_relative_shape_id(&self) -> Option<usize> {
        let fused = self.pieces.iter().filter_map(|piece| match piece {
            Piece::Fused(_, operation) => operation.max_relative_shape_id(),
            Piece::Part(_) => None,
        });
        fused.max()
    }

    pub(super) fn to_state(&self) -> ApartState {
        let pieces = self.pieces.iter().map(|piece| match piece {
            Piece::Fused(first, operation) => PieceState::Fused(*first, operation.to_state()),
            Piece::Part(part) => PieceState::Part(part.clone()),
        });
        let (reductions, inputs) = (self.reductions.clone(), self.inputs.clone());
        let is_variance = self.is_variance;
        ApartState { pieces: pieces.collect(), reductions, inputs, is_variance }
    }

    pub(super) fn from_state(device: &CubeDevice, state: ApartState) -> Self {
        let pieces = state.pieces.into_iter().map(|piece| match piece {
            PieceState::Fused(first, state) => {
                let operation = ElemwiseOptimization::from_state(device, state.decode());
                Piece::Fused(first, CubeOptimization::new(operation))
            }
            PieceState::Part(part) => Piece::Part(part),
        });
        Self {
            pieces: pieces.collect(),
            reductions: state.reductions,
            inputs: state.inputs,
            is_variance: state.is_variance,
            multiprocessors: multiprocessors(device),
        }
    }
}

/// Element-wise operations, the first of them at `first`: fused, where there are several that Burn fuses.
fn elementwise(first: usize, operations: &[OperationIr], device: &CubeDevice) -> Option<Piece> {
    let count = operations.len();
    if count > 1 {
        let mut fuser = ElementWiseFuser::new(device.clone());
        operations.iter().for_each(|operation| fuser.fuse(operation));
        if fuser.len() == count && fuser.properties().ready {
            return Some(Piece::Fused(first, fuser.finish()));
        }
    }
    let places = (first..first + count).collect();
    (count > 0).then(|| Piece::Part(Box::new(Part::Unfused(places))))
}

/// Whether a tensor's outer dimensions lie outside its inner ones in memory. Sizes of 1 and broadcasts lie anywhere.
fn is_in_order(tensors: &Tensors, tensor: &TensorIr) -> bool {
    let known = tensors.tensors.get(&tensor.id);
    let handle = known.and_then(|known| tensors.handles.get_handle_ref(&known.id));
    let (Some(known), Some(handle)) = (known, handle) else { return false };
    let sizes = known.shape.iter().zip(&handle.strides[..]);
    sizes
        .filter(|(size, stride)| **size > 1 && **stride > 0)
        .map(|(_, stride)| stride)
        .is_sorted_by(|a, b| a >= b)
}

fn multiprocessors(device: &CubeDevice) -> usize {
    DeviceProfile::of(&device.client()).multiprocessors
}
