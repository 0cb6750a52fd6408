//! Burn's own dropout in the stream: a product with a random mask of zeros and ones, and one with a number.
//!
//! The mask is a tensor, which automatic differentiation keeps. So dropout moves three tensors as large as its input,
//! unless the kernel in front of it or behind takes it along: those of softmax, GELU and layer norm do, and products where
//! a gradient is multiplied by the mask.

use super::random::Random;
use crate::{
    declined::unsupported,
    stream::{Part, SingleOperation, number},
    tensors::{Input, Tensors, consume, register_in_order},
};
use blackburn_kernels::{
    KernelError,
    dropout::{KeptElements, add_masked},
};
use burn_ir::{BinaryOpIr, NumericOperationIr, OperationIr, ScalarIr, TensorIr, TensorStatus};
use serde::{Deserialize, Serialize};

const OP: &str = "dropout";

/// Whether `operation` draws zeros and ones, as dropout does. It waits for nothing, so searches that wait for dropout let
/// it pass.
pub(super) fn draws_mask(operation: &OperationIr) -> bool {
    Random::of(operation, &()).is_some_and(|random| random.is_mask())
}

/// What dropout makes of a tensor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Dropped {
    /// The tensor.
    pub(super) x: TensorIr,
    mask: TensorIr,
    /// Where the number is.
    scale: u64,
    pub(super) out: TensorIr,
}

impl Dropped {
    /// The mask and the number, for a kernel whose tensors lie as `like` does, which has the mask's shape. Elsewhere than
    /// in a recorded pass, Burn's mask may have gaps between rows: then its elements are copied into the order of
    /// dimensions, in which those of `like` have to be.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] where the number is not known, or elements lie otherwise.
    pub(super) fn kept(
        &self,
        tensors: &Tensors,
        like: &Input,
    ) -> Result<KeptElements, KernelError> {
        let mask = Input::of(tensors, &self.mask, OP)?;
        if like.lies_as(&mask) {
            return self.by(tensors, &mask);
        }
        if !like.is_contiguous() {
            return Err(unsupported(OP, "a mask that lies otherwise than what it is for"));
        }
        self.kept_in_order(tensors, &like.shape)
    }

    /// The same with the mask's elements in the order of its dimensions, which are `shape`.
    ///
    /// # Errors
    ///
    /// As [`kept`](Self::kept), and where it has another shape.
    pub(super) fn kept_in_order(
        &self,
        tensors: &Tensors,
        shape: &[usize],
    ) -> Result<KeptElements, KernelError> {
        let mask = Input::of(tensors, &self.mask, OP)?;
        if mask.shape != shape {
            return Err(unsupported(OP, "a mask of another shape than what it is for"));
        }
        self.by(tensors, &mask.contiguous())
    }

    fn by(&self, tensors: &Tensors, mask: &Input) -> Result<KeptElements, KernelError> {
        let scale = number(tensors, self.scale);
        let scale = scale.ok_or_else(|| unsupported(OP, "a scale that is unknown"))? as f32;
        Ok(KeptElements { mask: mask.buffer(mask.elements()), scale })
    }

    /// Whether the mask lies as `x` does, without gaps.
    pub(super) fn lies_as(&self, tensors: &Tensors, x: &Input) -> Result<bool, KernelError> {
        Ok(x.lies_as(&Input::of(tensors, &self.mask, OP)?))
    }

    /// Lets go of the mask.
    pub(super) fn consume(&self, tensors: &mut Tensors) {
        consume(tensors, &self.mask);
    }
}

/// Looks for dropout, behind a tensor or at the head of a block.
#[derive(Clone, Debug, Default)]
pub(crate) struct DroppedSearch {
    /// Whether masks are Burn's to draw: `BlackburnRandom` is switched off.
    burn_draws: bool,
    /// The mask that Burn draws, and its position, where it is among the operations.
    random: Option<(usize, Random)>,
    product: Option<(usize, BinaryOpIr)>,
    scaled: Option<(usize, Dropped)>,
}

impl DroppedSearch {
    /// One that has not begun. `burn_draws` says whether masks are Burn's to draw.
    pub(super) fn new(burn_draws: bool) -> Self {
        Self { burn_draws, ..Self::default() }
    }

    /// Whether `operation` is the next one of dropout of `x`, or of any tensor.
    pub(super) fn follow(
        &mut self,
        operation: &OperationIr,
        position: usize,
        x: Option<&TensorIr>,
    ) -> bool {
        match &self.product {
            None => self.random(operation, position, x) || self.product(operation, position, x),
            Some((_, product)) if self.scaled.is_none() => {
                self.scaled = scaled(product, operation).map(|dropped| (position, dropped));
                self.scaled.is_some()
            }
            Some(_) => false,
        }
    }

