//! The mask of attention's scores, which softmax takes along.

use super::OP;
use crate::{
    declined::unsupported,
    stream::number,
    tensors::{Input, Tensors},
};
use blackburn_kernels::{KernelError, softmax::RowMask};
use burn_ir::{BaseOperationIr, MaskFillOpIr, OperationIr, ScalarIr, TensorIr};
use burn_std::Shape;
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

impl MaskFill {
    /// What `operation` fills, if it fills a tensor with a number.
    pub(super) fn of(operation: &OperationIr) -> Option<Self> {
        let OperationIr::BaseFloat(BaseOperationIr::MaskFill(op)) = operation else { return None };
        let MaskFillOpIr { tensor, mask, value: ScalarIr::UInt(value), out } = op else {
            return None;
        };
        Some(Self { input: tensor.clone(), mask: mask.clone(), value: *value, out: out.clone() })
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
    /// [`KernelError::Unsupported`] for more than three dimensions of rows.
    pub(super) fn rows(&self, context: &Tensors, shape: &Shape) -> Result<RowMask, KernelError> {
        const WITH_ROWS: usize = 4;
        let mask = Input::of(context, &self.mask, OP)?;
        let rank = shape.num_dims();
        if rank > WITH_ROWS || mask.shape.len() != rank {
            return Err(unsupported(OP, "a mask of many dimensions"));
        }
        // From the innermost dimension outward.
        let (mut sizes, mut strides, mut last) = ([1; WITH_ROWS], [0; WITH_ROWS], 0);
        for (place, dim) in (0..WITH_ROWS).rev().zip((0..rank).rev()) {
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
