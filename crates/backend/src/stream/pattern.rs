//! Fixed sequences of operations, written down as data.

use crate::tensors::Tensors;
use burn_backend::tensor::IndexingUpdateOp;
use burn_fusion::stream::ScalarId;
use burn_ir::{
    BaseOperationIr, FloatOperationIr, NumericOperationIr, OperationIr, ScalarIr, TensorIr,
};
use serde::{Deserialize, Serialize};

/// What a pattern calls a tensor.
pub(crate) type Name = &'static str;

/// A pattern: what each operation makes and from what, in the order in which Burn emits them.
///
/// A name that no step makes is an input, and the last step makes the output.
pub(crate) type Pattern = &'static [(Name, PatternStep)];

/// A number in a pattern that differs from layer to layer. Whoever replaces the pattern looks it up when the
/// operations run; [`ExpectedScalar::are_there`] never holds of it.
pub(crate) const ANY_NUMBER: f64 = f64::NAN;

/// An operation of a pattern, with the names of the tensors that it reads and the number in it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PatternStep {
    Add(Name, Name),
    AddScalar(Name, f64),
    /// Where a tensor is that number or less.
    AtMost(Name, f64),
    /// To any type.
    Cast(Name),
    Div(Name, Name),
    DivScalar(Name, f64),
    Erf(Name),
    Exp(Name),
    /// A tensor, and that number where the second one holds.
    Fill(Name, Name, f64),
    /// A tensor's elements at the indices that the second one has, along the last dimension.
    Gather(Name, Name),
    Log(Name),
    /// The largest element along the last dimension.
    MaxRow(Name),
    /// The mean of the elements along the last dimension.
    MeanRow(Name),
    Mul(Name, Name),
    MulScalar(Name, f64),
    Ones,
    PowfScalar(Name, f64),
    Recip(Name),
    /// The same elements in another shape.
    Reshape(Name),
    /// A tensor with the elements of the third added at the indices that the second has, along the last
    /// dimension.
    ScatterAdd(Name, Name, Name),
    Sqrt(Name),
    /// The sums over all dimensions but the second.
    SumOfChannels(Name),
    /// The sum of all rows along the last dimension.
    SumOfRows(Name),
    Sub(Name, Name),
    /// A tensor with its first two dimensions in each other's place.
    SwapFirst(Name),
    /// The sum of the elements along the last dimension.
    SumRow(Name),
    Tanh(Name),
    Zeros,
}

/// A number in the stream, and what the pattern has in its place.
///
/// While operations are matched only the position of the number is known; the number itself is
/// there when they run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ExpectedScalar {
    /// The position.
    pub(crate) id: u64,
    /// The number.
    pub(crate) value: f64,
}

impl ExpectedScalar {
    /// How far a number may be off: what single precision makes of a constant.
    const TOLERANCE: f64 = 1e-6;

    /// Whether all of them are in the stream this time.
    pub(crate) fn are_there(expected: &[Self], tensors: &Tensors) -> bool {
        expected.iter().all(|scalar| {
            let actual = tensors.scalars.get(&ScalarId { value: scalar.id });
            actual.is_some_and(|actual| scalar.is(*actual))
        })
    }

    /// Whether the pattern leaves the number open.
    pub(crate) fn is_any(&self) -> bool {
        self.value.is_nan()
    }

    /// Whether `actual` is the number.
    pub(super) fn is(&self, actual: ScalarIr) -> bool {
        let error = (actual.elem::<f64>() - self.value).abs();
        error <= Self::TOLERANCE * self.value.abs()
    }
}

/// The number that the stream has there.
pub(crate) fn number(tensors: &Tensors, id: u64) -> Option<f64> {
    tensors.scalars.get(&ScalarId { value: id }).map(|scalar| scalar.elem::<f64>())
}

/// An operation of the stream, its tensors under the names that a pattern gives them.
pub(super) struct Found<'a> {
    pub(super) reads: Vec<(Name, &'a TensorIr)>,
    pub(super) scalar: Option<(ScalarIr, f64)>,
    pub(super) out: &'a TensorIr,
}

