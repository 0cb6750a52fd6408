//! The provider of slices, which Burn copies an element a unit unless memory can be bound from there on.

use crate::{
    declined::unsupported,
    fused::channels::ByChannel,
    stream::{Done, Replacement, SingleOperation, ranges},
    tensors::{Tensors, consume, copied, cube_tensor, known_output, places, register_cube_tensor},
};
use blackburn_kernels::KernelError;
use burn::tensor::Slice;
use burn_backend::DType;
use burn_cubecl::tensor::CubeTensor;
use burn_ir::{BaseOperationIr as Base, OperationIr, TensorId, TensorIr};
use burn_std::{Metadata, Shape};
use serde::{Deserialize, Serialize};

const OP: &str = "copy";

/// A part of a tensor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Copied {
    whole: TensorIr,
    /// Stand for the part's ranges: see [`ranges`].
    ranges: Vec<Slice>,
    out: TensorIr,
}

impl SingleOperation for Copied {
    type Settings = ();

    fn of(operation: &OperationIr, (): &()) -> Option<Self> {
        let OperationIr::BaseFloat(Base::Slice(op)) = operation else { return None };
        let is_served = matches!(op.tensor.dtype, DType::F32 | DType::F16 | DType::BF16);
        let is_of_channels = ByChannel::of(operation, &()).is_some();
        (is_served && !is_of_channels).then(|| Self {
            whole: op.tensor.clone(),
            ranges: op.ranges.clone(),
            out: op.out.clone(),
        })
    }

    /// One operation alone: a copy saves nothing behind arithmetic.
    fn may_follow(&self, made: &[TensorId]) -> bool {
        made.is_empty()
    }
}

impl Replacement for Copied {
    const NAME: &'static str = "BlackburnCopy";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        let shape = known_output(tensors, &self.out, OP)?.shape.clone();
        let whole = cube_tensor(tensors, &self.whole, OP)?;
        if whole.qparams.is_some() || whole.meta.is_tiled() || shape.num_elements() == 0 {
            return Err(unsupported(OP, "no plain numbers"));
        }
        let part = sliced(&whole, &ranges(tensors, &self.ranges, OP)?, shape)?;
        register_cube_tensor(tensors, &self.out, part, OP)?;
        consume(tensors, &self.whole);
        Ok(Done::All)
    }
}

/// A part of a tensor: a view where Burn has one, because memory may be bound from there to there, else a copy.
fn sliced(tensor: &CubeTensor, slices: &[Slice], shape: Shape) -> Result<CubeTensor, KernelError> {
    let (whole, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let places = places(whole, slices, &shape, OP)?;
    let along = || places.iter().zip(strides.iter());
    let start: usize = along().map(|([first, _], stride)| first * stride).sum();
    let behind = (0..shape.num_dims()).map(|dim| {
        let end = places[dim][0] + shape[dim];
        whole[dim].saturating_sub(end) * strides[dim]
    });
    let size = tensor.dtype.size();
    let ends = [start, behind.sum()].map(|elements| (elements * size) as u64);
    let alignment = tensor.client.properties().memory.alignment;
    let is_whole = places.iter().all(|[_, step]| *step == 1);
    if is_whole && ends.iter().all(|end| end.is_multiple_of(alignment)) {
        let handle = tensor.handle.clone().offset_start(ends[0]).offset_end(ends[1]);
        let metadata = Metadata::new(shape, tensor.meta.strides.clone());
        let (client, device) = (tensor.client.clone(), tensor.device.clone());
        return Ok(CubeTensor::new(client, handle, metadata, device, tensor.dtype));
    }
    let steps: Vec<usize> = along().map(|([_, step], stride)| step * stride).collect();
    copied(tensor, &shape.clone(), &steps, start, shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Fuser, SingleSearch, emit::tensor};
    use burn_ir::{
        SliceOpIr,
        TensorStatus::{NotInit, ReadOnly},
    };

    #[test]
    fn slices_of_numbers_are_taken() {
        let slice = |dtype| {
            let whole = TensorIr { dtype, ..tensor(1, [4, 6], ReadOnly) };
            let out = TensorIr { dtype, ..tensor(2, [4, 2], NotInit) };
            let ranges = vec![Slice::full(); 2];
            OperationIr::BaseFloat(Base::Slice(SliceOpIr { tensor: whole, ranges, out }))
        };
        let claims =
            |dtype| Fuser::after(SingleSearch::<Copied>::default(), &[slice(dtype)]).claims();
        assert_eq!(claims(DType::F32), Some(1));
        assert_eq!(claims(DType::F64), None);
    }
}
