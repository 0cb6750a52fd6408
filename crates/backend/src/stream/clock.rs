use burn_ir::{FloatOperationIr, NumericOperationIr, OperationIr};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// The time of an operation stream, in operations that Burn showed to a provider's fuser or to clones of it
/// in other blocks. All of them share one clock.
///
/// Burn shows an operation only to the blocks that it belongs to, and goes on until no fuser waits. One
/// that waits for an operation that never comes makes it go on until it has as many blocks as it may
/// have, and cut off whatever is under way there: without a bias, the residual behind the next product.
#[derive(Clone, Debug, Default)]
pub(crate) struct StreamClock(Arc<AtomicU64>);

impl StreamClock {
    pub(crate) fn tick(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Whether `operation` is a matrix product, an operation of a module such as a convolution, one of Blackburn's own, or a
/// reduction of floats along dimensions.
pub(crate) fn separates(operation: &OperationIr) -> bool {
    let is_product = matches!(operation, OperationIr::Float(_, FloatOperationIr::Matmul(_)));
    is_product || matches!(operation, OperationIr::Module(_)) || is_own_or_reduction(operation)
}

/// Whether `operation` is one of Blackburn's own, or a reduction of floats along dimensions.
pub(crate) fn is_own_or_reduction(operation: &OperationIr) -> bool {
    matches!(operation, OperationIr::Custom(_)) || is_reduction(operation)
}

/// Whether `operation` is a reduction of floats along dimensions.
fn is_reduction(operation: &OperationIr) -> bool {
    use NumericOperationIr::{MaxDim, MeanDim, SumDim, SumDims};
    match operation {
        OperationIr::NumericFloat(_, operation) => {
            matches!(operation, SumDim(_) | SumDims(_) | MeanDim(_) | MaxDim(_))
        }
        _ => false,
    }
}
