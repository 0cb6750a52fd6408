//! Copies of tensors whose elements do not follow each other, and parts of tensors.

use super::{contiguous_strides, contiguous_tensor};
use crate::declined::unsupported;
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    region::{Region, write_region},
};
use burn::tensor::Slice;
use burn_backend::cubecl::dtype_to_elem_type;
use burn_cubecl::{kernel, tensor::CubeTensor};
use burn_std::Shape;

/// The memory that a tensor's elements span.
pub(crate) fn span(tensor: &CubeTensor) -> Buffer {
    let sizes = tensor.meta.shape().iter().zip(tensor.meta.strides().iter());
    let last: usize = sizes.map(|(size, stride)| size.saturating_sub(1) * stride).sum();
    Buffer {
        handle: tensor.handle.clone(),
        elements: last + 1,
        dtype: dtype_to_elem_type(tensor.dtype),
    }
}

/// A tensor whose elements follow each other: itself, or a copy.
pub(crate) fn contiguous(tensor: CubeTensor) -> CubeTensor {
    let is_plain = tensor.qparams.is_none() && !tensor.meta.is_tiled();
    if !is_plain || tensor.is_contiguous() {
        return kernel::into_contiguous(tensor);
    }
    let shape = tensor.meta.shape().clone();
    let copy = copied(&tensor, &shape, tensor.meta.strides(), 0, shape.clone());
    copy.unwrap_or_else(|_| kernel::into_contiguous(tensor))
}

/// A contiguous copy, in the shape `out`, of the elements of `source` from `start` on that lie by such strides.
///
/// # Errors
///
/// [`KernelError::Unsupported`] for what [`write_region`] does not serve, and where there is nothing to copy.
pub(crate) fn copied(
    source: &CubeTensor,
    shape: &[usize],
    strides: &[usize],
    start: usize,
    out: Shape,
) -> Result<CubeTensor, KernelError> {
    let dtype = dtype_to_elem_type(source.dtype);
    let held = source.handle.size_in_used() / dtype.size() as u64;
    // What lies behind the last element may be read, too.
    let memory = Buffer {
        handle: source.handle.clone(),
        elements: usize::try_from(held).unwrap_or(usize::MAX),
        dtype,
    };
    let region = Region {
        shape: shape.to_vec(),
        source_strides: strides.to_vec(),
        target_strides: contiguous_strides(shape),
        source_start: start,
        start: 0,
        adds: false,
    };
    let target = Buffer::empty(&source.client, out.num_elements(), dtype);
    write_region(&source.client, &region, &memory, &target)?;
    Ok(contiguous_tensor(source, target, out, source.dtype))
}

/// The first place of a part along each dimension, and from one to the next.
///
/// # Errors
///
/// [`KernelError::Unsupported`] in the name of `op` where `slices` are not parts of `whole` of the shape `part`, or go
/// from the end on.
pub(crate) fn places(
    whole: &[usize],
    slices: &[Slice],
    part: &[usize],
    op: &'static str,
) -> Result<Vec<[usize; 2]>, KernelError> {
    let refused = |reason: &str| unsupported(op, reason);
    if part.len() != whole.len() || slices.len() > whole.len() {
        return Err(refused("another rank than that of the whole"));
    }
    let mut places = Vec::with_capacity(whole.len());
    for (dim, size) in whole.iter().enumerate() {
        let slice = slices.get(dim).copied().unwrap_or_else(Slice::full);
        let step = usize::try_from(slice.step).ok().filter(|step| *step > 0);
        let step = step.ok_or_else(|| refused("a slice from the end on"))?;
        if slice.output_size(*size) != part[dim] {
            return Err(refused("a slice of another shape than its tensor"));
        }
        places.push([slice.to_range(*size).start, step]);
    }
    Ok(places)
}
