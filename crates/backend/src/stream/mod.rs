//! Fixed sequences of operations, written down as data and found in the stream: of element-wise operations
//! on tensors of one shape by [`Matcher`], of operations on rows by [`DataFlow`].

mod arithmetic;
mod clock;
mod data_flow;

use burn_backend::tensor::IndexingUpdateOp;
use burn_ir::{
    BaseOperationIr, FloatOperationIr, NumericOperationIr, OperationIr, ScalarIr, TensorIr,
    TensorStatus,
};
use serde::{Deserialize, Serialize};

/// What a pattern calls a tensor.
pub(crate) type Name = &'static str;

/// A pattern: what each operation makes and from what, in the order in which Burn emits them.
///
/// A name that no step makes is an input, and the last step makes the output.
pub(crate) type Pattern = &'static [(Name, Step)];

/// An operation of a pattern, with the names of the tensors that it reads and the number in it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
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
    Mul(Name, Name),
    MulScalar(Name, f64),
    Ones,
    PowfScalar(Name, f64),
    Recip(Name),
    /// A tensor with the elements of the third added at the indices that the second has, along the last
    /// dimension.
    ScatterAdd(Name, Name, Name),
    Sub(Name, Name),
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

    /// Whether `actual` is the number.
    pub(crate) fn is(&self, actual: ScalarIr) -> bool {
        let error = (actual.elem::<f64>() - self.value).abs();
        error <= Self::TOLERANCE * self.value.abs()
    }
}

/// How far a stream has followed a pattern whose tensors all have one shape, operation by operation.
#[derive(Clone, Debug)]
pub(crate) struct Matcher {
    pattern: Pattern,
    matched: usize,
    /// Tensors by name, as their latest reader describes them.
    tensors: Vec<(Name, TensorIr)>,
    scalars: Vec<ExpectedScalar>,
}

impl Matcher {
    /// A stream that has not started on `pattern`.
    pub(crate) fn new(pattern: Pattern) -> Self {
        Self { pattern, matched: 0, tensors: Vec::new(), scalars: Vec::new() }
    }

    /// Whether `operation` is the next of the pattern, and reads and makes the tensors that it
    /// should. After a `false` the stream is off the pattern.
    pub(crate) fn follow(&mut self, operation: &OperationIr) -> bool {
        let Some((made, step)) = self.pattern.get(self.matched) else { return false };
        let Some(found) = step.find(operation) else { return false };
        let on_pattern = found.reads.iter().all(|(name, tensor)| self.read(name, tensor))
            && self.fits(found.out)
            && self.read_scalar(found.scalar);
        if on_pattern {
            self.tensors.push((made, found.out.clone()));
            self.matched += 1;
        }
        // What else is read after the last step would have to be written.
        on_pattern && (!self.is_complete() || self.intermediates_are_dead())
    }

    /// Whether the stream has followed the whole pattern.
    pub(crate) fn is_complete(&self) -> bool {
        self.matched == self.pattern.len()
    }

    /// What the next operation of the pattern makes.
    pub(crate) fn awaits(&self) -> Option<Name> {
        self.pattern.get(self.matched).map(|(made, _)| *made)
    }

    /// How many operations have been followed.
    pub(crate) fn len(&self) -> usize {
        self.matched
    }

    /// The tensor of that name, with the status that its last reader gives it.
    pub(crate) fn tensor(&self, name: Name) -> Option<&TensorIr> {
        self.tensors.iter().find(|(other, _)| *other == name).map(|(_, tensor)| tensor)
    }

    /// What the last step makes, once the pattern is complete.
    pub(crate) fn output(&self) -> Option<&TensorIr> {
        self.pattern.last().and_then(|(name, _)| self.tensor(name))
    }

    /// The numbers to check when the operations run.
    pub(crate) fn scalars(&self) -> &[ExpectedScalar] {
        &self.scalars
    }

    fn read(&mut self, name: Name, tensor: &TensorIr) -> bool {
        if let Some((_, known)) = self.tensors.iter_mut().find(|(other, _)| *other == name) {
            let same = known.id == tensor.id;
            known.status = tensor.status;
            return same;
        }
        // A first mention is an input, which nothing in the pattern may have made.
        let made_here = self.made().any(|made| made.id == tensor.id);
        let fits = !made_here && self.fits(tensor);
        self.tensors.push((name, tensor.clone()));
        fits
    }

    fn read_scalar(&mut self, scalar: Option<(ScalarIr, f64)>) -> bool {
        let Some((placeholder, value)) = scalar else { return true };
        let ScalarIr::UInt(id) = placeholder else { return false };
        self.scalars.push(ExpectedScalar { id, value });
        true
    }

