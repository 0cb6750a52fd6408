use super::blueprint::UNITS;
use cubecl::prelude::*;

/// `y[r, s] = factor` times the sum of `x[r, c]`, or of `(x[r, c] - means[r])^2` if `squares`, over the columns of split s;
/// `columns` and `pitch` count vectors. Rows lie along x, splits along y. A cube has `lanes` units along a row and the
/// others along rows.
#[cube(launch_unchecked)]
pub(crate) fn row_sum_kernel<I: Float, O: Float, N: Size>(
    x: &[Vector<I, N>],
    means: &[I],
    y: &mut [O],
    rows: u32,
    columns: u32,
    pitch: u32,
    factor: f32,
    #[comptime] lanes: u32,
    #[comptime] squares: bool,
    #[define(I)] _input: ElemType,
    #[define(O)] _output: ElemType,
) {
    let row = CUBE_POS_X * CUBE_DIM_Y + UNIT_POS_Y;

    // 1. Each unit adds up its part of the row.
    let mut sum = Vector::<f32, N>::new(0.0f32);
    if row < rows {
        let mut column = CUBE_POS_Y * lanes + UNIT_POS_X;
        let step = CUBE_COUNT_Y * lanes;
        let mut mean = Vector::<f32, N>::new(0.0f32);
        if comptime!(squares) {
            mean = Vector::new(f32::cast_from(means[row as usize]));
        }
        while column < columns {
            let value = Vector::<f32, N>::cast_from(x[(row * pitch + column) as usize]) - mean;
            sum += if comptime!(squares) { value * value } else { value };
            column += step;
        }
    }
    let mut total = 0.0f32;
    #[unroll]
    for lane in 0..N::value().comptime() {
        total += sum.extract(lane);
    }

    // 2. The units of a row meet.
    let units = comptime!(UNITS as usize);
    let mut partial = Shared::<[f32]>::new_slice(units);
    let place = UNIT_POS_Y * lanes + UNIT_POS_X;
    partial[place as usize] = total;
    sync_cube();
    #[unroll]
    for halving in 0..comptime!(lanes.ilog2()) {
        let width = comptime!(lanes >> (halving + 1));
        if UNIT_POS_X < width {
            let other = partial[(place + width) as usize];
            partial[place as usize] += other;
        }
        sync_cube();
    }
    if UNIT_POS_X == 0 && row < rows {
        y[(row * CUBE_COUNT_Y + CUBE_POS_Y) as usize] =
            O::cast_from(partial[place as usize] * factor);
    }
}
