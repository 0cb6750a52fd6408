use super::{
    backward::BackwardSearch, forward::ForwardSearch, gradient::GradientSearch, pass::SoftmaxPass,
    probabilities::ProbabilitiesSearch,
};
use crate::{
    fused::dropped::draws_mask,
    stream::{Claim, Elapsed, Moment, Next, Part, Search},
};
use burn_ir::OperationIr;

/// Follows all passes at once from the head of a block, until one of them is found.
///
/// Burn settles what a fusion waited on in vain without fusing any of it. So where the first operations are
/// such as no other fusion takes, these alone are claimed then, for less than anything else bids, and run
/// as Burn runs them: the next search begins behind them.
#[derive(Clone)]
pub(crate) struct SoftmaxSearch {
    /// Whether masks of dropout are Burn's to draw.
    burn_draws: bool,
    candidates: Vec<Candidate>,
}

/// A pass that may be there, as far as the stream has followed it.
#[derive(Clone)]
struct Candidate {
    search: AnyPass,
    /// Whether it took all that came.
    is_open: bool,
}

/// The search for one of the passes.
pub(super) trait PassSearch {
    /// Whether it takes `operation`, at that position of the block.
    fn follow(&mut self, operation: &OperationIr, position: usize) -> Next;

    /// The pass, if it was found, with what runs first, as Burn runs it.
    fn found(&self) -> Option<Vec<Part<SoftmaxPass>>>;

    /// How many of the first operations no other fusion takes.
    fn unclaimed_prefix(&self) -> usize;

    /// As [`Search::gives_up`].
    fn gives_up(&self, _elapsed: Elapsed) -> bool {
        false
    }
}

#[derive(Clone)]
enum AnyPass {
    Forward(ForwardSearch),
    Backward(BackwardSearch),
    Probabilities(ProbabilitiesSearch),
    Gradient(GradientSearch),
}

/// The same for each kind of search.
macro_rules! each {
    ($any:expr, $search:ident => $body:expr) => {
        match $any {
            AnyPass::Forward($search) => $body,
            AnyPass::Backward($search) => $body,
            AnyPass::Probabilities($search) => $body,
            AnyPass::Gradient($search) => $body,
        }
    };
}

impl SoftmaxSearch {
    /// Above what Burn's fusions bid for as many operations: those get 100 for an input or output saved,
    /// 10 for an operation.
    const SCORE: u64 = 100_000;
    /// Below any other fusion.
    pub(super) const SCORE_OF_UNCLAIMED: u64 = 1;

    pub(crate) fn new(burn_draws: bool) -> Self {
        Self { burn_draws, candidates: Vec::new() }
    }

    /// Searches that have not begun.
    fn all(&self) -> Vec<Candidate> {
        let searches = [
            AnyPass::Forward(ForwardSearch::default()),
            AnyPass::Backward(BackwardSearch::default()),
            AnyPass::Probabilities(ProbabilitiesSearch::new(self.burn_draws)),
            AnyPass::Gradient(GradientSearch::default()),
        ];
        searches.map(|search| Candidate { search, is_open: true }).into()
    }
}

impl Search for SoftmaxSearch {
    type Replacement = SoftmaxPass;

    fn follow(&mut self, operation: &OperationIr, now: Moment) -> Next {
        let is_first = now.position == 0;
        if is_first {
            self.candidates = self.all();
        }
        let mut is_last = false;
        for candidate in self.candidates.iter_mut().filter(|candidate| candidate.is_open) {
            let next =
                each!(&mut candidate.search, search => search.follow(operation, now.position));
            candidate.is_open = next != Next::Refused;
            is_last |= next == Next::Last;
        }
        if is_first {
            self.candidates.retain(|candidate| candidate.is_open);
        }
        let is_taken = self.candidates.iter().any(|candidate| candidate.is_open);
        if is_last { Next::Last } else { Next::taken_if(is_taken) }
    }

    fn claim(&self) -> Option<Claim<SoftmaxPass>> {
        let mut searches = self.candidates.iter().map(|candidate| &candidate.search);
        let unclaimed = searches.clone().map(|any| each!(any, search => search.unclaimed_prefix()));
        let unclaimed = unclaimed.max().filter(|operations| *operations > 0);
        match searches.find_map(|any| each!(any, search => search.found())) {
            Some(parts) => Some(Claim { score: Self::SCORE, parts }),
            None => unclaimed.map(|operations| Claim {
                score: Self::SCORE_OF_UNCLAIMED,
                parts: vec![Part::Unfused((0..operations).collect())],
            }),
        }
    }

    fn gives_up(&self, elapsed: Elapsed) -> bool {
        let mut searches = self.candidates.iter().map(|candidate| &candidate.search);
        searches.any(|any| each!(any, search => search.gives_up(elapsed)))
    }

    /// The mask of dropout is drawn between the probabilities and the product with it.
    fn takes_time(operation: &OperationIr) -> bool {
        !draws_mask(operation)
    }
}