    /// Whether `tensor` has the shape of the pattern's tensors.
    pub(crate) fn fits(&self, tensor: &TensorIr) -> bool {
        self.tensors.first().is_none_or(|(_, first)| first.shape == tensor.shape)
    }

    fn made(&self) -> impl Iterator<Item = &TensorIr> {
        self.pattern[..self.matched].iter().filter_map(|(name, _)| self.tensor(name))
    }

    fn intermediates_are_dead(&self) -> bool {
        let intermediates = self.matched.saturating_sub(1);
        self.made().take(intermediates).all(|made| made.status == TensorStatus::ReadWrite)
    }
}

/// An operation of the stream, its tensors under the names that a pattern gives them.
struct Found<'a> {
    reads: Vec<(Name, &'a TensorIr)>,
    scalar: Option<(ScalarIr, f64)>,
    out: &'a TensorIr,
}

impl Step {
    /// How many tensors it reads.
    fn reads(self) -> usize {
        self.names().into_iter().flatten().count()
    }

    /// What it reads.
    fn names(self) -> [Option<Name>; 3] {
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
            | Self::MulScalar(name, _)
            | Self::PowfScalar(name, _)
            | Self::Recip(name)
            | Self::SumRow(name)
            | Self::Tanh(name) => [Some(name), None, None],
        }
    }

    fn find(self, operation: &OperationIr) -> Option<Found<'_>> {
        use BaseOperationIr as Base;
        use FloatOperationIr as Float;
        use NumericOperationIr as Numeric;

        match operation {
            OperationIr::Float(_, operation) => match (self, operation) {
                (Self::Erf(input), Float::Erf(op))
                | (Self::Exp(input), Float::Exp(op))
                | (Self::Log(input), Float::Log(op))
                | (Self::Recip(input), Float::Recip(op))
                | (Self::Tanh(input), Float::Tanh(op)) => {
                    Some(Found { reads: vec![(input, &op.input)], scalar: None, out: &op.out })
                }
                (Self::PowfScalar(lhs, value), Float::PowfScalar(op)) => Some(Found {
                    reads: vec![(lhs, &op.lhs)],
                    scalar: Some((op.rhs, value)),
                    out: &op.out,
                }),
                _ => None,
            },
            OperationIr::BaseFloat(operation) => match (self, operation) {
                (Self::Cast(input), Base::Cast(op)) => {
                    Some(Found { reads: vec![(input, &op.input)], scalar: None, out: &op.out })
                }
                (Self::Fill(tensor, mask, value), Base::MaskFill(op)) => Some(Found {
                    reads: vec![(tensor, &op.tensor), (mask, &op.mask)],
                    scalar: Some((op.value, value)),
                    out: &op.out,
                }),
                (Self::Gather(tensor, indices), Base::Gather(op)) => is_last(op.dim, &op.tensor)
                    .then(|| Found {
                        reads: vec![(tensor, &op.tensor), (indices, &op.indices)],
                        scalar: None,
                        out: &op.out,
                    }),
                (Self::ScatterAdd(tensor, indices, value), Base::Scatter(op)) => {
                    let adds = op.update == IndexingUpdateOp::Add && is_last(op.dim, &op.tensor);
                    adds.then(|| Found {
                        reads: vec![
                            (tensor, &op.tensor),
                            (indices, &op.indices),
                            (value, &op.value),
                        ],
                        scalar: None,
                        out: &op.out,
                    })
                }
                (Self::Ones, Base::Ones(op)) | (Self::Zeros, Base::Zeros(op)) => {
                    Some(Found { reads: vec![], scalar: None, out: &op.out })
                }
                _ => None,
            },
            OperationIr::NumericFloat(_, operation) => match (self, operation) {
                (Self::MaxRow(input), Numeric::MaxDim(op))
                | (Self::SumRow(input), Numeric::SumDim(op)) => is_last(op.axis, &op.input)
                    .then(|| Found { reads: vec![(input, &op.input)], scalar: None, out: &op.out }),
                (Self::Add(lhs, rhs), Numeric::Add(op))
                | (Self::Div(lhs, rhs), Numeric::Div(op))
                | (Self::Mul(lhs, rhs), Numeric::Mul(op))
                | (Self::Sub(lhs, rhs), Numeric::Sub(op)) => Some(Found {
                    reads: vec![(lhs, &op.lhs), (rhs, &op.rhs)],
                    scalar: None,
                    out: &op.out,
                }),
                (Self::AddScalar(lhs, value), Numeric::AddScalar(op))
                | (Self::AtMost(lhs, value), Numeric::LowerEqualElem(op))
                | (Self::DivScalar(lhs, value), Numeric::DivScalar(op))
                | (Self::MulScalar(lhs, value), Numeric::MulScalar(op)) => Some(Found {
                    reads: vec![(lhs, &op.lhs)],
                    scalar: Some((op.rhs, value)),
                    out: &op.out,
                }),
                _ => None,
            },
            _ => None,
        }
    }
}

