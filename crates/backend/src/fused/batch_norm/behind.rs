//! The gradient of a batch normalization behind arithmetic, mostly the gradient of the activation that follows the
//! normalization in the model.
//!
//! Burn's element-wise fusion begins the block with that arithmetic. Of the normalization's operations some read what it
//! makes and some do not, so Burn would have them in two blocks that depend on each other, and run them in pieces. Both
//! are claimed together here: Burn's fusion runs the arithmetic, and the normalization's kernels run the rest.

use super::{BatchNormPass, BatchNormSearch};
use crate::{
    fused::burns,
    stream::{Claimed, Fuser},
    tensors::Tensors,
};
use burn_cubecl::{
    CubeDevice,
    fusion::{self, CubeFuser, OptimizationProvider, RegistryError},
};
use burn_cubecl_fusion::{
    FallbackOperation,
    optim::{CubeOptimization, CubeOptimizationState, FusedOperation},
};
use burn_fusion::{FuserProperties, FuserStatus, NumOperations, OperationFuser};
use burn_ir::{BaseOperationIr, OperationIr, TensorId};

/// The provider.
pub(crate) struct BehindArithmetic;

impl BehindArithmetic {
    pub(crate) const NAME: &'static str = "BlackburnActivatedBatchNorm";

    /// # Errors
    ///
    /// As Burn's registry has them: a second provider of the name, and tensors that were there before.
    pub(crate) fn register() -> Result<(), RegistryError> {
        fusion::register(Self)
    }
}

impl OptimizationProvider for BehindArithmetic {
    type Operation = Both;

    fn fuser(&self, device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(BothFuser {
            arithmetic: burns::element_wise(device),
            norm: Fuser::new(BatchNormSearch::of_gradients()),
            stage: Stage::Arithmetic(None),
        })
    }
}

/// What the fuser waits for.
#[derive(Clone, Copy, PartialEq)]
enum Stage {
    /// More arithmetic, behind that which made the tensor, or the first operation of the normalization that reads it.
    Arithmetic(Option<TensorId>),
    /// The normalization's operations.
    Norm,
    /// Something else came.
    Over,
}

struct BothFuser {
    arithmetic: burns::BurnsFuser,
    norm: Fuser<BatchNormSearch>,
    stage: Stage,
}

/// What `operation` reads, if it swaps the first dimensions of images.
fn turned(operation: &OperationIr) -> Option<TensorId> {
    match operation {
        OperationIr::BaseFloat(BaseOperationIr::SwapDims(op)) if op.input.shape.num_dims() > 2 => {
            Some(op.input.id)
        }
        _ => None,
    }
}

impl OperationFuser<CubeOptimization> for BothFuser {
    fn fuse(&mut self, operation: &OperationIr) {
        match self.stage {
            Stage::Arithmetic(made) if made.is_some() && turned(operation) == made => {
                self.stage = Stage::Norm;
            }
            Stage::Arithmetic(_) => {
                let taken = self.arithmetic.len();
                self.arithmetic.fuse(operation);
                self.stage = match self.arithmetic.len() > taken {
                    true => Stage::Arithmetic(operation.outputs().next().map(|out| out.id)),
                    false => Stage::Over,
                };
            }
            Stage::Norm | Stage::Over => {}
        }
        match self.stage {
            Stage::Norm => self.norm.fuse(operation),
            Stage::Arithmetic(_) | Stage::Over => self.norm.pass_time(operation),
        }
    }

    fn finish(&mut self) -> CubeOptimization {
        CubeOptimization::new(Both {
            arithmetic: self.arithmetic.finish(),
            norm: self.norm.finish(),
        })
    }

    fn reset(&mut self) {
        if self.stage != Stage::Arithmetic(None) {
            self.arithmetic.reset();
            self.norm.reset();
            self.stage = Stage::Arithmetic(None);
        }
    }

    fn status(&self) -> FuserStatus {
        match self.stage {
            Stage::Arithmetic(_) => self.arithmetic.status(),
            Stage::Norm => self.norm.status(),
            Stage::Over => FuserStatus::Closed,
        }
    }

    fn properties(&self) -> FuserProperties {
        // Less than the whole gradient is better left to others.
        let found = self.norm.properties();
        let is_whole = found.ready && found.score == BatchNormSearch::SCORE;
        FuserProperties { score: found.score, ready: self.stage == Stage::Norm && is_whole }
    }

    fn len(&self) -> usize {
        match self.stage {
            Stage::Norm => self.arithmetic.len() + self.norm.len(),
            Stage::Arithmetic(_) | Stage::Over => self.arithmetic.len(),
        }
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(Self {
            arithmetic: self.arithmetic.clone_dyn(),
            norm: self.norm.clone(),
            stage: self.stage,
        })
    }
}

/// The arithmetic and the gradient behind it.
pub(crate) struct Both {
    arithmetic: CubeOptimization,
    norm: CubeOptimization,
}

impl FusedOperation for Both {
    const NAME: &'static str = BehindArithmetic::NAME;
    type State = [CubeOptimizationState; 2];

    fn num_ops_fused(&self) -> usize {
        self.arithmetic.num_ops_fused() + self.norm.num_ops_fused()
    }

    fn max_relative_shape_id(&self) -> Option<usize> {
        self.arithmetic.max_relative_shape_id().max(self.norm.max_relative_shape_id())
    }

    fn run(
        &mut self,
        tensors: &mut Tensors,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        self.arithmetic.run(tensors, fallback);
        let in_front = self.arithmetic.num_ops_fused();
        self.norm.run(tensors, &|at| fallback(in_front + at));
    }

    fn to_state(&self) -> Self::State {
        [self.arithmetic.to_state(), self.norm.to_state()]
    }

    fn from_state(device: &CubeDevice, [arithmetic, norm]: Self::State) -> Self {
        let norm = Claimed::<BatchNormPass>::from_state(device, norm.decode());
        Self {
            arithmetic: burns::element_wise_of(device, &arithmetic),
            norm: CubeOptimization::new(norm),
        }
    }
}
