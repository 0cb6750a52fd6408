//! The provider that takes sums over neighboring dimensions that leave out the last: gradients of
//! biases, of normalization gains, and of every other broadcast.
//!
//! With this provider on, the sum of the rows that the gradient of GELU makes is taken with that gradient
//! (see `gelu`); without it, sums are left to Burn there too.

mod behind;

use crate::{
    declined,
    stream::arithmetic_output,
    tensors::{Input, Tensors, consume, register_output, register_zeros},
};
#[cfg(test)]
pub(crate) use behind::tests as behind_tests;
pub(crate) use behind::{Followed, RowSum, RowSumSearch};
use blackburn_kernels::{
    KernelError,
    column_sum::{ColumnSumProblem, column_sum},
};
use burn_backend::DType;
use burn_cubecl::{
    CubeDevice,
    fusion::{CubeFuser, OptimizationProvider},
};
use burn_cubecl_fusion::{
    FallbackOperation,
    optim::{CubeOptimization, FusedOperation},
};
use burn_fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn_ir::{NumericOperationIr, OperationIr, TensorId, TensorIr};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The provider's name.
pub(crate) const NAME: &str = "BlackburnColumnSum";

const OP: &str = "column_sum";

/// Registers [`ColumnSumFuser`] with Burn.
pub(crate) struct ColumnSumProvider;

impl OptimizationProvider for ColumnSumProvider {
    type Operation = ColumnSumOperation;

    fn fuser(&self, _device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(ColumnSumFuser::default())
    }
}

/// Takes one sum at the head of a block, or behind one arithmetic operation that makes its input.
///
/// Burn settles an operation that no fusion wants together with the one after it, so a sum behind a
/// lone product would never head a block. Only operations that Burn's own element-wise fusion waits
/// on too are let in first: waiting on others would take their successors from that fusion.
///
/// Dimensions are not known yet: what the kernel does not serve falls back when it runs.
#[derive(Clone, Default)]
struct ColumnSumFuser {
    passenger: Option<TensorId>,
    sum: Option<Sum>,
    closed: bool,
}

impl ColumnSumFuser {
    /// Below the score of any fusion that saves a tensor (100, and 10 an operation), so that a sum
    /// that fuses with its neighbors is left to Burn.
    const SCORE: u64 = 15;
}

impl OperationFuser<CubeOptimization> for ColumnSumFuser {
    fn fuse(&mut self, operation: &OperationIr) {
        if self.closed {
            return;
        }
        if let Some(sum) = served_sum(operation)
            && self.passenger.is_none_or(|made| made == sum.input.id)
        {
            self.sum = Some(sum);
            self.closed = true;
        } else if self.passenger.is_none()
            && let Some(made) = arithmetic_output(operation)
        {
            self.passenger = Some(made);
        } else {
            self.closed = true;
        }
    }

    fn finish(&mut self) -> CubeOptimization {
        let sum = self.sum.clone().expect("Burn finishes a fuser only when it says it is ready");
        let passengers = usize::from(self.passenger.is_some());
        CubeOptimization::new(ColumnSumOperation { sum, passengers })
    }

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn status(&self) -> FuserStatus {
        if self.closed { FuserStatus::Closed } else { FuserStatus::Open }
    }

    fn properties(&self) -> FuserProperties {
        let ready = self.sum.is_some();
        FuserProperties { score: if ready { Self::SCORE } else { 0 }, ready }
    }

    fn len(&self) -> usize {
        usize::from(self.passenger.is_some()) + usize::from(self.sum.is_some())
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}

/// A sum over dimensions that are neighbors and not the last.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Sum {
    pub(crate) input: TensorIr,
    pub(crate) out: TensorIr,
    axes: Range<usize>,
}

/// The sum in `operation`, if its type and dimensions are ones that the kernel takes.
pub(crate) fn served_sum(operation: &OperationIr) -> Option<Sum> {
    let OperationIr::NumericFloat(dtype, operation) = operation else { return None };
    let (input, out, axes) = match operation {
        NumericOperationIr::SumDim(op) => (&op.input, &op.out, op.axis..op.axis + 1),
        NumericOperationIr::SumDims(op) => (&op.input, &op.out, neighbors(&op.axes)?),
        _ => return None,
    };
    let served = matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
        && axes.end < input.shape.num_dims()
        && out.dtype == input.dtype;
    served.then(|| Sum { input: input.clone(), out: out.clone(), axes })
}

/// The range that `axes` fill, in whatever order they are named.
fn neighbors(axes: &[usize]) -> Option<Range<usize>> {
    let (first, last) = (*axes.iter().min()?, *axes.iter().max()?);
    let range = first..last + 1;
    (axes.len() == range.len() && range.clone().all(|axis| axes.contains(&axis))).then_some(range)
}

impl Sum {
    /// Whether it leaves one row, along the last dimension, of all.
    pub(crate) fn is_of_rows(&self) -> bool {
        self.axes == (0..self.input.shape.num_dims() - 1)
    }

    /// Runs it on the kernel.
    pub(crate) fn launch(&self, context: &mut Tensors) -> Result<(), KernelError> {
        let Self { input, out, axes } = self;
        let x = Input::of(context, input, OP)?;
        if x.elements() == 0 {
            register_zeros(context, out, &x.place(), OP)?;
            consume(context, input);
            return Ok(());
        }
        let problem = ColumnSumProblem::new(&x.shape, &x.strides, axes.clone(), x.dtype)?;
        let y = column_sum(&x.client, &problem, &x.buffer(problem.span()))?;
        register_output(context, out, &x, y, OP)?;
        consume(context, input);
        Ok(())
    }
}

/// A sum on the kernel, or on Burn's own reduction where the kernel declines.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ColumnSumOperation {
    sum: Sum,
    /// Operations before it, which run unfused.
    passengers: usize,
}

impl FusedOperation for ColumnSumOperation {
    const NAME: &'static str = NAME;
    type State = Self;

    fn num_ops_fused(&self) -> usize {
        self.passengers + 1
    }

    fn run(
        &mut self,
        context: &mut Tensors,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        for passenger in 0..self.passengers {
            fallback(passenger).run(context);
        }
        if let Err(reason) = self.sum.launch(context) {
            declined::tell_once(NAME, &reason);
            fallback(self.passengers).run(context);
        }
    }

    fn to_state(&self) -> Self::State {
        self.clone()
    }

    fn from_state(_device: &cubecl::Device, state: Self::State) -> Self {
        state
    }
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
