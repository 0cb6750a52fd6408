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
//! Taken is what stands at the head of a block, and a gradient behind the product that it
//! multiplies, which `BlackburnMatmul` takes along. Elsewhere the gradient is Burn's:
//! - Behind other element-wise operations (a bias, the gradient of dropout) Burn's fusion makes one
//!   kernel of all, which saves more than ours gains.
//! - Behind a product that Burn's fusion takes, that is, without `BlackburnMatmul`, the sixteen
//!   operations become part of the product's kernel.

mod operation;

use crate::stream::{
    Matcher, Pattern,
    Step::{Add, AddScalar, DivScalar, Erf, Mul, MulScalar, PowfScalar, Tanh},
};
use crate::{
    fused::column_sum::{Followed, RowSumSearch},
    stream::Shown,
};
use burn_cubecl::{
    CubeDevice,
    fusion::{CubeFuser, OptimizationProvider},
};
use burn_cubecl_fusion::optim::{CubeOptimization, FusedOperation};
use burn_fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn_ir::{BaseOperationIr, OperationIr, TensorId};
pub(crate) use operation::GeluOperation;
use operation::Pass;
use std::{f64::consts::SQRT_2, sync::OnceLock};

/// The provider's name.
pub(crate) const NAME: &str = "BlackburnGelu";

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

/// Registers [`GeluFuser`] with Burn.
pub(crate) struct GeluProvider;

impl OptimizationProvider for GeluProvider {
    type Operation = GeluOperation;

    fn fuser(&self, _device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(GeluFuser::new(takes_sum(), Shown::default()))
    }
}

static TAKES_SUM: OnceLock<bool> = OnceLock::new();

/// Says whether the sum of a gradient's rows is served with it; the first call decides for the
/// process, as the first registration of providers does.
pub(crate) fn configure(takes_sum: bool) {
    // A second call finds Burn's registry sealed too, and changes nothing.
    let _ = TAKES_SUM.set(takes_sum);
}

/// Whether the sum of a gradient's rows is served with it.
pub(crate) fn takes_sum() -> bool {
    TAKES_SUM.get().copied().unwrap_or(true)
}

/// Follows both patterns from the head of a block, and the backward pass behind the forward pass too:
/// in `y.backward()` its gradient waits on nothing else.
///
/// It waits on no operation that Burn's element-wise fusion does not wait on too, so it takes none
/// from another fusion. Behind the backward pass it waits for the sum of its rows, which Burn's fusion
/// of reductions waits for too; it does so until any other operation comes ([`Shown`]).
#[derive(Clone)]
struct GeluFuser {
    /// Whether the sum of a gradient's rows is taken.
    takes_sum: bool,
    /// How many operations were followed.
    seen: usize,
    candidates: Vec<Candidate>,
    found: Option<GeluOperation>,
    /// Looks for the sum behind the backward pass that was found.
    behind: Option<RowSumSearch>,
    shown: Shown,
}

impl GeluFuser {
    /// How far the bid is above that of Burn's own fusion for the same operations: two operations
    /// more (210 each). With a mask and a scale behind GELU, ours and one kernel for those move 5
    /// tensors at about 2890 GB/s, and Burn's one kernel 3 tensors at 1571 (H200, bf16). With more
    /// behind it, Burn's kernel takes less time.
    const LEAD: u64 = 430;

    fn new(takes_sum: bool, shown: Shown) -> Self {
        let candidates = [FORWARD, BACKWARD].map(|pattern| Candidate::new(pattern, None)).into();
        Self { takes_sum, seen: 0, candidates, found: None, behind: None, shown }
    }

    fn find(&mut self) {
        let Some(complete) = self.candidates.iter().find(|c| c.matcher.is_complete()) else {
            return;
        };
        let pass = Pass::of(&complete.matcher);
        let next = pass.as_ref().filter(|pass| pass.dy.is_none()).map(|forward| forward.x.id);
        if let Some(pass) = pass {
            self.behind = (self.takes_sum && pass.dy.is_some())
                .then(|| RowSumSearch::behind(pass.out.clone(), &self.shown));
            let found = self.found.get_or_insert_default();
            found.passes.push(pass);
            found.ones = complete.ones.as_ref().map(|ones| ones.position);
        }
        self.candidates = next.map(|x| Candidate::new(BACKWARD, Some(x))).into_iter().collect();
    }
}

