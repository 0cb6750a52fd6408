use super::{
    blueprint::{MERGING_LANES, MERGING_ROW_LANES},
    samples::{Extent, Grouping, Partials, coefficient, share, write_part},
};
use crate::batch_norm::{Merge, One, Part, StridedRows, Tile, add, gated, load, meet, no_rows};
use cubecl::prelude::*;

/// Of each split and column the mean, less the column's first value, and the squares around it. Columns and the
/// stride count vectors. Cubes: samples and columns along x, splits along y.
#[cube(launch_unchecked)]
pub(crate) fn group_norm_statistics_kernel<I: Float, N: Size>(
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
                let place = row * x.stride + column;
                let values = load::<Vector<I, N>>(&x.memory, place, step, count);
                #[unroll]
                for i in 0..count {
                    let distance = Vector::<f32, N>::cast_from(values[i as usize]) - shift;
                    part.first += distance;
                    part.second += distance * distance;
                }
                row += comptime!(count * tile.row_lanes);
            }
        }
        let count = f32::cast_from((end - begin).div_ceil(tile.row_lanes));
        let mean = part.first / Vector::new(count);
        let first = share.sample * extent.rows * x.stride + column;
        let pivot = Vector::<f32, N>::cast_from(x.memory[first as usize]);
        part.count = count;
        part.second -= part.first * mean;
        part.first = (shift - pivot) + mean;
    }

    // 2. The units of a column meet.
    write_part::<N>(&mut part, partials, &share, extent.columns, Merge::Moments, tile);
}

/// What the merge of moments writes. The last two have to be there with parts alone.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct MomentsOut<I: Float> {
    pub(crate) mean: Box<[f32]>,
    pub(crate) rstd: Box<[f32]>,
    /// Mean, 1 / deviation, gamma and beta for each channel of a sample.
    pub(crate) coefficients: Box<[f32]>,
    pub(crate) variance: Box<[I]>,
    pub(crate) deviation: Box<[I]>,
}

/// Mean and deviation of each group from what the splits have. Cubes: a group of a sample each, along x, with
/// all units along y.
#[cube(launch_unchecked)]
pub(crate) fn group_norm_merge_moments_kernel<I: Float, G: Float>(
    partials: &Partials,
    x: &StridedRows<I>,
    gamma: &[G],
    beta: &[G],
    out: &mut MomentsOut<I>,
    grouping: Grouping,
    members: u32,
    epsilon: f32,
    #[comptime] affine: bool,
    #[comptime] parts: bool,
    #[comptime] tile: Tile,
    #[define(I, G)] _types: [ElemType; 2],
) {
    let group = CUBE_POS_X;
    let of_sample = partials.columns / members;
    let sample = group / of_sample;
    let first_column = group % of_sample * members;
    let start = sample * partials.rows * x.stride + first_column;
    let pivot = f32::cast_from(x.memory[start as usize]);

    // 1. Each unit merges some splits of some columns.
    let mut part = no_rows::<One>();
    let mut member = UNIT_POS_Y % MERGING_LANES;
    while member < members {
        let first = UNIT_POS_Y / MERGING_LANES;
        let column = first_column + member;
        let mut of_column = column_moments(partials, sample, column, first, tile);
        let apart = f32::cast_from(x.memory[(start + member) as usize]) - pivot;
        of_column.first += Vector::new(apart);
        add::<One>(&mut part, &of_column, Merge::Moments);
        member += MERGING_LANES;
    }

    // 2. They meet.
    meet::<One>(&mut part, Merge::Moments, tile);
    let mut both = Shared::<[f32]>::new_slice(2usize);
    if UNIT_POS_Y == 0 {
        let mean = pivot + part.first.extract(0usize);
        let squares = part.second / Vector::new(part.count);
        // Roundings may leave less than nothing.
        let variance = gated::<f32, One>(squares, squares).extract(0usize) + epsilon;
        let rstd = variance.inverse_sqrt();
        both[0] = mean;
        both[1] = rstd;
        out.mean[group as usize] = mean;
        out.rstd[group as usize] = rstd;
        if comptime!(parts) {
            out.variance[group as usize] = I::cast_from(variance);
            out.deviation[group as usize] = I::cast_from(variance.sqrt());
        }
    }
    sync_cube();

    // 3. What y is made with.
    let (mean, rstd) = (both[0], both[1]);
    let copies = grouping.copies;
    let of_one = out.coefficients.len() / 4;
    let mut at = UNIT_POS_Y;
    while at < grouping.of_group * copies {
        let place = (group * grouping.of_group * copies + at) as usize;
        let channel = (group * grouping.of_group + at / copies) % grouping.channels;
        let mut factor = 1.0f32;
        let mut addend = 0.0f32;
        if comptime!(affine) {
            factor = f32::cast_from(gamma[channel as usize]);
            addend = f32::cast_from(beta[channel as usize]);
        }
        out.coefficients[place] = mean;
        out.coefficients[of_one + place] = rstd;
        out.coefficients[2 * of_one + place] = factor;
        out.coefficients[3 * of_one + place] = addend;
        at += tile.row_lanes;
    }
}

