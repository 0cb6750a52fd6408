use super::{
    blueprint::Tile,
    channels::{
        Merge, One, Part, gated, inverse_deviation, load, merge_splits, no_rows, write_part,
    },
};
use cubecl::prelude::*;

/// Of each split and channel the sums of the gradient, and of its product with the distance from the mean.
/// `columns` and strides count vectors; y is read after a `ReLU`. Cubes: channels along x, splits along y.
#[cube(launch_unchecked)]
pub(crate) fn batch_norm_sums_kernel<I: Float, S: Float, N: Size>(
    x: &[Vector<I, N>],
    dy: &[Vector<I, N>],
    y: &[Vector<I, N>],
    mean: &[Vector<S, N>],
    partials: &mut [Vector<f32, N>],
    rows: u32,
    columns: u32,
    row_stride: u32,
    dy_stride: u32,
    split_rows: u32,
    #[comptime] relu: bool,
    #[comptime] tile: Tile,
    #[define(I)] _dtype: ElemType,
    #[define(S)] _statistics: ElemType,
) {
    let column = CUBE_POS_X * tile.lanes + UNIT_POS_X;
    let first_row = CUBE_POS_Y * split_rows;
    let end = first_row + min(rows - first_row, split_rows);

    // 1. Each unit adds up its rows.
    let mut part = no_rows::<N>();
    if column < columns {
        let center = Vector::<f32, N>::cast_from(mean[column as usize]);
        let mut row = first_row + UNIT_POS_Y;
        #[unroll]
        for stage in 0..2usize {
            let count = comptime!(tile.counts()[stage]);
            while row + comptime!((count - 1) * tile.row_lanes) < end {
                let rows = load_rows::<I, N>(
                    x, dy, y, row, column, columns, row_stride, dy_stride, relu, tile, count,
                );
                add_rows::<I, N>(&mut part, &rows, center, relu, count);
                row += comptime!(count * tile.row_lanes);
            }
        }
    }

    // 2. The units of a channel meet.
    write_part::<N>(&mut part, partials, column, columns, Merge::Sums, tile);
}

/// What a unit loads of some rows.
#[derive(CubeType)]
struct Rows<I: Float, N: Size> {
    x: Array<Vector<I, N>>,
    dy: Array<Vector<I, N>>,
    /// Empty where no `ReLU` came last.
    y: Array<Vector<I, N>>,
}

/// `count` rows from `row` on, a step of row lanes apart; all loads before the first is used.
#[cube]
fn load_rows<I: Float, N: Size>(
    x: &[Vector<I, N>],
    dy: &[Vector<I, N>],
    y: &[Vector<I, N>],
    row: u32,
    column: u32,
    columns: u32,
    row_stride: u32,
    dy_stride: u32,
    #[comptime] relu: bool,
    #[comptime] tile: Tile,
    #[comptime] count: u32,
) -> Rows<I, N> {
    let lanes = comptime!(tile.row_lanes);
    let of_y = comptime!(if relu { count } else { 0 });
    Rows::<I, N> {
        x: load::<Vector<I, N>>(x, row * row_stride + column, lanes * row_stride, count),
        dy: load::<Vector<I, N>>(dy, row * dy_stride + column, lanes * dy_stride, count),
        y: load::<Vector<I, N>>(y, row * columns + column, lanes * columns, of_y),
    }
}

/// The gradient of what `ReLU` took, or without one dy.
#[cube]
fn gradient<I: Float, N: Size>(
    rows: &Rows<I, N>,
    #[comptime] i: u32,
    #[comptime] relu: bool,
) -> Vector<f32, N> {
    let mut result = Vector::<f32, N>::cast_from(rows.dy[i as usize]);
    if comptime!(relu) {
        result = gated::<I, N>(result, rows.y[i as usize]);
    }
    result
}

#[cube]
fn add_rows<I: Float, N: Size>(
    part: &mut Part<N>,
    rows: &Rows<I, N>,
    center: Vector<f32, N>,
    #[comptime] relu: bool,
    #[comptime] count: u32,
) {
    #[unroll]
    for i in 0..count {
        let grad = gradient::<I, N>(rows, i, relu);
        let distance = Vector::<f32, N>::cast_from(rows.x[i as usize]) - center;
        part.first += grad;
        part.second += grad * distance;
    }
}

/// dbeta and dgamma from what the splits have: rounded, and before that in `sums`, `[2, channels]`. Cubes:
/// channels along x.
#[cube(launch_unchecked)]
pub(crate) fn batch_norm_merge_sums_kernel<S: Float, G: Float>(
    partials: &[f32],
    variance: &[S],
    sums: &mut [f32],
    dgamma: &mut [G],
    dbeta: &mut [G],
    channels: u32,
    splits: u32,
    rows: u32,
    split_rows: u32,
    epsilon: f32,
    #[comptime] tile: Tile,
    #[define(S)] _statistics: ElemType,
    #[define(G)] _parameter: ElemType,
) {
    let channel = CUBE_POS_X * tile.lanes + UNIT_POS_X;
    let merge = comptime!(Merge::Sums);
    let part = merge_splits(partials, channel, channels, splits, rows, split_rows, merge, tile);
    if UNIT_POS_Y == 0 && channel < channels {
        let of = Vector::<S, One>::new(variance[channel as usize]);
        let scale = inverse_deviation::<S, One>(of, epsilon);
        let plain = part.first.extract(0usize);
        let weighted = (part.second * scale).extract(0usize);
        sums[channel as usize] = plain;
        sums[(channels + channel) as usize] = weighted;
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
    x: &[Vector<I, N>],
    dy: &[Vector<I, N>],
    y: &[Vector<I, N>],
    mean: &[Vector<S, N>],
    variance: &[Vector<S, N>],
    gamma: &[Vector<G, N>],
    sums: &[Vector<f32, N>],
    dx: &mut [Vector<I, N>],
    dresidual: &mut [Vector<I, N>],
    rows: u32,
    columns: u32,
    row_stride: u32,
    dy_stride: u32,
    split_rows: u32,
    epsilon: f32,
    of_rows: f32,
    #[comptime] relu: bool,
    #[comptime] residual: bool,
    #[comptime] tile: Tile,
    #[define(I)] _dtype: ElemType,
    #[define(S)] _statistics: ElemType,
    #[define(G)] _parameter: ElemType,
) {
    let column = CUBE_POS_X * tile.lanes + UNIT_POS_X;
    let first_row = CUBE_POS_Y * split_rows;
    let end = first_row + min(rows - first_row, split_rows);
    if column < columns {
        let at = column as usize;
        let rstd = inverse_deviation::<S, N>(variance[at], epsilon);
        let of_rows = Vector::<f32, N>::new(of_rows);
        let of = Channels::<N> {
            mean: Vector::cast_from(mean[at]),
            scale: rstd * Vector::<f32, N>::cast_from(gamma[at]),
            plain: sums[at] * of_rows,
            weighted: sums[(columns + column) as usize] * of_rows * rstd,
        };
        let mut row = first_row + UNIT_POS_Y;
        // One row at a time: registers are left for no more, beside four numbers of each channel.
        while row < end {
            let loaded = load_rows::<I, N>(
                x, dy, y, row, column, columns, row_stride, dy_stride, relu, tile, 1u32,
            );
            let grad = gradient::<I, N>(&loaded, 0u32, relu);
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
