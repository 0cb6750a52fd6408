use super::{
    blueprint::Tile,
    channels::{
        Extent, Merge, One, Part, Partials, Statistics, StridedRows, gated, inverse_deviation,
        load, merge_splits, no_rows, share, write_part,
    },
};
use cubecl::prelude::*;

/// Of each split and channel the sums of the gradient, and of its product with the distance from the mean.
/// `columns` and strides count vectors; y is read after a `ReLU`. Cubes: channels along x, splits along y.
#[cube(launch_unchecked)]
pub(crate) fn batch_norm_sums_kernel<I: Float, S: Float, N: Size>(
    read: &BackwardRows<Vector<I, N>>,
    mean: &[Vector<S, N>],
    partials: &mut [Vector<f32, N>],
    extent: Extent,
    #[comptime] tile: Tile,
    #[define(I, S)] _types: [ElemType; 2],
) {
    let share = share(&extent, tile);
    let (column, first_row, end) = (share.column, share.first_row, share.end);

    // 1. Each unit adds up its rows.
    let mut part = no_rows::<N>();
    if column < extent.columns {
        let center = Vector::<f32, N>::cast_from(mean[column as usize]);
        let mut row = first_row + UNIT_POS_Y;
        #[unroll]
        for stage in 0..2usize {
            let count = comptime!(tile.counts()[stage]);
            while row + comptime!((count - 1) * tile.row_lanes) < end {
                let loaded = load_rows::<I, N>(read, row, column, extent.columns, tile, count);
                add_rows::<I, N>(&mut part, &loaded, center, count);
                row += comptime!(count * tile.row_lanes);
            }
        }
    }

    // 2. The units of a channel meet.
    write_part::<N>(&mut part, partials, column, extent.columns, Merge::Sums, tile);
}

/// What both kernels over rows read.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct BackwardRows<T: CubePrimitive> {
    pub(crate) x: StridedRows<T>,
    pub(crate) dy: StridedRows<T>,
    /// Contiguous rows, which are read after a `ReLU`.
    pub(crate) y: Box<[T]>,
    #[cube(comptime)]
    pub(crate) relu: bool,
}

/// What a unit has loaded of some rows.
#[derive(CubeType)]
struct Loaded<I: Float, N: Size> {
    x: Array<Vector<I, N>>,
    dy: Array<Vector<I, N>>,
    /// Empty where no `ReLU` came last.
    y: Array<Vector<I, N>>,
    #[cube(comptime)]
    relu: bool,
}

/// `count` rows from `row` on, a step of row lanes apart; all loads before the first is used.
#[cube]
fn load_rows<I: Float, N: Size>(
    read: &BackwardRows<Vector<I, N>>,
    row: u32,
    column: u32,
    columns: u32,
    #[comptime] tile: Tile,
    #[comptime] count: u32,
) -> Loaded<I, N> {
    let lanes = comptime!(tile.row_lanes);
    let of_y = comptime!(if read.relu { count } else { 0 });
    let (x, dy) = (&read.x, &read.dy);
    Loaded::<I, N> {
        x: load::<Vector<I, N>>(&x.memory, row * x.stride + column, lanes * x.stride, count),
        dy: load::<Vector<I, N>>(&dy.memory, row * dy.stride + column, lanes * dy.stride, count),
        y: load::<Vector<I, N>>(&read.y, row * columns + column, lanes * columns, of_y),
        relu: comptime!(read.relu),
    }
}

/// The gradient of what `ReLU` took, or without one dy.
#[cube]
fn gradient<I: Float, N: Size>(loaded: &Loaded<I, N>, #[comptime] i: u32) -> Vector<f32, N> {
    let mut result = Vector::<f32, N>::cast_from(loaded.dy[i as usize]);
    if comptime!(loaded.relu) {
        result = gated::<I, N>(result, loaded.y[i as usize]);
    }
    result
}

