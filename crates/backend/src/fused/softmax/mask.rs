//! The mask of attention's scores, which softmax takes along.

use super::OP;
use crate::{
    declined::unsupported,
    fused::mask_fill::MaskFill,
    tensors::{Input, Tensors},
};
use blackburn_kernels::{KernelError, softmax::RowMask};
use burn_ir::OperationIr;
use burn_std::Shape;

/// Dimensions of scores whose masks the kernel reads.
const MOST_DIMS: usize = 4;

impl MaskFill {
    /// The mask of scores that `operation` fills, if the kernel reads such masks.
    pub(super) fn of_scores(operation: &OperationIr) -> Option<Self> {
        Self::of(operation).filter(|fill| fill.out.shape.num_dims() <= MOST_DIMS)
    }

    /// The number.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] where the stream does not tell it.
    pub(super) fn value(&self, context: &Tensors) -> Result<f64, KernelError> {
        self.number(context).ok_or_else(|| unsupported(OP, "a mask's number is unknown"))
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
