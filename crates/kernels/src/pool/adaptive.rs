use crate::{
    divisor::{Divisor, divide},
    pixels::{Spread, place_of},
};
use cubecl::prelude::*;

/// One dimension: what is read, and what is written.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Parts {
    pub(crate) read: Divisor,
    pub(crate) written: Divisor,
}

/// The first of `from` that touches part `at` of `to`, and the one behind the last.
#[cube]
fn range(at: u32, from: &Divisor, to: &Divisor) -> (u32, u32) {
    let (first, _within) = divide(at * from.divisor, to);
    let (end, _within) = divide((at + 1) * from.divisor + to.divisor - 1, to);
    (first, end)
}

/// The mean of each window; or with `gradient`, what the windows that a pixel is in give it. A window's range of
/// pixels and a pixel's range of windows are the same formula, with the sizes in each other's place.
#[cube(launch_unchecked)]
pub(crate) fn pool_adaptive_kernel<I: Float, N: Size>(
    from: &[Vector<I, N>],
    to: &mut [Vector<I, N>],
    spread: Spread,
    rows: Parts,
    columns: Parts,
    #[comptime] gradient: bool,
    #[define(I)] _dtype: ElemType,
) {
    let unit = u32::cast_from(ABSOLUTE_POS);
    if unit >= spread.units {
        terminate!();
    }
    let place = place_of(unit, &spread);
    let (top, bottom) = range(place.row, &rows.read, &rows.written);
    let (left, right) = range(place.column, &columns.read, &columns.written);
    let mut sum = Vector::<f32, N>::new(0.0f32.runtime());
    for row in top..bottom {
        let line = (place.image * rows.read.divisor + row) * columns.read.divisor;
        for column in left..right {
            let value = from[((line + column) * spread.pitch + place.vector) as usize];
            let value = Vector::<f32, N>::cast_from(value);
            if comptime!(gradient) {
                let (first_row, end_row) = range(row, &rows.written, &rows.read);
                let (first_column, end_column) = range(column, &columns.written, &columns.read);
                let pixels = (end_row - first_row) * (end_column - first_column);
                sum += value * Vector::new(1.0f32 / f32::cast_from(pixels));
            } else {
                sum += value;
            }
        }
    }
    if comptime!(!gradient) {
        let pixels = (bottom - top) * (right - left);
        sum *= Vector::new(1.0f32 / f32::cast_from(pixels));
    }
    to[unit as usize] = Vector::cast_from(sum);
}
