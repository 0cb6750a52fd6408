use super::{
    Form, Order,
    samples::{Extent, Grouping, Partials, coefficient, share, write_part},
};
use crate::batch_norm::{Merge, One, StridedRows, Tile, load, meet, no_rows};
use cubecl::prelude::*;

/// What both kernels over all elements read.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct BackwardRows<T: CubePrimitive> {
    /// x, or what is there in its place.
    pub(crate) x: StridedRows<T>,
    pub(crate) dy: StridedRows<T>,
}

/// Of each split and column the sums of the gradient, and of its product with the distance from the mean.
/// Columns and strides count vectors. Cubes: samples and columns along x, splits along y.
#[cube(launch_unchecked)]
pub(crate) fn group_norm_sums_kernel<I: Float, N: Size>(
    read: &BackwardRows<Vector<I, N>>,
    mean: &[f32],
    partials: &mut [Vector<f32, N>],
    extent: Extent,
    of_group: u32,
    #[comptime] form: Form,
    #[comptime] order: Order,
    #[comptime] tile: Tile,
    #[define(I)] _dtype: ElemType,
) {
    let share = share(&extent, tile);
    let (column, end) = (share.column, share.end);
    let (x, dy) = (&read.x, &read.dy);

    // 1. Each unit adds up its rows.
    let mut part = no_rows::<N>();
    if column < extent.columns {
        let mut center = Vector::<f32, N>::new(0.0f32);
        if comptime!(form == Form::Input) {
            let place = share.sample * extent.columns + column;
            center = means_of::<N>(mean, place, of_group, order);
        }
        let (x_step, dy_step) = (tile.row_lanes * x.stride, tile.row_lanes * dy.stride);
        let mut row = share.first_row + UNIT_POS_Y;
        #[unroll]
        for stage in 0..2usize {
            let count = comptime!(tile.counts()[stage]);
            while row + comptime!((count - 1) * tile.row_lanes) < end {
                let (x_at, dy_at) = (row * x.stride + column, row * dy.stride + column);
                let values = load::<Vector<I, N>>(&x.memory, x_at, x_step, count);
                let grads = load::<Vector<I, N>>(&dy.memory, dy_at, dy_step, count);
                #[unroll]
                for i in 0..count {
                    let grad = Vector::<f32, N>::cast_from(grads[i as usize]);
                    let distance = Vector::<f32, N>::cast_from(values[i as usize]) - center;
                    part.first += grad;
                    part.second += grad * distance;
                }
                row += comptime!(count * tile.row_lanes);
            }
        }
    }

    // 2. The units of a column meet.
    write_part::<N>(&mut part, partials, &share, extent.columns, Merge::Sums, tile);
}

/// The means of the groups of a vector's channels, or with pixels last of its one channel. Channels are counted
/// through all samples, of which each has whole groups.
#[cube]
fn means_of<N: Size>(
    mean: &[f32],
    place: u32,
    of_group: u32,
    #[comptime] order: Order,
) -> Vector<f32, N> {
    let size = N::value().comptime();
    let mut means = Vector::<f32, N>::new(0.0f32);
    if comptime!(order == Order::PixelsLast) {
        means = Vector::new(mean[(place / of_group) as usize]);
    } else {
        #[unroll]
        for i in 0..size {
            let channel = place * comptime!(size as u32) + comptime!(i as u32);
            means.insert(i, mean[(channel / of_group) as usize]);
        }
    }
    means
}

/// What the merge of sums reads, beside these.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct MergeSumsIn<G: Float> {
    pub(crate) gamma: Box<[G]>,
    pub(crate) mean: Box<[f32]>,
    /// 1 / deviation of each group; where x is not there, deviations.
    pub(crate) rstd: Box<[f32]>,
}

/// And what it writes.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct MergeSumsOut {
    /// For each channel of a sample its part in the gradient of gamma, and then that in the gradient of beta.
    pub(crate) sums: Box<[f32]>,
    /// For each channel of a sample what `dx = scale dy - (x - mean) slope - offset` is made with: mean, scale,
    /// slope, offset.
    pub(crate) coefficients: Box<[f32]>,
}

