use burn_backend::DType;
use burn_ir::{
    BaseOperationIr, IntOperationIr, NumericOperationIr, OperationIr, TensorId, TensorIr,
    TensorStatus,
};

/// The tensor that `operation` makes, if it is arithmetic, a cast or integers of one value, which ranges are made of. Burn's
/// element-wise fusion waits on such an operation by itself.
///
/// Burn settles an operation that no fusion wants together with the one after it, which a provider
/// therefore has to meet behind such an operation, too.
pub(crate) fn arithmetic_output(operation: &OperationIr) -> Option<TensorId> {
    use NumericOperationIr::{
        Add, AddScalar, Div, DivScalar, Full, Mul, MulScalar, Sub, SubScalar,
    };

    let operation = match operation {
        OperationIr::BaseFloat(BaseOperationIr::Cast(op)) => return Some(op.out.id),
        OperationIr::Int(IntOperationIr::IntoFloat(op)) => return Some(op.out.id),
        OperationIr::NumericInt(_, Full(op)) => return Some(op.out.id),
        OperationIr::NumericFloat(_, operation) => operation,
        _ => return None,
    };
    match operation {
        Add(op) | Sub(op) | Mul(op) | Div(op) => Some(op.out.id),
        AddScalar(op) | SubScalar(op) | MulScalar(op) | DivScalar(op) => Some(op.out.id),
        _ => None,
    }
}

/// Whether `operation` reads a tensor of f32 that others hold, too, in 16 bits: what a policy of mixed precision makes of
/// each parameter, in front of the operations that read it.
///
/// Burn's element-wise fusion would begin with such a cast and take the view of a bias along. Then the bias is in a block in
/// front of its product's, and their sum fits neither. Nothing is lost where fusions do not begin so: weights have to be in
/// memory for products, and other parameters are small.
pub(crate) fn is_parameter_cast(operation: &OperationIr) -> bool {
    parameter_cast(operation).is_some()
}

/// What `operation` reads and makes, if it is such a cast ([`is_parameter_cast`]).
pub(crate) fn parameter_cast(operation: &OperationIr) -> Option<[&TensorIr; 2]> {
    let OperationIr::BaseFloat(BaseOperationIr::Cast(op)) = operation else { return None };
    let is_cast = op.input.dtype == DType::F32
        && op.input.status == TensorStatus::ReadOnly
        && matches!(op.out.dtype, DType::BF16 | DType::F16);
    is_cast.then_some([&op.input, &op.out])
}
