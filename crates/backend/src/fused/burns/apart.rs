//! Reductions that Burn fused with element-wise operations, run one after the other.
//!
//! A fused reduction of Burn's gives each output one unit, which walks through all that the output is made of: other
//! routines are for its autotuner, which is left out. Where outputs are few, that takes up to a thousand times as long as
//! the memory does. [`Apart`] runs the same operations with the element-wise ones fused among themselves and each
//! reduction on the kernels that take it where it is alone. That is more launches and more passes over memory, so sizes
//! decide when they are known.

use super::prepare;
use crate::{
    fused::{
        column_sum::Sum,
        reduce::{Reduction, suits_units},
        row_sum::RowSum,
    },
    stream::{Done, Part, Replacement, SingleOperation},
    tensors::Tensors,
};
use blackburn_kernels::{DeviceProfile, KernelError};
use burn_backend::cubecl::dtype_to_elem_type;
use burn_cubecl::CubeDevice;
use burn_cubecl_fusion::{
    FallbackOperation,
    optim::{
        CubeOptimization, CubeOptimizationState,
        elemwise::{ElementWiseFuser, ElemwiseOptimization},
    },
};
use burn_fusion::{NumOperations, OperationFuser};
use burn_ir::{OperationIr, TensorIr};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What an output is made of that one unit walks through in the time of the launches that running apart adds.
const FEW_ELEMENTS: usize = 128;

/// A reduction on the kernels that take it where it is alone.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Alone {
    Columns(Sum),
    Rows(RowSum),
    Other(Reduction),
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
    multiprocessors: usize,
}

/// [`Apart`], as it is written down.
#[derive(Serialize, Deserialize)]
pub(super) struct ApartState {
    pieces: Vec<PieceState>,
    reductions: Vec<[TensorIr; 2]>,
    inputs: Vec<TensorIr>,
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
        let mut begun = 0;
        for (place, operation) in operations.iter().enumerate() {
            let Some(alone) = Alone::of(operation) else { continue };
            pieces.extend(elementwise(begun, &operations[begun..place], device));
            pieces.push(Piece::Part(Box::new(Part::Replaced(vec![place], alone))));
            begun = place + 1;
            reductions.extend(operation.inputs().next().zip(operation.outputs().next()));
        }
        pieces.extend(elementwise(begun, &operations[begun..], device));
        let reductions = reductions.into_iter().map(|(x, y)| [x.clone(), y.clone()]).collect();
        let made: BTreeSet<_> =
            operations.iter().flat_map(|operation| operation.outputs()).map(|out| out.id).collect();
        let read = operations.iter().flat_map(|operation| operation.inputs());
        let inputs = read.filter(|input| !made.contains(&input.id)).cloned().collect();
        Self { pieces, reductions, inputs, multiprocessors: multiprocessors(device) }
    }

    /// Whether the fusion would leave most of the device idle.
    ///
    /// Inputs whose dimensions lie in another order in memory stay with it. Element-wise operations by themselves would
    /// hand that order on to whatever reads them, and units that reduce along an outer dimension read side by side.
    pub(super) fn is_faster(&self, tensors: &Tensors) -> bool {
        self.inputs.iter().all(|input| is_in_order(tensors, input)) && self.has_idle_units(tensors)
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
        ApartState { pieces: pieces.collect(), reductions, inputs }
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
