//! The provider that joins images and volumes by their channels, and takes parts of channels: `Tensor::cat` along the
//! second dimension, and slices there, which its gradients are.
//!
//! Burn's kernels write pixels side by side, in whatever order they were. Convolutions make images whose channels are
//! side by side: then each operation behind has to copy, or to walk through memory in steps. The kernel keeps the order.

use super::cat::bid_for;
use crate::{
    declined::unsupported,
    stream::{self, Done, Replacement, SingleOperation},
    tensors::{Images, Tensors, consume, cube_tensor, known_output, register_cube_tensor},
};
use blackburn_kernels::{
    KernelError,
    buffer::{Buffer, Rows},
    overwrite::{Overwrite, overwrite_parts},
};
use burn::tensor::Slice;
use burn_backend::{DType, cubecl::dtype_to_elem_type};
use burn_cubecl::tensor::CubeTensor;
use burn_ir::{BaseOperationIr as Base, OperationIr, TensorIr};
use burn_std::Shape;
use serde::{Deserialize, Serialize};

const OP: &str = "channels";

/// Channels side by side, or some of them, on the kernel, or as Burn has them where that declines.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum ByChannel {
    Joined {
        parts: Vec<TensorIr>,
        out: TensorIr,
    },
    Part {
        whole: TensorIr,
        /// Stands for the range of channels: see [`stream::range`].
        range: Slice,
        out: TensorIr,
    },
}

impl SingleOperation for ByChannel {
    type Settings = ();

    fn of(operation: &OperationIr, (): &()) -> Option<Self> {
        let is_served = |out: &TensorIr| {
            matches!(out.dtype, DType::F32 | DType::F16 | DType::BF16)
                && matches!(out.shape.num_dims(), 4 | 5)
        };
        match operation {
            OperationIr::BaseFloat(Base::Cat(op)) if op.dim == 1 && is_served(&op.out) => {
                let (parts, out) = (op.tensors.clone(), op.out.clone());
                parts
                    .iter()
                    .all(|part| part.dtype == out.dtype)
                    .then_some(Self::Joined { parts, out })
            }
            OperationIr::BaseFloat(Base::Slice(op)) if is_served(&op.out) => {
                let [whole, part] = [&op.tensor, &op.out].map(|tensor| &tensor.shape[..]);
                let is_by_channel =
                    (0..part.len()).all(|dim| (whole[dim] == part[dim]) == (dim != 1));
                let (whole, range, out) = (op.tensor.clone(), *op.ranges.get(1)?, op.out.clone());
                is_by_channel.then_some(Self::Part { whole, range, out })
            }
            _ => None,
        }
    }

    fn bid_of_burns(&self) -> u64 {
        match self {
            Self::Joined { parts, .. } => bid_for(parts.len()),
            Self::Part { .. } => 0,
        }
    }
}

impl Replacement for ByChannel {
    const NAME: &'static str = "BlackburnChannels";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        match self {
            Self::Joined { parts, out } => {
                let shape = known_output(tensors, out, OP)?.shape.clone();
                let known = parts.iter().map(|part| cube_tensor(tensors, part, OP));
                let joined = joined(known.collect::<Result<_, _>>()?, shape, out.dtype)?;
                register_cube_tensor(tensors, out, joined, OP)?;
                parts.iter().for_each(|part| consume(tensors, part));
            }
            Self::Part { whole, range, out } => {
                let shape = known_output(tensors, out, OP)?.shape.clone();
                let range = stream::range(tensors, range, OP)?;
                let made = part(cube_tensor(tensors, whole, OP)?, range, shape, out.dtype)?;
                register_cube_tensor(tensors, out, made, OP)?;
                consume(tensors, whole);
            }
        }
        Ok(Done::All)
    }
}

/// Images side by side by their channels, in the order of the first one whose channels follow each other.
fn joined(parts: Vec<CubeTensor>, shape: Shape, dtype: DType) -> Result<CubeTensor, KernelError> {
    let parts: Vec<CubeTensor> =
        parts.into_iter().filter(|part| part.meta.shape().num_elements() > 0).collect();
    let Some(first) = parts.first().cloned() else { return Err(unsupported(OP, "no elements")) };
    let in_place = |part: &CubeTensor| Images::in_place_of(part.clone());
    let leads = parts.iter().filter_map(in_place).find(Images::has_channels_last);
    let order = leads.unwrap_or_else(|| Images::of(first));
    let client = order.client();
    let out = Buffer::empty(client, shape.num_elements(), dtype_to_elem_type(dtype));
    let mut at = 0;
    let written = parts.into_iter().map(|part| {
        let channels = part.meta.shape()[1];
        let source = order.in_order(part).by_channel();
        let pitch = source.columns / channels * shape[1];
        let target = Rows { buffer: out.clone(), pitch, ..source };
        let skipped = [at, 0];
        at += source.columns;
        Overwrite { target, source, skipped }
    });
    overwrite_parts(client, &written.collect::<Vec<_>>())?;
    Ok(order.shaped(out, shape, dtype))
}

