//! Streams that follow a pattern, for tests of those who search for it.

use super::pattern::{Name, Pattern, PatternStep as Step};
use burn_backend::{DType, Shape};
use burn_ir::{
    BaseOperationIr, BinaryOpIr, FloatOperationIr as Float, NumericOperationIr as Numeric,
    OperationIr, ReduceDimOpIr, ScalarIr, ScalarOpIr, ShapeOpIr, TensorId, TensorIr, TensorStatus,
    UnaryOpIr,
};

/// A tensor of f32, of which the stream tells a number for each size.
pub(crate) fn tensor<const D: usize>(id: u64, shape: [usize; D], status: TensorStatus) -> TensorIr {
    TensorIr { id: TensorId::new(id), shape: Shape::from(shape), status, dtype: DType::F32 }
}

/// The operations of `pattern`. Its inputs have the numbers that `inputs` gives them and are read
/// again later; what it makes is numbered from `first` on and read by the pattern alone.
///
/// # Panics
///
/// Where the pattern has another input, or a step that no test has needed yet.
pub(crate) fn emit(
    pattern: Pattern,
    inputs: &[(Name, u64)],
    first: u64,
    shape: [usize; 2],
) -> Vec<OperationIr> {
    use TensorStatus::{NotInit, ReadOnly, ReadWrite};

    let operation = |at: usize| {
        let read = |name: Name| match pattern.iter().position(|(made, _)| *made == name) {
            Some(made) => {
                let is_last =
                    pattern[at + 1..].iter().all(|(_, step)| !step.names().contains(&Some(name)));
                tensor(first + made as u64, shape, if is_last { ReadWrite } else { ReadOnly })
            }
            None => {
                let input = inputs.iter().find(|(input, _)| *input == name);
                let (_, id) = input.unwrap_or_else(|| panic!("no input {name}"));
                tensor(*id, shape, ReadOnly)
            }
        };
        let out = tensor(first + at as u64, shape, NotInit);
        let unary = |input| UnaryOpIr { input: read(input), out: out.clone() };
        let binary = |lhs, rhs| BinaryOpIr { lhs: read(lhs), rhs: read(rhs), out: out.clone() };
        let scalar =
            |lhs| ScalarOpIr { lhs: read(lhs), rhs: ScalarIr::UInt(at as u64), out: out.clone() };
        let float = |operation| OperationIr::Float(DType::F32, operation);
        let numeric = |operation| OperationIr::NumericFloat(DType::F32, operation);
        match pattern[at].1 {
            Step::Add(lhs, rhs) => numeric(Numeric::Add(binary(lhs, rhs))),
            Step::AddScalar(lhs, _) => numeric(Numeric::AddScalar(scalar(lhs))),
            Step::Div(lhs, rhs) => numeric(Numeric::Div(binary(lhs, rhs))),
            Step::DivScalar(lhs, _) => numeric(Numeric::DivScalar(scalar(lhs))),
            Step::Erf(input) => float(Float::Erf(unary(input))),
            Step::Mul(lhs, rhs) => numeric(Numeric::Mul(binary(lhs, rhs))),
            Step::MulScalar(lhs, _) => numeric(Numeric::MulScalar(scalar(lhs))),
            Step::PowfScalar(lhs, _) => float(Float::PowfScalar(scalar(lhs))),
            Step::Sqrt(input) => float(Float::Sqrt(unary(input))),
            Step::Sub(lhs, rhs) => numeric(Numeric::Sub(binary(lhs, rhs))),
            Step::Tanh(input) => float(Float::Tanh(unary(input))),
            other => panic!("no test has needed {other:?} yet"),
        }
    };
    (0..pattern.len()).map(operation).collect()
}

/// The sum of the tensor of that number along a dimension; its result has that number and 100.
pub(crate) fn sum_along<const D: usize>(id: u64, shape: [usize; D], axis: usize) -> OperationIr {
    let input = tensor(id, shape, TensorStatus::ReadOnly);
    let out = tensor(id + 100, shape, TensorStatus::NotInit);
    let sum = ReduceDimOpIr { input, out, axis, accumulator_len: 1 };
    OperationIr::NumericFloat(DType::F32, Numeric::SumDim(sum))
}

/// The tensor `out` that holds what the tensor `id` does.
pub(crate) fn view(id: u64, shape: [usize; 2], out: u64) -> OperationIr {
    let input = tensor(id, shape, TensorStatus::ReadWrite);
    let out = tensor(out, shape, TensorStatus::NotInit);
    OperationIr::BaseFloat(BaseOperationIr::Reshape(ShapeOpIr { input, out }))
}
