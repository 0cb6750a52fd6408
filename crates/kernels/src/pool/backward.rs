use super::walk::{Line, count, lanes};
use crate::{
    divisor::divide,
    pixels::{Spread, place_of},
};
use cubecl::prelude::*;

/// What a backward kernel is compiled for, beside types and vectors; of each pair, the first is for rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BackwardPlan {
    /// Whether a window's gradient goes to the pixel that its index names; otherwise each tap gets its share.
    pub(crate) by_index: bool,
    /// Whether shares are taken over the padding, too.
    pub(crate) padded: bool,
    /// Pixels of a cell: as many as windows are apart, or one.
    pub(crate) cell: [u32; 2],
    /// Whether a cell is one pixel of several that windows are apart.
    pub(crate) divides: [bool; 2],
    /// Windows that reach a cell.
    pub(crate) windows: [u32; 2],
    pub(crate) unrolled: bool,
}

/// Where a cell lies in one dimension.
#[derive(CubeType, Clone, Copy)]
struct Cell {
    /// The last window that reaches it.
    last: u32,
    /// Pixels from that window's first tap to the cell.
    within: u32,
    /// The first pixel; before the image, a number beyond its end.
    first: u32,
}

#[cube]
fn cell_at(at: u32, line: &Line, #[comptime] divides: bool) -> Cell {
    let mut last = at;
    let mut within = 0u32.runtime();
    if comptime!(divides) {
        let (window, rest) = divide(at + line.padding, &line.stride);
        last = window;
        within = rest;
    }
    Cell { last, within, first: last * line.stride.divisor + within - line.padding }
}

/// dx of a cell, a vector of channels a unit.
#[cube(launch_unchecked)]
pub(crate) fn pool_backward_kernel<I: Float, N: Size>(
    dy: &[Vector<I, N>],
    indices: &[Vector<i32, N>],
    dx: &mut [Vector<I, N>],
    spread: Spread,
    rows: Line,
    columns: Line,
    #[comptime] plan: BackwardPlan,
    #[define(I)] _dtype: ElemType,
) {
    let unit = u32::cast_from(ABSOLUTE_POS);
    if unit >= spread.units {
        terminate!();
    }
    let place = place_of(unit, &spread);
    let above = cell_at(place.row, &rows, plan.divides[0]);
    let beside = cell_at(place.column, &columns, plan.divides[1]);
    let vectors = spread.vectors.divisor;

    // 1. Each window that reaches the cell gives its gradient to the cell's pixels.
    let mut sums = Array::<Vector<f32, N>>::new(comptime!((plan.cell[0] * plan.cell[1]) as usize));
    #[unroll]
    for i in 0..comptime!(plan.cell[0] * plan.cell[1]) {
        sums[i as usize] = Vector::new(0.0f32.runtime());
    }
    #[unroll(plan.unrolled)]
    for back_row in 0..comptime!(plan.windows[0]) {
        #[unroll(plan.unrolled)]
        for back_column in 0..comptime!(plan.windows[1]) {
            // Before the first window, numbers wrap around.
            let row = above.last - back_row;
            let column = beside.last - back_column;
            let there = row < rows.windows && column < columns.windows;
            let row = min(row, rows.windows - 1);
            let column = min(column, columns.windows - 1);
            let window = (place.image * rows.windows + row) * columns.windows + column;
            let gradient = dy[(window * spread.pitch + place.vector) as usize];
            let gradient = Vector::<f32, N>::cast_from(gradient);
            if comptime!(!plan.by_index) {
                let taps = count(row, &rows, plan.padded) * count(column, &columns, plan.padded);
                let share = gradient * Vector::new(1.0f32 / f32::cast_from(taps));
                let tap_row = above.within + back_row * rows.stride.divisor;
                let tap_column = beside.within + back_column * columns.stride.divisor;
                #[unroll]
                for i in 0..comptime!(plan.cell[0]) {
                    #[unroll]
                    for j in 0..comptime!(plan.cell[1]) {
                        let has = there && tap_row + i < rows.taps && tap_column + j < columns.taps;
                        let at = comptime!((i * plan.cell[1] + j) as usize);
                        sums[at] += select_many(lanes::<N>(has), share, Vector::new(0.0f32));
                    }
                }
            } else {
                let index = indices[(window * vectors + place.vector) as usize];
                #[unroll]
                for i in 0..comptime!(plan.cell[0]) {
                    #[unroll]
                    for j in 0..comptime!(plan.cell[1]) {
                        let pixel = (above.first + i) * columns.size + beside.first + j;
                        let named = index.equal(&Vector::new(i32::cast_from(pixel)));
                        let has = named.vec_and(lanes::<N>(there));
                        let at = comptime!((i * plan.cell[1] + j) as usize);
                        sums[at] += select_many(has, gradient, Vector::new(0.0f32));
                    }
                }
            }
        }
    }

    // 2. Pixels of the cell that are inside of the image.
    #[unroll]
    for i in 0..comptime!(plan.cell[0]) {
        #[unroll]
        for j in 0..comptime!(plan.cell[1]) {
            let (row, column) = (above.first + i, beside.first + j);
            if row < rows.size && column < columns.size {
                let pixel = (place.image * rows.size + row) * columns.size + column;
                let at = comptime!((i * plan.cell[1] + j) as usize);
                dx[(pixel * vectors + place.vector) as usize] = Vector::cast_from(sums[at]);
            }
        }
    }
}
