//! The mask of attention's scores, which softmax takes along.

use super::OP;
use crate::{
    declined::unsupported,
    stream::number,
    tensors::{Input, Tensors},
};
use blackburn_kernels::{KernelError, softmax::RowMask};
use burn_ir::{BaseOperationIr, MaskFillOpIr, OperationIr, ScalarIr, TensorIr};
use burn_std::{BoolStore, DType, Shape};
use serde::{Deserialize, Serialize};

/// Elements that are given a number where a mask says so.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct MaskFill {
    /// What is masked.
    pub(super) input: TensorIr,
    pub(super) mask: TensorIr,
    /// Where the number is.
    value: u64,
    /// What comes of it.
    pub(super) out: TensorIr,
}

/// Dimensions of the rows that kernels read masks of, and the elements of a row.
const MOST_DIMS: usize = 4;

impl MaskFill {
    /// What `operation` fills, if it fills a tensor with a number and kernels read such masks.
    pub(super) fn of(operation: &OperationIr) -> Option<Self> {
        let OperationIr::BaseFloat(BaseOperationIr::MaskFill(op)) = operation else { return None };
        let MaskFillOpIr { tensor, mask, value: ScalarIr::UInt(value), out } = op else {
            return None;
        };
        let dims = tensor.shape.num_dims();
        let is_served = dims <= MOST_DIMS
            && mask.shape.num_dims() == dims
            && matches!(mask.dtype, DType::Bool(BoolStore::U8 | BoolStore::U32));
        is_served.then(|| Self {
            input: tensor.clone(),
            mask: mask.clone(),
            value: *value,
            out: out.clone(),
        })
    }

    /// The number.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] where the stream does not tell it.
    pub(super) fn value(&self, context: &Tensors) -> Result<f64, KernelError> {
        number(context, self.value).ok_or_else(|| unsupported(OP, "a mask's number is unknown"))
    }

    /// The mask of rows of that shape, as the kernel reads it.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] where the mask is tiled, or unknown to the stream.
    pub(super) fn rows(&self, context: &Tensors, shape: &Shape) -> Result<RowMask, KernelError> {
        let mask = Input::of(context, &self.mask, OP)?;
        // From the innermost dimension outward.
        let (mut sizes, mut strides, mut last) = ([1; MOST_DIMS], [0; MOST_DIMS], 0);
        for (place, dim) in (0..MOST_DIMS).rev().zip((0..shape.num_dims()).rev()) {
            sizes[place] = shape[dim];
            if mask.shape[dim] > 1 {
                strides[place] = mask.strides[dim];
                last += (mask.shape[dim] - 1) * mask.strides[dim];
            }
        }
        let [outer, middle, inner, _] = sizes;
        Ok(RowMask { buffer: mask.buffer(last + 1), dims: [outer, middle, inner], strides })
    }
}
