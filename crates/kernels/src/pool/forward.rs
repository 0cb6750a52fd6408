use super::walk::{Line, count, lanes};
use crate::pixels::{Spread, place_of};
use cubecl::prelude::*;

/// What becomes of a window's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Taken {
    /// The largest.
    Max,
    /// The largest, and where it is.
    MaxAndIndex,
    /// Their mean.
    Mean,
}

/// What a forward kernel is compiled for, beside types and vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ForwardPlan {
    pub(crate) taken: Taken,
    /// Whether means are taken over the padding, too.
    pub(crate) padded: bool,
    pub(crate) taps: [u32; 2],
    pub(crate) unrolled: bool,
}

/// What a unit has seen of its window.
#[derive(CubeType, Clone, Copy)]
struct Seen<N: Size> {
    /// The largest number so far, or the sum.
    value: Vector<f32, N>,
    /// Where the largest is.
    index: Vector<i32, N>,
    /// Whether no tap was inside so far.
    none: bool,
}

/// y of a window, a vector of channels a unit. `lowest` is negative infinity, which WGSL has no word for.
#[cube(launch_unchecked)]
pub(crate) fn pool_forward_kernel<I: Float, N: Size>(
    x: &[Vector<I, N>],
    y: &mut [Vector<I, N>],
    indices: &mut [Vector<i32, N>],
    spread: Spread,
    rows: Line,
    columns: Line,
    lowest: f32,
    #[comptime] plan: ForwardPlan,
    #[define(I)] _dtype: ElemType,
) {
    let unit = u32::cast_from(ABSOLUTE_POS);
    if unit >= spread.units {
        terminate!();
    }
    let place = place_of(unit, &spread);
    let image = place.image * rows.size;
    // Positions outside of the image wrap around to numbers beyond its end.
    let top = place.row * rows.stride.divisor - rows.padding;
    let left = place.column * columns.stride.divisor - columns.padding;

    let is_max = comptime!(plan.taken != Taken::Mean);
    let start = if comptime!(is_max) { lowest } else { 0.0f32.runtime() };
    let mut seen = Seen::<N> {
        value: Vector::new(start),
        index: Vector::new((-1i32).runtime()),
        none: true.runtime(),
    };
    #[unroll(plan.unrolled)]
    for tap_row in 0..comptime!(plan.taps[0]) {
        #[unroll(plan.unrolled)]
        for tap_column in 0..comptime!(plan.taps[1]) {
            let row = top + tap_row * rows.dilation;
            let column = left + tap_column * columns.dilation;
            let inside = row < rows.size && column < columns.size;
            // A load without a condition: see the module.
            let pixel =
                (image + min(row, rows.size - 1)) * columns.size + min(column, columns.size - 1);
            let value = x[(pixel * spread.pitch + place.vector) as usize];
            let value = Vector::<f32, N>::cast_from(value);
            if comptime!(is_max) {
                let index = i32::cast_from(row * columns.size + column);
                take_larger::<N>(&mut seen, value, index, inside);
            } else {
                seen.value += select_many(lanes::<N>(inside), value, Vector::new(0.0f32));
            }
        }
    }

    if comptime!(plan.taken == Taken::MaxAndIndex) {
        indices[unit as usize] = seen.index;
    }
    let mut result = seen.value;
    if comptime!(!is_max) {
        let count =
            count(place.row, &rows, plan.padded) * count(place.column, &columns, plan.padded);
        result = seen.value * Vector::new(1.0f32 / f32::cast_from(count));
    }
    y[unit as usize] = Vector::cast_from(result);
}

/// Keeps the larger one. The first tap that is inside is taken whatever it is, and so is NaN.
#[cube]
fn take_larger<N: Size>(seen: &mut Seen<N>, value: Vector<f32, N>, index: i32, inside: bool) {
    let larger = value.greater_than(&seen.value).or(value.is_nan()).or(lanes::<N>(seen.none));
    let takes = larger.vec_and(lanes::<N>(inside));
    seen.value = select_many(takes, value, seen.value);
    seen.index = select_many(takes, Vector::new(index), seen.index);
    seen.none = seen.none && !inside;
}
