use burn_ir::{NumericOperationIr, OperationIr, TensorId};

/// The tensor that `operation` makes, if it is arithmetic. Burn's element-wise fusion waits on such an
/// operation by itself.
///
/// Burn settles an operation that no fusion wants together with the one after it, which a provider
/// therefore has to meet behind such an operation, too.
pub(crate) fn arithmetic_output(operation: &OperationIr) -> Option<TensorId> {
    use NumericOperationIr::{Add, AddScalar, Div, DivScalar, Mul, MulScalar, Sub, SubScalar};

    let OperationIr::NumericFloat(_, operation) = operation else { return None };
    match operation {
        Add(op) | Sub(op) | Mul(op) | Div(op) => Some(op.out.id),
        AddScalar(op) | SubScalar(op) | MulScalar(op) | DivScalar(op) => Some(op.out.id),
        _ => None,
    }
}
