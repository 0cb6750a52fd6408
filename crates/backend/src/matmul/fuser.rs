use super::{activations::KnownActivation, chain::Chain, operation::MatmulOperation};
use crate::pattern::Matcher;
use burn_cubecl_fusion::optim::CubeOptimization;
use burn_fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn_ir::{NumericOperationIr, OperationIr};

/// Follows the stream from a product through what is done to it.
///
/// Views in front of a product are left alone: no other fusion starts with a view either, so Burn
/// runs it at once and begins the next search behind it. An arithmetic operation in front is let
/// in, one at most, since Burn would settle it together with the product otherwise: its
/// element-wise fusion waits behind it, does not take it alone, and gives up on the product.
#[derive(Clone, Default)]
pub(super) struct MatmulFuser {
    /// How many operations were let in.
    seen: usize,
    /// Positions of those that are not part of the chain: they run first, as Burn runs them.
    passengers: Vec<usize>,
    chain: Option<Chain>,
    /// The activations that the operations behind the chain may turn out to be.
    candidates: Vec<(KnownActivation, Matcher)>,
    closed: bool,
}

impl MatmulFuser {
    /// Above any other fusion: those get 100 for an input or output saved, 10 for an operation.
    const SCORE: u64 = 1_000_000;
    /// Below any other fusion that saves a tensor.
    const SCORE_BEHIND_ARITHMETIC: u64 = 15;

    /// Before the product. Says whether `operation` was let in.
    fn lead(&mut self, operation: &OperationIr) -> bool {
        self.chain = Chain::start(operation, self.seen);
        if self.chain.is_some() {
            return true;
        }
        let let_in = self.seen == 0 && is_arithmetic(operation);
        if let_in {
            self.passengers.push(self.seen);
        }
        let_in
    }

    /// Behind the product. Says whether `operation` was let in.
    fn follow(&mut self, operation: &OperationIr) -> bool {
        let Some(chain) = &mut self.chain else { return false };
        if self.candidates.is_empty() {
            if chain.follow(operation, self.seen) {
                return true;
            }
            // The bias of a linear layer gets its shape between the product and the addition.
            if chain.end() == self.seen && chain.may_precede_as_row(operation) {
                self.passengers.push(self.seen);
                return true;
            }
            let fresh = KnownActivation::ALL.map(|known| (known, Matcher::new(known.pattern())));
            self.candidates = fresh.into();
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
        !self.candidates.is_empty()
    }
}

impl OperationFuser<CubeOptimization> for MatmulFuser {
    fn fuse(&mut self, operation: &OperationIr) {
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
        CubeOptimization::new(MatmulOperation { passengers, chain })
    }

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn status(&self) -> FuserStatus {
        if self.closed { FuserStatus::Closed } else { FuserStatus::Open }
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
        self.chain.as_ref().map_or(self.seen, Chain::end)
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}

/// Whether `operation` is one that Burn's element-wise fusion waits on.
fn is_arithmetic(operation: &OperationIr) -> bool {
    use NumericOperationIr::{Add, AddScalar, Div, DivScalar, Mul, MulScalar, Sub, SubScalar};

    matches!(
        operation,
        OperationIr::NumericFloat(
            _,
            Add(_)
                | AddScalar(_)
                | Div(_)
                | DivScalar(_)
                | Mul(_)
                | MulScalar(_)
                | Sub(_)
                | SubScalar(_)
        )
    )
}

#[cfg(test)]
mod tests;
