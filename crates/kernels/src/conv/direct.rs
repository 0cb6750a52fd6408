//! Groups of few channels: no tile of a matrix product is filled by them, so that a unit computes its elements of
//! the output on its own.

use super::gather::{
    Gather, ImageStrides, Tap, WeightStrides, element_at, is_inside, pixel_at, shift_of, weight_at,
};
use crate::{
    divisor::{Divisor, divide},
    matmul::EpilogueBlueprint,
};
use cubecl::prelude::*;

/// `out[pixel, channel] = bias[channel] + sum over taps and channels of the group`, neighboring channels a unit.
/// Vectors have more than one element only where each channel is a group. `columns` counts the vectors of a
/// pixel, `group_columns` the channels of a group of the output.
#[cube(launch_unchecked)]
pub(crate) fn conv_direct_kernel<I: Float, O: Float, N: Size>(
    gathered: &[Vector<I, N>],
    weights: &[I],
    bias: &[O],
    out: &mut [Vector<O, N>],
    units: u32,
    columns: Divisor,
    group_columns: Divisor,
    gather: Gather,
    weight_strides: WeightStrides,
    images: ImageStrides,
    #[comptime] epilogue: EpilogueBlueprint,
    #[define(I)] _input: ElemType,
    #[define(O)] _output: ElemType,
) {
    let size = N::value().comptime();
    let width = comptime!(size as u32);
    let index = u32::cast_from(ABSOLUTE_POS);
    if index >= units {
        terminate!();
    }
    let (pixel_index, vector) = divide(index, &columns);
    let column = vector * width;
    let (group, within) = divide(column, &group_columns);
    let pixel = pixel_at(pixel_index, &gather);

    let mut sum = Vector::<f32, N>::new(0.0f32);
    for tap_row in 0..gather.tap_rows {
        for tap_column in 0..gather.tap_columns.divisor {
            let first = Tap { row: tap_row, column: tap_column, channel: 0u32 };
            let shift = shift_of(&first, &gather);
            if is_inside(&pixel, &shift, &gather) {
                let at = pixel.element + shift.element;
                for channel in 0..gather.channels {
                    let from = at + (group * gather.channels + channel) * gather.source.channel;
                    let value = Vector::<f32, N>::cast_from(gathered[(from / width) as usize]);
                    let tap = Tap { row: tap_row, column: tap_column, channel };
                    let first =
                        group * weight_strides.group + weight_at(within, &tap, &weight_strides);
                    let mut weight = Vector::<f32, N>::empty();
                    #[unroll]
                    for lane in 0..size {
                        let next = comptime!(lane as u32) * weight_strides.group;
                        weight.insert(lane, f32::cast_from(weights[(first + next) as usize]));
                    }
                    sum = fma(value, weight, sum);
                }
            }
        }
    }

    if comptime!(epilogue.bias) {
        #[unroll]
        for lane in 0..size {
            let offset = f32::cast_from(bias[(column + comptime!(lane as u32)) as usize]);
            sum.insert(lane, sum.extract(lane) + offset);
        }
    }
    let to = element_at(pixel_index, &gather, &images) + column;
    out[(to / width) as usize] = Vector::cast_from(sum);
}

/// `out[split, k, tap, channel]`: the sum over the pixels of a split. Units count channels first, then k, then
/// taps, so that neighbors read neighboring channels; splits lie along y. `images` are the output's gradient.
#[cube(launch_unchecked)]
pub(crate) fn conv_direct_weights_kernel<I: Float, O: Float>(
    gathered: &[I],
    dy: &[I],
    out: &mut [O],
    elements: u32,
    out_channels: Divisor,
    group_filters: Divisor,
    split_pixels: u32,
    gather: Gather,
    images: ImageStrides,
    #[define(I)] _input: ElemType,
    #[define(O)] _output: ElemType,
) {
    let index = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    if index >= elements {
        terminate!();
    }
    let (rest, channel) = divide(index, &gather.padded_channels);
    let (tap, filter) = divide(rest, &out_channels);
    let (tap_row, tap_column) = divide(tap, &gather.tap_columns);
    let (group, _within) = divide(filter, &group_filters);
    let shift = shift_of(&Tap { row: tap_row, column: tap_column, channel }, &gather);
    let group_origin = group * gather.channels * gather.source.channel;
    let dy_channel = filter * images.channel;

    let first = CUBE_POS_Y * split_pixels;
    let mut sum = 0.0f32;
    for pixel_index in first..min(first + split_pixels, gather.pixels) {
        let pixel = pixel_at(pixel_index, &gather);
        let mut value = 0.0f32;
        if is_inside(&pixel, &shift, &gather) {
            let at = pixel.element + shift.element + group_origin;
            value = f32::cast_from(gathered[at as usize]);
        }
        let gradient = element_at(pixel_index, &gather, &images) + dy_channel;
        sum = fma(value, f32::cast_from(dy[gradient as usize]), sum);
    }
    let taps = gather.tap_rows * gather.tap_columns.divisor;
    let to = (filter * taps + tap) * gather.channels + channel;
    out[(CUBE_POS_Y * elements + to) as usize] = O::cast_from(sum);
}
