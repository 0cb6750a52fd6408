use super::{
    backward::BackwardSearch,
    forward::ForwardSearch,
    operation::{Pass, SoftmaxOperation},
};
use crate::gelu::Shown;
use burn_cubecl_fusion::optim::CubeOptimization;
use burn_fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn_ir::OperationIr;

/// Follows either pass from the head of a block.
///
/// Burn settles what a fusion waited on in vain without fusing any of it. So where the first operations are
/// such as no other fusion takes, these alone are claimed then, for less than anything else bids, and run
/// as Burn runs them: the next search begins behind them.
#[derive(Clone, Default)]
pub(super) struct SoftmaxFuser {
    /// How many operations were let in.
    seen: usize,
    search: Search,
    closed: bool,
    shown: Shown,
}

#[derive(Clone, Default)]
enum Search {
    #[default]
    Nothing,
    Forward(ForwardSearch),
    Backward(BackwardSearch),
}

impl SoftmaxFuser {
    /// Above what Burn's fusions bid for as many operations: those get 100 for an input or output saved,
    /// 10 for an operation.
    const SCORE: u64 = 100_000;
    /// Below any other fusion.
    const SCORE_OF_NEITHER: u64 = 1;

    fn follow(&mut self, operation: &OperationIr) -> bool {
        match &mut self.search {
            Search::Nothing => {
                self.search = match ForwardSearch::start(operation) {
                    Some(forward) => Search::Forward(forward),
                    None => match BackwardSearch::start(operation, &self.shown) {
                        Some(backward) => Search::Backward(backward),
                        None => return false,
                    },
                };
                true
            }
            Search::Forward(forward) => forward.follow(operation, self.seen),
            Search::Backward(backward) => backward.follow(operation, self.seen),
        }
    }

    /// What there is to claim.
    fn claim(&self) -> Option<Pass> {
        let (found, waited_on) = match &self.search {
            Search::Nothing => return None,
            Search::Forward(forward) => (forward.found().map(Pass::Forward), forward.lone()),
            Search::Backward(backward) => (backward.found().map(Pass::Backward), backward.lone()),
        };
        found.or((waited_on > 0).then_some(Pass::Neither(waited_on)))
    }

    fn is_over(&self) -> bool {
        match &self.search {
            Search::Nothing => false,
            Search::Forward(forward) => forward.is_over(),
            Search::Backward(backward) => backward.is_over(),
        }
    }
}

impl OperationFuser<CubeOptimization> for SoftmaxFuser {
    fn fuse(&mut self, operation: &OperationIr) {
        self.shown.count();
        if self.closed {
            return;
        }
        if self.follow(operation) {
            self.seen += 1;
        } else {
            self.closed = true;
        }
    }

    fn finish(&mut self) -> CubeOptimization {
        let pass = self.claim().expect("Burn finishes a fuser only when it says it is ready");
        CubeOptimization::new(SoftmaxOperation { pass })
    }

    fn reset(&mut self) {
        *self = Self { shown: self.shown.clone(), ..Self::default() };
    }

    fn status(&self) -> FuserStatus {
        if self.closed || self.is_over() { FuserStatus::Closed } else { FuserStatus::Open }
    }

    fn properties(&self) -> FuserProperties {
        let score = match self.claim() {
            Some(Pass::Neither(_)) => Self::SCORE_OF_NEITHER,
            Some(_) => Self::SCORE,
            None => 0,
        };
        FuserProperties { score, ready: score > 0 }
    }

    /// What was let in behind the last step is left to others.
    fn len(&self) -> usize {
        self.claim().map_or(self.seen, |pass| pass.len())
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}
