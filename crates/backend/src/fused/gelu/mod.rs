//! The provider that runs `burn::nn::Gelu`, forward and backward, on the GELU kernels.
//!
//! Burn emits GELU as five element-wise operations and its gradient as sixteen ([`FORWARD`],
//! [`BACKWARD`]). Burn's own fusion makes one kernel of either, which moves about half the bytes a
//! second that ours moves.
//!
//! The gradient is not the same function: Burn differentiates the tanh approximation of GELU
//! although its forward is the exact one, and the kernel computes the derivative of the forward,
//! `Phi(x) + x phi(x)`. They differ by up to 9e-4 of the output's gradient (at |x| = 2), which is
//! 14,000 roundings of f32 and a fifth of one of bf16.
//!
//! With the gradient goes the sum of its rows if it is next in the stream, as it is where a linear layer
//! with a bias is in front of GELU: one kernel makes both, and the gradient is not read again for the
//! sum. The stream has `SumDim` right behind the sixteen operations at rank 2, and `Reshape`, `SumDim`
//! at higher ranks, where Burn's layer makes a matrix of its input.
//!
//! Dropout behind GELU goes with it, whose mask is drawn in between, and what dropout passes on goes with the gradient.
//!
//! Taken is what stands at the head of a block, and a gradient behind the product that it
//! multiplies, which `BlackburnMatmul` takes along. Elsewhere the gradient is Burn's:
//! - Behind other element-wise operations (a bias, say) Burn's fusion makes one kernel of all, which
//!   saves more than ours gains.
//! - Behind a product that Burn's fusion takes, that is, without `BlackburnMatmul`, the sixteen
//!   operations become part of the product's kernel.

mod pass;

use crate::{
    fused::{
        column_sum::RowSumSearch,
        dropped::{Dropped, DroppedSearch, PassedOnSearch, draws_mask},
    },
    stream::{
        Claim, Elapsed, Matcher, Moment, Next, Part, Pattern,
        PatternStep::{Add, AddScalar, DivScalar, Erf, Mul, MulScalar, PowfScalar, Tanh},
        Search, burn_score,
    },
};
use burn_ir::{BaseOperationIr, OperationIr, TensorId, TensorStatus};
pub(crate) use pass::GeluPass;
use std::f64::consts::SQRT_2;

/// `ActivationOps::gelu` of burn-backend: `x (1 + erf(x / sqrt 2)) / 2`.
pub(crate) const FORWARD: Pattern = &[
    ("scaled", DivScalar("x", SQRT_2)),
    ("erf", Erf("scaled")),
    ("one_plus_erf", AddScalar("erf", 1.0)),
    ("twice", Mul("x", "one_plus_erf")),
    ("y", DivScalar("twice", 2.0)),
];

/// `ActivationOps::gelu_backward` of burn-backend, with the constants that it has.
pub(crate) const BACKWARD: Pattern = &[
    ("x3", PowfScalar("x", 3.0)),
    ("c1", MulScalar("x3", 0.035_677_4)),
    ("c2", MulScalar("x", 0.797_885)),
    ("c3", MulScalar("x3", 0.053_516_1)),
    ("c4", MulScalar("x", 0.398_942)),
    ("inner1", Add("c1", "c2")),
    ("inner2", Add("c3", "c4")),
    ("tanh", Tanh("inner1")),
    ("tanh2", Mul("tanh", "tanh")),
    ("minus_tanh2", MulScalar("tanh2", -1.0)),
    ("sech2", AddScalar("minus_tanh2", 1.0)),
    ("half_tanh", MulScalar("tanh", 0.5)),
    ("product", Mul("inner2", "sech2")),
    ("half_plus_product", AddScalar("product", 0.5)),
    ("slope", Add("half_tanh", "half_plus_product")),
    ("dx", Mul("slope", "dy")),
];