/// The moments of a column, from every so many splits from `first` on.
#[cube]
fn column_moments(
    partials: &Partials,
    sample: u32,
    column: u32,
    first: u32,
    #[comptime] tile: Tile,
) -> Part<One> {
    let (rows, split_rows, columns) = (partials.rows, partials.split_rows, partials.columns);
    let mut part = no_rows::<One>();
    let mut split = first;
    while split < partials.splits {
        // All loads before the first use, so that they are on their way together. A part of no rows changes
        // nothing.
        let mut others = Sequence::<Part<One>>::new();
        #[unroll]
        for i in 0..tile.at_once {
            let at = split + comptime!(i * MERGING_ROW_LANES);
            let mut other = no_rows::<One>();
            if at < partials.splits {
                let place = 2 * (sample * partials.splits + at) * columns + column;
                other.count = f32::cast_from(min(rows - at * split_rows, split_rows));
                other.first = Vector::new(partials.sums[place as usize]);
                other.second = Vector::new(partials.sums[(place + columns) as usize]);
            }
            others.push(other);
        }
        #[unroll]
        for i in 0..tile.at_once {
            add::<One>(&mut part, &others[i as usize], Merge::Moments);
        }
        split += comptime!(tile.at_once * MERGING_ROW_LANES);
    }
    part
}

/// What a unit keeps of its column.
#[derive(CubeType, Clone, Copy)]
struct Column<N: Size> {
    mean: Vector<f32, N>,
    rstd: Vector<f32, N>,
    gamma: Vector<f32, N>,
    beta: Vector<f32, N>,
}

#[cube]
fn column_of<N: Size>(coefficients: &[Vector<f32, N>], place: u32) -> Column<N> {
    Column::<N> {
        mean: coefficient::<N>(coefficients, place, 0usize),
        rstd: coefficient::<N>(coefficients, place, 1usize),
        gamma: coefficient::<N>(coefficients, place, 2usize),
        beta: coefficient::<N>(coefficients, place, 3usize),
    }
}

/// What the pass that makes y writes, in contiguous rows.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ApplyOut<T: CubePrimitive> {
    pub(crate) y: Box<[T]>,
    pub(crate) normalized: Box<[T]>,
}