impl OperationFuser<CubeOptimization> for GeluFuser {
    fn fuse(&mut self, operation: &OperationIr) {
        self.shown.count();
        if let Some(search) = self.behind.take() {
            match (search.follow(operation), &mut self.found) {
                (Followed::Waits(search), _) => self.behind = Some(search),
                (Followed::Found(sum), Some(found)) => found.sum = Some(sum),
                _ => {}
            }
            return;
        }
        if self.candidates.is_empty() {
            return;
        }
        let position = self.seen;
        self.seen += 1;
        self.candidates.retain_mut(|candidate| candidate.follow(operation, position));
        self.find();
    }

    fn finish(&mut self) -> CubeOptimization {
        let found = self.found.clone();
        CubeOptimization::new(found.expect("Burn finishes a fuser only when it says it is ready"))
    }

    fn reset(&mut self) {
        *self = Self::new(self.takes_sum, self.shown.clone());
    }

    fn status(&self) -> FuserStatus {
        let waits =
            !self.candidates.is_empty() || self.behind.as_ref().is_some_and(RowSumSearch::waits);
        if waits { FuserStatus::Open } else { FuserStatus::Closed }
    }

    /// A sum adds nothing to the bid: Burn's fusion of reductions bids nothing for it either.
    fn properties(&self) -> FuserProperties {
        let score = self.found.as_ref().map_or(0, |found| found.burn_score() + Self::LEAD);
        FuserProperties { score, ready: self.found.is_some() }
    }

    fn len(&self) -> usize {
        self.found.as_ref().map_or(self.seen, GeluOperation::num_ops_fused)
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}

/// How far the stream has followed one of the patterns.
#[derive(Clone)]
struct Candidate {
    matcher: Matcher,
    /// What the input has to be.
    x: Option<TensorId>,
    /// The ones that the backward pass starts from in `y.backward()`: the search puts them in front
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
        Self { matcher: Matcher::new(pattern), x, ones: None }
    }

    /// As [`Matcher::follow`].
    fn follow(&mut self, operation: &OperationIr, position: usize) -> bool {
        if let OperationIr::BaseFloat(BaseOperationIr::Ones(op)) = operation
            && self.ones.is_none()
            && matches!(self.matcher.awaits(), Some("x3" | "dx"))
        {
            self.ones = Some(Ones { id: op.out.id, position });
            return true;
        }
        let on_pattern = self.matcher.follow(operation);
        let is = |name, id| self.matcher.tensor(name).is_some_and(|tensor| tensor.id == id);
        on_pattern
            && self.x.is_none_or(|x| is("x", x))
            && (!self.matcher.is_complete() || self.ones.as_ref().is_none_or(|o| is("dy", o.id)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fused::column_sum::behind_tests::{sum, view};
    use crate::stream::{
        burn_score,
        emit::{emit, tensor},
    };
    use burn_ir::{CreationOpIr, TensorStatus};

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

    fn after(operations: &[OperationIr]) -> GeluFuser {
        let mut fuser = GeluFuser::new(true, Shown::default());
        operations.iter().for_each(|operation| fuser.fuse(operation));
        fuser
    }

    /// How many operations the fuser would take, if it is ready.
    fn taken(operations: &[OperationIr]) -> Option<usize> {
        let fuser = after(operations);
        fuser.properties().ready.then(|| fuser.len())
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
            assert_eq!(after(&stream).found.and_then(|found| found.ones), Some(at));
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
    fn the_sum_of_a_gradient_s_rows_is_taken_with_it() {
        const DX: u64 = 35;

        let is_open = |fuser: &GeluFuser| matches!(fuser.status(), FuserStatus::Open);
        assert!(is_open(&after(&backward())), "a sum may follow");
        assert_eq!(taken(&[&backward()[..], &[sum(DX, SHAPE)]].concat()), Some(17));
        let viewed = [&backward()[..], &[view(DX, SHAPE, 40), sum(40, SHAPE)]].concat();
        assert_eq!(taken(&viewed[..17]), Some(16), "the view waits for the sum");
        assert_eq!(taken(&viewed), Some(18));
        let both = [&forward()[..], &backward(), &[sum(DX, SHAPE)]].concat();
        assert_eq!(taken(&both), Some(22));
        assert_eq!(taken(&[&backward()[..], &[sum(9, SHAPE)]].concat()), Some(16), "of another");
        // The output of the forward pass has no such sum.
        assert_eq!(taken(&[&forward()[..], &[sum(14, SHAPE)]].concat()), Some(5));
        let mut alone = GeluFuser::new(false, Shown::default());
        backward().iter().for_each(|operation| alone.fuse(operation));
        assert!(!is_open(&alone), "it is another provider's");
    }
}
