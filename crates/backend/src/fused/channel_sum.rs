//! The provider that takes sums over all dimensions but one in the middle: gradients of what a normalization of
//! images has for each channel.

use crate::{
    declined::unsupported,
    stream::{Done, Replacement, SingleOperation},
    tensors::{
        Tensors, consume, contiguous_buffer, contiguous_tensor, cube_tensor, known_output,
        register_cube_tensor,
    },
};
use blackburn_kernels::{
    KernelError,
    buffer::{Buffer, Rows},
    column_sum::{ColumnSumProblem, column_sum},
    row_sum::row_sum_as,
};
use burn_backend::{DType, cubecl::dtype_to_elem_type};
use burn_cubecl::kernel::cast;
use burn_ir::{NumericOperationIr, OperationIr, TensorId, TensorIr};
use serde::{Deserialize, Serialize};

const OP: &str = "channel_sum";

/// A sum that leaves the dimension `kept`, neither the first nor the last.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ChannelSum {
    input: TensorIr,
    out: TensorIr,
    kept: usize,
}

impl SingleOperation for ChannelSum {
    type Settings = ();

    fn of(operation: &OperationIr, (): &()) -> Option<Self> {
        let OperationIr::NumericFloat(dtype, NumericOperationIr::SumDims(op)) = operation else {
            return None;
        };
        let rank = op.input.shape.num_dims();
        let mut others = (0..rank).filter(|dim| !op.axes.contains(dim));
        let (kept, None) = (others.next()?, others.next()) else { return None };
        let served = matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
            && (1..rank - 1).contains(&kept)
            && op.axes.len() + 1 == rank
            && op.out.dtype == op.input.dtype;
        served.then(|| Self { input: op.input.clone(), out: op.out.clone(), kept })
    }

    fn may_follow(&self, made: &[TensorId]) -> bool {
        matches!(made, [] | [_]) && made.iter().all(|made| *made == self.input.id)
    }
}

impl Replacement for ChannelSum {
    const NAME: &'static str = "BlackburnChannelSum";

    /// Channels that lie innermost are columns. Others have rows of pixels, copied where these do not follow each
    /// other, whose sums, in f32, are columns then.
    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        let Self { input, out, kept } = self;
        let shape = known_output(tensors, out, OP)?.shape.clone();
        let x = cube_tensor(tensors, input, OP)?;
        let (sizes, strides) = (x.meta.shape(), x.meta.strides());
        let channels = sizes[*kept];
        if sizes.num_elements() == 0 {
            return Err(unsupported(OP, "no elements"));
        }
        let order = (0..sizes.num_dims()).filter(|dim| dim != kept).chain([*kept]);
        let [turned, steps]: [Vec<usize>; 2] = [
            order.clone().map(|dim| sizes[dim]).collect(),
            order.map(|dim| strides[dim]).collect(),
        ];
        let [dtype, wide] = [x.dtype, DType::F32].map(dtype_to_elem_type);
        let columns = ColumnSumProblem::new(&turned, &steps, 0..turned.len() - 1, dtype);
        let (sums, dtype) = match (steps.last(), columns) {
            (Some(1), Ok(problem)) => {
                let (handle, elements) = (x.handle.clone(), problem.span());
                let all = Buffer { handle, elements, dtype };
                (column_sum(&x.client, &problem, &all)?, x.dtype)
            }
            _ => {
                let pixels = sizes[kept + 1..].iter().product();
                let rows = sizes.num_elements() / pixels;
                let buffer = contiguous_buffer(x.clone());
                let all = Rows { buffer, rows, columns: pixels, pitch: pixels };
                let of_rows = row_sum_as(&x.client, &all, 1.0, wide)?;
                let images = rows / channels;
                let problem =
                    ColumnSumProblem::new(&[images, channels], &[channels, 1], 0..1, wide)?;
                (column_sum(&x.client, &problem, &of_rows)?, DType::F32)
            }
        };
        let sums = contiguous_tensor(&x, sums, shape, dtype);
        register_cube_tensor(tensors, out, cast(sums, out.dtype), OP)?;
        consume(tensors, input);
        Ok(Done::All)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Fuser, SingleSearch, emit::tensor};
    use burn_ir::{ReduceDimsOpIr, TensorStatus};

    fn sum_over<const D: usize>(shape: [usize; D], axes: &[usize]) -> OperationIr {
        let input = tensor(1, shape, TensorStatus::ReadOnly);
        let out = tensor(2, shape, TensorStatus::NotInit);
        let sum = ReduceDimsOpIr { input, out, axes: axes.to_vec() };
        OperationIr::NumericFloat(DType::F32, NumericOperationIr::SumDims(sum))
    }

    #[test]
    fn sums_that_leave_a_dimension_in_the_middle_are_taken_and_no_others() {
        let taken = |operation| {
            Fuser::after(SingleSearch::<ChannelSum>::default(), &[operation]).claims().is_some()
        };
        assert!(taken(sum_over([4, 6, 8, 9], &[0, 2, 3])));
        assert!(taken(sum_over([4, 6, 8], &[2, 0])));
        assert!(!taken(sum_over([4, 6, 8], &[0, 1])), "the last is left");
        assert!(!taken(sum_over([4, 6, 8], &[1, 2])), "the first is left");
        assert!(!taken(sum_over([4, 6, 8, 9], &[0, 3])), "two are left");
    }
}
