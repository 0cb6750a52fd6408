//! Rows of channels without a copy.
//!
//! Burn reduces images over all but their channels by a swap of the first two dimensions and a reshape to
//! `[channels, rest]`. Its reshape copies images whose channels follow each other, element by element, though such
//! rows can be told by strides: one from channel to channel, and a pixel's from pixel to pixel.

use super::OP;
use crate::{
    declined::unsupported,
    tensors::{Tensors, consume, cube_tensor, known_output, register_cube_tensor},
};
use blackburn_kernels::KernelError;
use burn_cubecl::tensor::CubeTensor;
use burn_ir::{BaseOperationIr, OperationIr, TensorIr};
use burn_std::Metadata;
use serde::{Deserialize, Serialize};

/// A reshape of images to a row for each channel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ChannelRows {
    input: TensorIr,
    out: TensorIr,
}

impl ChannelRows {
    pub(super) fn of(operation: &OperationIr) -> Option<Self> {
        let OperationIr::BaseFloat(BaseOperationIr::Reshape(op)) = operation else { return None };
        let is_flattened = op.input.shape.num_dims() > 3 && op.out.shape.num_dims() == 2;
        is_flattened.then(|| Self { input: op.input.clone(), out: op.out.clone() })
    }

    /// # Errors
    ///
    /// [`KernelError::Unsupported`] for another shape, and where no two strides lead through the rows.
    pub(super) fn launch(&self, tensors: &mut Tensors) -> Result<(), KernelError> {
        let shape = known_output(tensors, &self.out, OP)?.shape.clone();
        let x = cube_tensor(tensors, &self.input, OP)?;
        let (sizes, strides) = (x.meta.shape(), x.meta.strides());
        let is_plain = x.qparams.is_none() && !x.meta.is_tiled();
        if !is_plain || shape.first() != sizes.first() {
            return Err(unsupported(OP, "a reshape to other rows than those of channels"));
        }
        let Some(pixel) = merged_stride(&sizes[1..], &strides[1..]) else {
            return Err(unsupported(OP, "pixels that do not lie evenly"));
        };
        let meta = Metadata::new(shape, [strides[0], pixel]);
        let rows = CubeTensor::new(x.client, x.handle, meta, x.device, x.dtype);
        register_cube_tensor(tensors, &self.out, rows, OP)?;
        consume(tensors, &self.input);
        Ok(())
    }
}

/// The stride of one dimension in the place of those, if there is one that leads through the same elements in the
/// same order.
fn merged_stride(sizes: &[usize], strides: &[usize]) -> Option<usize> {
    let mut merged: Option<(usize, usize)> = None;
    for (size, stride) in sizes.iter().zip(strides).rev().filter(|(size, _)| **size != 1) {
        merged = Some(match merged {
            None => (*stride, *size),
            Some((inner, count)) if *stride == inner * count => (inner, count * size),
            Some(_) => return None,
        });
    }
    Some(merged.map_or(1, |(stride, _)| stride))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_stride_leads_through_pixels_whose_channels_follow_each_other() {
        // 4 images of 5 by 7 pixels of 8 channels.
        assert_eq!(merged_stride(&[4, 5, 7], &[280, 56, 8]), Some(8));
        assert_eq!(merged_stride(&[4, 1, 7], &[56, 999, 8]), Some(8));
        assert_eq!(merged_stride(&[1, 1, 1], &[3, 2, 5]), Some(1));
        // Contiguous images whose first two dimensions were swapped.
        assert_eq!(merged_stride(&[4, 5, 7], &[280, 7, 1]), None);
    }
}
