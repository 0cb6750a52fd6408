//! The provider of gradients of slices: zeros, of which the slice's gradient is written to a part; and the sum of that
//! with another gradient of the same tensor, of which the rest stays as it is.
//!
//! A projection to queries, keys and values that is sliced in three has three such gradients. Burn writes zeros as large
//! as the projection for each, copies a third, and adds two of them over all three thirds.

use crate::{
    declined::unsupported,
    stream::{Claim, Done, Elapsed, Moment, Next, Part, Replacement, Search, ranges},
    tensors::{
        Input, Location, Tensors, consume, cube_tensor, known_output, places, register_cube_tensor,
        span, take_cube_tensor, zeros,
    },
};
use blackburn_kernels::{
    KernelError,
    region::{Region, write_region},
};
use burn::tensor::Slice;
use burn_backend::DType;
use burn_cubecl::tensor::CubeTensor;
use burn_ir::{
    BaseOperationIr as Base, NumericOperationIr as Numeric, OperationIr, TensorId, TensorIr,
    TensorStatus,
};
use serde::{Deserialize, Serialize};

const OP: &str = "slice_gradient";

/// The gradient of what was sliced, on the kernel, or as Burn has it where that declines.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SliceGradient {
    /// The slice's.
    value: TensorIr,
    /// Stand for the slice: see [`ranges`].
    ranges: Vec<Slice>,
    /// What it becomes a part of, and what that gives.
    whole: Whole,
    out: TensorIr,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Whole {
    Zeros,
    /// Another gradient, to which it is added.
    Sum(TensorIr),
}

impl Replacement for SliceGradient {
    const NAME: &'static str = "BlackburnSliceGradient";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        let shape = known_output(tensors, &self.out, OP)?.shape.clone();
        let value = cube_tensor(tensors, &self.value, OP)?;
        let slice = Target::of(&value, &ranges(tensors, &self.ranges, OP)?, &shape)?;
        let target = match &self.whole {
            Whole::Zeros => {
                let target = zeros(&Location::of(&value), shape, self.out.dtype);
                slice.write(&value, &target, false)?;
                target
            }
            Whole::Sum(other) => {
                if !Input::of(tensors, other, OP)?.is_dense() {
                    return Err(unsupported(OP, "another gradient with gaps"));
                }
                // Nothing may go wrong any more once it is taken: Burn's operations would not find it.
                let known = cube_tensor(tensors, other, OP)?;
                slice.region(&known, true)?.check(&span(&value), &span(&known))?;
                drop(known);
                let other = take_cube_tensor(tensors, other, OP)?;
                let target = if other.can_mut() { other } else { other.copy() };
                slice.write(&value, &target, true)?;
                target
            }
        };
        register_cube_tensor(tensors, &self.out, target, OP)?;
        consume(tensors, &self.value);
        Ok(Done::All)
    }
}

/// The part of a tensor that a slice is.
struct Target<'a> {
    /// Of the slice's gradient.
    shape: &'a [usize],
    strides: &'a [usize],
    /// The first place along each dimension, and from one to the next.
    places: Vec<[usize; 2]>,
}

impl<'a> Target<'a> {
    fn of(value: &'a CubeTensor, ranges: &[Slice], whole: &[usize]) -> Result<Self, KernelError> {
        let (shape, strides) = (&value.meta.shape()[..], &value.meta.strides()[..]);
        if value.meta.is_tiled() {
            return Err(unsupported(OP, "a gradient of tiles"));
        }
        Ok(Self { shape, strides, places: places(whole, ranges, shape, OP)? })
    }

    /// Where it lies in `target`.
    fn region(&self, target: &CubeTensor, adds: bool) -> Result<Region, KernelError> {
        if target.meta.is_tiled() {
            return Err(unsupported(OP, "a whole of tiles"));
        }
        let strides = &target.meta.strides()[..];
        let along = self.places.iter().zip(strides);
        Ok(Region {
            shape: self.shape.to_vec(),
            source_strides: self.strides.to_vec(),
            target_strides: along.clone().map(|([_, step], stride)| step * stride).collect(),
            source_start: 0,
            start: along.map(|([first, _], stride)| first * stride).sum(),
            adds,
        })
    }

    fn write(
        &self,
        value: &CubeTensor,
        target: &CubeTensor,
        adds: bool,
    ) -> Result<(), KernelError> {
        let region = self.region(target, adds)?;
        write_region(&value.client, &region, &span(value), &span(target))
    }
}

/// Takes zeros, what is written to a part of them, and a sum with what is there already.
#[derive(Clone, Default)]
pub(crate) struct SliceGradientSearch {
    zeros: Option<TensorId>,
    found: Option<SliceGradient>,
    has_sum: bool,
}

impl SliceGradientSearch {
    /// More than Burn bids for writing the zeros.
    const SCORE: u64 = 250;

