//! The provider that adds values to the places that indices name: `scatter` and `select_assign`, and the gradients of
//! `gather` and `select`, which Burn makes of zeros and these.
//!
//! Slices of 32-bit integers are taken, too.
//!
//! Burn's own kernels walk through the indices one after the other, a unit for each row or column, where the device has
//! no atomic addition of the type, and in `select_assign` always. Where it adds f32 by atomic operations, that is left
//! to it.

use crate::{
    declined::unsupported,
    stream::{Claim, Done, Elapsed, Moment, Next, Part, Replacement, Search, arithmetic_output},
    tensors::{
        Tensors, consume, contiguous, contiguous_buffer, contiguous_tensor, cube_tensor,
        known_output, register_cube_tensor,
    },
};
use blackburn_kernels::{
    KernelError,
    scatter::{ScatterProblem, SelectProblem, scatter_add, select_add},
};
use burn_backend::{DType, Shape, cubecl::dtype_to_elem_type, tensor::IndexingUpdateOp};
use burn_cubecl::{ops::permute, tensor::CubeTensor};
use burn_ir::{BaseOperationIr as Base, OperationIr, TensorIr};
use cubecl::{features::AtomicUsage, ir::Type};
use serde::{Deserialize, Serialize};

const OP: &str = "scatter";

/// An addition on the kernels, or as Burn has it where those decline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Scatter {
    /// Whether each element has an index of its own, and not each slice.
    has_own_indices: bool,
    dim: usize,
    x: TensorIr,
    index: TensorIr,
    values: TensorIr,
    y: TensorIr,
}

impl Scatter {
    fn of(operation: &OperationIr) -> Option<Self> {
        let (operation, is_float) = match operation {
            OperationIr::BaseFloat(operation) => (operation, true),
            OperationIr::BaseInt(operation) => (operation, false),
            _ => return None,
        };
        macro_rules! found {
            ($op:ident, $own:literal) => {
                ($op.update == IndexingUpdateOp::Add).then(|| Self {
                    has_own_indices: $own,
                    dim: $op.dim,
                    x: $op.tensor.clone(),
                    index: $op.indices.clone(),
                    values: $op.value.clone(),
                    y: $op.out.clone(),
                })
            };
        }
        let found = match operation {
            Base::Scatter(op) if is_float => found!(op, true),
            Base::SelectAssign(op) => found!(op, false),
            _ => None,
        };
        found.filter(|Self { x, index, values, y, .. }| {
            matches!(y.dtype, DType::F32 | DType::F16 | DType::BF16 | DType::I32)
                && x.dtype == y.dtype
                && values.dtype == y.dtype
                && index.dtype == DType::I32
        })
    }
}

/// Takes the operation at the head of a block, or behind arithmetic and the zeros that it adds to, which Burn would
/// settle together with it. Waiting for views, too, would take what follows them from other fusions.
#[derive(Clone, Default)]
pub(crate) struct ScatterSearch {
    in_front: usize,
    found: Option<Scatter>,
}

impl ScatterSearch {
    /// As that of other single operations, below the score of a fusion that saves a tensor.
    const SCORE: u64 = 15;
}

impl Search for ScatterSearch {
    type Replacement = Scatter;

    fn follow(&mut self, operation: &OperationIr, _now: Moment) -> Next {
        self.found = Scatter::of(operation);
        if self.found.is_some() {
            return Next::Last;
        }
        let is_zeros = matches!(
            operation,
            OperationIr::BaseFloat(Base::Zeros(_)) | OperationIr::BaseInt(Base::Zeros(_))
        );
        self.in_front += 1;
        Next::taken_if(is_zeros || arithmetic_output(operation).is_some())
    }

    fn claim(&self) -> Option<Claim<Scatter>> {
        let at = self.in_front;
        let replaced = Part::Replaced(vec![at], self.found.clone()?);
        Some(Claim { score: Self::SCORE, parts: vec![Part::Unfused((0..at).collect()), replaced] })
    }

    /// Others begin with zeros, too.
    fn gives_up(&self, elapsed: Elapsed) -> bool {
        elapsed.since_first > self.in_front as u64
    }
}

impl Replacement for Scatter {
    const NAME: &'static str = "BlackburnScatter";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        known_output(tensors, &self.y, OP)?;
        let [x, index, values] =
            [&self.x, &self.index, &self.values].map(|tensor| cube_tensor(tensors, tensor, OP));
        let (x, index, values) = (x?, index?, values?);
        let y = if self.has_own_indices {
            self.by_rows(&x, index, values)?
        } else {
            self.by_slices(&x, index, values)?
        };
        register_cube_tensor(tensors, &self.y, y, OP)?;
        for tensor in [&self.x, &self.index, &self.values] {
            consume(tensors, tensor);
        }
        Ok(Done::All)
    }
}