    /// Burn joins the block of `x` with that of the mask when they are multiplied, and shows the mask behind `x` then.
    fn random(&mut self, operation: &OperationIr, position: usize, x: Option<&TensorIr>) -> bool {
        let random = x.and_then(|x| Random::of(operation, &()).filter(|random| random.is_like(x)));
        let taken = random.is_some() && self.random.is_none();
        if taken {
            self.random = random.map(|random| (position, random));
        }
        taken
    }

    fn product(&mut self, operation: &OperationIr, position: usize, x: Option<&TensorIr>) -> bool {
        let OperationIr::NumericFloat(_, NumericOperationIr::Mul(op)) = operation else {
            return false;
        };
        let BinaryOpIr { lhs, rhs, out } = op;
        // What is not made here may be read elsewhere.
        let is_ours = x.is_none_or(|x| x.id == lhs.id && lhs.status == TensorStatus::ReadWrite);
        let fits = is_ours
            && lhs.id != rhs.id
            && lhs.shape == rhs.shape
            && [rhs, out].iter().all(|tensor| tensor.dtype == lhs.dtype);
        if fits {
            self.product = Some((position, op.clone()));
        }
        fits
    }

    /// The dropout, if all of it was found.
    pub(super) fn found(&self) -> Option<&Dropped> {
        self.scaled.as_ref().map(|(_, dropped)| dropped)
    }

    /// The mask that is drawn on the way, as part of a claim.
    pub(super) fn drawn<R>(&self, replacement: impl FnOnce(Random) -> R) -> Option<Part<R>> {
        let (position, random) = self.random.clone()?;
        Some(match self.burn_draws {
            true => Part::Unfused(vec![position]),
            false => Part::Replaced(vec![position], replacement(random)),
        })
    }

    /// Where its two products are.
    pub(super) fn positions(&self) -> impl Iterator<Item = usize> {
        let product = self.product.as_ref().map(|(position, _)| *position);
        product.into_iter().chain(self.scaled.as_ref().map(|(position, _)| *position))
    }
}

/// What is behind the product with the mask.
fn scaled(product: &BinaryOpIr, operation: &OperationIr) -> Option<Dropped> {
    let OperationIr::NumericFloat(_, NumericOperationIr::MulScalar(op)) = operation else {
        return None;
    };
    let ScalarIr::UInt(scale) = op.rhs else { return None };
    let is_next = op.lhs.id == product.out.id && op.lhs.status == TensorStatus::ReadWrite;
    let BinaryOpIr { lhs: x, rhs: mask, .. } = product.clone();
    is_next.then(|| Dropped { x, mask, scale, out: op.out.clone() })
}

/// Looks for the gradient that dropout passes on, at the head of a block: the number comes before the mask there.
#[derive(Clone, Debug, Default)]
pub(crate) struct PassedOnSearch {
    /// The tensor, where the number is, and the product.
    scaled: Option<(TensorIr, u64, TensorIr)>,
    found: Option<Dropped>,
}

impl PassedOnSearch {
    /// The operations, which are the first ones of their block.
    pub(super) const OPERATIONS: usize = 2;

    /// Whether it takes `operation`, at that position.
    pub(super) fn follow(&mut self, operation: &OperationIr, position: usize) -> bool {
        let OperationIr::NumericFloat(_, operation) = operation else { return false };
        match (position, operation, &self.scaled) {
            (0, NumericOperationIr::MulScalar(op), None) => {
                let ScalarIr::UInt(scale) = op.rhs else { return false };
                self.scaled = Some((op.lhs.clone(), scale, op.out.clone()));
                true
            }
            (1, NumericOperationIr::Mul(op), Some((x, scale, scaled))) => {
                let BinaryOpIr { lhs, rhs: mask, out } = op;
                let fits = lhs.id == scaled.id
                    && lhs.status == TensorStatus::ReadWrite
                    && mask.shape == lhs.shape
                    && [mask, out].iter().all(|tensor| tensor.dtype == x.dtype);
                self.found = fits.then(|| Dropped {
                    x: x.clone(),
                    mask: mask.clone(),
                    scale: *scale,
                    out: out.clone(),
                });
                fits
            }
            _ => false,
        }
    }

    /// Whether it took one operation, and not both.
    pub(super) fn is_under_way(&self) -> bool {
        self.scaled.is_some() && self.found.is_none()
    }

    /// What was found.
    pub(super) fn found(&self) -> Option<&Dropped> {
        self.found.as_ref()
    }
}

/// A residual and what dropout leaves of a tensor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DroppedSum {
    dropped: Dropped,
    residual: TensorIr,
    pub(super) out: TensorIr,
}

