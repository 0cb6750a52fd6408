use super::{
    backward::BackwardSearch,
    forward::ForwardSearch,
    operation::{Pass, SoftmaxOperation},
};
use crate::gelu::Shown;
use burn_cubecl_fusion::optim::{CubeOptimization, FusedOperation};
use burn_fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn_ir::OperationIr;

/// Follows either pass from the head of a block.
///
/// Burn would settle what a fusion waited on in vain without fusing any of it, so where the first
/// operation is one that no other fusion starts with, it is claimed by itself, for less than anything else
/// bids, and runs as Burn runs it: the search goes on behind it.
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
    const SCORE_OF_HEAD: u64 = 1;

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

    /// The pass that was found.
    fn found(&self) -> Option<Pass> {
        match &self.search {
            Search::Nothing => None,
            Search::Forward(forward) => forward.found().map(Pass::Forward),
            Search::Backward(backward) => backward.found().map(Pass::Backward),
        }
    }

    /// Whether no other fusion starts with the head.
    fn has_lone_head(&self) -> bool {
        match &self.search {
            Search::Nothing => false,
            Search::Forward(forward) => forward.starts_with_peak(),
            Search::Backward(_) => true,
        }
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
        let pass = self.found().unwrap_or(Pass::Head);
        CubeOptimization::new(SoftmaxOperation { pass })
    }

    fn reset(&mut self) {
        *self = Self { shown: self.shown.clone(), ..Self::default() };
    }

    fn status(&self) -> FuserStatus {
        if self.closed || self.is_over() { FuserStatus::Closed } else { FuserStatus::Open }
    }

    fn properties(&self) -> FuserProperties {
        let score = match self.found() {
            Some(_) => Self::SCORE,
            None if self.has_lone_head() => Self::SCORE_OF_HEAD,
            None => 0,
        };
        FuserProperties { score, ready: score > 0 }
    }

    /// What was let in behind the last step is left to others.
    fn len(&self) -> usize {
        match self.found() {
            Some(pass) => SoftmaxOperation { pass }.num_ops_fused(),
            None if self.has_lone_head() => 1,
            None => self.seen,
        }
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}