/// y, and with parts what is normalized and, in the order of y, `x - mean`. Cubes: samples and columns along x,
/// splits along y.
#[cube(launch_unchecked)]
pub(crate) fn group_norm_apply_kernel<I: Float, N: Size>(
    x: &StridedRows<Vector<I, N>>,
    coefficients: &[Vector<f32, N>],
    out: &mut ApplyOut<Vector<I, N>>,
    centered: &mut [Vector<I, N>],
    extent: Extent,
    #[comptime] parts: bool,
    #[comptime] tile: Tile,
    #[define(I)] _dtype: ElemType,
) {
    let share = share(&extent, tile);
    let (column, columns, end) = (share.column, extent.columns, share.end);
    if column < columns {
        let of = column_of::<N>(coefficients, share.sample * columns + column);
        // One number less of each channel in registers, where both factors are read no more.
        let scale = of.rstd * of.gamma;
        let x_step = comptime!(tile.row_lanes) * x.stride;
        let mut row = share.first_row + UNIT_POS_Y;
        #[unroll]
        for stage in 0..2usize {
            let count = comptime!(tile.counts()[stage]);
            while row + comptime!((count - 1) * tile.row_lanes) < end {
                let at = row * x.stride + column;
                let values = load::<Vector<I, N>>(&x.memory, at, x_step, count);
                #[unroll]
                for i in 0..count {
                    let place = ((row + i * tile.row_lanes) * columns + column) as usize;
                    let distance = Vector::<f32, N>::cast_from(values[i as usize]) - of.mean;
                    if comptime!(parts) {
                        let normalized = distance * of.rstd;
                        out.y[place] = Vector::cast_from(normalized * of.gamma + of.beta);
                        out.normalized[place] = Vector::cast_from(normalized);
                        centered[place] = Vector::cast_from(distance);
                    } else {
                        out.y[place] = Vector::cast_from(distance * scale + of.beta);
                    }
                }
                row += comptime!(count * tile.row_lanes);
            }
        }
    }
}

/// y and what is normalized, with channels last, and `x - mean` with pixels last. Cubes as above.
#[cube(launch_unchecked)]
pub(crate) fn group_norm_apply_turned_kernel<I: Float, N: Size>(
    x: &StridedRows<Vector<I, N>>,
    coefficients: &[Vector<f32, N>],
    out: &mut ApplyOut<Vector<I, N>>,
    centered: &mut [I],
    extent: Extent,
    #[comptime] tile: Tile,
    #[define(I)] _dtype: ElemType,
) {
    let size = N::value().comptime();
    let share = share(&extent, tile);
    let (column, columns, end) = (share.column, extent.columns, share.end);
    let (lanes, row_lanes) = comptime!((tile.lanes, tile.row_lanes));
    // A number more in each row, so that those of a column are in different banks.
    let pitch = comptime!(row_lanes + 1);
    let mut turned = Shared::<[f32]>::new_slice(comptime!((pitch * lanes) as usize * size));
    let channels = columns * comptime!(size as u32);
    let first_channel = (column - UNIT_POS_X) * comptime!(size as u32);
    let is_there = column < columns;
    // Units beyond the last column load what is there, and write nothing.
    let of = column_of::<N>(coefficients, share.sample * columns + min(column, columns - 1));
    // The same for all units of a cube, which meet.
    let mut first = share.first_row;
    while first < end {
        // 1. A unit has a row of its column.
        let row = first + UNIT_POS_Y;
        if is_there && row < end {
            let value = x.memory[(row * x.stride + column) as usize];
            let distance = Vector::<f32, N>::cast_from(value) - of.mean;
            let normalized = distance * of.rstd;
            let place = (row * columns + column) as usize;
            out.y[place] = Vector::cast_from(normalized * of.gamma + of.beta);
            out.normalized[place] = Vector::cast_from(normalized);
            #[unroll]
            for i in 0..size {
                let at = (UNIT_POS_X * comptime!(size as u32) + comptime!(i as u32)) * pitch;
                turned[(at + UNIT_POS_Y) as usize] = distance.extract(i);
            }
        }
        sync_cube();

        // 2. Units beside each other have pixels beside each other, of one channel.
        let unit = UNIT_POS_Y * lanes + UNIT_POS_X;
        let first_pixel = first - share.sample * extent.rows;
        #[unroll]
        for i in 0..size {
            let element = unit + comptime!(i as u32 * lanes * row_lanes);
            let (channel, pixel) = (element / row_lanes, element % row_lanes);
            if first_channel + channel < channels && first + pixel < end {
                let of_sample = share.sample * channels + first_channel + channel;
                let place = of_sample * extent.rows + first_pixel + pixel;
                let value = turned[(channel * pitch + pixel) as usize];
                centered[place as usize] = I::cast_from(value);
            }
        }
        // The next rows are written to the same memory.
        sync_cube();
        first += row_lanes;
    }
}