impl DroppedSum {
    pub(super) fn launch(&self, tensors: &mut Tensors) -> Result<(), KernelError> {
        let Self { dropped, residual, out } = self;
        let mut x = Input::of(tensors, &dropped.x, OP)?;
        let mut other = Input::of(tensors, residual, OP)?;
        if !x.lies_as(&other) || !dropped.lies_as(tensors, &x)? {
            (x, other) = (x.contiguous(), other.contiguous());
        }
        let kept = dropped.kept(tensors, &x)?;
        let elements = x.elements();
        let sum = add_masked(&x.client, &x.buffer(elements), &kept, &other.buffer(elements))?;
        register_in_order(tensors, out, &x, sum, OP)?;
        consume(tensors, &dropped.x);
        dropped.consume(tensors);
        consume(tensors, residual);
        Ok(())
    }
}

/// Looks for the sum of a residual and of what dropout leaves of a tensor, at the head of a block.
#[derive(Clone, Debug, Default)]
pub(crate) struct DroppedSumSearch {
    dropped: DroppedSearch,
    sum: Option<DroppedSum>,
    /// How many operations it took.
    taken: usize,
}

impl DroppedSumSearch {
    /// The operations of the sum, which are the first ones of their block.
    pub(super) const OPERATIONS: usize = 3;

    /// Whether it takes `operation`, at that position.
    pub(super) fn follow(&mut self, operation: &OperationIr, position: usize) -> bool {
        if position != self.taken || self.sum.is_some() {
            return false;
        }
        let taken = match self.dropped.found() {
            None => self.dropped.follow(operation, position, None),
            Some(dropped) => {
                self.sum = sum_of(dropped, operation);
                self.sum.is_some()
            }
        };
        self.taken += usize::from(taken);
        taken
    }

    /// Whether it took some operations, and not all of a sum.
    pub(super) fn is_under_way(&self) -> bool {
        self.taken > 0 && self.sum.is_none()
    }

    /// The sum, if it was found.
    pub(super) fn found(&self) -> Option<&DroppedSum> {
        self.sum.as_ref()
    }
}

fn sum_of(dropped: &Dropped, operation: &OperationIr) -> Option<DroppedSum> {
    let OperationIr::NumericFloat(_, NumericOperationIr::Add(op)) = operation else { return None };
    let is_dropped =
        |tensor: &TensorIr| tensor.id == dropped.out.id && tensor.status == TensorStatus::ReadWrite;
    let residual = match (is_dropped(&op.lhs), is_dropped(&op.rhs)) {
        (true, false) => &op.rhs,
        (false, true) => &op.lhs,
        _ => return None,
    };
    let fits = residual.shape == dropped.x.shape && residual.dtype == dropped.x.dtype;
    fits.then(|| DroppedSum {
        dropped: dropped.clone(),
        residual: residual.clone(),
        out: op.out.clone(),
    })
}

/// Streams with dropout in them, for tests of those who look for it.
#[cfg(test)]
pub(crate) mod streams {
    use crate::stream::emit::tensor;
    use burn_backend::{DType, Distribution};
    use burn_ir::{
        BinaryOpIr, FloatOperationIr, NumericOperationIr, OperationIr, RandomOpIr, ScalarIr,
        ScalarOpIr,
        TensorStatus::{NotInit, ReadOnly, ReadWrite},
    };

    /// The mask `out`.
    pub(crate) fn random<const D: usize>(out: u64, shape: [usize; D]) -> OperationIr {
        let out = tensor(out, shape, NotInit);
        let distribution = Distribution::Bernoulli(0.9);
        let random = FloatOperationIr::Random(RandomOpIr { out, distribution });
        OperationIr::Float(DType::F32, random)
    }

    /// `t{out} = t{x} t{mask}`.
    pub(crate) fn masked<const D: usize>(
        x: u64,
        mask: u64,
        shape: [usize; D],
        out: u64,
    ) -> OperationIr {
        let [lhs, rhs] = [(x, ReadWrite), (mask, ReadOnly)].map(|(id, of)| tensor(id, shape, of));
        let out = tensor(out, shape, NotInit);
        let product = NumericOperationIr::Mul(BinaryOpIr { lhs, rhs, out });
        OperationIr::NumericFloat(DType::F32, product)
    }

    /// `t{out}`, t{x} times a number.
    pub(crate) fn scaled<const D: usize>(x: u64, shape: [usize; D], out: u64) -> OperationIr {
        let (lhs, out) = (tensor(x, shape, ReadWrite), tensor(out, shape, NotInit));
        let product =
            NumericOperationIr::MulScalar(ScalarOpIr { lhs, rhs: ScalarIr::UInt(9), out });
        OperationIr::NumericFloat(DType::F32, product)
    }

