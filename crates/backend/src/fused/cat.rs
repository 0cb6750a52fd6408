//! The provider that joins many tensors: `Tensor::cat` and `Tensor::stack` of long lists.
//!
//! Burn makes one kernel of a joint, with the strides and a branch of each tensor. The compiler takes minutes for hundreds
//! of them, and a few tensors more are another kernel. Here a launch copies sixteen.

use crate::{
    declined::unsupported,
    stream::{Done, Replacement, SingleOperation},
    tensors::{
        Tensors, consume, contiguous_buffer, contiguous_tensor, cube_tensor, known_output,
        register_cube_tensor, rows_of,
    },
};
use blackburn_kernels::{
    KernelError,
    buffer::{Buffer, Rows},
    overwrite::{Overwrite, overwrite_parts},
};
use burn_backend::{DType, cubecl::dtype_to_elem_type};
use burn_cubecl::tensor::CubeTensor;
use burn_ir::{BaseOperationIr as Base, OperationIr, TensorIr};
use burn_std::Shape;
use serde::{Deserialize, Serialize};

const OP: &str = "cat";

/// The longest list that Burn may make a kernel of.
const MOST_OF_BURNS: usize = 16;

/// What Burn's fusion bids at most for a joint of so many tensors that may be left to it: it counts them as reads that it
/// saves. No fusion may have more of them.
pub(crate) fn bid_for(tensors: usize) -> u64 {
    let bid = if tensors > MOST_OF_BURNS { 1000 } else { 100 };
    bid * tensors as u64
}

/// Many tensors, one behind the other along a dimension.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Joint {
    parts: Vec<TensorIr>,
    dim: usize,
    out: TensorIr,
}

impl SingleOperation for Joint {
    type Settings = ();

    fn of(operation: &OperationIr, (): &()) -> Option<Self> {
        let (OperationIr::BaseFloat(Base::Cat(op)) | OperationIr::BaseInt(Base::Cat(op))) =
            operation
        else {
            return None;
        };
        let dtype = op.out.dtype;
        let is_copied =
            matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::I32 | DType::I64);
        let is_served = is_copied
            && op.tensors.len() > MOST_OF_BURNS
            && op.tensors.iter().all(|part| part.dtype == dtype);
        is_served.then(|| Self { parts: op.tensors.clone(), dim: op.dim, out: op.out.clone() })
    }

    fn bid_of_burns(&self) -> u64 {
        bid_for(self.parts.len())
    }
}

impl Replacement for Joint {
    const NAME: &'static str = "BlackburnCat";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        let shape = known_output(tensors, &self.out, OP)?.shape.clone();
        let parts = self.parts.iter().map(|part| cube_tensor(tensors, part, OP));
        let made = joined(parts.collect::<Result<_, _>>()?, self.dim, shape, self.out.dtype)?;
        register_cube_tensor(tensors, &self.out, made, OP)?;
        self.parts.iter().for_each(|part| consume(tensors, part));
        Ok(Done::All)
    }
}

fn joined(
    parts: Vec<CubeTensor>,
    dim: usize,
    shape: Shape,
    dtype: DType,
) -> Result<CubeTensor, KernelError> {
    let like = parts.first().cloned().filter(|_| shape.num_elements() > 0);
    let Some(like) = like else { return Err(unsupported(OP, "no elements")) };
    let out = Buffer::empty(&like.client, shape.num_elements(), dtype_to_elem_type(dtype));
    let outer: usize = shape[..dim].iter().product();
    let pitch: usize = shape[dim..].iter().product();
    let mut at = 0;
    let mut all = Vec::with_capacity(parts.len());
    for part in parts {
        let columns: usize = part.meta.shape()[dim..].iter().product();
        if outer * columns == 0 {
            continue;
        }
        let source = match rows_of(&part) {
            Some(rows) if outer == 1 || rows.rows == outer => rows,
            _ => {
                Rows { rows: outer, columns, pitch: columns, ..Rows::one(contiguous_buffer(part)) }
            }
        };
        // With one row outside, its rows follow each other in the result.
        let pitch = if outer == 1 { source.columns } else { pitch };
        let target = Rows { buffer: out.clone(), pitch, ..source };
        all.push(Overwrite { target, source, skipped: [at, 0] });
        at += columns;
    }
    overwrite_parts(&like.client, &all)?;
    Ok(contiguous_tensor(&like, out, shape, dtype))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Fuser, SingleSearch, emit::tensor};
    use burn_ir::{
        CatOpIr,
        TensorStatus::{NotInit, ReadOnly},
    };

    #[test]
    fn long_lists_alone_are_joined() {
        let joint = |count: usize, dtype| {
            let of = |id, rows, status| TensorIr { dtype, ..tensor(id, [rows, 3], status) };
            let tensors: Vec<_> = (1..=count as u64).map(|id| of(id, 1, ReadOnly)).collect();
            let out = of(count as u64 + 1, count, NotInit);
            OperationIr::BaseFloat(Base::Cat(CatOpIr { tensors, dim: 0, out }))
        };
        let claims = |count, dtype| {
            let search = SingleSearch::<Joint>::default();
            Fuser::after(search, &[joint(count, dtype)]).claims()
        };
        assert_eq!(claims(17, DType::F32), Some(1));
        assert_eq!(claims(16, DType::F32), None, "what Burn fuses with its neighbors");
        assert_eq!(claims(17, DType::F64), None);
    }

    #[test]
    fn long_lists_are_worth_more_than_their_reads() {
        assert_eq!(bid_for(16), 1600);
        assert_eq!(bid_for(17), 17_000);
    }
}
