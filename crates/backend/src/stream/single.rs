//! The search of providers that replace a single operation.

use super::{Claim, Moment, Next, Part, Replacement, Search, arithmetic_output};
use burn_ir::{OperationIr, TensorId};

/// A replacement of one operation.
pub(crate) trait SingleOperation: Replacement + Sync {
    /// How its provider is set up.
    type Settings: Clone + Default + Send + Sync + 'static;

    /// What replaces `operation`, if that is one of those which kernels serve.
    fn of(operation: &OperationIr, settings: &Self::Settings) -> Option<Self>;

    /// Whether it may be claimed behind arithmetic operations that make the tensors `made`.
    fn may_follow(&self, _made: &[TensorId]) -> bool {
        true
    }

    /// What Burn's element-wise fusion bids for the operation alone, in which it saves nothing.
    fn bid_of_burns(&self) -> u64 {
        0
    }
}

/// Takes the operation at the head of a block, or behind arithmetic.
///
/// Burn settles operations that no fusion wants together with the one after them, so an operation behind a
/// lone product would never head a block. Only operations that Burn's own element-wise fusion waits on too
/// are let in first: waiting on others would take their successors from that fusion. Where it saves anything
/// by fusing them it bids more, and the operation heads the next block.
#[derive(Clone)]
pub(crate) struct SingleSearch<R: SingleOperation> {
    settings: R::Settings,
    /// What the operations in front make.
    in_front: Vec<TensorId>,
    found: Option<R>,
}

impl<R: SingleOperation> SingleSearch<R> {
    /// More than Burn bids for the operation alone by this. It is below the score of any fusion that saves a tensor
    /// (100, and 10 an operation), so that an operation that fuses with its neighbors is left to Burn.
    const SCORE: u64 = 15;

    pub(crate) fn new(settings: R::Settings) -> Self {
        Self { settings, in_front: Vec::new(), found: None }
    }
}

impl<R: SingleOperation> Default for SingleSearch<R> {
    fn default() -> Self {
        Self::new(R::Settings::default())
    }
}

impl<R: SingleOperation> Search for SingleSearch<R> {
    type Replacement = R;

    fn follow(&mut self, operation: &OperationIr, _now: Moment) -> Next {
        self.found =
            R::of(operation, &self.settings).filter(|found| found.may_follow(&self.in_front));
        if self.found.is_some() {
            return Next::Last;
        }
        let made = arithmetic_output(operation);
        self.in_front.extend(made);
        Next::taken_if(made.is_some())
    }

    fn claim(&self) -> Option<Claim<R>> {
        let at = self.in_front.len();
        let found = self.found.clone()?;
        let score = Self::SCORE + found.bid_of_burns();
        let replaced = Part::Replaced(vec![at], found);
        Some(Claim { score, parts: vec![Part::Unfused((0..at).collect()), replaced] })
    }
}
