//! Convolutions of volumes as those of images, whose channels are frames side by side.
//!
//! What is [stacked](blackburn_kernels::frames) is x, or the gradient of the output where that of x is made. The taps of
//! the weights go along with their channels. Each frame of the result is then an image of its own.

use super::{FoundProduct, OP, PassResult};
use crate::{declined::unsupported, tensors::contiguous_buffer};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    frames::{FrameProblem, FrameWalk, stack_frames},
};
use burn_cubecl::{
    ops::{permute, permute_nchw_to_nhwc},
    tensor::CubeTensor,
};
use burn_ir::Conv2dOptionsIr;
use burn_std::{Metadata, Shape};
use serde::{Deserialize, Serialize};

/// How a kernel walks along the frames of volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Depth {
    pub(super) stride: usize,
    pub(super) padding: usize,
    pub(super) dilation: usize,
}

/// Options of volumes: those of their frames, and how they walk along these.
pub(super) fn of_frames(
    stride: [usize; 3],
    padding: [usize; 3],
    dilation: [usize; 3],
    groups: usize,
) -> (Conv2dOptionsIr, Depth) {
    let [_, rows, columns] = padding;
    let walk = Conv2dOptionsIr {
        stride: [stride[1], stride[2]],
        padding: [(rows, rows), (columns, columns)],
        dilation: [dilation[1], dilation[2]],
        groups,
    };
    (walk, Depth { stride: stride[0], padding: padding[0], dilation: dilation[0] })
}

/// The pass of images that makes volumes, or their weights.
pub(super) struct OfImages {
    pub(super) pass: FoundProduct,
    pub(super) operands: [CubeTensor; 2],
    /// The shape of what it makes.
    pub(super) shape: [usize; 4],
    /// Frames of a volume of the result, or channels of a tap of the weights.
    within: usize,
    /// Whether the first two dimensions of the result are in each other's place.
    is_swapped: bool,
}

impl OfImages {
    /// The one for a pass of volumes with those operands, whose result has that shape.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] for tensors of another rank than 5, and what the kernel that stacks frames refuses.
    pub(super) fn of(
        pass: &FoundProduct,
        depth: Depth,
        [first, second]: [CubeTensor; 2],
        shape: [usize; 5],
    ) -> Result<Self, KernelError> {
        let (mut pass, groups) = (pass.clone(), pass.walk.groups);
        let [n, channels, frames, height, width] = shape;
        let [filters, _, taps, ..] = five(second.meta.shape())?;
        if pass.result == PassResult::Output
            && depth.stride == 1
            && pass.sums_pixels(second.meta.shape(), &shape)
        {
            // As for images: what walks is as large as the volumes.
            pass.result = PassResult::Weight;
            std::mem::swap(&mut pass.walk.stride, &mut pass.walk.dilation);
            let depth = Depth { stride: depth.dilation, dilation: depth.stride, ..depth };
            let operands = [first, second].map(|tensor| permute(tensor, &[1, 0, 2, 3, 4]));
            let shape = [channels, n, frames, height, width];
            return Ok(Self { is_swapped: true, ..Self::of(&pass, depth, operands, shape)? });
        }
        let Depth { stride, padding, dilation } = depth;
        let (operands, shape, within) = match pass.result {
            PassResult::Output => {
                let walk = FrameWalk::of_output(taps, stride, padding, dilation);
                let operands = [stacked(first, walk, frames, groups)?, columns_of(second)?];
                (operands, [n * frames, channels, height, width], frames)
            }
            PassResult::Input => {
                let walk = FrameWalk::of_input(taps, stride, padding, dilation);
                let rows = rows_of(second, [groups, filters / groups.max(1)])?;
                let operands = [stacked(first, walk, frames, groups)?, rows];
                (operands, [n * frames, channels, height, width], frames)
            }
            // Here the second operand is the gradient, and the frames of the result are taps.
            PassResult::Weight => {
                let walk = FrameWalk::of_output(frames, stride, padding, dilation);
                let out_frames = taps;
                let alone = FrameWalk::of_output(1, 1, 0, 1);
                let operands = [
                    stacked(first, walk, out_frames, groups)?,
                    stacked(second, alone, out_frames, 1)?,
                ];
                (operands, [n, frames * channels, height, width], channels)
            }
        };
        Ok(Self { pass, operands, shape, within, is_swapped: false })
    }

