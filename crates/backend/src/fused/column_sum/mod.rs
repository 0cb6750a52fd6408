//! The provider that takes sums over neighboring dimensions that leave out the last: gradients of
//! biases, of normalization gains, and of every other broadcast.
//!
//! With this provider on, the sum of the rows that the gradient of GELU makes is taken with that gradient
//! (see `gelu`); without it, sums are left to Burn there too.

mod behind;

use crate::{
    stream::{Done, Replacement, SingleOperation},
    tensors::{Input, Tensors, consume, register_output, register_zeros},
};
pub(crate) use behind::RowSumSearch;
use blackburn_kernels::{
    KernelError,
    column_sum::{ColumnSumProblem, column_sum},
};
use burn_backend::DType;
use burn_ir::{NumericOperationIr, OperationIr, TensorId, TensorIr};
use serde::{Deserialize, Serialize};
use std::ops::Range;

const OP: &str = "column_sum";

/// A sum over dimensions that are neighbors and not the last.
///
/// Sizes are not known while the stream is searched: what the kernel does not serve falls back when it runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Sum {
    pub(crate) input: TensorIr,
    pub(crate) out: TensorIr,
    axes: Range<usize>,
}

impl SingleOperation for Sum {
    type Settings = ();

    fn of(operation: &OperationIr, (): &()) -> Option<Self> {
        let OperationIr::NumericFloat(dtype, operation) = operation else { return None };
        let (input, out, axes) = match operation {
            NumericOperationIr::SumDim(op) => (&op.input, &op.out, op.axis..op.axis + 1),
            NumericOperationIr::SumDims(op) => (&op.input, &op.out, neighbors(&op.axes)?),
            _ => return None,
        };
        let served = matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
            && axes.end < input.shape.num_dims()
            && out.dtype == input.dtype;
        served.then(|| Self { input: input.clone(), out: out.clone(), axes })
    }

    fn may_follow(&self, made: &[TensorId]) -> bool {
        matches!(made, [] | [_]) && made.iter().all(|made| *made == self.input.id)
    }
}

impl Replacement for Sum {
    const NAME: &'static str = "BlackburnColumnSum";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        let Self { input, out, axes } = self;
        let x = Input::of(tensors, input, OP)?;
        if x.elements() == 0 {
            register_zeros(tensors, out, &x.location(), OP)?;
        } else {
            let problem = ColumnSumProblem::new(&x.shape, &x.strides, axes.clone(), x.dtype)?;
            let y = column_sum(&x.client, &problem, &x.buffer(problem.span()))?;
            register_output(tensors, out, &x, y, OP)?;
        }
        consume(tensors, input);
        Ok(Done::All)
    }
}

impl Sum {
    /// Whether it leaves one row, along the last dimension, of all.
    fn is_of_rows(&self) -> bool {
        self.axes == (0..self.input.shape.num_dims() - 1)
    }

    /// The length of a row.
    pub(crate) fn columns(&self, tensors: &Tensors) -> Option<usize> {
        tensors.tensors.get(&self.input.id).and_then(|known| known.shape.last().copied())
    }
}

/// The range that `axes` fill, in whatever order they are named.
fn neighbors(axes: &[usize]) -> Option<Range<usize>> {
    let (first, last) = (*axes.iter().min()?, *axes.iter().max()?);
    let range = first..last + 1;
    (axes.len() == range.len() && range.clone().all(|axis| axes.contains(&axis))).then_some(range)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_neighbors_in_any_order_and_with_no_gap() {
        assert_eq!(neighbors(&[1, 0]), Some(0..2));
        assert_eq!(neighbors(&[2]), Some(2..3));
        assert_eq!(neighbors(&[0, 2]), None);
        assert_eq!(neighbors(&[1, 1]), None);
        assert_eq!(neighbors(&[]), None);
    }
}
