//! The provider that runs the gradient of `burn::nn::Embedding` on the kernel.
//!
//! Burn adds rows to zeros at the places that an index names. Taken are the zeros and that, where all of it
//! is one matrix; views of the index or the rows that the stream shows in between run first.
//!
//! A table that is a model's head as well has another gradient, to which automatic differentiation adds this one: two
//! passes over the whole table for the few rows that a batch names. That sum is taken, too, and rows are added where the
//! other gradient lies.

use crate::{
    ops::embedding::{add_row_sums, check, row_sums},
    stream::{Claim, Done, Elapsed, Moment, Next, Part, Replacement, Search},
    tensors::{
        Tensors, consume, cube_tensor, known_output, register_cube_tensor, take_cube_tensor,
    },
};
use blackburn_kernels::KernelError;
use burn_backend::{DType, tensor::IndexingUpdateOp};
use burn_ir::{
    BaseOperationIr, NumericOperationIr, OperationIr, SelectAssignOpIr, TensorIr, TensorStatus,
};
use serde::{Deserialize, Serialize};

const OP: &str = "embedding_backward";

/// Follows the stream from zeros to what is added to them, and to what that is added to.
#[derive(Clone, Default)]
pub(crate) struct EmbeddingSearch {
    zeros: Option<TensorIr>,
    /// How many views stand in between.
    views: usize,
    found: Option<EmbeddingGradient>,
}

impl EmbeddingSearch {
    /// Above what Burn's fusions bid for as many operations.
    const SCORE: u64 = 100_000;
    /// Views of the index and of the rows.
    const MOST_VIEWS: usize = 2;
}

impl Search for EmbeddingSearch {
    type Replacement = EmbeddingGradient;

    fn follow(&mut self, operation: &OperationIr, _now: Moment) -> Next {
        let Some(zeros) = &self.zeros else {
            let OperationIr::BaseFloat(BaseOperationIr::Zeros(op)) = operation else {
                return Next::Refused;
            };
            let served = matches!(op.out.dtype, DType::F32 | DType::F16 | DType::BF16)
                && op.out.shape.num_dims() == 2;
            self.zeros = Some(op.out.clone());
            return Next::taken_if(served);
        };
        if let Some(found) = &mut self.found {
            found.other = other_gradient(operation, &found.out);
            return if found.other.is_some() { Next::Last } else { Next::Refused };
        }
        match operation {
            OperationIr::BaseFloat(BaseOperationIr::SelectAssign(op)) if is_of_rows(op, zeros) => {
                self.found = Some(EmbeddingGradient::new(&op.indices, &op.value, &op.out));
                Next::Taken
            }
            OperationIr::BaseFloat(BaseOperationIr::Reshape(op))
            | OperationIr::BaseInt(BaseOperationIr::Reshape(op)) => {
                self.views += 1;
                Next::taken_if(self.views <= Self::MOST_VIEWS && op.input.id != zeros.id)
            }
            _ => Next::Refused,
        }
    }

    /// Views run first, as Burn runs them.
    fn claim(&self) -> Option<Claim<EmbeddingGradient>> {
        let found = self.found.clone()?;
        let last = 1 + self.views;
        let mut replaced = vec![0, last];
        if found.other.is_some() {
            replaced.push(last + 1);
        }
        let parts = vec![Part::Unfused((1..last).collect()), Part::Replaced(replaced, found)];
        Some(Claim { score: Self::SCORE, parts })
    }

    /// What follows comes at once, views included: others begin with zeros, too.
    fn gives_up(&self, elapsed: Elapsed) -> bool {
        match self.found {
            Some(_) => elapsed.since_last > 0,
            None => elapsed.since_first > Self::MOST_VIEWS as u64,
        }
    }

    fn takes_time(operation: &OperationIr) -> bool {
        !matches!(operation, OperationIr::Drop(_))
    }
}

/// Whether rows are added to `zeros`, which nobody else reads.
fn is_of_rows(op: &SelectAssignOpIr, zeros: &TensorIr) -> bool {
    op.tensor.id == zeros.id
        && op.tensor.status == TensorStatus::ReadWrite
        && op.dim == 0
        && op.update == IndexingUpdateOp::Add
        && op.value.shape.num_dims() == 2
        && op.value.shape.last() == zeros.shape.last()
        && op.value.dtype == zeros.dtype
        && op.indices.dtype == DType::I32
}

