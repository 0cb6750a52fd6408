//! Operands of a convolution as its kernels take them.

use super::OP;
use crate::{declined::unsupported, tensors::contiguous};
use blackburn_kernels::{KernelError, buffer::Buffer, matmul::TensorLayout};
use burn_backend::cubecl::dtype_to_elem_type;
use burn_cubecl::{
    ops::{permute_nchw_to_nhwc, permute_nhwc_to_nchw},
    tensor::CubeTensor,
};
use burn_std::Shape;

/// An operand as a tensor of rank 4.
#[derive(Clone)]
pub(super) struct Operand {
    tensor: CubeTensor,
    pub(super) shape: [usize; 4],
    strides: [usize; 4],
}

impl Operand {
    fn of(tensor: CubeTensor) -> Result<Self, KernelError> {
        let shape = four(tensor.meta.shape())?;
        let strides = match **tensor.meta.strides() {
            [image, channel, column] => [image, channel, shape[3] * column, column],
            [image, channel, row, column] => [image, channel, row, column],
            _ => return Err(unsupported(OP, "strides of another rank than the shape")),
        };
        Ok(Self { tensor, shape, strides })
    }

    /// Images as they lie, or a copy of those whose elements lie on each other.
    pub(super) fn images(tensor: CubeTensor) -> Result<Self, KernelError> {
        let images = Self::of(tensor)?;
        let are_apart = images.sizes().all(|(size, stride)| size == 1 || stride > 0);
        if are_apart { Ok(images) } else { Self::of(contiguous(images.tensor)) }
    }

    /// Weights as they lie if those are their taps or their channels that follow each other, without gaps that
    /// tensor cores' copies would have to skip; otherwise a copy with the channels innermost. CUDA's allocator
    /// leaves gaps behind rows of a few taps, which is all the same to groups of one channel: they have no such copies.
    pub(super) fn weights(tensor: CubeTensor, groups: usize) -> Result<Self, KernelError> {
        let weights = Self::of(tensor)?;
        let ([_, channels, r, s], [_, _, row, column]) = (weights.shape, weights.strides);
        let is_single = groups > 1 && channels == 1;
        let taps_are_even = is_single || r == 1 || s == 1 || row == s * column;
        let is_dense = weights.sizes().any(|(size, stride)| size > 1 && stride == 1);
        let are_apart = weights.sizes().all(|(size, stride)| size == 1 || stride > 0);
        if taps_are_even && is_dense && are_apart {
            return Ok(weights);
        }
        let copy = contiguous(permute_nchw_to_nhwc(weights.tensor));
        Self::of(permute_nhwc_to_nchw(copy))
    }

    /// Each dimension's size and stride.
    fn sizes(&self) -> impl Iterator<Item = (usize, usize)> {
        self.shape.into_iter().zip(self.strides)
    }

    /// With the first two dimensions in each other's place.
    pub(super) fn swapped(&self) -> Self {
        let mut swapped = self.clone();
        swapped.shape.swap(0, 1);
        swapped.strides.swap(0, 1);
        swapped
    }

    pub(super) fn layout(&self) -> TensorLayout<'_> {
        let dtype = dtype_to_elem_type(self.tensor.dtype);
        TensorLayout { shape: &self.shape, strides: &self.strides, dtype }
    }

    /// Its first elements in memory.
    pub(super) fn buffer(&self, elements: usize) -> Buffer {
        let dtype = dtype_to_elem_type(self.tensor.dtype);
        Buffer { handle: self.tensor.handle.clone(), elements, dtype }
    }
}

/// The sizes of a tensor of rank 3 or 4; one of rank 3 has images of height 1.
pub(super) fn four(shape: &Shape) -> Result<[usize; 4], KernelError> {
    match **shape {
        [n, c, w] => Ok([n, c, 1, w]),
        [n, c, h, w] => Ok([n, c, h, w]),
        _ => Err(unsupported(OP, "a tensor of another rank than 3 or 4")),
    }
}
