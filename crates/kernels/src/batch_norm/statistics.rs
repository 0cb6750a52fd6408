use super::{
    blueprint::Tile,
    channels::{
        Extent, Merge, One, Part, Partials, StridedRows, gated, load, merge_splits, no_rows, share,
        write_part,
    },
};
use cubecl::prelude::*;

/// Of each split and channel the mean, less the channel's first value, and the squares around it. `columns`
/// and the stride count vectors. Cubes: channels along x, splits along y.
#[cube(launch_unchecked)]
pub(crate) fn batch_norm_statistics_kernel<I: Float, N: Size>(
    x: &StridedRows<Vector<I, N>>,
    partials: &mut [Vector<f32, N>],
    extent: Extent,
    #[comptime] tile: Tile,
    #[define(I)] _dtype: ElemType,
) {
    let share = share(&extent, tile);
    let (column, first_row, end) = (share.column, share.first_row, share.end);
    let begin = first_row + UNIT_POS_Y;
    let step = comptime!(tile.row_lanes) * x.stride;

    // 1. Each unit adds up how far its rows are from the first of them, and the squares of that.
    let mut part = no_rows::<N>();
    if column < extent.columns && begin < end {
        let shift = Vector::<f32, N>::cast_from(x.memory[(begin * x.stride + column) as usize]);
        let mut row = begin;
        #[unroll]
        for stage in 0..2usize {
            let count = comptime!(tile.counts()[stage]);
            while row + comptime!((count - 1) * tile.row_lanes) < end {
                add_rows::<I, N>(&mut part, &x.memory, row * x.stride + column, step, shift, count);
                row += comptime!(count * tile.row_lanes);
            }
        }
        let count = f32::cast_from((end - begin).div_ceil(tile.row_lanes));
        let mean = part.first / Vector::new(count);
        let pivot = Vector::<f32, N>::cast_from(x.memory[column as usize]);
        part.count = count;
        part.second -= part.first * mean;
        part.first = (shift - pivot) + mean;
    }

    // 2. The units of a channel meet.
    write_part::<N>(&mut part, partials, column, extent.columns, Merge::Moments, tile);
}

/// Adds the distances of `count` rows from `shift`, and their squares.
#[cube]
fn add_rows<I: Float, N: Size>(
    part: &mut Part<N>,
    x: &[Vector<I, N>],
    place: u32,
    step: u32,
    shift: Vector<f32, N>,
    #[comptime] count: u32,
) {
    let values = load::<Vector<I, N>>(x, place, step, count);
    #[unroll]
    for i in 0..count {
        let distance = Vector::<f32, N>::cast_from(values[i as usize]) - shift;
        part.first += distance;
        part.second += distance * distance;
    }
}

/// Mean and variance of each channel from what the splits have. Cubes: channels along x.
#[cube(launch_unchecked)]
pub(crate) fn batch_norm_merge_moments_kernel<I: Float>(
    partials: &Partials,
    x: &[I],
    mean: &mut [f32],
    variance: &mut [f32],
    #[comptime] tile: Tile,
    #[define(I)] _dtype: ElemType,
) {
    let channel = CUBE_POS_X * tile.lanes + UNIT_POS_X;
    let part = merge_splits(partials, channel, Merge::Moments, tile);
    if UNIT_POS_Y == 0 && channel < partials.channels {
        let pivot = f32::cast_from(x[channel as usize]);
        mean[channel as usize] = pivot + part.first.extract(0usize);
        let squares = part.second / Vector::new(part.count);
        // Roundings may leave less than nothing.
        variance[channel as usize] = gated::<f32, One>(squares, squares).extract(0usize);
    }
}

/// Running statistics behind a batch: `kept` times what they were and `new` times the batch's.
#[cube(launch_unchecked)]
pub(crate) fn batch_norm_running_kernel<R: Float>(
    running_mean: &[R],
    running_variance: &[R],
    mean: &[f32],
    variance: &[f32],
    updated_mean: &mut [R],
    updated_variance: &mut [R],
    channels: u32,
    kept: f32,
    new: f32,
    #[define(R)] _running: ElemType,
) {
    let channel = ABSOLUTE_POS;
    if channel < channels as usize {
        let of_mean = f32::cast_from(running_mean[channel]) * kept + mean[channel] * new;
        let of_variance =
            f32::cast_from(running_variance[channel]) * kept + variance[channel] * new;
        updated_mean[channel] = R::cast_from(of_mean);
        updated_variance[channel] = R::cast_from(of_variance);
    }
}
