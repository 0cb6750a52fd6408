use crate::{
    divisor::{Divisor, divide},
    pixels::{Spread, place_of},
};
use cubecl::prelude::*;

/// Keys' parameter: the slope of the cubic one pixel away.
const A: f32 = -0.75;

/// What an output gives to the pixels around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Filter {
    /// All to the pixel that it lies in.
    Nearest,
    Linear,
    Cubic,
}

impl Filter {
    /// Pixels from an output to the first that it gives nothing.
    fn radius(self) -> i32 {
        match self {
            Self::Nearest | Self::Linear => 1,
            Self::Cubic => 2,
        }
    }
}

/// One dimension: output o lies at `(o scale + offset) / divisor` between the pixels.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Axis {
    pub(crate) pixels: u32,
    pub(crate) outputs: u32,
    pub(crate) scale: Divisor,
    pub(crate) offset: i32,
    pub(crate) divisor: i32,
    /// One over the divisor.
    pub(crate) step: f32,
}

/// The first output whose place times the divisor is not below `from`; their number where there is none.
#[cube]
fn first_output(from: i32, axis: &Axis) -> u32 {
    let ahead = u32::cast_from(max(from - axis.offset, 0i32));
    let (first, _within) = divide(ahead + axis.scale.divisor - 1, &axis.scale);
    min(first, axis.outputs)
}

/// The first output that touches a pixel, and the one behind the last.
#[cube]
fn outputs_of(pixel: u32, axis: &Axis, #[comptime] filter: Filter) -> (u32, u32) {
    let place = i32::cast_from(pixel) * axis.divisor;
    let end = place + comptime!(filter.radius()) * axis.divisor;
    let mut first = place;
    if comptime!(filter != Filter::Nearest) {
        first += 1i32 - comptime!(filter.radius()) * axis.divisor;
    }
    (first_output(first, axis), first_output(end, axis))
}

/// The filter at a distance, in pixels.
#[cube]
fn filtered(distance: f32, #[comptime] filter: Filter) -> f32 {
    let far = distance.abs();
    if comptime!(filter == Filter::Cubic) {
        let near = 1.0f32 - far * far * (comptime!(A + 3.0) - comptime!(A + 2.0) * far);
        // Both differences are exact where the result counts.
        let left = 2.0f32 - far;
        let beyond = comptime!(A) * (far - 1.0f32) * left * left;
        select(far <= 1.0f32, near, select(far < 2.0f32, beyond, 0.0f32))
    } else {
        max(1.0f32 - far, 0.0f32)
    }
}

/// How far an output lies behind a pixel, times the divisor.
#[cube]
fn distance(output: u32, pixel: u32, axis: &Axis) -> i32 {
    let place = i32::cast_from(output * axis.scale.divisor) + axis.offset;
    place - i32::cast_from(pixel) * axis.divisor
}

/// Whether an output so far from a pixel that it touches gives it something: the cubic is zero one pixel away.
#[cube]
fn counts(distance: i32, axis: &Axis, #[comptime] filter: Filter) -> bool {
    if comptime!(filter == Filter::Cubic) {
        distance != axis.divisor && distance != -axis.divisor
    } else {
        true.runtime()
    }
}

/// What part of an output's gradient belongs to a pixel so far from it. The pixels at the ends have the taps beyond
/// the image, too.
#[cube]
fn weight(distance: i32, pixel: u32, axis: &Axis, #[comptime] filter: Filter) -> f32 {
    let distance = f32::cast_from(distance) * axis.step;
    let mut weight = filtered(distance, filter);
    if pixel == 0 {
        #[unroll]
        for beyond in 1..=comptime!(filter.radius()) {
            weight += filtered(distance + comptime!(beyond as f32), filter);
        }
    }
    if pixel + 1 == axis.pixels {
        #[unroll]
        for beyond in 1..=comptime!(filter.radius()) {
            weight += filtered(distance - comptime!(beyond as f32), filter);
        }
    }
    weight
}

/// dx, a vector of channels of a pixel a unit.
#[cube(launch_unchecked)]
pub(crate) fn interpolate_backward_kernel<I: Float, N: Size>(
    dy: &[Vector<I, N>],
    dx: &mut [Vector<I, N>],
    spread: Spread,
    rows: Axis,
    columns: Axis,
    #[comptime] filters: [Filter; 2],
    #[define(I)] _dtype: ElemType,
) {
    let unit = u32::cast_from(ABSOLUTE_POS);
    if unit >= spread.units {
        terminate!();
    }
    let place = place_of(unit, &spread);
    let (top, bottom) = outputs_of(place.row, &rows, filters[0]);
    let (left, right) = outputs_of(place.column, &columns, filters[1]);
    let mut sum = Vector::<f32, N>::new(0.0f32.runtime());
    for row in top..bottom {
        let above = distance(row, place.row, &rows);
        if counts(above, &rows, filters[0]) {
            // 1. What the outputs of a row give.
            let line = (place.image * rows.outputs + row) * columns.outputs;
            let mut along = Vector::<f32, N>::new(0.0f32.runtime());
            for column in left..right {
                let beside = distance(column, place.column, &columns);
                if counts(beside, &columns, filters[1]) {
                    let gradient = dy[((line + column) * spread.pitch + place.vector) as usize];
                    let gradient = Vector::<f32, N>::cast_from(gradient);
                    if comptime!(filters[1] == Filter::Nearest) {
                        along += gradient;
                    } else {
                        let share = weight(beside, place.column, &columns, filters[1]);
                        along += gradient * Vector::new(share);
                    }
                }
            }
            // 2. What the row gives.
            if comptime!(filters[0] == Filter::Nearest) {
                sum += along;
            } else {
                sum += along * Vector::new(weight(above, place.row, &rows, filters[0]));
            }
        }
    }
    dx[unit as usize] = Vector::cast_from(sum);
}