/// Follows both patterns from the head of a block, and the backward pass behind the forward pass too:
/// in `y.backward()` its gradient waits on nothing else.
///
/// It waits on no operation that Burn's element-wise fusion does not wait on too, so it takes none
/// from another fusion. Behind the backward pass it waits for the sum of its rows, which Burn's fusion
/// of reductions waits for too; it does so until any other operation comes.
#[derive(Clone)]
pub(crate) struct GeluSearch {
    /// Whether the sum of a gradient's rows is taken.
    takes_sum: bool,
    /// Whether masks of dropout are Burn's to draw.
    burn_draws: bool,
    candidates: Vec<Candidate>,
    /// The passes that were found, one behind the other.
    passes: Vec<Matcher>,
    /// The position of the operation that makes `dy`, if it is among them.
    ones: Option<usize>,
    /// Looks for the sum behind the backward pass that was found.
    behind: Option<RowSumSearch>,
    /// Looks for dropout behind the forward pass that was found.
    dropped: Option<DroppedSearch>,
    /// Looks for what dropout passes on in front of the backward pass.
    passed_on: PassedOnSearch,
}

impl GeluSearch {
    /// How far the bid is above that of Burn's own fusion for the same operations: two operations
    /// more (210 each). With a mask and a scale behind GELU, ours and one kernel for those move 5
    /// tensors at about 2890 GB/s, and Burn's one kernel 3 tensors at 1571 (H200, bf16). With more
    /// behind it, Burn's kernel takes less time.
    const LEAD: u64 = 430;
    /// What Burn's fusion bids more where dropout's two operations are in front of the backward pass.
    const OF_DROPOUT: u64 = 2 * 210;

    pub(crate) fn new(takes_sum: bool, burn_draws: bool) -> Self {
        let candidate = |pattern| Candidate::new(pattern, None);
        let candidates = [FORWARD, BACKWARD].map(candidate).into();
        let (passes, ones, behind, dropped) = (Vec::new(), None, None, None);
        let passed_on = PassedOnSearch::default();
        Self { takes_sum, burn_draws, candidates, passes, ones, behind, dropped, passed_on }
    }

    /// A pass that was found. Says whether anything may follow it.
    fn take(&mut self, complete: &Candidate) -> bool {
        self.candidates.clear();
        let Some(pass) = GeluPass::of(&complete.matcher, None) else { return false };
        self.ones = complete.ones.as_ref().map(|ones| ones.position);
        self.passes.push(complete.matcher.clone());
        match pass.gradient() {
            Some(dx) => self.behind = self.takes_sum.then(|| RowSumSearch::behind(dx.clone())),
            None => {
                let x = complete.matcher.tensor("x").map(|x| x.id);
                self.candidates.push(Candidate::new(BACKWARD, x));
                self.dropped = Some(DroppedSearch::new(self.burn_draws));
            }
        }
        pass.gradient().is_none() || self.takes_sum
    }

    /// What Burn's own fusion bids for the same operations.
    fn burn_score(&self) -> u64 {
        let pass = |(at, matcher): (usize, &Matcher)| match matcher.tensor("dy") {
            None => burn_score(FORWARD, 2),
            // The second pass does not read x again, and ones are not read.
            Some(_) => burn_score(BACKWARD, 3 - at - usize::from(self.ones.is_some())),
        };
        self.passes.iter().enumerate().map(pass).sum()
    }
}

impl Search for GeluSearch {
    type Replacement = GeluPass;

    fn follow(&mut self, operation: &OperationIr, now: Moment) -> Next {
        if let Some(behind) = &mut self.behind {
            return behind.follow(operation, now.position);
        }
        if self.passed_on.follow(operation, now.position) {
            if let Some(dropped) = self.passed_on.found() {
                self.candidates = vec![Candidate::of_gradient(dropped.out.id)];
            }
            return Next::Taken;
        }
        if self.passed_on.is_under_way() {
            return Next::Refused;
        }
        if let Some(dropped) = &mut self.dropped {
            let y = self.passes.last().and_then(Matcher::output);
            if y.is_some() && dropped.follow(operation, now.position, y) {
                self.candidates.clear();
                return if dropped.found().is_some() { Next::Last } else { Next::Taken };
            }
            // It follows at once, or not at all.
            self.dropped = None;
        }
        self.candidates.retain_mut(|candidate| candidate.follow(operation, now.position));
        let complete = self.candidates.iter().find(|candidate| candidate.matcher.is_complete());
        if let Some(complete) = complete.cloned() {
            return if self.take(&complete) { Next::Taken } else { Next::Last };
        }
        Next::taken_if(!self.candidates.is_empty())
    }

