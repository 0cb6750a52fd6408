use super::{
    blueprint::Tile,
    channels::{gated, inverse_deviation, load},
};
use cubecl::prelude::*;

/// What follows normalization.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tail {
    /// A residual is added.
    pub(super) residual: bool,
    /// `ReLU` comes last.
    pub(super) relu: bool,
}

/// What a unit keeps of its channels.
#[derive(CubeType, Clone, Copy)]
struct Channels<N: Size> {
    mean: Vector<f32, N>,
    /// gamma / deviation.
    scale: Vector<f32, N>,
    beta: Vector<f32, N>,
}

/// y. `columns` and `row_stride` count vectors. Cubes: channels along x, splits along y.
#[cube(launch_unchecked)]
pub(crate) fn batch_norm_apply_kernel<I: Float, S: Float, G: Float, N: Size>(
    x: &[Vector<I, N>],
    residual: &[Vector<I, N>],
    mean: &[Vector<S, N>],
    variance: &[Vector<S, N>],
    gamma: &[Vector<G, N>],
    beta: &[Vector<G, N>],
    y: &mut [Vector<I, N>],
    rows: u32,
    columns: u32,
    row_stride: u32,
    split_rows: u32,
    epsilon: f32,
    #[comptime] tail: Tail,
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
        let of = Channels::<N> {
            mean: Vector::cast_from(mean[at]),
            scale: inverse_deviation::<S, N>(variance[at], epsilon)
                * Vector::<f32, N>::cast_from(gamma[at]),
            beta: Vector::cast_from(beta[at]),
        };
        let mut row = first_row + UNIT_POS_Y;
        #[unroll]
        for stage in 0..2usize {
            let count = comptime!(tile.counts()[stage]);
            while row + comptime!((count - 1) * tile.row_lanes) < end {
                apply_rows::<I, N>(
                    x, residual, y, &of, row, column, columns, row_stride, tail, tile, count,
                );
                row += comptime!(count * tile.row_lanes);
            }
        }
    }
}

/// y of `count` rows from `row` on, a step of row lanes apart.
#[cube]
fn apply_rows<I: Float, N: Size>(
    x: &[Vector<I, N>],
    residual: &[Vector<I, N>],
    y: &mut [Vector<I, N>],
    of: &Channels<N>,
    row: u32,
    column: u32,
    columns: u32,
    row_stride: u32,
    #[comptime] tail: Tail,
    #[comptime] tile: Tile,
    #[comptime] count: u32,
) {
    let place = row * columns + column;
    let step = comptime!(tile.row_lanes) * columns;
    let x_step = comptime!(tile.row_lanes) * row_stride;
    let values = load::<Vector<I, N>>(x, row * row_stride + column, x_step, count);
    let addends = comptime!(if tail.residual { count } else { 0 });
    let addends = load::<Vector<I, N>>(residual, place, step, addends);
    #[unroll]
    for i in 0..count {
        let distance = Vector::<f32, N>::cast_from(values[i as usize]) - of.mean;
        let mut result = distance * of.scale + of.beta;
        if comptime!(tail.residual) {
            result += Vector::<f32, N>::cast_from(addends[i as usize]);
        }
        if comptime!(tail.relu) {
            result = gated::<f32, N>(result, result);
        }
        y[(place + i * step) as usize] = Vector::cast_from(result);
    }
}
