//! Images and sequences as samples of channels and pixels, in the order in which they lie.

use super::{Channels, contiguous_buffer, contiguous_tensor};
use blackburn_kernels::{
    buffer::{Buffer, Rows},
    group_norm::{GroupNormProblem, Order},
};
use burn_backend::{DType, cubecl::dtype_to_elem_type};
use burn_cubecl::{
    ops::{permute_nchw_to_nhwc_shape, permute_nhwc_to_nchw},
    tensor::CubeTensor,
};
use burn_std::Shape;
use cubecl::client::Client;

/// A tensor of channels in the second dimension.
pub(crate) struct Images {
    tensor: CubeTensor,
    lies: Lies,
}

/// How its numbers lie.
enum Lies {
    /// Channels follow each other.
    ChannelsLast(Box<Channels>),
    /// Pixels do.
    PixelsLast(Buffer),
}

impl Images {
    /// As it lies if it is contiguous or channels follow each other there, and otherwise a contiguous copy.
    pub(crate) fn of(tensor: CubeTensor) -> Self {
        Self::in_place_of(tensor.clone()).unwrap_or_else(|| {
            let lies = Lies::PixelsLast(contiguous_buffer(tensor.clone()));
            Self { tensor, lies }
        })
    }

    /// As it lies, if it is contiguous or channels follow each other there.
    pub(crate) fn in_place_of(tensor: CubeTensor) -> Option<Self> {
        let has_one_pixel = tensor.meta.shape()[2..].iter().product::<usize>() == 1;
        let lies = match tensor.is_contiguous() && !has_one_pixel {
            true => Lies::PixelsLast(contiguous_buffer(tensor.clone())),
            false => Lies::ChannelsLast(Box::new(Channels::in_place_of(tensor.clone())?)),
        };
        Some(Self { tensor, lies })
    }

    /// Another tensor of the same shape in the same order: as it lies there, or a copy.
    pub(crate) fn in_order(&self, tensor: CubeTensor) -> Self {
        let lies = match self.lies {
            Lies::ChannelsLast(_) => Lies::ChannelsLast(Box::new(Channels::of(tensor.clone()))),
            Lies::PixelsLast(_) => Lies::PixelsLast(contiguous_buffer(tensor.clone())),
        };
        Self { tensor, lies }
    }

    /// What a normalization of so many groups asks, with parameters of the tensor's type.
    pub(crate) fn problem(&self, groups: usize) -> GroupNormProblem {
        let shape = self.tensor.meta.shape();
        let sizes = [shape[0], shape[1], shape[2..].iter().product()];
        let order = match self.lies {
            Lies::ChannelsLast(_) => Order::ChannelsLast,
            Lies::PixelsLast(_) => Order::PixelsLast,
        };
        let dtype = dtype_to_elem_type(self.tensor.dtype);
        let contiguous = GroupNormProblem::contiguous(sizes, groups, order, dtype);
        GroupNormProblem { x_stride: self.stride(), ..contiguous }
    }

    /// Elements from one pixel to the next where channels follow each other.
    pub(crate) fn stride(&self) -> usize {
        match &self.lies {
            Lies::ChannelsLast(channels) => channels.rows.pitch,
            Lies::PixelsLast(_) => self.tensor.meta.shape()[1],
        }
    }

    /// Images, rows, columns and channels, a sequence being an image of height 1. Where pixels follow each other, each
    /// channel is an image of its own, of one channel.
    pub(crate) fn sizes(&self) -> Option<[usize; 4]> {
        let [images, channels, height, width] = match self.tensor.meta.shape()[..] {
            [images, channels, width] => [images, channels, 1, width],
            [images, channels, height, width] => [images, channels, height, width],
            _ => return None,
        };
        Some(match self.lies {
            Lies::ChannelsLast(_) => [images, height, width, channels],
            Lies::PixelsLast(_) => [images * channels, height, width, 1],
        })
    }

    /// Elements from one pixel to the next, as [`sizes`](Self::sizes) has channels.
    pub(crate) fn pitch(&self) -> usize {
        match &self.lies {
            Lies::ChannelsLast(channels) => channels.rows.pitch,
            Lies::PixelsLast(_) => 1,
        }
    }

    /// Rows in which each channel has as many columns as the others: a pixel is a row, or an image is.
    pub(crate) fn by_channel(&self) -> Rows {
        match &self.lies {
            Lies::ChannelsLast(channels) => channels.rows.clone(),
            Lies::PixelsLast(buffer) => {
                let rows = self.tensor.meta.shape()[0];
                let columns = buffer.elements / rows.max(1);
                Rows { buffer: buffer.clone(), rows, columns, pitch: columns }
            }
        }
    }

    /// Whether channels follow each other.
    pub(crate) fn has_channels_last(&self) -> bool {
        matches!(self.lies, Lies::ChannelsLast(_))
    }

    /// The same with nothing between pixels, copied where something is.
    pub(crate) fn contiguous(self) -> Buffer {
        match self.lies {
            Lies::ChannelsLast(channels) => channels.contiguous(),
            Lies::PixelsLast(buffer) => buffer,
        }
    }

    /// Where it is.
    pub(crate) fn client(&self) -> &Client {
        &self.tensor.client
    }

    /// Its memory.
    pub(crate) fn buffer(&self) -> Buffer {
        match &self.lies {
            Lies::ChannelsLast(channels) => channels.rows.buffer.clone(),
            Lies::PixelsLast(buffer) => buffer.clone(),
        }
    }

    /// A tensor of the same shape and type in the same order, contiguous there.
    pub(crate) fn like(&self, buffer: Buffer) -> CubeTensor {
        self.shaped(buffer, self.tensor.meta.shape().clone(), self.tensor.dtype)
    }

    /// A tensor of that shape and type in the same order, contiguous there.
    pub(crate) fn shaped(&self, buffer: Buffer, shape: Shape, dtype: DType) -> CubeTensor {
        let of = |shape| contiguous_tensor(&self.tensor, buffer, shape, dtype);
        match &self.lies {
            Lies::ChannelsLast(_) => permute_nhwc_to_nchw(of(permute_nchw_to_nhwc_shape(shape))),
            Lies::PixelsLast(_) => of(shape),
        }
    }
}
