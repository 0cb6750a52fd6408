//! Where the terms of an implicit product lie: pixels and taps walk an image, weights and outputs. What
//! every family of kernels shares.
//!
//! A product has a row or a term for each *pixel* of a grid and one for each *tap and channel*. Pixel (i, j)
//! and tap (r, s) meet in the gathered image at row `i scale + shift + r step`, and likewise for columns. No
//! number is divided by a stride: the gradient of a strided convolution is computed by the residues of its
//! pixels, each a product of its own with the taps that meet them (see [`parts`](super::parts)).

use crate::divisor::{Divisor, divide};
use cubecl::prelude::*;

/// A tensor of images: distances in elements, and where it begins.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct ImageStrides {
    pub(crate) origin: u32,
    pub(crate) image: u32,
    pub(crate) row: u32,
    pub(crate) column: u32,
    pub(crate) channel: u32,
}

/// The weights, from the first tap on: distances in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct WeightStrides {
    pub(crate) origin: u32,
    /// From group to group.
    pub(crate) group: u32,
    /// From column to column of the product.
    pub(crate) column: u32,
    /// From channel to channel of what is gathered.
    pub(crate) channel: u32,
    pub(crate) tap_row: u32,
    pub(crate) tap_column: u32,
}

/// How pixels and taps walk the gathered images. Shifts and steps may be negative: they wrap around.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Gather {
    /// Pixels of the grid, of all images.
    pub(crate) pixels: u32,
    pub(crate) image_pixels: Divisor,
    pub(crate) row_pixels: Divisor,
    pub(crate) tap_rows: u32,
    pub(crate) tap_columns: Divisor,
    /// Channels of a tap, with those that rows are padded with.
    pub(crate) padded_channels: Divisor,
    /// Channels of a group.
    pub(crate) channels: u32,
    pub(crate) height: u32,
    pub(crate) width: u32,
    pub(crate) scale_row: u32,
    pub(crate) scale_column: u32,
    pub(crate) shift_row: u32,
    pub(crate) shift_column: u32,
    pub(crate) step_row: u32,
    pub(crate) step_column: u32,
    pub(crate) source: ImageStrides,
}

/// Where a pixel's first tap lies. All numbers wrap around where that is above the image or left of it.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Pixel {
    /// First element of the image.
    pub(crate) image: u32,
    pub(crate) row: u32,
    pub(crate) column: u32,
    /// The element of channel 0.
    pub(crate) element: u32,
}

/// How far a tap lies from a pixel's first one.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Shift {
    pub(crate) row: u32,
    pub(crate) column: u32,
    /// To the tap's channel.
    pub(crate) element: u32,
}

/// A tap and one of its channels.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Tap {
    pub(crate) row: u32,
    pub(crate) column: u32,
    pub(crate) channel: u32,
}

/// A row that is outside of every image, whatever is added: a pixel's, a tap's or both.
pub(crate) const OUTSIDE: u32 = 1 << 30;

/// Image, row and column of a pixel in the grid.
#[cube]
pub(crate) fn grid_position(index: u32, gather: &Gather) -> (u32, u32, u32) {
    let (image, within) = divide(index, &gather.image_pixels);
    let (row, column) = divide(within, &gather.row_pixels);
    (image, row, column)
}

/// Pixel `index` of the grid; beyond its end, one whose taps are all outside.
#[cube]
pub(crate) fn pixel_at(index: u32, gather: &Gather) -> Pixel {
    let (image, i, j) = grid_position(index, gather);
    let row = i * gather.scale_row + gather.shift_row;
    let column = j * gather.scale_column + gather.shift_column;
    let source = &gather.source;
    let image = source.origin + image * source.image;
    Pixel {
        image,
        row: select(index < gather.pixels, row, OUTSIDE),
        column,
        element: image + row * source.row + column * source.column,
    }
}

/// Tap and channel `index`, channels first.
#[cube]
pub(crate) fn tap_at(index: u32, gather: &Gather) -> Tap {
    let (tap, channel) = divide(index, &gather.padded_channels);
    let (row, column) = divide(tap, &gather.tap_columns);
    Tap { row, column, channel }
}

/// The way from the first tap to `tap`.
#[cube]
pub(crate) fn shift_of(tap: &Tap, gather: &Gather) -> Shift {
    let row = tap.row * gather.step_row;
    let column = tap.column * gather.step_column;
    let element = row * gather.source.row
        + column * gather.source.column
        + tap.channel * gather.source.channel;
    Shift { row, column, element }
}

/// Whether a pixel's tap is inside of the image.
#[cube]
pub(crate) fn is_inside(pixel: &Pixel, shift: &Shift, gather: &Gather) -> bool {
    pixel.row + shift.row < gather.height && pixel.column + shift.column < gather.width
}

/// The element of a pixel's tap: the sum of both elements, by rows and columns. It is for kernels that have more
/// pixels than registers for their elements.
#[cube]
pub(crate) fn source_at(pixel: &Pixel, shift: &Shift, gather: &Gather) -> u32 {
    let (row, column) = (pixel.row + shift.row, pixel.column + shift.column);
    pixel.image + row * gather.source.row + column * gather.source.column
}

/// Channel 0 of pixel `index` of the grid in a tensor that has one pixel for each.
#[cube]
pub(crate) fn element_at(index: u32, gather: &Gather, tensor: &ImageStrides) -> u32 {
    let (image, row, column) = grid_position(index, gather);
    tensor.origin + image * tensor.image + row * tensor.row + column * tensor.column
}

/// A weight of group 0.
#[cube]
pub(crate) fn weight_at(column: u32, tap: &Tap, weights: &WeightStrides) -> u32 {
    weights.origin
        + column * weights.column
        + tap.channel * weights.channel
        + tap.row * weights.tap_row
        + tap.column * weights.tap_column
}
