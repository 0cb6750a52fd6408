//! The provider of reductions: extremes and their places, products, logical ones, sums of integers, and whatever
//! is made of a whole tensor.
//!
//! Without its autotuner Burn gives each output one unit, which walks through all that the output is made of. The
//! same library has routines by which planes and cubes share that, and [`plan`] says which one runs. Sums and means
//! of floating-point numbers run on the kernels of row and column sums.

mod passes;
mod plan;

pub(super) use plan::suits_units;

use crate::{
    declined::unsupported,
    stream::{Done, Replacement, SingleOperation, is_last},
    tensors::{
        Tensors, consume, contiguous_buffer, contiguous_tensor, cube_tensor, known_output,
        register_cube_tensor, rows_of,
    },
};
use blackburn_kernels::{
    KernelError,
    buffer::{Buffer, Rows},
    column_sum::{ColumnSumProblem, column_sum_scaled},
    row_sum::row_sum_as,
};
use burn_backend::{DType, cubecl::dtype_to_elem_type};
use burn_cubecl::{kernel::cast, tensor::CubeTensor};
use burn_ir::{
    BaseOperationIr as Base, NumericOperationIr as Numeric, OperationIr, ReduceDimOpIr,
    ReduceDimWithIndicesOpIr, ReduceOpIr, TensorId, TensorIr,
};
use burn_std::{BoolStore, Shape};
use cubek::reduce::components::instructions::ReduceOperationConfig as Operation;
use serde::{Deserialize, Serialize};

const OP: &str = "reduce";

/// One reduction.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Reduction {
    operation: Operation,
    input: TensorIr,
    out: TensorIr,
    /// Where extremes are, if that is asked besides.
    places: Option<TensorIr>,
    /// Along which dimension; `None` for a number of the whole tensor.
    axis: Option<usize>,
}

impl SingleOperation for Reduction {
    type Settings = ();

    fn of(operation: &OperationIr, (): &()) -> Option<Self> {
        let found = match operation {
            OperationIr::NumericFloat(_, operation) => Self::of_numbers(operation, true),
            OperationIr::NumericInt(_, operation) => Self::of_numbers(operation, false),
            OperationIr::BaseFloat(operation)
            | OperationIr::BaseInt(operation)
            | OperationIr::BaseBool(operation) => Self::of_truth(operation),
            _ => None,
        };
        found.filter(Self::is_served)
    }

    fn may_follow(&self, made: &[TensorId]) -> bool {
        matches!(made, [] | [_]) && made.iter().all(|made| *made == self.input.id)
    }
}

impl Reduction {
    fn of_numbers(operation: &Numeric, is_float: bool) -> Option<Self> {
        Some(match operation {
            Numeric::Sum(op) => Self::of_all(Operation::Sum, op),
            // Burn rounds the mean of integers once for each dimension.
            Numeric::Mean(op) if is_float => Self::of_all(Operation::Mean, op),
            Numeric::Prod(op) => Self::of_all(Operation::Prod, op),
            Numeric::Max(op) => Self::of_all(Operation::Max, op),
            Numeric::Min(op) => Self::of_all(Operation::Min, op),
            Numeric::MaxAbs(op) => Self::of_all(Operation::MaxAbs, op),
            // Other providers take sums of floating-point numbers, and means along the last dimension.
            Numeric::SumDim(op) if !is_float => Self::along(Operation::Sum, op),
            Numeric::MeanDim(op) if !is_float || !is_last(op.axis, &op.input) => {
                Self::along(Operation::Mean, op)
            }
            Numeric::ProdDim(op) => Self::along(Operation::Prod, op),
            Numeric::MaxDim(op) => Self::along(Operation::Max, op),
            Numeric::MinDim(op) => Self::along(Operation::Min, op),
            Numeric::MaxAbsDim(op) => Self::along(Operation::MaxAbs, op),
            Numeric::ArgMax(op) => Self::along(Operation::ArgMax, op),
            Numeric::ArgMin(op) => Self::along(Operation::ArgMin, op),
            Numeric::MaxDimWithIndices(op) => Self::with_places(Operation::ArgMax, op),
            Numeric::MinDimWithIndices(op) => Self::with_places(Operation::ArgMin, op),
            _ => return None,
        })
    }

    fn of_truth(operation: &Base) -> Option<Self> {
        Some(match operation {
            Base::Any(op) => Self::of_all(Operation::Any, op),
            Base::All(op) => Self::of_all(Operation::All, op),
            Base::AnyDim(op) => Self::along(Operation::Any, op),
            Base::AllDim(op) => Self::along(Operation::All, op),
            _ => return None,
        })
    }