/// Some channels of images, in their order.
fn part(
    whole: CubeTensor,
    range: Slice,
    shape: Shape,
    dtype: DType,
) -> Result<CubeTensor, KernelError> {
    let channels = whole.meta.shape()[1];
    if range.step != 1 {
        return Err(unsupported(OP, "a step of channels"));
    }
    if shape.num_elements() == 0 {
        return Err(unsupported(OP, "no elements"));
    }
    let range = range.to_range(channels);
    if range.len() != shape[1] {
        return Err(unsupported(OP, "a range that is not that of the result"));
    }
    // Burn's result is a view there.
    let step = whole.meta.strides()[1] * whole.dtype.size();
    let alignment = whole.client.properties().memory.alignment;
    let is_aligned = |channels: usize| ((channels * step) as u64).is_multiple_of(alignment);
    if is_aligned(range.start) && is_aligned(channels - range.end) {
        return Err(unsupported(OP, "a part that needs no copy"));
    }
    let Some(images) = Images::in_place_of(whole) else {
        return Err(unsupported(OP, "an image of another order"));
    };
    let client = images.client();
    let out = Buffer::empty(client, shape.num_elements(), dtype_to_elem_type(dtype));
    let all = images.by_channel();
    let of_channel = all.columns / channels;
    let source = Rows { columns: of_channel * range.len(), ..all };
    let target = Rows { buffer: out.clone(), pitch: source.columns, ..source };
    let skipped = [0, of_channel * range.start];
    overwrite_parts(client, &[Overwrite { target, source, skipped }])?;
    Ok(images.shaped(out, shape, dtype))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Fuser, SingleSearch, emit::tensor};
    use burn_ir::{
        CatOpIr, SliceOpIr,
        TensorStatus::{NotInit, ReadOnly},
    };

    fn taken(operation: &OperationIr) -> bool {
        let search = SingleSearch::<ByChannel>::default();
        Fuser::after(search, std::slice::from_ref(operation)).claims() == Some(1)
    }

    #[test]
    fn images_and_volumes_are_joined_by_channels_alone() {
        let joint = |dim, dtype| {
            let of = |id, status| TensorIr { dtype, ..tensor(id, [2, 3, 4, 5], status) };
            let tensors = vec![of(1, ReadOnly), of(2, ReadOnly)];
            OperationIr::BaseFloat(Base::Cat(CatOpIr { tensors, dim, out: of(3, NotInit) }))
        };
        assert!(taken(&joint(1, DType::BF16)));
        assert!(!taken(&joint(2, DType::BF16)), "rows");
        assert!(!taken(&joint(1, DType::F64)));
        let tokens = OperationIr::BaseFloat(Base::Cat(CatOpIr {
            tensors: vec![tensor(1, [2, 1, 8], ReadOnly), tensor(2, [2, 4, 8], ReadOnly)],
            dim: 1,
            out: tensor(3, [2, 5, 8], NotInit),
        }));
        assert!(!taken(&tokens), "sequences of tokens, which Burn fuses with what follows");
    }

    #[test]
    fn parts_of_channels_alone_are_taken() {
        let part = |shape: [usize; 4]| {
            OperationIr::BaseFloat(Base::Slice(SliceOpIr {
                tensor: tensor(1, [2, 8, 4, 5], ReadOnly),
                ranges: vec![Slice::full(); 4],
                out: tensor(2, shape, NotInit),
            }))
        };
        assert!(taken(&part([2, 3, 4, 5])));
        assert!(!taken(&part([2, 8, 4, 3])), "columns");
        assert!(!taken(&part([2, 3, 4, 3])), "columns of some channels");
        assert!(!taken(&part([2, 8, 4, 5])), "all");
    }

    #[test]
    fn more_is_bid_than_burn_bids_for_the_joint_alone() {
        let of = |id| tensor(id, [2, 3, 4, 5], ReadOnly);
        let joined = ByChannel::Joined { parts: vec![of(1), of(2), of(3)], out: of(4) };
        assert_eq!(joined.bid_of_burns(), 300);
    }
}
