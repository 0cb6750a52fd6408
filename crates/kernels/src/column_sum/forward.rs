use super::blueprint::{ROW_LANES, VECTOR_LANES};
use cubecl::prelude::*;

/// Rows that a unit asks for before it adds the first: one after the other they would take the latency of memory each.
const ROWS_AT_ONCE: usize = 4;

/// `y[o, s, c]` is the sum of `x[o, r, c]`, or of `(x[o, r, c] - means[o, c])^2` if `squares`, over the rows r of split s,
/// times `factor`; strides and `columns` count vectors. Cubes: columns along x, splits along y, outer along z.
#[cube(launch_unchecked)]
pub(crate) fn column_sum_kernel<I: Float, O: Float, N: Size>(
    x: &[Vector<I, N>],
    means: &[Vector<I, N>],
    y: &mut [Vector<O, N>],
    rows: u32,
    columns: u32,
    outer_stride: u32,
    row_stride: u32,
    factor: f32,
    #[comptime] squares: bool,
    #[define(I)] _input: ElemType,
    #[define(O)] _output: ElemType,
) {
    let column = CUBE_POS_X * VECTOR_LANES + UNIT_POS_X;

    // 1. Each unit adds up its rows.
    let mut sum = Vector::<f32, N>::new(0.0f32);
    if column < columns {
        sum = sum_of_rows::<I, N>(
            x,
            means,
            CUBE_POS_Z * outer_stride + column,
            CUBE_POS_Z * columns + column,
            CUBE_POS_Y * ROW_LANES + UNIT_POS_Y,
            CUBE_COUNT_Y * ROW_LANES,
            rows,
            row_stride,
            squares,
            ROWS_AT_ONCE,
        );
    }

    // 2. The units of a column meet.
    write_cube_sum::<O, N>(sum * Vector::new(factor), y, column, columns);
}

/// The sum of every `step`-th row of a column from row `first` on. The column begins at `origin`, its mean is at `place`.
#[cube]
pub(super) fn sum_of_rows<I: Float, N: Size>(
    x: &[Vector<I, N>],
    means: &[Vector<I, N>],
    origin: u32,
    place: u32,
    first: u32,
    step: u32,
    rows: u32,
    row_stride: u32,
    #[comptime] squares: bool,
    #[comptime] at_once: usize,
) -> Vector<f32, N> {
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut row = first;
    // What rows beyond the end count as.
    let mut nothing = Vector::<I, N>::new(I::new(0.0));
    if comptime!(squares) {
        nothing = means[place as usize];
    }
    let mean = Vector::<f32, N>::cast_from(nothing);
    while row < rows {
        let mut found = Array::<Vector<I, N>>::new(at_once);
        #[unroll]
        for i in 0..at_once {
            let this = row + comptime!(i as u32) * step;
            found[i] = nothing;
            if this < rows {
                found[i] = x[(origin + this * row_stride) as usize];
            }
        }
        #[unroll]
        for i in 0..at_once {
            let value = Vector::<f32, N>::cast_from(found[i]);
            sum += if comptime!(squares) {
                let distance = value - mean;
                distance * distance
            } else {
                value
            };
        }
        row += comptime!(at_once as u32) * step;
    }
    sum
}

/// Adds up what the units of a column hold, and writes it to the place of this cube's split: `y` is
/// `[outer, splits, columns]`, in vectors. All units of the cube have to call it.
#[cube]
pub(crate) fn write_cube_sum<O: Float, N: Size>(
    sum: Vector<f32, N>,
    y: &mut [Vector<O, N>],
    column: u32,
    columns: u32,
) {
    let lanes = comptime!((VECTOR_LANES * ROW_LANES) as usize);
    let mut partial = Shared::<[Vector<f32, N>]>::new_slice(lanes);
    partial[(UNIT_POS_Y * VECTOR_LANES + UNIT_POS_X) as usize] = sum;
    sync_cube();
    if UNIT_POS_Y == 0 && column < columns {
        let mut total = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for lane in 0..ROW_LANES {
            total += partial[(lane * VECTOR_LANES + UNIT_POS_X) as usize];
        }
        let index = (CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) * columns + column;
        y[index as usize] = Vector::cast_from(total);
    }
}