    fn of_all(operation: Operation, op: &ReduceOpIr) -> Self {
        let (input, out) = (op.input.clone(), op.out.clone());
        Self { operation, input, out, places: None, axis: None }
    }

    fn along(operation: Operation, op: &ReduceDimOpIr) -> Self {
        let (input, out) = (op.input.clone(), op.out.clone());
        Self { operation, input, out, places: None, axis: Some(op.axis) }
    }

    fn with_places(operation: Operation, op: &ReduceDimWithIndicesOpIr) -> Self {
        let (input, out) = (op.tensor.clone(), op.out.clone());
        Self { operation, input, out, places: Some(op.out_indices.clone()), axis: Some(op.dim) }
    }

    fn is_served(&self) -> bool {
        let (input, out) = (self.input.dtype, self.out.dtype);
        let is_truth = |dtype| matches!(dtype, DType::Bool(BoolStore::U8 | BoolStore::U32));
        let is_place = |dtype| matches!(dtype, DType::I32 | DType::I64 | DType::U32);
        let is_number =
            matches!(input, DType::F32 | DType::F16 | DType::BF16 | DType::I32 | DType::U32);
        match (self.operation, &self.places) {
            (Operation::Any | Operation::All, _) => (is_number || is_truth(input)) && is_truth(out),
            (Operation::ArgMax | Operation::ArgMin, None) => is_number && is_place(out),
            (_, places) => {
                let are_placed = places.as_ref().is_none_or(|places| is_place(places.dtype));
                is_number && out == input && are_placed
            }
        }
    }

    /// Whether the kernels of sums take it.
    fn is_of_sums(&self) -> bool {
        matches!(self.operation, Operation::Sum | Operation::Mean) && self.input.dtype.is_float()
    }

    /// What comes out for the whole of `x`.
    fn whole(&self, x: &CubeTensor) -> Result<CubeTensor, KernelError> {
        let (operation, out) = (self.operation, self.out.dtype);
        if self.is_of_sums() {
            return sum_of_all(x, operation == Operation::Mean);
        }
        let x = match passes::flat(x) {
            Some(x) => x,
            // A pass along the dimension whose elements are nearest each other leaves none apart.
            None => {
                let (sizes, strides) = (x.meta.shape(), x.meta.strides());
                let longer = (0..sizes.num_dims()).filter(|dim| sizes[*dim] > 1);
                let nearest = longer.min_by_key(|dim| strides[*dim]).unwrap_or(0);
                let left =
                    passes::along(x, nearest, operation, passes::between(operation, x.dtype))?;
                passes::flat(&left).ok_or_else(|| unsupported(OP, "elements that lie apart"))?
            }
        };
        passes::along(&x, 0, operation, out)
    }

    /// What comes out for `x` along a dimension.
    fn one_dimension(&self, x: &CubeTensor, axis: usize) -> Result<CubeTensor, KernelError> {
        if self.is_of_sums()
            && let Ok(mean) = mean_of_columns(x, axis)
        {
            return Ok(mean);
        }
        passes::along_faster(x, axis, self.operation, self.out.dtype)
    }
}

impl Replacement for Reduction {
    const NAME: &'static str = "BlackburnReduce";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        let x = cube_tensor(tensors, &self.input, OP)?;
        if x.meta.shape().num_elements() == 0 {
            return Err(unsupported(OP, "no elements"));
        }
        let shape = known_output(tensors, &self.out, OP)?.shape.clone();
        let (y, places) = match (self.axis, &self.places) {
            (None, _) => (self.whole(&x)?, None),
            (Some(axis), None) => (self.one_dimension(&x, axis)?, None),
            (Some(axis), Some(places)) => {
                known_output(tensors, places, OP)?;
                let [y, found] = passes::extremes_faster(&x, axis, self.operation, places.dtype)?;
                (y, Some((places, found)))
            }
        };
        if let Some((places, found)) = places {
            let found = shaped(found, shape.clone(), places.dtype);
            register_cube_tensor(tensors, places, found, OP)?;
        }
        register_cube_tensor(tensors, &self.out, shaped(y, shape, self.out.dtype), OP)?;
        consume(tensors, &self.input);
        Ok(Done::All)
    }
}

/// The same numbers, contiguous, by the sizes and the type that the stream knows them by: truth is an integer to
/// kernels.
fn shaped(y: CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    CubeTensor::new_contiguous(y.client, y.device, shape, y.handle, dtype)
}