#[cube]
fn add_rows<I: Float, N: Size>(
    part: &mut Part<N>,
    loaded: &Loaded<I, N>,
    center: Vector<f32, N>,
    #[comptime] count: u32,
) {
    #[unroll]
    for i in 0..count {
        let grad = gradient::<I, N>(loaded, i);
        let distance = Vector::<f32, N>::cast_from(loaded.x[i as usize]) - center;
        part.first += grad;
        part.second += grad * distance;
    }
}

/// dbeta and dgamma from what the splits have: rounded, and before that in `sums`, `[2, channels]`. Cubes:
/// channels along x.
#[cube(launch_unchecked)]
pub(crate) fn batch_norm_merge_sums_kernel<S: Float, G: Float>(
    partials: &Partials,
    variance: &[S],
    sums: &mut [f32],
    dgamma: &mut [G],
    dbeta: &mut [G],
    epsilon: f32,
    #[comptime] tile: Tile,
    #[define(S, G)] _types: [ElemType; 2],
) {
    let channel = CUBE_POS_X * tile.lanes + UNIT_POS_X;
    let part = merge_splits(partials, channel, Merge::Sums, tile);
    if UNIT_POS_Y == 0 && channel < partials.channels {
        let of = Vector::<S, One>::new(variance[channel as usize]);
        let scale = inverse_deviation::<S, One>(of, epsilon);
        let plain = part.first.extract(0usize);
        let weighted = (part.second * scale).extract(0usize);
        sums[channel as usize] = plain;
        sums[(partials.channels + channel) as usize] = weighted;
        dbeta[channel as usize] = G::cast_from(plain);
        dgamma[channel as usize] = G::cast_from(weighted);
    }
}

/// What a unit keeps of its channels: `dx = scale (g - plain - (x - mean) weighted)`.
#[derive(CubeType, Clone, Copy)]
struct Channels<N: Size> {
    mean: Vector<f32, N>,
    scale: Vector<f32, N>,
    plain: Vector<f32, N>,
    weighted: Vector<f32, N>,
}

/// dx, and after a `ReLU` what passes it, where that is asked for. `columns` and strides count vectors; `sums`
/// are `[2, columns]`. Cubes: channels along x, splits along y.
#[cube(launch_unchecked)]
pub(crate) fn batch_norm_input_gradient_kernel<I: Float, S: Float, G: Float, N: Size>(
    read: &BackwardRows<Vector<I, N>>,
    statistics: &Statistics<Vector<S, N>>,
    gamma: &[Vector<G, N>],
    sums: &[Vector<f32, N>],
    dx: &mut [Vector<I, N>],
    dresidual: &mut [Vector<I, N>],
    extent: Extent,
    of_rows: f32,
    #[comptime] residual: bool,
    #[comptime] tile: Tile,
    #[define(I, S, G)] _types: [ElemType; 3],
) {
    let share = share(&extent, tile);
    let (column, first_row, end) = (share.column, share.first_row, share.end);
    let columns = extent.columns;
    if column < columns {
        let at = column as usize;
        let rstd = inverse_deviation::<S, N>(statistics.variance[at], statistics.epsilon);
        let of_rows = Vector::<f32, N>::new(of_rows);
        let of = Channels::<N> {
            mean: Vector::cast_from(statistics.mean[at]),
            scale: rstd * Vector::<f32, N>::cast_from(gamma[at]),
            plain: sums[at] * of_rows,
            weighted: sums[(columns + column) as usize] * of_rows * rstd,
        };
        let mut row = first_row + UNIT_POS_Y;
        // One row at a time: registers are left for no more, beside four numbers of each channel.
        while row < end {
            let loaded = load_rows::<I, N>(read, row, column, columns, tile, 1u32);
            let grad = gradient::<I, N>(&loaded, 0u32);
            let distance = Vector::<f32, N>::cast_from(loaded.x[0usize]) - of.mean;
            let result = (grad - of.plain - distance * of.weighted) * of.scale;
            let place = (row * columns + column) as usize;
            dx[place] = Vector::cast_from(result);
            if comptime!(residual) {
                dresidual[place] = Vector::cast_from(grad);
            }
            row += tile.row_lanes;
        }
    }
}