    /// A sum adds nothing to the bid: Burn's fusion of reductions bids nothing for it either.
    fn claim(&self) -> Option<Claim<GeluPass>> {
        let (last, others) = self.passes.split_last()?;
        let mut parts = vec![Part::Unfused(self.ones.into_iter().collect())];
        for matcher in others {
            parts.extend(pass_parts(matcher, None));
        }
        match self.dropped.as_ref().filter(|dropped| dropped.found().is_some()) {
            Some(dropped) => parts.extend(dropped_parts(last, dropped)),
            None => parts.extend(pass_parts(last, self.behind.as_ref())),
        }
        let mut score = self.burn_score() + Self::LEAD;
        if let Some(dropped) = self.passed_on.found() {
            score += Self::OF_DROPOUT;
            take_passed_on(&mut parts, dropped);
        }
        Some(Claim { score, parts })
    }

    /// What may follow a pass follows it at once: the sum of a gradient's rows, or a gradient behind the forward pass. Whoever
    /// waits for more keeps Burn from ending its segment, and a norm that begins in there is cut into pieces.
    fn gives_up(&self, elapsed: Elapsed) -> bool {
        !self.passes.is_empty() && elapsed.since_last > 0
    }

    /// The mask of dropout is drawn between the forward pass and the product with it.
    fn takes_time(operation: &OperationIr) -> bool {
        !draws_mask(operation)
    }
}

/// Has the backward pass among `parts` take what dropout passes on, by the first operations of the block.
fn take_passed_on(parts: &mut [Part<GeluPass>], dropped: &Dropped) {
    for part in parts {
        if let Part::Replaced(positions, GeluPass::Backward { passed_on, .. }) = part {
            positions.splice(0..0, 0..PassedOnSearch::OPERATIONS);
            *passed_on = Some(Box::new(dropped.clone()));
        }
    }
}

/// The forward pass in the place of the operations that `complete` has followed, and of dropout behind it.
fn dropped_parts(complete: &Matcher, dropped: &DroppedSearch) -> Vec<Part<GeluPass>> {
    let pass = GeluPass::of(complete, None).zip(dropped.found());
    let Some(pass) = pass.and_then(|(pass, found)| pass.dropped(found)) else {
        return Vec::new();
    };
    let mask = dropped.drawn(GeluPass::Mask);
    let steps = complete.positions().iter().copied().chain(dropped.positions()).collect();
    mask.into_iter().chain([Part::Replaced(steps, pass)]).collect()
}

/// A pass in the place of the operations that `complete` has followed, and of the sum of its rows if that was
/// found `behind` it. Nothing where the kernel does not take the type.
pub(crate) fn pass_parts(complete: &Matcher, behind: Option<&RowSumSearch>) -> Vec<Part<GeluPass>> {
    let sum = behind.and_then(RowSumSearch::found).cloned();
    let Some(pass) = GeluPass::of(complete, sum) else { return Vec::new() };
    let sum = behind.map(RowSumSearch::parts).unwrap_or_default();
    let sum = sum.into_iter().map(|part| part.map(GeluPass::RowSum));
    std::iter::once(Part::Replaced(complete.positions().to_vec(), pass)).chain(sum).collect()
}

/// How far the stream has followed one of the patterns.
#[derive(Clone)]
struct Candidate {
    matcher: Matcher,
    /// What the input has to be.
    x: Option<TensorId>,
    /// What the gradient of the output has to be.
    dy: Option<TensorId>,
    /// The ones that the backward pass starts from in `y.backward()`: Burn shows them in front
    /// of it or in front of its last operation. They run first, as Burn runs them.
    ones: Option<Ones>,
}

#[derive(Clone)]
struct Ones {
    id: TensorId,
    position: usize,
}

impl Candidate {
    fn new(pattern: Pattern, x: Option<TensorId>) -> Self {
        Self { matcher: Matcher::element_wise(pattern), x, dy: None, ones: None }
    }

    /// The backward pass of the gradient `dy`.
    fn of_gradient(dy: TensorId) -> Self {
        Self { dy: Some(dy), ..Self::new(BACKWARD, None) }
    }

    /// Whether the gradient is `dy`, and nobody else reads it: it is not made then.
    fn ends(&self, dy: TensorId) -> bool {
        let found = self.matcher.tensor("dy");
        found.is_some_and(|found| found.id == dy && found.status == TensorStatus::ReadWrite)
    }

