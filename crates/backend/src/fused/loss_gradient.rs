//! The provider that takes what the gradient of a mean or of a sum begins with.
//!
//! Autodiff begins with a one, brings it to the rank of what was summed, and multiplies. Burn's element-wise fusion
//! ends in front of that reshape and leaves it over. Burn searches what is left over once more, and makes one piece of
//! it: the reshape, and the products and convolutions of the layers in front of the loss. The multiplication waits for
//! that piece and the piece for the multiplication, so that no order is left, and Burn runs the whole stretch unfused.
//! Convolutions then run on its direct kernels, which take a hundred times as long.
//!
//! Claimed with what is in front of it, the reshape is never left over. All of these are single numbers.

use crate::stream::{
    Claim, Done, Elapsed, Moment, Next, Part, Replacement, Search, arithmetic_output,
};
use crate::tensors::Tensors;
use blackburn_kernels::KernelError;
use burn_ir::{BaseOperationIr, OperationIr, TensorId};
use serde::{Deserialize, Serialize};

/// All runs as Burn runs it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum LossGradient {}

impl Replacement for LossGradient {
    const NAME: &'static str = "BlackburnLossGradient";

    fn launch(&self, _tensors: &mut Tensors) -> Result<Done, KernelError> {
        match *self {}
    }
}

/// Follows a one and its factors up to the reshape.
#[derive(Clone, Default)]
pub(crate) struct LossGradientSearch {
    /// What operations of one dimension make.
    made: Vec<TensorId>,
    has_one: bool,
    is_complete: bool,
}

impl LossGradientSearch {
    /// Above what Burn's element-wise fusion bids for so few operations.
    const SCORE: u64 = 2_000;
    /// The one, a loss scale and its product, a cast.
    const MOST: usize = 5;
    /// Other blocks get the derivative of the mean in between.
    const PATIENCE: u64 = 6;
}

impl Search for LossGradientSearch {
    type Replacement = LossGradient;

    fn follow(&mut self, operation: &OperationIr, _now: Moment) -> Next {
        if let OperationIr::BaseFloat(BaseOperationIr::Reshape(op)) = operation {
            let is_number = op.input.shape.num_dims() == 1 && self.made.contains(&op.input.id);
            self.is_complete = self.has_one && is_number && op.out.shape.num_dims() > 1;
            return if self.is_complete { Next::Last } else { Next::Refused };
        }
        let is_one = matches!(operation, OperationIr::BaseFloat(BaseOperationIr::Ones(_)));
        let has_one_dimension = operation.outputs().all(|out| out.shape.num_dims() == 1);
        let is_taken = (is_one || arithmetic_output(operation).is_some())
            && has_one_dimension
            && self.made.len() < Self::MOST;
        if is_taken {
            self.has_one |= is_one;
            self.made.extend(operation.outputs().map(|out| out.id));
        }
        Next::taken_if(is_taken)
    }

    fn claim(&self) -> Option<Claim<LossGradient>> {
        let parts = vec![Part::Unfused((0..=self.made.len()).collect())];
        self.is_complete.then_some(Claim { score: Self::SCORE, parts })
    }

    fn gives_up(&self, elapsed: Elapsed) -> bool {
        elapsed.since_last > Self::PATIENCE
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Fuser, emit::tensor};
    use burn_backend::DType;
    use burn_ir::{BinaryOpIr, CreationOpIr, NumericOperationIr, ShapeOpIr, TensorStatus};

    fn one(id: u64) -> OperationIr {
        let out = tensor(id, [1], TensorStatus::NotInit);
        OperationIr::BaseFloat(BaseOperationIr::Ones(CreationOpIr { out }))
    }

    fn scaled(lhs: u64, rhs: u64, out: u64) -> OperationIr {
        let [lhs, rhs] = [lhs, rhs].map(|id| tensor(id, [1], TensorStatus::ReadOnly));
        let out = tensor(out, [1], TensorStatus::NotInit);
        OperationIr::NumericFloat(DType::F32, NumericOperationIr::Mul(BinaryOpIr { lhs, rhs, out }))
    }

    fn reshaped(id: u64) -> OperationIr {
        let input = tensor(id, [1], TensorStatus::ReadWrite);
        let out = tensor(id + 100, [1, 1, 1], TensorStatus::NotInit);
        OperationIr::BaseFloat(BaseOperationIr::Reshape(ShapeOpIr { input, out }))
    }

    #[test]
    fn a_one_is_taken_with_its_factors_and_its_reshape() {
        let claims = |operations: &[OperationIr]| {
            Fuser::after(LossGradientSearch::default(), operations).claims()
        };
        assert_eq!(claims(&[one(1), reshaped(1)]), Some(2));
        assert_eq!(claims(&[scaled(1, 2, 3), one(4), scaled(4, 2, 5), reshaped(5)]), Some(4));
        assert_eq!(claims(&[scaled(1, 2, 3), reshaped(3)]), None, "no one");
        assert_eq!(claims(&[one(1), reshaped(9)]), None, "another tensor");
        assert_eq!(claims(&[one(1), scaled(1, 2, 3)]), None, "no reshape");
    }
}
