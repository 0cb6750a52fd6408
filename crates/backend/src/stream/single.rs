//! The search of providers that replace a single operation.

use super::{Claim, Moment, Next, Part, Replacement, Search, arithmetic_output};
use burn_ir::{OperationIr, TensorId};

/// A replacement of one operation.
pub(crate) trait SingleOperation: Replacement + Sync {
    /// What replaces `operation`, if that is one of those which kernels serve.
    fn of(operation: &OperationIr) -> Option<Self>;

    /// Whether it may be claimed behind an arithmetic operation that makes the tensor `made`.
    fn may_follow(&self, _made: TensorId) -> bool {
        true
    }
}

/// Takes the operation at the head of a block, or behind one arithmetic operation.
///
/// Burn settles an operation that no fusion wants together with the one after it, so an operation behind a
/// lone product would never head a block. Only operations that Burn's own element-wise fusion waits on too
/// are let in first: waiting on others would take their successors from that fusion.
#[derive(Clone)]
pub(crate) struct SingleSearch<R> {
    /// What the operation in front makes.
    in_front: Option<TensorId>,
    found: Option<R>,
}

impl<R> SingleSearch<R> {
    /// Below the score of any fusion that saves a tensor (100, and 10 an operation), so that an
    /// operation that fuses with its neighbors is left to Burn.
    const SCORE: u64 = 15;
}

impl<R> Default for SingleSearch<R> {
    fn default() -> Self {
        Self { in_front: None, found: None }
    }
}

impl<R: SingleOperation> Search for SingleSearch<R> {
    type Replacement = R;

    fn follow(&mut self, operation: &OperationIr, _now: Moment) -> Next {
        self.found = R::of(operation)
            .filter(|found| self.in_front.is_none_or(|made| found.may_follow(made)));
        if self.found.is_some() {
            return Next::Last;
        }
        let first = self.in_front.is_none();
        self.in_front = self.in_front.or(arithmetic_output(operation));
        Next::taken_if(first && self.in_front.is_some())
    }

    fn claim(&self) -> Option<Claim<R>> {
        let at = usize::from(self.in_front.is_some());
        let replaced = Part::Replaced(vec![at], self.found.clone()?);
        Some(Claim { score: Self::SCORE, parts: vec![Part::Unfused((0..at).collect()), replaced] })
    }
}