    /// As [`Matcher::follow`].
    fn follow(&mut self, operation: &OperationIr, position: usize) -> bool {
        if let OperationIr::BaseFloat(BaseOperationIr::Ones(op)) = operation
            && self.ones.is_none()
            && self.dy.is_none()
            && matches!(self.matcher.awaits(), Some("x3" | "dx"))
        {
            self.ones = Some(Ones { id: op.out.id, position });
            return true;
        }
        let on_pattern = self.matcher.follow(operation, position);
        let is = |name, id| self.matcher.tensor(name).is_some_and(|tensor| tensor.id == id);
        on_pattern
            && self.x.is_none_or(|x| is("x", x))
            && (!self.matcher.is_complete() || self.ones.as_ref().is_none_or(|o| is("dy", o.id)))
            && (!self.matcher.is_complete() || self.dy.is_none_or(|dy| self.ends(dy)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fused::dropped::streams::{masked, random, scaled},
        stream::{
            Fuser,
            emit::{emit, sum_along, tensor, view},
        },
    };
    use burn_fusion::OperationFuser;
    use burn_ir::{CreationOpIr, NumericOperationIr};

    const X: (&str, u64) = ("x", 0);
    const DY: (&str, u64) = ("dy", 1);
    const SHAPE: [usize; 2] = [1, 2];

    fn forward() -> Vec<OperationIr> {
        emit(FORWARD, &[X], 10, SHAPE)
    }

    fn backward() -> Vec<OperationIr> {
        emit(BACKWARD, &[X, DY], 20, SHAPE)
    }

    fn ones(id: u64) -> OperationIr {
        let out = tensor(id, SHAPE, TensorStatus::NotInit);
        OperationIr::BaseFloat(BaseOperationIr::Ones(CreationOpIr { out }))
    }

    fn sum(id: u64) -> OperationIr {
        sum_along(id, SHAPE, 0)
    }

    fn after(operations: &[OperationIr]) -> Fuser<GeluSearch> {
        Fuser::after(GeluSearch::new(true, false), operations)
    }

    /// How many operations the fuser would take, if it is ready.
    fn taken(operations: &[OperationIr]) -> Option<usize> {
        after(operations).claims()
    }

    #[test]
    fn each_pass_is_taken_whole_or_not_at_all() {
        assert_eq!(taken(&forward()), Some(5));
        assert_eq!(taken(&backward()), Some(16));
        assert_eq!(taken(&forward()[..4]), None);
        assert_eq!(taken(&backward()[..15]), None);
    }

    #[test]
    fn ones_are_taken_with_the_pass_that_starts_from_them() {
        let (operations, (_, dy)) = (backward(), DY);
        let in_front = [&[ones(dy)], &operations[..]].concat();
        let inside = [&operations[..15], &[ones(dy)], &operations[15..]].concat();
        for (stream, at) in [(in_front, 0), (inside, 15)] {
            assert_eq!(taken(&stream), Some(17));
            assert_eq!(after(&stream).search.ones, Some(at));
        }
    }

    #[test]
    fn ones_that_are_for_others_are_not_taken() {
        assert_eq!(taken(&[&[ones(9)], &backward()[..]].concat()), None);
        assert_eq!(taken(&[&[ones(9), ones(8)], &backward()[..]].concat()), None);
        assert_eq!(taken(&[&[ones(9)], &forward()[..]].concat()), None);
    }

    #[test]
    fn both_passes_are_taken_where_one_is_behind_the_other() {
        let both = [forward(), backward()].concat();
        assert_eq!(taken(&both), Some(21));
        assert_eq!(taken(&both[..20]), Some(5));
        let (_, dy) = DY;
        let with_ones = [&both[..20], &[ones(dy)], &both[20..]].concat();
        let score = after(&with_ones).properties().score;
        assert_eq!(taken(&with_ones), Some(22));
        // Burn's kernel reads x and writes two of the tensors that 22 operations read and write.
        let burns = burn_score(FORWARD, 0) + burn_score(BACKWARD, 3) + 100 + 2 * 10;
        assert!(score > burns, "{score} {burns}");
        let of_another = [forward(), emit(BACKWARD, &[("x", 7), DY], 20, SHAPE)].concat();
        assert_eq!(taken(&of_another), Some(5));
    }

    #[test]
    fn the_wait_for_a_sum_is_over_when_another_block_got_the_next_operation() {
        let mut fuser = after(&backward());
        let mut other_block = fuser.clone();
        other_block.reset();
        assert!(fuser.is_open());
        other_block.fuse(&sum(9));
        assert!(!fuser.is_open());
        // It is still taken if it comes.
        fuser.fuse(&view(35, SHAPE, 40));
        assert!(fuser.is_open());
        fuser.fuse(&sum(40));
        assert_eq!(fuser.claims(), Some(18));
    }

    #[test]
    fn dropout_behind_the_forward_pass_is_taken_with_it() {
        const MASK: u64 = 50;
        let behind = [random(MASK, SHAPE), masked(14, MASK, SHAPE, 51), scaled(51, SHAPE, 52)];
        let stream = [&forward()[..], &behind].concat();
        assert_eq!(taken(&stream), Some(8));
        assert_eq!(taken(&stream[..7]), Some(5), "a product with a mask alone");
        assert_eq!(taken(&[&forward()[..], &behind[1..]].concat()), Some(7), "drawn before");
        let parts = after(&stream).search.claim().expect("all of it came").parts;
        let lengths: Vec<usize> = parts.iter().map(Part::len).filter(|len| *len > 0).collect();
        assert_eq!(lengths, [1, 7], "the mask is drawn first");
        // A mask that is drawn for others is no time that goes by.
        let mut fuser = after(&forward());
        let mut other_block = fuser.clone();
        other_block.reset();
        other_block.fuse(&behind[0]);
        assert!(fuser.is_open());
        other_block.fuse(&sum(9));
        assert!(!fuser.is_open());
        fuser.fuse(&behind[1]);
        assert!(fuser.is_open());
    }

    #[test]
    fn what_dropout_passes_on_is_taken_with_the_backward_pass() {
        const MASK: u64 = 50;
        let (_, dy) = DY;
        let in_front = [scaled(60, SHAPE, 61), masked(61, MASK, SHAPE, dy)];
        let read_again = [&in_front[..], &backward()].concat();
        assert_eq!(taken(&read_again), None, "others read the gradient later");
        let mut stream = read_again;
        if let Some(OperationIr::NumericFloat(_, NumericOperationIr::Mul(op))) = stream.last_mut() {
            op.rhs.status = TensorStatus::ReadWrite;
        }
        assert_eq!(taken(&stream), Some(18));
        assert_eq!(taken(&[&stream[..], &[sum(35)]].concat()), Some(19));
        assert_eq!(taken(&stream[..17]), None);
        let of_another = [scaled(60, SHAPE, 61), masked(61, MASK, SHAPE, 62)];
        assert_eq!(taken(&[&of_another[..], &backward()].concat()), None);
        assert_eq!(taken(&[&in_front[..], &forward()].concat()), None);
        let score = after(&stream).properties().score;
        // Burn's kernel saves what the two products make, and two launches.
        let burns = burn_score(BACKWARD, 3) + 2 * (2 * 100 + 10);
        assert!(score > burns, "{score} {burns}");
    }

    #[test]
    fn the_sum_of_a_gradient_s_rows_is_taken_with_it() {
        const DX: u64 = 35;

        assert!(after(&backward()).is_open(), "a sum may follow");
        assert_eq!(taken(&[&backward()[..], &[sum(DX)]].concat()), Some(17));
        let viewed = [&backward()[..], &[view(DX, SHAPE, 40), sum(40)]].concat();
        assert_eq!(taken(&viewed[..17]), Some(16), "the view waits for the sum");
        assert_eq!(taken(&viewed), Some(18));
        let both = [&forward()[..], &backward(), &[sum(DX)]].concat();
        assert_eq!(taken(&both), Some(22));
        assert_eq!(taken(&[&backward()[..], &[sum(9)]].concat()), Some(16), "of another");
        // The output of the forward pass has no such sum.
        assert_eq!(taken(&[&forward()[..], &[sum(14)]].concat()), Some(5));
        let alone = Fuser::after(GeluSearch::new(false, false), &backward());
        assert!(!alone.is_open(), "it is another provider's");
    }
}
