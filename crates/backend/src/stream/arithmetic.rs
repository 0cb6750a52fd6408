use burn_ir::{BaseOperationIr, NumericOperationIr, OperationIr, TensorId};

/// The tensor that `operation` makes, if it is arithmetic, a cast or a part of a tensor. Burn's element-wise fusion waits on such
/// an operation by itself.
///
/// Burn settles an operation that no fusion wants together with the one after it, which a provider
/// therefore has to meet behind such an operation, too.
pub(crate) fn arithmetic_output(operation: &OperationIr) -> Option<TensorId> {
    use NumericOperationIr::{Add, AddScalar, Div, DivScalar, Mul, MulScalar, Sub, SubScalar};

    let operation = match operation {
        OperationIr::BaseFloat(BaseOperationIr::Cast(op)) => return Some(op.out.id),
        OperationIr::BaseFloat(BaseOperationIr::Slice(op)) => return Some(op.out.id),
        OperationIr::NumericFloat(_, operation) => operation,
        _ => return None,
    };
    match operation {
        Add(op) | Sub(op) | Mul(op) | Div(op) => Some(op.out.id),
        AddScalar(op) | SubScalar(op) | MulScalar(op) | DivScalar(op) => Some(op.out.id),
        _ => None,
    }
}
