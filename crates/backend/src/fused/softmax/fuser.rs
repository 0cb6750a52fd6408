use super::{
    backward::BackwardSearch,
    forward::ForwardSearch,
    operation::{Pass, SoftmaxOperation},
    probabilities::ProbabilitiesSearch,
};
use crate::stream::Shown;
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
    candidates: Vec<Candidate>,
    closed: bool,
    shown: Shown,
}

/// A pass that may be there, as far as the stream has followed it.
#[derive(Clone)]
struct Candidate {
    search: Search,
    /// Whether it let in all that came.
    is_open: bool,
}

#[derive(Clone)]
enum Search {
    Forward(ForwardSearch),
    Backward(BackwardSearch),
    Probabilities(ProbabilitiesSearch),
}

impl Search {
    /// Those that `operation` may begin.
    fn start(operation: &OperationIr, shown: &Shown) -> impl Iterator<Item = Self> {
        let forward = ForwardSearch::start(operation).map(Self::Forward);
        let backward = BackwardSearch::start(operation, shown).map(Self::Backward);
        let probabilities = ProbabilitiesSearch::start(operation).map(Self::Probabilities);
        [forward, backward, probabilities].into_iter().flatten()
    }

    fn follow(&mut self, operation: &OperationIr, position: usize) -> bool {
        match self {
            Self::Forward(forward) => forward.follow(operation, position),
            Self::Backward(backward) => backward.follow(operation, position),
            Self::Probabilities(probabilities) => probabilities.follow(operation, position),
        }
    }

    fn found(&self) -> Option<Pass> {
        match self {
            Self::Forward(forward) => forward.found().map(Pass::Forward),
            Self::Backward(backward) => backward.found().map(Pass::Backward),
            Self::Probabilities(search) => search.found().map(Pass::Probabilities),
        }
    }

    /// How many of the first operations no other fusion takes.
    fn lone(&self) -> usize {
        match self {
            Self::Forward(forward) => forward.lone(),
            Self::Backward(backward) => backward.lone(),
            Self::Probabilities(probabilities) => probabilities.lone(),
        }
    }

    fn is_over(&self) -> bool {
        match self {
            Self::Forward(forward) => forward.is_over(),
            Self::Backward(backward) => backward.is_over(),
            Self::Probabilities(probabilities) => probabilities.is_over(),
        }
    }
}

impl SoftmaxFuser {
    /// Above what Burn's fusions bid for as many operations: those get 100 for an input or output saved,
    /// 10 for an operation.
    const SCORE: u64 = 100_000;
    /// Below any other fusion.
    const SCORE_OF_NEITHER: u64 = 1;

    fn follow(&mut self, operation: &OperationIr) -> bool {
        if self.seen == 0 {
            let searches = Search::start(operation, &self.shown);
            self.candidates = searches.map(|search| Candidate { search, is_open: true }).collect();
        } else {
            for candidate in self.candidates.iter_mut().filter(|candidate| candidate.is_open) {
                candidate.is_open = candidate.search.follow(operation, self.seen);
            }
        }
        self.candidates.iter().any(|candidate| candidate.is_open)
    }

    fn searches(&self) -> impl Iterator<Item = &Search> {
        self.candidates.iter().map(|candidate| &candidate.search)
    }

    /// What there is to claim.
    pub(super) fn claim(&self) -> Option<Pass> {
        let waited_on = self.searches().map(Search::lone).max().filter(|lone| *lone > 0);
        self.searches().find_map(Search::found).or(waited_on.map(Pass::Neither))
    }

    fn is_over(&self) -> bool {
        self.searches().any(Search::is_over)
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
