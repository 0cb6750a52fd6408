use super::{
    activations::KnownActivation,
    chain::Chain,
    product::{MatmulPass, Product, ProductSettings},
};
use crate::{
    fused::{
        column_sum::RowSumSearch,
        gelu::{self, pass_parts},
    },
    stream::{
        Claim, Elapsed, Matcher, Moment, Next, Part, Search, arithmetic_output, is_own_or_reduction,
    },
};
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
#[derive(Clone)]
pub(crate) struct MatmulSearch {
    settings: MatmulSettings,
    /// Positions of those that are not part of the chain: they run first, as Burn runs them.
    passengers: Vec<usize>,
    chain: Option<Chain>,
    /// The activations that the operations behind the chain may turn out to be.
    candidates: Vec<(KnownActivation, Matcher)>,
    /// The gradient of GELU that they may turn out to be, or have turned out to be.
    gradient: Option<Matcher>,
    /// Looks for the sum of its rows behind it.
    behind: Option<RowSumSearch>,
}

/// How products are computed, and what is claimed with them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MatmulSettings {
    pub(crate) product: ProductSettings,
    /// Whether the gradient of GELU behind a product is claimed with it.
    pub(crate) takes_gelu: bool,
    /// Whether the sum of that gradient's rows is, too.
    pub(crate) takes_sum: bool,
}

impl MatmulSearch {
    /// Above any other fusion: those get 100 for an input or output saved, 10 for an operation.
    pub(super) const SCORE: u64 = 1_000_000;
    /// Below any other fusion that saves a tensor.
    pub(super) const SCORE_BEHIND_ARITHMETIC: u64 = 15;

    pub(crate) fn new(settings: MatmulSettings) -> Self {
        Self {
            settings,
            passengers: Vec::new(),
            chain: None,
            candidates: Vec::new(),
            gradient: None,
            behind: None,
        }
    }

    /// Before the product.
    fn lead(&mut self, operation: &OperationIr, position: usize) -> Next {
        self.chain = Chain::start(operation, position);
        if self.chain.is_some() {
            return Next::Taken;
        }
        let taken = position == 0 && arithmetic_output(operation).is_some();
        if taken {
            self.passengers.push(position);
        }
        Next::taken_if(taken)
    }

    /// The gradient of GELU, if all of it was found.
    fn gelu(&self) -> Option<&Matcher> {
        self.gradient.as_ref().filter(|matcher| matcher.is_complete())
    }
}

impl Search for MatmulSearch {
    type Replacement = MatmulPass;

    fn follow(&mut self, operation: &OperationIr, now: Moment) -> Next {
        let position = now.position;
        if let Some(behind) = &mut self.behind {
            return behind.follow(operation, position);
        }
        let Some(chain) = &mut self.chain else { return self.lead(operation, position) };
        if self.candidates.is_empty() && self.gradient.is_none() {
            if chain.follow(operation, position) {
                return if chain.is_over() { Next::Last } else { Next::Taken };
            }
            // The bias of a linear layer gets its shape between the product and the addition.
            if chain.end() == position && chain.may_precede_as_row(operation) {
                self.passengers.push(position);
                return Next::Taken;
            }
            // All activations read their input again behind their first operation. A cast that frees it belongs to what
            // follows, such as a loss.
            if !chain.is_freed_by(operation) {
                let fresh = KnownActivation::ALL
                    .map(|known| (known, Matcher::element_wise(known.pattern())));
                self.candidates = fresh.into();
            }
            let may_follow = self.settings.takes_gelu && chain.end() == position;
            self.gradient = may_follow.then(|| Matcher::element_wise(gelu::BACKWARD));
        }
        self.candidates.retain_mut(|(_, matcher)| {
            // The chain's value is what the activation is applied to.
            matcher.follow(operation, position)
                && matcher.tensor("x").is_some_and(|x| x.id == chain.value().id)
        });
        if let Some((known, matcher)) = self.candidates.iter().find(|(_, m)| m.is_complete()) {
            let taken = chain.follow_activation(*known, matcher, position);
            self.candidates.clear();
            return Next::taken_if(taken);
        }
        // Mostly the shape tells the product that becomes a gradient's factor from its neighbors.
        let value = chain.value();
        self.gradient
            .take_if(|matcher| !(matcher.follow(operation, position) && matcher.fits(value)));
        self.gradient.take_if(|matcher| {
            matcher.is_complete() && matcher.tensor("dy").is_none_or(|dy| dy.id != value.id)
        });
        if let Some(dx) = self.gelu().and_then(Matcher::output) {
            self.behind = self.settings.takes_sum.then(|| RowSumSearch::behind(dx.clone()));
            return if self.behind.is_some() { Next::Taken } else { Next::Last };
        }
        Next::taken_if(!self.candidates.is_empty() || self.gradient.is_some())
    }

    fn claim(&self) -> Option<Claim<MatmulPass>> {
        let chain = self.chain.clone()?;
        let behind_arithmetic = chain.first > 0;
        let score = if behind_arithmetic { Self::SCORE_BEHIND_ARITHMETIC } else { Self::SCORE };
        // What was let in behind the last step is left to others.
        let passengers = self.passengers.iter().copied().filter(|at| *at < chain.end()).collect();
        let positions = chain.positions(chain.steps.len());
        let product = Product { chain, settings: self.settings.product };
        let mut parts = vec![
            Part::Unfused(passengers),
            Part::Replaced(positions, MatmulPass::Product(product)),
        ];
        if let Some(matcher) = self.gelu() {
            let gelu = pass_parts(matcher, self.behind.as_ref());
            parts.extend(gelu.into_iter().map(|part| part.map(MatmulPass::Gelu)));
        }
        Some(Claim { score, parts })
    }

    /// Nothing that is taken with a product waits for a reduction, or for one of Blackburn's own operations. What would
    /// wait for more keeps Burn from ending its segment, and what begins in there is cut into pieces: a norm's gradient,
    /// or a model's layers beside the product of a time embedding.
    fn gives_up(&self, elapsed: Elapsed) -> bool {
        elapsed.since_last > 0
    }

    fn takes_time(operation: &OperationIr) -> bool {
        is_own_or_reduction(operation)
    }
}