    /// What is added to the gradient that was found, and what that makes.
    fn sum<'a>(found: &SliceGradient, operation: &'a OperationIr) -> Option<[&'a TensorIr; 2]> {
        let OperationIr::NumericFloat(_, Numeric::Add(op)) = operation else { return None };
        let [own, other] = match found.out.id {
            id if op.lhs.id == id => [&op.lhs, &op.rhs],
            id if op.rhs.id == id => [&op.rhs, &op.lhs],
            _ => return None,
        };
        let is_last = own.status == TensorStatus::ReadWrite && other.id != own.id;
        let is_alike =
            other.shape == own.shape && [other, &op.out].map(|x| x.dtype) == [own.dtype; 2];
        (is_last && is_alike).then_some([other, &op.out])
    }
}

impl Search for SliceGradientSearch {
    type Replacement = SliceGradient;

    fn follow(&mut self, operation: &OperationIr, _now: Moment) -> Next {
        if let Some(found) = &mut self.found {
            let Some([other, out]) = Self::sum(found, operation) else { return Next::Refused };
            found.whole = Whole::Sum(other.clone());
            found.out = out.clone();
            self.has_sum = true;
            return Next::Last;
        }
        match (operation, self.zeros) {
            (OperationIr::BaseFloat(Base::Zeros(op)), None) => {
                let is_served = matches!(op.out.dtype, DType::F32 | DType::F16 | DType::BF16);
                self.zeros = is_served.then_some(op.out.id);
                Next::taken_if(is_served)
            }
            (OperationIr::BaseFloat(Base::SliceAssign(op)), Some(zeros)) => {
                let is_found = op.tensor.id == zeros
                    && op.tensor.status == TensorStatus::ReadWrite
                    && op.value.dtype == op.tensor.dtype;
                self.found = is_found.then(|| SliceGradient {
                    value: op.value.clone(),
                    ranges: op.ranges.clone(),
                    whole: Whole::Zeros,
                    out: op.out.clone(),
                });
                Next::taken_if(is_found)
            }
            _ => Next::Refused,
        }
    }

    fn claim(&self) -> Option<Claim<SliceGradient>> {
        let operations = if self.has_sum { 3 } else { 2 };
        let found = self.found.clone()?;
        let parts = vec![Part::Replaced((0..operations).collect(), found)];
        Some(Claim { score: Self::SCORE, parts })
    }

    /// What comes for other blocks in between is no reason to wait for a sum.
    fn gives_up(&self, elapsed: Elapsed) -> bool {
        self.found.is_some() && elapsed.since_last > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Fuser, emit::tensor};
    use burn_ir::{
        BinaryOpIr, CreationOpIr, SliceAssignOpIr,
        TensorStatus::{NotInit, ReadOnly, ReadWrite},
    };

    fn zeros(dtype: DType) -> OperationIr {
        let out = TensorIr { dtype, ..tensor(1, [4, 6], NotInit) };
        OperationIr::BaseFloat(Base::Zeros(CreationOpIr { out }))
    }

    fn assigned(status: TensorStatus) -> OperationIr {
        OperationIr::BaseFloat(Base::SliceAssign(SliceAssignOpIr {
            tensor: tensor(1, [4, 6], status),
            ranges: vec![Slice::full(); 2],
            value: tensor(2, [4, 2], ReadWrite),
            out: tensor(3, [4, 6], NotInit),
        }))
    }

    fn sum(ids: [u64; 2], status: TensorStatus) -> OperationIr {
        let [lhs, rhs] = ids.map(|id| tensor(id, [4, 6], status));
        let dtype = lhs.dtype;
        let out = tensor(9, [4, 6], NotInit);
        OperationIr::NumericFloat(dtype, Numeric::Add(BinaryOpIr { lhs, rhs, out }))
    }

    fn claims(operations: &[OperationIr]) -> Option<usize> {
        Fuser::after(SliceGradientSearch::default(), operations).claims()
    }

    #[test]
    fn a_part_of_zeros_is_taken_and_its_sum_with_another_gradient() {
        let (zeros, part) = (zeros(DType::F32), assigned(ReadWrite));
        assert_eq!(claims(std::slice::from_ref(&zeros)), None);
        assert_eq!(claims(&[zeros.clone(), part.clone()]), Some(2));
        for ids in [[3, 7], [7, 3]] {
            let all = [zeros.clone(), part.clone(), sum(ids, ReadWrite)];
            assert_eq!(claims(&all), Some(3), "{ids:?}");
        }
    }

    #[test]
    fn what_others_read_is_not_taken() {
        let part = assigned(ReadWrite);
        assert_eq!(claims(&[zeros(DType::F64), part.clone()]), None);
        assert_eq!(claims(&[zeros(DType::F32), assigned(ReadOnly)]), None, "zeros that stay");
        let doubled = [zeros(DType::F32), part.clone(), sum([3, 3], ReadWrite)];
        assert_eq!(claims(&doubled), Some(2), "a sum with itself");
        let kept = [zeros(DType::F32), part, sum([3, 7], ReadOnly)];
        assert_eq!(claims(&kept), Some(2), "a gradient that others read");
    }
}
