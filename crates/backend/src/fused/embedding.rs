//! The provider that runs the gradient of `burn::nn::Embedding` on the kernel.
//!
//! Burn adds rows to zeros at the places that an index names. Taken are the zeros and that, where all of it
//! is one matrix; views of the index or the rows that the stream shows in between run first.

use crate::{
    ops::embedding::row_sums,
    stream::{Claim, Done, Elapsed, Moment, Next, Part, Replacement, Search},
    tensors::{Tensors, consume, cube_tensor, known_output, register_cube_tensor},
};
use blackburn_kernels::KernelError;
use burn_backend::{DType, tensor::IndexingUpdateOp};
use burn_ir::{BaseOperationIr, OperationIr, SelectAssignOpIr, TensorIr, TensorStatus};
use serde::{Deserialize, Serialize};

const OP: &str = "embedding_backward";

/// Follows the stream from zeros to what is added to them.
#[derive(Clone, Default)]
pub(crate) struct EmbeddingSearch {
    zeros: Option<TensorIr>,
    /// How many views stand in between.
    views: usize,
    found: Option<SelectAssignOpIr>,
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
        match operation {
            OperationIr::BaseFloat(BaseOperationIr::SelectAssign(op)) if is_of_rows(op, zeros) => {
                self.found = Some(op.clone());
                Next::Last
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
        let found = EmbeddingGradient(self.found.clone()?);
        let last = 1 + self.views;
        let parts = vec![Part::Unfused((1..last).collect()), Part::Replaced(vec![0, last], found)];
        Some(Claim { score: Self::SCORE, parts })
    }

    /// Zeros are waited behind for what follows at once, views included: others begin so too.
    fn gives_up(&self, elapsed: Elapsed) -> bool {
        elapsed.since_first > Self::MOST_VIEWS as u64
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

/// The gradient on the kernel, or as Burn's own operations where that declines.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct EmbeddingGradient(SelectAssignOpIr);

impl Replacement for EmbeddingGradient {
    const NAME: &'static str = "BlackburnEmbedding";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        let SelectAssignOpIr { indices, value, out, .. } = &self.0;
        let shape = known_output(tensors, out, OP)?.shape.clone();
        let dy = cube_tensor(tensors, value, OP)?;
        let index = cube_tensor(tensors, indices, OP)?;
        let dw = row_sums(dy, index, shape)?;
        register_cube_tensor(tensors, out, dw, OP)?;
        for tensor in [indices, value] {
            consume(tensors, tensor);
        }
        Ok(Done::All)
    }
}