    /// `t{out} = t{residual} + t{x}`.
    pub(crate) fn added<const D: usize>(
        residual: u64,
        x: u64,
        shape: [usize; D],
        out: u64,
    ) -> OperationIr {
        let [lhs, rhs] =
            [(residual, ReadOnly), (x, ReadWrite)].map(|(id, of)| tensor(id, shape, of));
        let out = tensor(out, shape, NotInit);
        let sum = NumericOperationIr::Add(BinaryOpIr { lhs, rhs, out });
        OperationIr::NumericFloat(DType::F32, sum)
    }
}

#[cfg(test)]
mod tests {
    use super::{
        streams::{added, masked, random, scaled},
        *,
    };
    use crate::stream::emit::tensor;

    const SHAPE: [usize; 2] = [1, 2];
    const OTHER: [usize; 2] = [0, 2];
    const X: u64 = 1;
    const MASK: u64 = 2;

    /// Which of `operations` are taken behind tensor `X`.
    fn behind_x(operations: &[OperationIr]) -> (DroppedSearch, Vec<bool>) {
        let x = tensor(X, SHAPE, TensorStatus::NotInit);
        let mut search = DroppedSearch::default();
        let taken = operations
            .iter()
            .enumerate()
            .map(|(at, operation)| search.follow(operation, at, Some(&x)))
            .collect();
        (search, taken)
    }

    #[test]
    fn dropout_is_found_with_the_mask_that_is_drawn_for_it() {
        let stream = [random(MASK, SHAPE), masked(X, MASK, SHAPE, 3), scaled(3, SHAPE, 4)];
        let (search, taken) = behind_x(&stream);
        assert_eq!(taken, [true; 3]);
        assert_eq!(search.found().map(|dropped| dropped.out.id.value()), Some(4));
        assert!(matches!(search.drawn(drop), Some(Part::Replaced(at, ())) if at == [0]));
        assert_eq!(search.positions().collect::<Vec<_>>(), [1, 2]);
        let (search, _) = behind_x(&stream[1..]);
        assert!(search.found().is_some() && search.drawn(drop).is_none(), "drawn before");
        let burn_draws = DroppedSearch { burn_draws: true, ..behind_x(&stream).0 };
        assert!(matches!(burn_draws.drawn(drop), Some(Part::Unfused(at)) if at == [0]));
        assert!(behind_x(&stream[..2]).0.found().is_none());
    }

    #[test]
    fn what_only_looks_like_dropout_is_left_alone() {
        assert_eq!(behind_x(&[random(MASK, OTHER)]).1, [false], "a mask of another shape");
        let of_another = [random(MASK, SHAPE), masked(7, MASK, SHAPE, 3)];
        assert_eq!(behind_x(&of_another).1, [true, false]);
        let of_another = [masked(X, MASK, SHAPE, 3), scaled(7, SHAPE, 4)];
        assert_eq!(behind_x(&of_another).1, [true, false]);
        assert_eq!(behind_x(&[scaled(X, SHAPE, 4)]).1, [false]);
    }

    /// How many of `operations`, from the head of a block on, a search takes.
    fn count_taken(
        operations: &[OperationIr],
        mut follow: impl FnMut(&OperationIr, usize) -> bool,
    ) -> usize {
        operations.iter().enumerate().filter(|(at, operation)| follow(operation, *at)).count()
    }

    #[test]
    fn a_sum_with_what_is_left_is_found_at_the_head_of_a_block() {
        let stream = [masked(X, MASK, SHAPE, 3), scaled(3, SHAPE, 4), added(5, 4, SHAPE, 6)];
        let after = |operations: &[OperationIr]| {
            let mut search = DroppedSumSearch::default();
            (count_taken(operations, |op, at| search.follow(op, at)), search)
        };
        let (taken, search) = after(&stream);
        assert_eq!(taken, DroppedSumSearch::OPERATIONS);
        assert!(search.found().is_some_and(|sum| sum.out.id.value() == 6));
        assert!(!search.is_under_way());
        assert!(after(&stream[..2]).1.is_under_way());
        assert_eq!(after(&[&stream[..2], &[added(5, 7, SHAPE, 6)]].concat()).0, 2, "another's");
        assert_eq!(after(&[scaled(X, SHAPE, 4), stream[0].clone()]).0, 0, "not at the head");
    }

    #[test]
    fn a_gradient_that_is_passed_on_has_its_number_first() {
        let after = |operations: &[OperationIr]| {
            let mut search = PassedOnSearch::default();
            (count_taken(operations, |op, at| search.follow(op, at)), search)
        };
        let (taken, search) = after(&[scaled(X, SHAPE, 3), masked(3, MASK, SHAPE, 4)]);
        assert_eq!(taken, PassedOnSearch::OPERATIONS);
        let found = search.found().expect("both operations came");
        assert_eq!((found.x.id.value(), found.out.id.value()), (X, 4));
        let (taken, search) = after(&[scaled(X, SHAPE, 3), masked(7, MASK, SHAPE, 4)]);
        assert!(taken == 1 && search.is_under_way(), "another's");
    }
}