/// The sums of each channel of a sample from what the splits have, and what dx is made with. Cubes: a group of a
/// sample each, along x.
#[cube(launch_unchecked)]
pub(crate) fn group_norm_merge_sums_kernel<G: Float>(
    partials: &Partials,
    read: &MergeSumsIn<G>,
    out: &mut MergeSumsOut,
    grouping: Grouping,
    of_count: f32,
    #[comptime] affine: bool,
    #[comptime] form: Form,
    #[comptime] order: Order,
    #[comptime] tile: Tile,
    #[define(G)] _parameter: ElemType,
) {
    let group = CUBE_POS_X;
    let (of_group, copies) = (grouping.of_group, grouping.copies);
    let columns = partials.columns;
    let mut rstd = read.rstd[group as usize];
    if comptime!(form != Form::Input) {
        rstd = 1.0f32 / rstd;
    }
    let mut of_distance = rstd;
    if comptime!(form == Form::Normalized) {
        of_distance = 1.0f32.runtime();
    }
    let half = (out.sums.len() / 2) as u32;

    // 1. Each channel's sums, some channels at a time. The units of a channel meet.
    let mut plain = 0.0f32;
    let mut weighted = 0.0f32;
    // The same for all units of a cube.
    let mut first = 0u32;
    while first < of_group {
        let member = first + UNIT_POS_X;
        // Among those of all samples.
        let channel = group * of_group + member;
        let mut part = no_rows::<One>();
        if member < of_group {
            let mut term = UNIT_POS_Y;
            while term < partials.splits * copies {
                let (split, copy) = (term / copies, term % copies);
                let mut sample = channel;
                let mut column = copy;
                if comptime!(order == Order::ChannelsLast) {
                    sample = channel / grouping.channels;
                    column = channel % grouping.channels;
                }
                let place = 2 * (sample * partials.splits + split) * columns + column;
                part.first += Vector::new(partials.sums[place as usize]);
                part.second += Vector::new(partials.sums[(place + columns) as usize]);
                term += tile.row_lanes;
            }
        }
        meet::<One>(&mut part, Merge::Sums, tile);
        if UNIT_POS_Y == 0 && member < of_group {
            let of_plain = part.first.extract(0usize);
            let of_weighted = part.second.extract(0usize) * of_distance;
            out.sums[channel as usize] = of_weighted;
            out.sums[(half + channel) as usize] = of_plain;
            let factor = factor_of::<G>(&read.gamma, channel % grouping.channels, affine);
            plain += factor * of_plain;
            weighted += factor * of_weighted;
        }
        first += tile.lanes;
    }

    // 2. The sums of the group.
    let lanes = comptime!(tile.lanes as usize);
    let mut totals = Shared::<[f32]>::new_slice(comptime!(2 * lanes));
    if UNIT_POS_Y == 0 {
        totals[UNIT_POS_X as usize] = plain;
        totals[lanes + UNIT_POS_X as usize] = weighted;
    }
    sync_cube();
    let mut all_plain = 0.0f32;
    let mut all_weighted = 0.0f32;
    #[unroll]
    for lane in 0..lanes {
        all_plain += totals[lane];
        all_weighted += totals[lanes + lane];
    }

    // 3. What dx is made with.
    let offset = rstd * (all_plain * of_count);
    let slope = rstd * (all_weighted * of_count) * of_distance;
    let mut center = 0.0f32;
    if comptime!(form == Form::Input) {
        center = read.mean[group as usize];
    }
    let of_one = out.coefficients.len() / 4;
    let mut at = UNIT_POS_Y * tile.lanes + UNIT_POS_X;
    while at < of_group * copies {
        let place = (group * of_group * copies + at) as usize;
        let channel = (group * of_group + at / copies) % grouping.channels;
        out.coefficients[place] = center;
        out.coefficients[of_one + place] = rstd * factor_of::<G>(&read.gamma, channel, affine);
        out.coefficients[2 * of_one + place] = slope;
        out.coefficients[3 * of_one + place] = offset;
        at += comptime!(tile.lanes * tile.row_lanes);
    }
}

#[cube]
fn factor_of<G: Float>(gamma: &[G], channel: u32, #[comptime] affine: bool) -> f32 {
    let mut factor = 1.0f32;
    if comptime!(affine) {
        factor = f32::cast_from(gamma[channel as usize]);
    }
    factor
}

/// dx, in contiguous rows. Columns and strides count vectors. Cubes: samples and columns along x, splits along y.
#[cube(launch_unchecked)]
pub(crate) fn group_norm_input_gradient_kernel<I: Float, N: Size>(
    read: &BackwardRows<Vector<I, N>>,
    coefficients: &[Vector<f32, N>],
    dx: &mut [Vector<I, N>],
    extent: Extent,
    #[comptime] tile: Tile,
    #[define(I)] _dtype: ElemType,
) {
    let share = share(&extent, tile);
    let (column, columns) = (share.column, extent.columns);
    let (x, dy) = (&read.x, &read.dy);
    if column < columns {
        let place = share.sample * columns + column;
        let center = coefficient::<N>(coefficients, place, 0usize);
        let scale = coefficient::<N>(coefficients, place, 1usize);
        let slope = coefficient::<N>(coefficients, place, 2usize);
        let offset = coefficient::<N>(coefficients, place, 3usize);
        let mut row = share.first_row + UNIT_POS_Y;
        // One row at a time: registers are left for no more, beside four numbers of each channel.
        while row < share.end {
            let value = x.memory[(row * x.stride + column) as usize];
            let grad = dy.memory[(row * dy.stride + column) as usize];
            let distance = Vector::<f32, N>::cast_from(value) - center;
            let result = Vector::<f32, N>::cast_from(grad) * scale - distance * slope - offset;
            dx[(row * columns + column) as usize] = Vector::cast_from(result);
            row += tile.row_lanes;
        }
    }
}