/// Whether the dimension is the last of the tensor's.
fn is_last(dim: usize, tensor: &TensorIr) -> bool {
    dim + 1 == tensor.shape.num_dims()
}

/// What Burn's own element-wise fusion bids for `steps`: 100 for each read or write that it saves,
/// all but `kept`, and 10 for each launch.
pub(crate) fn burn_score(steps: &[(Name, Step)], kept: usize) -> u64 {
    let reads: usize = steps.iter().map(|(_, step)| step.reads()).sum();
    let saved = (reads + steps.len()).saturating_sub(kept);
    100 * saved as u64 + 10 * steps.len().saturating_sub(1) as u64
}

pub(crate) use arithmetic::arithmetic_output;
pub(crate) use clock::Shown;
pub(crate) use data_flow::DataFlow;

#[cfg(test)]
pub(crate) mod emit;
#[cfg(test)]
mod tests {
    use super::{emit::tensor as shaped, *};
    use burn_backend::DType;
    use burn_ir::{BinaryOpIr, ScalarOpIr, TensorId, UnaryOpIr};

    /// x (erf(x) + 1)
    const PATTERN: Pattern = &[
        ("erf", Step::Erf("x")),
        ("sum", Step::AddScalar("erf", 1.0)),
        ("y", Step::Mul("x", "sum")),
    ];

    fn tensor(id: u64, status: TensorStatus) -> TensorIr {
        shaped(id, [1, 2], status)
    }

    /// The pattern's operations, the last of which multiplies `lhs` by `rhs`.
    fn stream(lhs: u64, rhs: u64, erf_status: TensorStatus) -> [OperationIr; 3] {
        use TensorStatus::{NotInit, ReadOnly, ReadWrite};

        let erf = UnaryOpIr { input: tensor(0, ReadOnly), out: tensor(1, NotInit) };
        let sum = ScalarOpIr {
            lhs: tensor(1, erf_status),
            rhs: ScalarIr::UInt(7),
            out: tensor(2, NotInit),
        };
        let product = BinaryOpIr {
            lhs: tensor(lhs, ReadWrite),
            rhs: tensor(rhs, ReadWrite),
            out: tensor(3, NotInit),
        };
        [
            OperationIr::Float(DType::F32, FloatOperationIr::Erf(erf)),
            OperationIr::NumericFloat(DType::F32, NumericOperationIr::AddScalar(sum)),
            OperationIr::NumericFloat(DType::F32, NumericOperationIr::Mul(product)),
        ]
    }

    fn follow(stream: &[OperationIr]) -> Option<Matcher> {
        let mut matcher = Matcher::new(PATTERN);
        stream.iter().all(|operation| matcher.follow(operation)).then_some(matcher)
    }

    #[test]
    fn a_stream_that_follows_the_pattern_tells_its_tensors_and_numbers() {
        let matcher = follow(&stream(0, 2, TensorStatus::ReadWrite)).unwrap();
        assert!(matcher.is_complete());
        assert_eq!(matcher.tensor("x").unwrap().status, TensorStatus::ReadWrite);
        assert_eq!(matcher.output().unwrap().id, TensorId::new(3));
        assert_eq!(matcher.scalars(), [ExpectedScalar { id: 7, value: 1.0 }]);
    }

    #[test]
    fn other_tensors_in_the_same_operations_are_off_the_pattern() {
        assert!(follow(&stream(2, 0, TensorStatus::ReadWrite)).is_none(), "swapped");
        assert!(follow(&stream(9, 2, TensorStatus::ReadWrite)).is_none(), "another input");
    }

    #[test]
    fn an_intermediate_that_is_read_later_is_off_the_pattern() {
        assert!(follow(&stream(0, 2, TensorStatus::ReadOnly)).is_none());
    }

    #[test]
    fn a_number_may_be_off_by_what_single_precision_makes_of_it() {
        let expected = ExpectedScalar { id: 0, value: std::f64::consts::SQRT_2 };
        assert!(expected.is(ScalarIr::Float(f64::from(std::f32::consts::SQRT_2))));
        assert!(!expected.is(ScalarIr::Float(1.415)));
        assert!(ExpectedScalar { id: 0, value: 3.0 }.is(ScalarIr::Int(3)));
    }

    #[test]
    fn the_score_counts_what_one_kernel_saves() {
        // Of 4 reads and 3 writes, one of each is left, and 2 of 3 launches are saved.
        assert_eq!(burn_score(PATTERN, 2), 520);
    }
}
