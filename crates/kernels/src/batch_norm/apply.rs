use super::{
    blueprint::Tile,
    channels::{Extent, Statistics, StridedRows, gated, inverse_deviation, load, share},
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

/// y. Strides and columns count vectors. Cubes: channels along x, splits along y.
#[cube(launch_unchecked)]
pub(crate) fn batch_norm_apply_kernel<I: Float, S: Float, G: Float, N: Size>(
    x: &StridedRows<Vector<I, N>>,
    residual: &[Vector<I, N>],
    statistics: &Statistics<Vector<S, N>>,
    gamma: &[Vector<G, N>],
    beta: &[Vector<G, N>],
    y: &mut [Vector<I, N>],
    extent: Extent,
    #[comptime] tail: Tail,
    #[comptime] tile: Tile,
    #[define(I, S, G)] _types: [ElemType; 3],
) {
    let share = share(&extent, tile);
    let (column, first_row, end) = (share.column, share.first_row, share.end);
    if column < extent.columns {
        let at = column as usize;
        let of = Channels::<N> {
            mean: Vector::cast_from(statistics.mean[at]),
            scale: inverse_deviation::<S, N>(statistics.variance[at], statistics.epsilon)
                * Vector::<f32, N>::cast_from(gamma[at]),
            beta: Vector::cast_from(beta[at]),
        };
        let mut row = first_row + UNIT_POS_Y;
        #[unroll]
        for stage in 0..2usize {
            let count = comptime!(tile.counts()[stage]);
            while row + comptime!((count - 1) * tile.row_lanes) < end {
                let columns = extent.columns;
                apply_rows::<I, N>(x, residual, y, &of, row, column, columns, tail, tile, count);
                row += comptime!(count * tile.row_lanes);
            }
        }
    }
}

/// y of `count` rows from `row` on, a step of row lanes apart.
#[cube]
fn apply_rows<I: Float, N: Size>(
    x: &StridedRows<Vector<I, N>>,
    residual: &[Vector<I, N>],
    y: &mut [Vector<I, N>],
    of: &Channels<N>,
    row: u32,
    column: u32,
    columns: u32,
    #[comptime] tail: Tail,
    #[comptime] tile: Tile,
    #[comptime] count: u32,
) {
    let place = row * columns + column;
    let step = comptime!(tile.row_lanes) * columns;
    let x_step = comptime!(tile.row_lanes) * x.stride;
    let values = load::<Vector<I, N>>(&x.memory, row * x.stride + column, x_step, count);
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