    /// The distances in the volumes, given those in the images.
    pub(super) fn strides(&self, [image, channel, row, column]: [usize; 4]) -> Vec<usize> {
        let [mut first, mut second, frame] = match self.pass.result {
            PassResult::Output | PassResult::Input => [self.within * image, channel, image],
            PassResult::Weight => [image, channel, self.within * channel],
        };
        if self.is_swapped {
            std::mem::swap(&mut first, &mut second);
        }
        vec![first, second, frame, row, column]
    }
}

/// The sizes of a tensor of volumes.
pub(super) fn five(shape: &Shape) -> Result<[usize; 5], KernelError> {
    <[usize; 5]>::try_from(&shape[..])
        .map_err(|_| unsupported(OP, "a tensor of another rank than 5, of volumes"))
}

/// Images in memory of their own, whose channels follow each other.
fn images(like: &CubeTensor, buffer: Buffer, [n, c, h, w]: [usize; 4]) -> CubeTensor {
    let strides = vec![h * w * c, 1, w * c, c];
    let meta = Metadata::new(Shape::new([n, c, h, w]), strides);
    CubeTensor::new(like.client.clone(), buffer.handle, meta, like.device.clone(), like.dtype)
}

/// An image for each frame of the result: those frames of the volumes that meet it, side by side.
fn stacked(
    volumes: CubeTensor,
    walk: FrameWalk,
    out_frames: usize,
    groups: usize,
) -> Result<CubeTensor, KernelError> {
    let [n, channels, frames, height, width] = five(volumes.meta.shape())?;
    let like = volumes.clone();
    let x = contiguous_buffer(permute_nchw_to_nhwc(volumes));
    let problem = FrameProblem {
        volumes: n,
        frames,
        out_frames,
        pixels: height * width,
        groups,
        channels: channels / groups.max(1),
        walk,
        dtype: x.dtype,
    };
    let is_there = walk.is_identity() && frames == out_frames;
    let x = if is_there { x } else { stack_frames(&like.client, &problem, &x)? };
    Ok(images(&like, x, [n * out_frames, walk.taps * channels, height, width]))
}

/// Weights whose taps along frames are channels of each filter.
fn columns_of(weights: CubeTensor) -> Result<CubeTensor, KernelError> {
    let [filters, channels, taps, r, s] = five(weights.meta.shape())?;
    let like = weights.clone();
    let buffer = contiguous_buffer(permute(weights, &[0, 3, 4, 2, 1]));
    Ok(images(&like, buffer, [filters, taps * channels, r, s]))
}

/// Weights whose taps along frames are filters of each group, of which there are so many with so many filters.
fn rows_of(weights: CubeTensor, [groups, filters]: [usize; 2]) -> Result<CubeTensor, KernelError> {
    let [_, channels, taps, r, s] = five(weights.meta.shape())?;
    let mut grouped = permute(weights, &[0, 2, 3, 4, 1]);
    let steps = grouped.meta.strides().to_vec();
    let strides = [&[filters * steps[0]][..], &steps].concat();
    let shape = Shape::new([groups, filters, taps, r, s, channels]);
    *grouped.meta = Metadata::new(shape, strides);
    let like = grouped.clone();
    let buffer = contiguous_buffer(permute(grouped, &[0, 2, 1, 3, 4, 5]));
    Ok(images(&like, buffer, [groups * taps * filters, channels, r, s]))
}