impl Scatter {
    fn by_rows(
        &self,
        x: &CubeTensor,
        index: CubeTensor,
        values: CubeTensor,
    ) -> Result<CubeTensor, KernelError> {
        /// Below this Burn's walk through a row takes few steps.
        const FEWEST_TERMS: usize = 16;
        /// Burn writes the places that are named alone, of this many.
        const PLACES_PER_TERM: usize = 4;

        let dtype = dtype_to_elem_type(x.dtype);
        let usage = x.client.properties().atomic_type_usage(Type::atomic(dtype));
        if x.dtype == DType::F32 && usage.contains(AtomicUsage::Add) {
            return Err(unsupported(OP, "f32, which the device adds by atomic operations"));
        }
        let (terms, places) = (values.meta.shape()[self.dim], x.meta.shape()[self.dim]);
        if terms < FEWEST_TERMS || terms * PLACES_PER_TERM < places {
            return Err(unsupported(OP, "few values for many places"));
        }
        let rank = x.meta.shape().num_dims();
        let mut axes: Vec<usize> = (0..rank).collect();
        axes.swap(self.dim, rank - 1);
        let rows = x.meta.shape().num_elements() / places;
        if values.meta.shape().num_elements() / terms != rows {
            return Err(unsupported(OP, "values for a part of the rows"));
        }
        let problem = ScatterProblem { rows, terms, places, dtype };
        let last = permute(x.clone(), &axes);
        let shape = last.meta.shape().clone();
        let [of_x, of_index, of_values] =
            [last, permute(index, &axes), permute(values, &axes)].map(contiguous_buffer);
        let y = scatter_add(&x.client, &problem, &of_x, &of_index, &of_values)?;
        Ok(contiguous(permute(contiguous_tensor(x, y, shape, x.dtype), &axes)))
    }

    fn by_slices(
        &self,
        x: &CubeTensor,
        index: CubeTensor,
        values: CubeTensor,
    ) -> Result<CubeTensor, KernelError> {
        /// Below this Burn's walk through the indices takes few steps.
        const FEWEST_TERMS: usize = 16;
        /// Burn's kernel waits for memory once for each term. Meanwhile so many elements of y are read and written, of
        /// which Burn writes only those that are named.
        const PLACES_PER_TERM: usize = 1 << 18;

        let shape: Shape = x.meta.shape().clone();
        let size = |dims: &[usize]| dims.iter().product::<usize>();
        let problem = SelectProblem {
            outer: size(&shape[..self.dim]),
            terms: values.meta.shape()[self.dim],
            places: shape[self.dim],
            inner: size(&shape[self.dim + 1..]),
            dtype: dtype_to_elem_type(x.dtype),
        };
        if problem.terms < FEWEST_TERMS || shape.num_elements() > problem.terms * PLACES_PER_TERM {
            return Err(unsupported(OP, "few slices for many places"));
        }
        let [of_x, of_index, of_values] = [x.clone(), index, values].map(contiguous_buffer);
        let y = select_add(&x.client, &problem, &of_x, &of_index, &of_values)?;
        Ok(contiguous_tensor(x, y, shape, x.dtype))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Fuser, emit::tensor};
    use burn_ir::{
        CreationOpIr, ScatterOpIr,
        TensorStatus::{NotInit, ReadOnly, ReadWrite},
    };

    fn scatter(update: IndexingUpdateOp, index: DType) -> OperationIr {
        OperationIr::BaseFloat(Base::Scatter(ScatterOpIr {
            tensor: tensor(1, [4, 6], ReadWrite),
            dim: 1,
            indices: TensorIr { dtype: index, ..tensor(2, [4, 3], ReadOnly) },
            value: tensor(3, [4, 3], ReadOnly),
            update,
            out: tensor(4, [4, 6], NotInit),
        }))
    }

    #[test]
    fn additions_are_taken_with_the_zeros_in_front() {
        let taken = |operations: &[OperationIr]| {
            Fuser::after(ScatterSearch::default(), operations).claims()
        };
        let add = || scatter(IndexingUpdateOp::Add, DType::I32);
        let zeros =
            OperationIr::BaseFloat(Base::Zeros(CreationOpIr { out: tensor(1, [4, 6], NotInit) }));
        assert_eq!(taken(&[add()]), Some(1));
        assert_eq!(taken(&[zeros, add()]), Some(2));
        assert_eq!(taken(&[scatter(IndexingUpdateOp::Assign, DType::I32)]), None);
        assert_eq!(taken(&[scatter(IndexingUpdateOp::Add, DType::I64)]), None);
    }
}
