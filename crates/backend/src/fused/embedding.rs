//! The provider that runs the gradient of `burn::nn::Embedding` on the kernel.
//!
//! Burn adds rows to zeros at the places that an index names. Taken are the zeros and that, where all of it
//! is one matrix; views of the index or the rows that the stream shows in between run first.

use crate::ops::embedding::row_sums;
use crate::{
    declined,
    stream::Shown,
    tensors::{Tensors, consume, cube_tensor, register_cube_tensor},
};
use blackburn_kernels::KernelError;
use burn_backend::{DType, tensor::IndexingUpdateOp};
use burn_cubecl::{
    CubeDevice,
    fusion::{CubeFuser, OptimizationProvider},
};
use burn_cubecl_fusion::{
    FallbackOperation,
    optim::{CubeOptimization, FusedOperation},
};
use burn_fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn_ir::{BaseOperationIr, OperationIr, SelectAssignOpIr, TensorIr, TensorStatus};
use serde::{Deserialize, Serialize};

/// The provider's name.
pub(crate) const NAME: &str = "BlackburnEmbedding";

const OP: &str = "embedding_backward";

/// Gives Burn an [`EmbeddingFuser`].
pub(crate) struct EmbeddingProvider;

impl OptimizationProvider for EmbeddingProvider {
    type Operation = EmbeddingOperation;

    fn fuser(&self, _device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(EmbeddingFuser::default())
    }
}

/// Follows the stream from zeros to what is added to them.
#[derive(Clone, Default)]
struct EmbeddingFuser {
    zeros: Option<TensorIr>,
    /// How many views stand in between.
    views: usize,
    /// How many operations had been shown with the zeros.
    shown_at: u64,
    found: Option<SelectAssignOpIr>,
    closed: bool,
    shown: Shown,
}

impl EmbeddingFuser {
    /// Above what Burn's fusions bid for as many operations.
    const SCORE: u64 = 100_000;
    /// Views of the index and of the rows.
    const MOST_VIEWS: usize = 2;

    /// Says whether `operation` was let in.
    fn follow(&mut self, operation: &OperationIr) -> bool {
        let Some(zeros) = &self.zeros else {
            let OperationIr::BaseFloat(BaseOperationIr::Zeros(op)) = operation else {
                return false;
            };
            let served = matches!(op.out.dtype, DType::F32 | DType::F16 | DType::BF16)
                && op.out.shape.num_dims() == 2;
            self.zeros = served.then(|| op.out.clone());
            self.shown_at = self.shown.so_far();
            return served;
        };
        match operation {
            OperationIr::BaseFloat(BaseOperationIr::SelectAssign(op)) if is_of_rows(op, zeros) => {
                self.found = Some(op.clone());
                self.closed = true;
                true
            }
            OperationIr::BaseFloat(BaseOperationIr::Reshape(op))
            | OperationIr::BaseInt(BaseOperationIr::Reshape(op)) => {
                self.views += 1;
                self.views <= Self::MOST_VIEWS && op.input.id != zeros.id
            }
            _ => false,
        }
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

impl OperationFuser<CubeOptimization> for EmbeddingFuser {
    fn fuse(&mut self, operation: &OperationIr) {
        self.shown.count();
        if !self.closed && !self.follow(operation) {
            self.closed = true;
        }
    }

    fn finish(&mut self) -> CubeOptimization {
        let found = self.found.clone();
        let found = found.expect("Burn finishes a fuser only when it says it is ready");
        CubeOptimization::new(EmbeddingOperation { views: self.views, found })
    }

    fn reset(&mut self) {
        *self = Self { shown: self.shown.clone(), ..Self::default() };
    }

    /// Zeros are waited behind for what follows at once, views included: others begin so too.
    fn status(&self) -> FuserStatus {
        let elsewhere = self.shown.so_far().saturating_sub(self.shown_at);
        let is_passed = self.zeros.is_some() && elsewhere > Self::MOST_VIEWS as u64;
        if self.closed || is_passed { FuserStatus::Closed } else { FuserStatus::Open }
    }

    fn properties(&self) -> FuserProperties {
        let ready = self.found.is_some();
        FuserProperties { score: if ready { Self::SCORE } else { 0 }, ready }
    }

    fn len(&self) -> usize {
        usize::from(self.zeros.is_some()) + self.views + usize::from(self.found.is_some())
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}

/// The gradient on the kernel, or as Burn's own operations where that declines.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct EmbeddingOperation {
    /// Operations between the zeros and the addition.
    views: usize,
    found: SelectAssignOpIr,
}

impl EmbeddingOperation {
    fn launch(&self, context: &mut Tensors) -> Result<(), KernelError> {
        let SelectAssignOpIr { indices, value, out, .. } = &self.found;
        let unknown =
            || KernelError::Unsupported { op: OP, reason: "its output is unknown".into() };
        let shape = context.tensors.get(&out.id).ok_or_else(unknown)?.shape.clone();
        let dy = cube_tensor(context, value, OP)?;
        let index = cube_tensor(context, indices, OP)?;
        let dw = row_sums(dy, index, shape)?;
        register_cube_tensor(context, out, dw, OP)?;
        for tensor in [indices, value] {
            consume(context, tensor);
        }
        Ok(())
    }
}

impl FusedOperation for EmbeddingOperation {
    const NAME: &'static str = NAME;
    type State = Self;

    fn num_ops_fused(&self) -> usize {
        2 + self.views
    }

    fn run(
        &mut self,
        context: &mut Tensors,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        for view in 1..=self.views {
            fallback(view).run(context);
        }
        if let Err(reason) = self.launch(context) {
            declined::tell_once(NAME, &reason);
            fallback(0).run(context);
            fallback(1 + self.views).run(context);
        }
    }

    fn to_state(&self) -> Self::State {
        self.clone()
    }

    fn from_state(_device: &cubecl::Device, state: Self::State) -> Self {
        state
    }
}
