//! A product and what is done to it, as the stream has them.

use super::activations::{KnownActivation, fuses_kept_preactivation};
use crate::stream::{ExpectedScalar, Matcher};
use burn_backend::DType;
use burn_ir::{
    BaseOperationIr, BinaryOpIr, FloatOperationIr, MatmulOpIr, NumericOperationIr, OperationIr,
    ScalarIr, ScalarOpIr, TensorId, TensorIr, TensorStatus,
};
use serde::{Deserialize, Serialize};

/// One thing done to the product.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Action {
    /// Summed over its first dimension of three: the gradient of a matrix that all of a batch share.
    BatchSum,
    /// Multiplied, or divided, by the number at that position of the stream.
    Scale { scalar: u64, divides: bool },
    /// One number added to each column.
    Bias(TensorIr),
    /// A function applied to each element.
    Activation {
        function: KnownActivation,
        /// The numbers that make its operations that function.
        scalars: Vec<ExpectedScalar>,
        /// Whether its input is read again later.
        kept: bool,
    },
    /// A tensor of the same shape added.
    Residual(TensorIr),
    /// Multiplied by a tensor of the same shape: by the mask of dropout, where the product is the gradient of what it
    /// left.
    Factor(TensorIr),
    /// Looked at under another shape.
    View,
}

impl Action {
    /// What is done to a product comes in this order; views fit in anywhere but before a sum.
    fn rank(&self) -> usize {
        match self {
            Self::View => 0,
            Self::BatchSum => 1,
            Self::Scale { .. } => 2,
            Self::Bias(_) => 3,
            Self::Activation { .. } => 4,
            // A kernel has one of them.
            Self::Residual(_) | Self::Factor(_) => 5,
        }
    }
}

/// An [`Action`] with the operations that it stands for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ChainStep {
    pub(super) action: Action,
    /// What it makes.
    pub(super) out: TensorIr,
    /// The position of its first operation.
    pub(super) first: usize,
    /// How many operations follow each other there.
    pub(super) operations: usize,
}

/// A product and the steps that follow it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Chain {
    pub(super) lhs: TensorIr,
    pub(super) rhs: TensorIr,
    pub(super) product: TensorIr,
    /// The position of the product's operation.
    pub(super) first: usize,
    pub(super) steps: Vec<ChainStep>,
}

impl Chain {
    /// The product in `operation`, if the kernels take its types.
    pub(super) fn start(operation: &OperationIr, first: usize) -> Option<Self> {
        let OperationIr::Float(_, FloatOperationIr::Matmul(MatmulOpIr { lhs, rhs, out })) =
            operation
        else {
            return None;
        };
        let served = matches!(out.dtype, DType::F32 | DType::F16 | DType::BF16)
            && lhs.dtype == out.dtype
            && rhs.dtype == out.dtype;
        served.then(|| Self {
            lhs: lhs.clone(),
            rhs: rhs.clone(),
            product: out.clone(),
            first,
            steps: Vec::new(),
        })
    }

    /// The position after the last operation of the last step.
    pub(super) fn end(&self) -> usize {
        self.steps.last().map_or(self.first + 1, |step| step.first + step.operations)
    }

    /// Positions of the product's operation and of those of the steps, as far as there are that many.
    pub(super) fn positions(&self, steps: usize) -> Vec<usize> {
        let of_steps =
            self.steps[..steps].iter().flat_map(|step| step.first..step.first + step.operations);
        std::iter::once(self.first).chain(of_steps).collect()
    }

    /// What the steps have made so far.
    pub(super) fn value(&self) -> &TensorIr {
        self.value_before(self.steps.len())
    }

    /// What the first `steps` steps make.
    pub(super) fn value_before(&self, steps: usize) -> &TensorIr {
        self.steps[..steps].last().map_or(&self.product, |step| &step.out)
    }

    /// Takes the step that `operation` is by itself, if it is one.
    pub(super) fn follow(&mut self, operation: &OperationIr, position: usize) -> bool {
        let Some((action, out)) = self.single_step(operation) else { return false };
        self.take(ChainStep { action, out: out.clone(), first: position, operations: 1 })
    }

    /// Takes the step that `matcher` has followed through to its end, at `position`.
    pub(super) fn follow_activation(
        &mut self,
        function: KnownActivation,
        matcher: &Matcher,
        position: usize,
    ) -> bool {
        let (Some(x), Some(out)) = (matcher.tensor("x"), matcher.output()) else { return false };
        let kept = x.status != TensorStatus::ReadWrite;
        if (kept && !fuses_kept_preactivation()) || out.dtype != x.dtype {
            return false;
        }
        let scalars = matcher.scalars().to_vec();
        let operations = matcher.positions().len();
        let (out, first) = (out.clone(), position + 1 - operations);
        let action = Action::Activation { function, scalars, kept };
        self.take(ChainStep { action, out, first, operations })
    }