impl<'a> Found<'a> {
    fn of<const N: usize>(reads: [(Name, &'a TensorIr); N], out: &'a TensorIr) -> Option<Self> {
        Some(Self { reads: reads.into(), scalar: None, out })
    }

    fn with_scalar<const N: usize>(
        reads: [(Name, &'a TensorIr); N],
        scalar: (ScalarIr, f64),
        out: &'a TensorIr,
    ) -> Option<Self> {
        Some(Self { reads: reads.into(), scalar: Some(scalar), out })
    }
}

impl PatternStep {
    /// How many tensors it reads.
    fn reads(self) -> usize {
        self.names().into_iter().flatten().count()
    }

    /// What it reads.
    pub(super) fn names(self) -> [Option<Name>; 3] {
        match self {
            Self::Zeros | Self::Ones => [None; 3],
            Self::Add(lhs, rhs)
            | Self::Div(lhs, rhs)
            | Self::Fill(lhs, rhs, _)
            | Self::Gather(lhs, rhs)
            | Self::Mul(lhs, rhs)
            | Self::Sub(lhs, rhs) => [Some(lhs), Some(rhs), None],
            Self::ScatterAdd(tensor, indices, value) => [tensor, indices, value].map(Some),
            Self::AddScalar(name, _)
            | Self::AtMost(name, _)
            | Self::Cast(name)
            | Self::DivScalar(name, _)
            | Self::Erf(name)
            | Self::Exp(name)
            | Self::Log(name)
            | Self::MaxRow(name)
            | Self::MeanRow(name)
            | Self::MulScalar(name, _)
            | Self::PowfScalar(name, _)
            | Self::Recip(name)
            | Self::Reshape(name)
            | Self::Sqrt(name)
            | Self::SumOfChannels(name)
            | Self::SumOfRows(name)
            | Self::SumRow(name)
            | Self::SwapFirst(name)
            | Self::Tanh(name) => [Some(name), None, None],
        }
    }

    pub(super) fn find(self, operation: &OperationIr) -> Option<Found<'_>> {
        use BaseOperationIr as Base;
        use FloatOperationIr as Float;
        use NumericOperationIr as Numeric;

        match operation {
            OperationIr::Float(_, operation) => match (self, operation) {
                (Self::Erf(x), Float::Erf(op))
                | (Self::Exp(x), Float::Exp(op))
                | (Self::Log(x), Float::Log(op))
                | (Self::Recip(x), Float::Recip(op))
                | (Self::Sqrt(x), Float::Sqrt(op))
                | (Self::Tanh(x), Float::Tanh(op)) => Found::of([(x, &op.input)], &op.out),
                (Self::PowfScalar(x, value), Float::PowfScalar(op)) => {
                    Found::with_scalar([(x, &op.lhs)], (op.rhs, value), &op.out)
                }
                _ => None,
            },
            OperationIr::BaseFloat(operation) => match (self, operation) {
                (Self::Cast(x), Base::Cast(op)) => Found::of([(x, &op.input)], &op.out),
                (Self::Fill(x, mask, value), Base::MaskFill(op)) => {
                    let reads = [(x, &op.tensor), (mask, &op.mask)];
                    Found::with_scalar(reads, (op.value, value), &op.out)
                }
                (Self::Gather(x, indices), Base::Gather(op)) if is_last(op.dim, &op.tensor) => {
                    Found::of([(x, &op.tensor), (indices, &op.indices)], &op.out)
                }
                (Self::ScatterAdd(x, indices, value), Base::Scatter(op))
                    if op.update == IndexingUpdateOp::Add && is_last(op.dim, &op.tensor) =>
                {
                    let reads = [(x, &op.tensor), (indices, &op.indices), (value, &op.value)];
                    Found::of(reads, &op.out)
                }
                (Self::Reshape(x), Base::Reshape(op)) => Found::of([(x, &op.input)], &op.out),
                (Self::SwapFirst(x), Base::SwapDims(op))
                    if op.dim1.min(op.dim2) == 0 && op.dim1.max(op.dim2) == 1 =>
                {
                    Found::of([(x, &op.input)], &op.out)
                }
                (Self::Ones, Base::Ones(op)) | (Self::Zeros, Base::Zeros(op)) => {
                    Found::of([], &op.out)
                }
                _ => None,
            },
            OperationIr::NumericFloat(_, operation) => match (self, operation) {
                (Self::MaxRow(x), Numeric::MaxDim(op))
                | (Self::MeanRow(x), Numeric::MeanDim(op))
                | (Self::SumRow(x), Numeric::SumDim(op))
                    if is_last(op.axis, &op.input) =>
                {
                    Found::of([(x, &op.input)], &op.out)
                }
                (Self::SumOfChannels(x), Numeric::SumDims(op))
                    if (0..op.input.shape.num_dims())
                        .filter(|dim| !op.axes.contains(dim))
                        .eq([1]) =>
                {
                    Found::of([(x, &op.input)], &op.out)
                }
                (Self::SumOfRows(x), Numeric::SumDims(op))
                    if op.axes.iter().copied().eq(0..op.input.shape.num_dims().max(1) - 1) =>
                {
                    Found::of([(x, &op.input)], &op.out)
                }
                (Self::SumOfRows(x), Numeric::SumDim(op))
                    if op.axis == 0 && op.input.shape.num_dims() == 2 =>
                {
                    Found::of([(x, &op.input)], &op.out)
                }
                (Self::Add(lhs, rhs), Numeric::Add(op))
                | (Self::Div(lhs, rhs), Numeric::Div(op))
                | (Self::Mul(lhs, rhs), Numeric::Mul(op))
                | (Self::Sub(lhs, rhs), Numeric::Sub(op)) => {
                    Found::of([(lhs, &op.lhs), (rhs, &op.rhs)], &op.out)
                }
                (Self::AddScalar(x, value), Numeric::AddScalar(op))
                | (Self::AtMost(x, value), Numeric::LowerEqualElem(op))
                | (Self::DivScalar(x, value), Numeric::DivScalar(op))
                | (Self::MulScalar(x, value), Numeric::MulScalar(op)) => {
                    Found::with_scalar([(x, &op.lhs)], (op.rhs, value), &op.out)
                }
                _ => None,
            },
            _ => None,
        }
    }
}

/// Whether the dimension is the last of the tensor's.
pub(crate) fn is_last(dim: usize, tensor: &TensorIr) -> bool {
    dim + 1 == tensor.shape.num_dims()
}

/// What Burn's own element-wise fusion bids for `steps`: 100 for each read or write that it saves,
/// all but `kept`, and 10 for each launch.
pub(crate) fn burn_score(steps: &[(Name, PatternStep)], kept: usize) -> u64 {
    let reads: usize = steps.iter().map(|(_, step)| step.reads()).sum();
    let saved = (reads + steps.len()).saturating_sub(kept);
    100 * saved as u64 + 10 * steps.len().saturating_sub(1) as u64
}