/// What `operation` adds `gradient` to, if that is all it does and nobody else reads either.
fn other_gradient(operation: &OperationIr, gradient: &TensorIr) -> Option<OtherGradient> {
    let OperationIr::NumericFloat(_, NumericOperationIr::Add(op)) = operation else {
        return None;
    };
    let [own, other] = match gradient.id == op.lhs.id {
        true => [&op.lhs, &op.rhs],
        false => [&op.rhs, &op.lhs],
    };
    let is_taken = [other, own].iter().all(|it| it.status == TensorStatus::ReadWrite)
        && own.id == gradient.id
        && other.id != own.id
        && other.shape == own.shape
        && other.dtype == op.out.dtype;
    is_taken.then(|| OtherGradient { gradient: other.clone(), sum: op.out.clone() })
}

/// The gradient on the kernel, or as Burn's own operations where that declines.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct EmbeddingGradient {
    index: TensorIr,
    dy: TensorIr,
    out: TensorIr,
    other: Option<OtherGradient>,
}

/// Another gradient of the same table, and the sum of both.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct OtherGradient {
    gradient: TensorIr,
    sum: TensorIr,
}

impl EmbeddingGradient {
    fn new(index: &TensorIr, dy: &TensorIr, out: &TensorIr) -> Self {
        Self { index: index.clone(), dy: dy.clone(), out: out.clone(), other: None }
    }
}

impl Replacement for EmbeddingGradient {
    const NAME: &'static str = "BlackburnEmbedding";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        let Self { index, dy, out, other } = self;
        let shape = known_output(tensors, out, OP)?.shape.clone();
        let of_dy = cube_tensor(tensors, dy, OP)?;
        let of_index = cube_tensor(tensors, index, OP)?;
        let (result, dw) = match other {
            None => (out, row_sums(of_dy, of_index, shape)?),
            Some(OtherGradient { gradient, sum }) => {
                known_output(tensors, sum, OP)?;
                // What is taken cannot be given back to Burn's operations.
                check(&of_dy, &of_index, &shape)?;
                let gradient = take_cube_tensor(tensors, gradient, OP)?;
                (sum, add_row_sums(of_dy, of_index, gradient)?)
            }
        };
        register_cube_tensor(tensors, result, dw, OP)?;
        for tensor in [index, dy] {
            consume(tensors, tensor);
        }
        Ok(Done::All)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Fuser, emit::tensor};
    use burn_ir::{
        BinaryOpIr, CreationOpIr,
        TensorStatus::{NotInit, ReadOnly, ReadWrite},
    };

    const ZEROS: u64 = 1;
    const GRADIENT: u64 = 2;
    const HEAD: u64 = 3;

    fn table(id: u64, status: TensorStatus) -> TensorIr {
        tensor(id, [50, 8], status)
    }

    fn gradient() -> Vec<OperationIr> {
        let indices = TensorIr { dtype: DType::I32, ..tensor(10, [4], ReadOnly) };
        vec![
            OperationIr::BaseFloat(BaseOperationIr::Zeros(CreationOpIr {
                out: table(ZEROS, NotInit),
            })),
            OperationIr::BaseFloat(BaseOperationIr::SelectAssign(SelectAssignOpIr {
                tensor: table(ZEROS, ReadWrite),
                dim: 0,
                indices,
                value: tensor(11, [4, 8], ReadWrite),
                update: IndexingUpdateOp::Add,
                out: table(GRADIENT, NotInit),
            })),
        ]
    }

    fn sum(lhs: TensorIr, rhs: TensorIr) -> OperationIr {
        let add = BinaryOpIr { lhs, rhs, out: table(20, NotInit) };
        OperationIr::NumericFloat(DType::F32, NumericOperationIr::Add(add))
    }

    /// How many operations are claimed of a gradient and what comes behind it.
    fn claims(then: Option<OperationIr>) -> Option<usize> {
        let operations: Vec<_> = gradient().into_iter().chain(then).collect();
        Fuser::after(EmbeddingSearch::default(), &operations).claims()
    }

    #[test]
    fn the_other_gradient_of_a_table_is_taken_from_either_side() {
        let [own, other] = [GRADIENT, HEAD].map(|id| table(id, ReadWrite));
        assert_eq!(claims(Some(sum(own.clone(), other.clone()))), Some(3));
        assert_eq!(claims(Some(sum(other, own))), Some(3));
        assert_eq!(claims(None), Some(2));
    }

    #[test]
    fn what_somebody_else_reads_is_not_written_to() {
        let [own, other] = [GRADIENT, HEAD].map(|id| table(id, ReadWrite));
        let kept = TensorIr { status: ReadOnly, ..other.clone() };
        let row = tensor(HEAD, [1, 8], ReadWrite);
        for (lhs, rhs) in [(&own, &kept), (&own, &own), (&own, &row), (&other, &other)] {
            assert_eq!(claims(Some(sum(lhs.clone(), rhs.clone()))), Some(2));
        }
    }
}
