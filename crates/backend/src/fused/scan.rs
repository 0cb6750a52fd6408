//! The provider of cumulative sums, products, maxima and minima.
//!
//! Each is an operation of its own in the stream, also where Burn's gradients are made of them. Burn's GPU kernel
//! combines all that comes before an element anew for each element. Tensors whose elements do not follow each other,
//! such as reversed ones, are copied first.

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
    scan::{ScanOperation, ScanProblem, scan},
};
use burn_backend::{DType, cubecl::dtype_to_elem_type};
use burn_ir::{DimOpIr, NumericOperationIr as Numeric, OperationIr, TensorIr};
use serde::{Deserialize, Serialize};

const OP: &str = "scan";

/// A cumulative operation on the kernels, or as Burn has it where those decline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Scan {
    kind: Kind,
    x: TensorIr,
    y: TensorIr,
    dim: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Kind {
    Sum,
    Product,
    Max,
    Min,
}

impl Kind {
    fn operation(self) -> ScanOperation {
        match self {
            Self::Sum => ScanOperation::Sum,
            Self::Product => ScanOperation::Product,
            Self::Max => ScanOperation::Max,
            Self::Min => ScanOperation::Min,
        }
    }
}

impl SingleOperation for Scan {
    type Settings = ();

    fn of(operation: &OperationIr, (): &()) -> Option<Self> {
        let (OperationIr::NumericFloat(_, operation) | OperationIr::NumericInt(_, operation)) =
            operation
        else {
            return None;
        };
        let (kind, DimOpIr { input, out, axis }) = match operation {
            Numeric::CumSum(op) => (Kind::Sum, op),
            Numeric::CumProd(op) => (Kind::Product, op),
            Numeric::CumMax(op) => (Kind::Max, op),
            Numeric::CumMin(op) => (Kind::Min, op),
            _ => return None,
        };
        let is_served =
            matches!(input.dtype, DType::F32 | DType::F16 | DType::BF16 | DType::I32 | DType::U32)
                && out.dtype == input.dtype;
        is_served.then(|| Self { kind, x: input.clone(), y: out.clone(), dim: *axis })
    }
}

impl Replacement for Scan {
    const NAME: &'static str = "BlackburnScan";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        /// Up to here Burn reads an element's predecessors as fast as a copy of them is made. In 16 bits it rounds each
        /// step.
        const SHORT: usize = 16;

        let Self { kind, x, y, dim } = self;
        let shape = known_output(tensors, y, OP)?.shape.clone();
        let input = cube_tensor(tensors, x, OP)?;
        let problem =
            ScanProblem::new(kind.operation(), &shape, *dim, dtype_to_elem_type(y.dtype))?;
        if problem.length <= SHORT && !input.is_contiguous() && y.dtype.size() == 4 {
            return Err(unsupported(OP, "few elements that lie apart"));
        }
        let made = scan(&input.client, &problem, &contiguous_buffer(input.clone()))?;
        let made = contiguous_tensor(&input, made, shape, y.dtype);
        register_cube_tensor(tensors, y, made, OP)?;
        consume(tensors, x);
        Ok(Done::All)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Fuser, SingleSearch, emit::tensor};
    use burn_ir::TensorStatus::{NotInit, ReadOnly};

    fn along(of: fn(DimOpIr) -> Numeric, dtype: DType) -> OperationIr {
        let of_type = |tensor: TensorIr| TensorIr { dtype, ..tensor };
        let op = DimOpIr {
            input: of_type(tensor(1, [4, 6], ReadOnly)),
            out: of_type(tensor(2, [4, 6], NotInit)),
            axis: 1,
        };
        match dtype.is_float() {
            true => OperationIr::NumericFloat(dtype, of(op)),
            false => OperationIr::NumericInt(dtype, of(op)),
        }
    }

    #[test]
    fn cumulative_operations_are_taken_alone_in_the_types_of_the_kernels() {
        let taken =
            |operation| Fuser::after(SingleSearch::<Scan>::default(), &[operation]).claims();
        for of in [Numeric::CumSum, Numeric::CumProd, Numeric::CumMax, Numeric::CumMin] {
            for dtype in [DType::F32, DType::BF16, DType::F16, DType::I32, DType::U32] {
                assert_eq!(taken(along(of, dtype)), Some(1), "{dtype:?}");
            }
            assert_eq!(taken(along(of, DType::I64)), None);
            assert_eq!(taken(along(of, DType::F64)), None);
        }
    }

    #[test]
    fn the_operation_and_its_dimension_are_kept() {
        let found = Scan::of(&along(Numeric::CumMin, DType::F32), &()).unwrap();
        assert_eq!((found.kind, found.dim), (Kind::Min, 1));
    }
}
