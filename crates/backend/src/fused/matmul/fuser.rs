use super::{activations::KnownActivation, chain::Chain, operation::MatmulOperation};
use crate::{
    fused::{
        column_sum::{Followed, RowSumSearch},
        gelu::{self, GeluOperation},
    },
    stream::arithmetic_output,
    stream::{Matcher, Shown},
};
use burn_cubecl_fusion::optim::{CubeOptimization, FusedOperation};
use burn_fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn_ir::OperationIr;

/// Follows the stream from a product through what is done to it.
///
/// Views in front of a product are left alone: no other fusion starts with a view either, so Burn
/// runs it at once and begins the next search behind it. An arithmetic operation in front is let
/// in, one at most, since Burn would settle it together with the product otherwise: its
/// element-wise fusion waits behind it, does not take it alone, and gives up on the product.
///
/// The gradient of GELU behind a product is claimed with it. It multiplies the product by what
/// fifteen operations make of another tensor in the meantime, in a block of their own. Burn joins the
/// two blocks only if something in front waits for what is behind; otherwise the last operation
/// starts a third block, and no fusion gets all sixteen. The sum of its rows is claimed as
/// `BlackburnGelu` claims it.
#[derive(Clone, Default)]
pub(super) struct MatmulFuser {
    /// Whether the gradient of GELU is claimed.
    takes_gelu: bool,
    /// Whether the sum of its rows is claimed with it.
    takes_sum: bool,
    /// How many operations were let in.
    seen: usize,
    /// Positions of those that are not part of the chain: they run first, as Burn runs them.
    passengers: Vec<usize>,
    chain: Option<Chain>,
    /// The activations that the operations behind the chain may turn out to be.
    candidates: Vec<(KnownActivation, Matcher)>,
    /// The gradient of GELU that they may turn out to be.
    gradient: Option<Matcher>,
    /// That gradient, complete.
    gelu: Option<GeluOperation>,
    /// Looks for the sum behind it.
    behind: Option<RowSumSearch>,
    shown: Shown,
    closed: bool,
}

impl MatmulFuser {
    /// Above any other fusion: those get 100 for an input or output saved, 10 for an operation.
    pub(super) const SCORE: u64 = 1_000_000;
    /// Below any other fusion that saves a tensor.
    pub(super) const SCORE_BEHIND_ARITHMETIC: u64 = 15;

    /// Claims the gradient of GELU if it `takes_gelu`, and the sum of its rows if it `takes_sum`.
    pub(super) fn new(takes_gelu: bool, takes_sum: bool) -> Self {
        Self { takes_gelu, takes_sum, ..Self::default() }
    }

    /// Before the product. Says whether `operation` was let in.
    fn lead(&mut self, operation: &OperationIr) -> bool {
        self.chain = Chain::start(operation, self.seen);
        if self.chain.is_some() {
            return true;
        }
        let let_in = self.seen == 0 && arithmetic_output(operation).is_some();
        if let_in {
            self.passengers.push(self.seen);
        }
        let_in
    }

    /// Behind the product. Says whether `operation` was let in.
    fn follow(&mut self, operation: &OperationIr) -> bool {
        if let Some(search) = self.behind.take() {
            return self.follow_gradient(search, operation);
        }
        let Some(chain) = &mut self.chain else { return false };
        if self.candidates.is_empty() && self.gradient.is_none() {
            if chain.follow(operation, self.seen) {
                self.closed = chain.is_over();
                return true;
            }
            // The bias of a linear layer gets its shape between the product and the addition.
            if chain.end() == self.seen && chain.may_precede_as_row(operation) {
                self.passengers.push(self.seen);
                return true;
            }
            let fresh = KnownActivation::ALL.map(|known| (known, Matcher::new(known.pattern())));
            self.candidates = fresh.into();
            let may_follow = self.takes_gelu && chain.end() == self.seen;
            self.gradient = may_follow.then(|| Matcher::new(gelu::BACKWARD));
        }
        self.candidates.retain_mut(|(_, matcher)| {
            // The chain's value is what the activation is applied to.
            matcher.follow(operation)
                && matcher.tensor("x").is_some_and(|x| x.id == chain.value().id)
        });
        if let Some((known, matcher)) = self.candidates.iter().find(|(_, m)| m.is_complete()) {
            let taken = chain.follow_activation(*known, matcher, self.seen);
            self.candidates.clear();
            return taken;
        }
        // Mostly the shape tells the product that becomes a gradient's factor from its neighbors.
        let value = chain.value();
        self.gradient.take_if(|matcher| !(matcher.follow(operation) && matcher.fits(value)));
        if let Some(matcher) = self.gradient.take_if(|matcher| matcher.is_complete()) {
            self.gelu = GeluOperation::of(&matcher)
                .filter(|_| matcher.tensor("dy").is_some_and(|dy| dy.id == value.id));
            self.behind = (self.takes_sum && self.gelu.is_some())
                .then(|| matcher.output().cloned())
                .flatten()
                .map(|gradient| RowSumSearch::behind(gradient, &self.shown));
            self.closed = self.behind.is_none();
            return true;
        }
        !self.candidates.is_empty() || self.gradient.is_some()
    }

    /// Behind the gradient of GELU. Says whether `operation` was let in.
    fn follow_gradient(&mut self, search: RowSumSearch, operation: &OperationIr) -> bool {
        match search.follow(operation) {
            Followed::Waits(search) => self.behind = Some(search),
            Followed::Found(sum) => {
                self.gelu = self.gelu.take().map(|gelu| gelu.with_sum(sum));
                self.closed = true;
            }
            Followed::Lost => return false,
        }
        true
    }
}

impl OperationFuser<CubeOptimization> for MatmulFuser {
    fn fuse(&mut self, operation: &OperationIr) {
        self.shown.count();
        if self.closed {
            return;
        }
        let let_in =
            if self.chain.is_none() { self.lead(operation) } else { self.follow(operation) };
        if let_in {
            self.seen += 1;
        } else {
            self.closed = true;
        }
    }

    fn finish(&mut self) -> CubeOptimization {
        let chain = self.chain.clone();
        let chain = chain.expect("Burn finishes a fuser only when it says it is ready");
        let end = chain.end();
        let passengers = self.passengers.iter().copied().filter(|at| *at < end).collect();
        CubeOptimization::new(MatmulOperation { passengers, chain, gelu: self.gelu.clone() })
    }

    fn reset(&mut self) {
        let shown = self.shown.clone();
        *self = Self { shown, ..Self::new(self.takes_gelu, self.takes_sum) };
    }

    fn status(&self) -> FuserStatus {
        let is_over = self.behind.as_ref().is_some_and(|search| !search.waits());
        if self.closed || is_over { FuserStatus::Closed } else { FuserStatus::Open }
    }

    fn properties(&self) -> FuserProperties {
        let score = match &self.chain {
            Some(chain) if chain.first > 0 => Self::SCORE_BEHIND_ARITHMETIC,
            Some(_) => Self::SCORE,
            None => 0,
        };
        FuserProperties { score, ready: score > 0 }
    }

    /// What was let in behind the last step is left to others.
    fn len(&self) -> usize {
        let behind = self.gelu.as_ref().map_or(0, GeluOperation::num_ops_fused);
        self.chain.as_ref().map_or(self.seen, |chain| chain.end() + behind)
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}
