//! The provider that takes sums and means along the last dimensions.
//!
//! Without its autotuner Burn runs few long rows at a hundredth of the memory's speed: the statistics of
//! normalizations over channels and groups are such.

use crate::{
    declined::unsupported,
    stream::{Done, Replacement, SingleOperation, is_last},
    tensors::{
        Location, Tensors, consume, contiguous_tensor, cube_tensor, known_output,
        register_cube_tensor, register_zeros, rows_of,
    },
};
use blackburn_kernels::{
    KernelError,
    buffer::{Buffer, Rows},
    column_sum::{ColumnSumProblem, column_sum_scaled},
    row_sum::row_sum,
};
use burn_backend::{DType, cubecl::dtype_to_elem_type};
use burn_cubecl::tensor::CubeTensor;
use burn_ir::{NumericOperationIr, OperationIr, TensorId, TensorIr};
use serde::{Deserialize, Serialize};

const OP: &str = "row_sum";

/// A sum, or a mean, over the last dimensions.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RowSum {
    input: TensorIr,
    out: TensorIr,
    /// How many of the last dimensions.
    dims: usize,
    is_mean: bool,
}

impl SingleOperation for RowSum {
    type Settings = ();

    fn of(operation: &OperationIr, (): &()) -> Option<Self> {
        let OperationIr::NumericFloat(dtype, operation) = operation else { return None };
        let (input, out, dims, is_mean) = match operation {
            NumericOperationIr::SumDim(op) if is_last(op.axis, &op.input) => {
                (&op.input, &op.out, 1, false)
            }
            NumericOperationIr::MeanDim(op) if is_last(op.axis, &op.input) => {
                (&op.input, &op.out, 1, true)
            }
            NumericOperationIr::SumDims(op) => {
                let rank = op.input.shape.num_dims();
                let dims = op.axes.len();
                let are_last = (rank.saturating_sub(dims)..rank).all(|dim| op.axes.contains(&dim));
                (dims > 0 && dims <= rank && are_last)
                    .then_some((&op.input, &op.out, dims, false))?
            }
            _ => return None,
        };
        let served =
            matches!(dtype, DType::F32 | DType::F16 | DType::BF16) && out.dtype == input.dtype;
        served.then(|| Self { input: input.clone(), out: out.clone(), dims, is_mean })
    }

    fn may_follow(&self, made: &[TensorId]) -> bool {
        matches!(made, [] | [_]) && made.iter().all(|made| *made == self.input.id)
    }
}

impl Replacement for RowSum {
    const NAME: &'static str = "BlackburnRowSum";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        let Self { input, out, dims, is_mean } = self;
        let shape = known_output(tensors, out, OP)?.shape.clone();
        let x = cube_tensor(tensors, input, OP)?;
        let sizes = x.meta.shape();
        let columns: usize = sizes[sizes.num_dims() - dims..].iter().product();
        let elements = sizes.num_elements();
        if elements == 0 && !(*is_mean && columns == 0) {
            register_zeros(tensors, out, &Location::of(&x), OP)?;
        } else {
            let factor = if *is_mean { 1.0 / columns as f32 } else { 1.0 };
            let y = match rows_of(&x) {
                Some(all) if all.is_contiguous() => {
                    let rows = elements / columns.max(1);
                    row_sum(&x.client, &Rows { rows, columns, pitch: columns, ..all }, factor)?
                }
                Some(rows) if *dims == 1 => row_sum(&x.client, &rows, factor)?,
                _ => turned_sum(&x, *dims, factor)?,
            };
            register_cube_tensor(tensors, out, contiguous_tensor(&x, y, shape, out.dtype), OP)?;
        }
        consume(tensors, input);
        Ok(Done::All)
    }
}

/// The sums of rows whose elements lie apart, next to those of the other rows: rows of channels that were told by strides,
/// and the pixels of images whose channels lie innermost.
fn turned_sum(x: &CubeTensor, dims: usize, factor: f32) -> Result<Buffer, KernelError> {
    let (sizes, strides) = (x.meta.shape(), x.meta.strides());
    if x.qparams.is_some() || x.meta.is_tiled() {
        return Err(unsupported(OP, "rows of other than plain numbers"));
    }
    let kept = sizes.num_dims() - dims;
    let Some(innermost) = kept.checked_sub(1).filter(|dim| strides[*dim] == 1) else {
        return Err(unsupported(OP, "rows that do not follow each other"));
    };
    let order = || (0..innermost).chain(kept..sizes.num_dims()).chain([innermost]);
    let [turned, steps]: [Vec<usize>; 2] =
        [order().map(|dim| sizes[dim]).collect(), order().map(|dim| strides[dim]).collect()];
    let dtype = dtype_to_elem_type(x.dtype);
    let problem = ColumnSumProblem::new(&turned, &steps, innermost..innermost + dims, dtype)?;
    let all = Buffer { handle: x.handle.clone(), elements: problem.span(), dtype };
    column_sum_scaled(&x.client, &problem, &all, factor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{
        Fuser, SingleSearch,
        emit::{sum_along, tensor},
    };
    use burn_ir::{ReduceDimOpIr, TensorStatus};

    fn mean_along(axis: usize) -> OperationIr {
        let input = tensor(1, [4, 6, 8], TensorStatus::ReadOnly);
        let out = tensor(2, [4, 6, 8], TensorStatus::NotInit);
        let mean = ReduceDimOpIr { input, out, axis, accumulator_len: 1 };
        OperationIr::NumericFloat(DType::F32, NumericOperationIr::MeanDim(mean))
    }

    #[test]
    fn sums_and_means_along_the_last_dimension_are_taken_and_no_others() {
        let taken = |operation| {
            Fuser::after(SingleSearch::<RowSum>::default(), &[operation]).claims().is_some()
        };
        assert!(taken(mean_along(2)));
        assert!(taken(sum_along(1, [4, 6, 8], 2)));
        assert!(!taken(mean_along(1)));
        assert!(!taken(sum_along(1, [4, 6, 8], 0)));
    }
}