    /// Whether `operation` gives a tensor the shape of a row of the chain's value and may run before
    /// the product: it neither reads what the chain makes nor frees what the chain reads.
    pub(super) fn may_precede_as_row(&self, operation: &OperationIr) -> bool {
        let OperationIr::BaseFloat(BaseOperationIr::Reshape(op)) = operation else { return false };
        let frees = op.input.status == TensorStatus::ReadWrite;
        is_row_of(&op.out, self.value())
            && !self.makes(op.input.id)
            && !(frees && self.reads(op.input.id))
    }

    fn take(&mut self, step: ChainStep) -> bool {
        let rank = step.action.rank();
        let in_order = rank == 0 || self.steps.iter().all(|taken| taken.action.rank() < rank);
        if in_order {
            self.steps.push(step);
        }
        in_order
    }

    fn single_step<'a>(&self, operation: &'a OperationIr) -> Option<(Action, &'a TensorIr)> {
        use NumericOperationIr::{Add, DivScalar, Mul, MulScalar, SumDim};

        match operation {
            OperationIr::BaseFloat(BaseOperationIr::Reshape(op)) => {
                self.is_spent_by(&op.input).then_some((Action::View, &op.out))
            }
            OperationIr::NumericFloat(_, MulScalar(op)) => self.scale(op, false),
            OperationIr::NumericFloat(_, DivScalar(op)) => self.scale(op, true),
            OperationIr::NumericFloat(_, Add(op)) => self.add(op),
            OperationIr::NumericFloat(_, Mul(op)) => self.multiply(op),
            OperationIr::NumericFloat(_, SumDim(op)) => {
                let is_of_batch = self.steps.is_empty()
                    && op.axis == 0
                    && op.input.shape.num_dims() == 3
                    && op.out.dtype == op.input.dtype
                    && self.is_spent_by(&op.input);
                is_of_batch.then_some((Action::BatchSum, &op.out))
            }
            _ => None,
        }
    }

    fn scale<'a>(&self, op: &'a ScalarOpIr, divides: bool) -> Option<(Action, &'a TensorIr)> {
        let ScalarIr::UInt(scalar) = op.rhs else { return None };
        self.is_spent_by(&op.lhs).then_some((Action::Scale { scalar, divides }, &op.out))
    }

    /// The other tensor of an operation on the chain's value, where nobody else reads that.
    fn other<'a>(&self, op: &'a BinaryOpIr) -> Option<&'a TensorIr> {
        let other = if self.is_spent_by(&op.lhs) {
            &op.rhs
        } else if self.is_spent_by(&op.rhs) {
            &op.lhs
        } else {
            return None;
        };
        (!self.makes(other.id) && other.dtype == op.out.dtype).then_some(other)
    }

    fn multiply<'a>(&self, op: &'a BinaryOpIr) -> Option<(Action, &'a TensorIr)> {
        let other = self.other(op)?;
        (other.shape == self.value().shape).then(|| (Action::Factor(other.clone()), &op.out))
    }

    fn add<'a>(&self, op: &'a BinaryOpIr) -> Option<(Action, &'a TensorIr)> {
        let other = self.other(op)?;
        let action = if is_row_of(other, self.value()) && !self.has_bias() {
            Action::Bias(other.clone())
        } else if other.shape == self.value().shape {
            Action::Residual(other.clone())
        } else {
            return None;
        };
        Some((action, &op.out))
    }

    /// Whether it is a gradient of a weight, which nothing follows that a product could take. Blocks that
    /// stay open are counted by Burn, and at four it begins to close others.
    pub(super) fn is_over(&self) -> bool {
        self.steps.last().is_some_and(|step| step.action == Action::BatchSum)
    }

    fn has_bias(&self) -> bool {
        self.steps.iter().any(|step| step.action.rank() >= 3)
    }

    /// Whether `tensor` is the chain's value, read for the last time.
    fn is_spent_by(&self, tensor: &TensorIr) -> bool {
        tensor.id == self.value().id && tensor.status == TensorStatus::ReadWrite
    }

    /// Whether `operation` reads the chain's value for the last time.
    pub(super) fn is_freed_by(&self, operation: &OperationIr) -> bool {
        operation.inputs().any(|input| self.is_spent_by(input))
    }

    fn makes(&self, id: TensorId) -> bool {
        self.product.id == id || self.steps.iter().any(|step| step.out.id == id)
    }

    fn reads(&self, id: TensorId) -> bool {
        let operand = |step: &ChainStep| match &step.action {
            Action::Bias(tensor) | Action::Residual(tensor) | Action::Factor(tensor) => {
                tensor.id == id
            }
            Action::BatchSum | Action::Scale { .. } | Action::Activation { .. } | Action::View => {
                false
            }
        };
        self.lhs.id == id || self.rhs.id == id || self.steps.iter().any(operand)
    }
}

/// Whether `tensor` has the last dimension of `value` and is 1 in the others, as far as the stream
/// tells: it numbers sizes, and 0 is the number of the size 1.
fn is_row_of(tensor: &TensorIr, value: &TensorIr) -> bool {
    const ONE: usize = 0;

    let Some((last, leading)) = tensor.shape.split_last() else { return false };
    tensor.shape.num_dims() == value.shape.num_dims()
        && leading.iter().all(|size| *size == ONE)
        && value.shape.last() == Some(last)
}
