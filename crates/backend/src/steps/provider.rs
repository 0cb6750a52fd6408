//! The providers that take the steps of several parameters together, one launch for up to
//! [`MOST_TENSORS`]. Burn's optimizers hand over one parameter at a time, each of which is one operation in
//! the stream.
//!
//! What differs from step to step are scalars of the operation, which Burn's plans leave open.
//!
//! Burn puts operations into one block if they share a tensor, as those with a gate or a seed do; others
//! begin a block each, and are merged when there are as many blocks as there may be.

use super::operation::{StepRequest, Steps};
use crate::stream::{Claim, Elapsed, Moment, Next, Part, Scalars, Search};
use blackburn_kernels::step::{MOST_TENSORS, StepNumbers};
use burn_ir::OperationIr;
use std::fmt::Debug;

/// An optimizer whose step takes N tensors (parameter, gradient, and states in f32) and makes all but the
/// gradient.
pub(crate) trait Optimizer<const N: usize>:
    Clone + Debug + Default + Send + Sync + 'static
{
    /// The provider's name.
    const NAME: &'static str;
    /// Whose errors say so.
    const OP: &'static str;
    /// What the operation is named in the stream: its trait says so, too.
    const ID: &'static str;
    /// The operation's scalars: the draw, then the step's numbers.
    const SCALARS: usize;
    /// The step's numbers, as the kernel takes them.
    type Numbers: StepNumbers<N> + Send;

    /// The step's numbers among an operation's scalars; none where one is unknown.
    fn numbers(scalars: &Scalars<'_>) -> Option<Self::Numbers>;

    /// Makes them those of the next step, which is taken at the learning rate `rate`.
    fn advance(numbers: &mut Self::Numbers, rate: f64);
}

/// Takes steps that follow each other, share what the device says of them, and do not depend on each other.
///
/// It is over when Burn shows any other operation, to whichever block, or many blocks would wait for
/// parameters that do not come.
#[derive(Clone)]
pub(crate) struct StepSearch<K, const N: usize> {
    requests: Vec<StepRequest<K, N>>,
}

impl<K, const N: usize> Default for StepSearch<K, N> {
    fn default() -> Self {
        Self { requests: Vec::new() }
    }
}

impl<K, const N: usize> StepSearch<K, N> {
    /// As of any fusion below those that save a tensor. Nobody else takes these operations.
    const SCORE: u64 = 15;
}

impl<K: Optimizer<N>, const N: usize> Search for StepSearch<K, N> {
    type Replacement = Steps<K, N>;
    const MAY_CAST_FIRST: bool = false;

    fn follow(&mut self, operation: &OperationIr, now: Moment) -> Next {
        let Some(request) = StepRequest::<K, N>::of(operation) else { return Next::Refused };
        let shares = |other: &StepRequest<K, N>| other.shared().eq(request.shared());
        if self.gives_up(now.elapsed)
            || !self.requests.first().is_none_or(shares)
            || self.requests.iter().any(|other| request.reads_from(other))
        {
            return Next::Refused;
        }
        self.requests.push(request);
        if self.requests.len() == MOST_TENSORS { Next::Last } else { Next::Taken }
    }

    /// One alone, too: left to Burn, it would be settled together with whatever ended this search.
    fn claim(&self) -> Option<Claim<Steps<K, N>>> {
        let positions: Vec<_> = (0..self.requests.len()).collect();
        let steps = Part::Replaced(positions, Steps { requests: self.requests.clone() });
        (!self.requests.is_empty()).then(|| Claim { score: Self::SCORE, parts: vec![steps] })
    }

    fn gives_up(&self, elapsed: Elapsed) -> bool {
        elapsed.since_first > 0
    }

    /// Operations of other kinds do.
    fn takes_time(operation: &OperationIr) -> bool {
        StepRequest::<K, N>::of(operation).is_none()
    }
}