/// The sum of all elements, or their mean: one row, or the sums of rows that lie apart.
fn sum_of_all(x: &CubeTensor, is_mean: bool) -> Result<CubeTensor, KernelError> {
    let elements = x.meta.shape().num_elements();
    let factor = if is_mean { 1.0 / elements as f32 } else { 1.0 };
    let [storage, wide] = [x.dtype, DType::F32].map(dtype_to_elem_type);
    let dense = passes::flat(x);
    let rows = match rows_of(dense.as_ref().unwrap_or(x)) {
        Some(rows) => rows,
        None => Rows::one(contiguous_buffer(x.clone())),
    };
    let one = Shape::new([1]);
    if rows.is_contiguous() {
        let y = row_sum_as(&x.client, &Rows::one(rows.buffer), factor, storage)?;
        return Ok(contiguous_tensor(x, y, one, x.dtype));
    }
    let of_rows = row_sum_as(&x.client, &rows, 1.0, wide)?;
    let y = row_sum_as(&x.client, &Rows::one(of_rows), factor, wide)?;
    Ok(cast(contiguous_tensor(x, y, one, DType::F32), x.dtype))
}

/// Means along a dimension that leaves others side by side.
fn mean_of_columns(x: &CubeTensor, axis: usize) -> Result<CubeTensor, KernelError> {
    let (sizes, strides) = (x.meta.shape(), x.meta.strides());
    let dtype = dtype_to_elem_type(x.dtype);
    let problem = ColumnSumProblem::new(sizes, strides, axis..axis + 1, dtype)?;
    let all = Buffer { handle: x.handle.clone(), elements: problem.span(), dtype };
    let y = column_sum_scaled(&x.client, &problem, &all, 1.0 / sizes[axis] as f32)?;
    let outputs = Shape::new([sizes.num_elements() / sizes[axis]]);
    Ok(contiguous_tensor(x, y, outputs, x.dtype))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{
        Fuser, SingleSearch,
        emit::{sum_along, tensor},
    };
    use burn_ir::TensorStatus::{NotInit, ReadOnly};

    const SHAPE: [usize; 3] = [4, 6, 8];

    fn claims(operation: OperationIr) -> Option<usize> {
        Fuser::after(SingleSearch::<Reduction>::default(), &[operation]).claims()
    }

    fn along(axis: usize, of: fn(ReduceDimOpIr) -> Numeric, out: DType) -> OperationIr {
        let out = TensorIr { dtype: out, ..tensor(2, SHAPE, NotInit) };
        let op = ReduceDimOpIr { input: tensor(1, SHAPE, ReadOnly), out, axis, accumulator_len: 1 };
        OperationIr::NumericFloat(DType::F32, of(op))
    }

    #[test]
    fn what_other_providers_take_is_left_to_them() {
        assert_eq!(claims(sum_along(1, SHAPE, 0)), None);
        assert_eq!(claims(sum_along(1, SHAPE, 2)), None);
        assert_eq!(claims(along(2, Numeric::MeanDim, DType::F32)), None);
        assert_eq!(claims(along(1, Numeric::MeanDim, DType::F32)), Some(1));
        assert_eq!(claims(along(2, Numeric::MaxDim, DType::F32)), Some(1));
    }

    #[test]
    fn places_are_integers_of_at_least_32_bits() {
        assert_eq!(claims(along(2, Numeric::ArgMax, DType::I32)), Some(1));
        assert_eq!(claims(along(2, Numeric::ArgMax, DType::I64)), Some(1));
        assert_eq!(claims(along(2, Numeric::ArgMax, DType::I16)), None);
        assert_eq!(claims(along(2, Numeric::TopK, DType::F32)), None);
    }

    #[test]
    fn truth_is_reduced_as_it_is_stored() {
        let any = |store| {
            let truth =
                |id, status| TensorIr { dtype: DType::Bool(store), ..tensor(id, SHAPE, status) };
            let op = ReduceOpIr { input: truth(1, ReadOnly), out: truth(2, NotInit) };
            claims(OperationIr::BaseBool(Base::Any(op)))
        };
        assert_eq!(any(BoolStore::U8), Some(1));
        assert_eq!(any(BoolStore::U32), Some(1));
        assert_eq!(any(BoolStore::Native), None);
    }

    #[test]
    fn all_of_a_tensor_is_taken_but_the_mean_of_integers() {
        let op = || ReduceOpIr { input: tensor(1, SHAPE, ReadOnly), out: tensor(2, [1], NotInit) };
        let float = |operation| claims(OperationIr::NumericFloat(DType::F32, operation));
        assert_eq!(float(Numeric::Sum(op())), Some(1));
        assert_eq!(float(Numeric::Mean(op())), Some(1));
        assert_eq!(claims(OperationIr::NumericInt(DType::I32, Numeric::Mean(op()))), None);
    }
}
