//! The provider of the k largest elements along a dimension: `topk`, `argtopk` and `topk_with_indices`.
//!
//! Burn gives each row one unit of the GPU. `sort` and `argsort` do not come by: Burn's fusion has no operation of them,
//! and runs the default of its backend trait, which sorts on the host.

use crate::{
    declined::unsupported,
    stream::{Done, Replacement, SingleOperation},
    tensors::{
        Tensors, consume, contiguous, contiguous_buffer, contiguous_tensor, cube_tensor,
        known_output, register_cube_tensor,
    },
};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    top_k::{TopK, TopKProblem, top_k},
};
use burn_backend::{DType, Shape, cubecl::dtype_to_elem_type};
use burn_cubecl::ops::permute;
use burn_ir::{NumericOperationIr as Numeric, OperationIr, TensorIr};
use serde::{Deserialize, Serialize};

const OP: &str = "top_k";

/// The largest elements on the kernel, or as Burn has them where that declines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Largest {
    x: TensorIr,
    dim: usize,
    values: Option<TensorIr>,
    indices: Option<TensorIr>,
}

impl SingleOperation for Largest {
    type Settings = ();

    fn of(operation: &OperationIr, (): &()) -> Option<Self> {
        let OperationIr::NumericFloat(_, operation) = operation else { return None };
        let found = match operation {
            Numeric::TopK(op) => Self {
                x: op.input.clone(),
                dim: op.axis,
                values: Some(op.out.clone()),
                indices: None,
            },
            Numeric::ArgTopK(op) => Self {
                x: op.input.clone(),
                dim: op.axis,
                values: None,
                indices: Some(op.out.clone()),
            },
            Numeric::TopKWithIndices(op) => Self {
                x: op.tensor.clone(),
                dim: op.dim,
                values: Some(op.out.clone()),
                indices: Some(op.out_indices.clone()),
            },
            _ => return None,
        };
        let is_served = matches!(found.x.dtype, DType::F32 | DType::F16 | DType::BF16)
            && found.values.as_ref().is_none_or(|values| values.dtype == found.x.dtype)
            && found.indices.as_ref().is_none_or(|indices| indices.dtype == DType::I32);
        is_served.then_some(found)
    }
}

impl Replacement for Largest {
    const NAME: &'static str = "BlackburnTopK";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        /// Rows below this are too short for a cube each.
        const SHORTEST: usize = 128;

        let x = cube_tensor(tensors, &self.x, OP)?;
        let (outputs, dim) = ([&self.values, &self.indices], self.dim);
        let mut k = 0;
        for out in outputs.into_iter().flatten() {
            k = known_output(tensors, out, OP)?.shape[dim];
        }
        let columns = x.meta.shape()[dim];
        if columns < SHORTEST {
            return Err(unsupported(OP, "short rows"));
        }
        let rank = x.meta.shape().num_dims();
        let mut axes: Vec<usize> = (0..rank).collect();
        axes.swap(dim, rank - 1);
        let last = permute(x.clone(), &axes);
        let mut sizes: Vec<usize> = last.meta.shape().iter().copied().collect();
        sizes[rank - 1] = k;
        let rows = x.meta.shape().num_elements() / columns;
        let problem = TopKProblem { rows, columns, k, dtype: dtype_to_elem_type(x.dtype) };
        let TopK { values, indices } = top_k(&x.client, &problem, &contiguous_buffer(last))?;
        let back = |made: Buffer, dtype| {
            let made = contiguous_tensor(&x, made, Shape::from(sizes.clone()), dtype);
            contiguous(permute(made, &axes))
        };
        if let Some(out) = &self.values {
            register_cube_tensor(tensors, out, back(values, out.dtype), OP)?;
        }
        if let Some(out) = &self.indices {
            register_cube_tensor(tensors, out, back(indices, out.dtype), OP)?;
        }
        consume(tensors, &self.x);
        Ok(Done::All)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Fuser, SingleSearch, emit::tensor};
    use burn_ir::{
        TensorStatus::{NotInit, ReadOnly},
        TopKWithIndicesOpIr,
    };

    #[test]
    fn values_and_places_of_32_bits_are_taken_together() {
        let operation = |dtype| {
            OperationIr::NumericFloat(
                DType::F32,
                Numeric::TopKWithIndices(TopKWithIndicesOpIr {
                    tensor: tensor(1, [4, 600], ReadOnly),
                    dim: 1,
                    k: 3,
                    out: tensor(2, [4, 3], NotInit),
                    out_indices: TensorIr { dtype, ..tensor(3, [4, 3], NotInit) },
                }),
            )
        };
        let taken =
            |dtype| Fuser::after(SingleSearch::<Largest>::default(), &[operation(dtype)]).claims();
        assert_eq!(taken(DType::I32), Some(1));
        assert_eq!(taken(DType::I64), None);
    }
}
