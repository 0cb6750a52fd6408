//! The search of providers that replace a single operation.

use super::{Claim, Elapsed, Moment, Next, Part, Replacement, Search, arithmetic_output};
use burn_ir::{BaseOperationIr, OperationIr, TensorId};

/// A replacement of one operation.
pub(crate) trait SingleOperation: Replacement + Sync {
    /// Whether those behind arithmetic are claimed together, with further arithmetic among them.
    ///
    /// Burn gathers what claims leave of its blocks in one more block. If one is left that needs the claimed
    /// arithmetic, and that needs something else that is left, these blocks have no order, and Burn runs all of them
    /// unfused.
    const IN_ROWS: bool = false;

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

    /// What it makes, if a view of that which comes right behind is taken along where the operation heads its block. The
    /// view would be left of the block otherwise, with others of the kind in front of it that have to run first, and Burn
    /// finds no order for what is left together.
    fn viewed(&self) -> Option<TensorId> {
        None
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
    /// What arithmetic makes.
    made: Vec<TensorId>,
    /// Operations that are replaced, and arithmetic among them.
    taken: Vec<Option<R>>,
    /// Whether a view of what the only one makes follows.
    has_view: bool,
}

/// What an operation reads that swaps two dimensions.
fn swapped(operation: &OperationIr) -> Option<TensorId> {
    match operation {
        OperationIr::BaseFloat(BaseOperationIr::SwapDims(op)) => Some(op.input.id),
        _ => None,
    }
}

impl<R: SingleOperation> SingleSearch<R> {
    /// More than Burn bids for the operation alone by this. It is below the score of any fusion that saves a tensor
    /// (100, and 10 an operation), so that an operation that fuses with its neighbors is left to Burn.
    const SCORE: u64 = 15;
    /// Above providers that take the operation without its view.
    const FOR_A_VIEW: u64 = 5;

    pub(crate) fn new(settings: R::Settings) -> Self {
        Self { settings, made: Vec::new(), taken: Vec::new(), has_view: false }
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
        if let [Some(found)] = &self.taken[..]
            && self.made.is_empty()
        {
            let view = found.viewed().zip(swapped(operation));
            self.has_view = view.is_some_and(|(made, read)| made == read);
            return if self.has_view { Next::Last } else { Next::Refused };
        }
        let found = R::of(operation, &self.settings);
        if let Some(found) = found.filter(|found| found.may_follow(&self.made)) {
            let is_alone = self.made.is_empty();
            let is_last = if is_alone { found.viewed().is_none() } else { !R::IN_ROWS };
            self.taken.push(Some(found));
            return if is_last { Next::Last } else { Next::Taken };
        }
        let made = arithmetic_output(operation);
        if made.is_some() {
            self.made.extend(made);
            self.taken.push(None);
        }
        Next::taken_if(made.is_some())
    }

    fn claim(&self) -> Option<Claim<R>> {
        let last = self.taken.iter().rposition(Option::is_some)?;
        let bid = self.taken.iter().flatten().next()?.bid_of_burns();
        let part = |(at, taken): (usize, &Option<R>)| match taken {
            Some(found) => Part::Replaced(vec![at], found.clone()),
            None => Part::Unfused(vec![at]),
        };
        let parts = self.taken[..=last].iter().enumerate().map(part);
        let view = self.has_view.then(|| Part::Unfused(vec![last + 1]));
        let score = Self::SCORE + bid + if self.has_view { Self::FOR_A_VIEW } else { 0 };
        Some(Claim { score, parts: parts.chain(view).collect() })
    }

    /// What comes for other blocks in between is no reason to wait for more.
    fn gives_up(&self, elapsed: Elapsed) -> bool {
        self.taken.iter().any(Option::is_some) && elapsed.since_last > 0
    }
}
