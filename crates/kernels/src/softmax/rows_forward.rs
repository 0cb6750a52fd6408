use super::{
    blueprint::SoftmaxBlueprint,
    row_mask::{Mask, MaskForm},
};
use crate::functions::exponential_by;
use cubecl::prelude::*;

/// What a pass over rows writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SoftmaxForm {
    /// The logarithm of softmax as y.
    pub(crate) logarithms: bool,
    /// What elements lack to the largest.
    pub(crate) shifted: bool,
    /// The exponentials of that.
    pub(crate) exponentials: bool,
    /// Which elements are masked.
    pub(crate) mask: MaskForm,
    /// Dropout makes y of what is asked for as y.
    pub(crate) dropped: bool,
}

/// What dropout leaves of y: a factor for each element, in rows that far apart.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeptRows<O: Float, N: Size> {
    pub(crate) mask: Box<[Vector<O, N>]>,
    pub(crate) pitch: u32,
    pub(crate) scale: f32,
}

/// What the units of a row know together.
#[derive(CubeType, Clone, Copy)]
struct Met {
    /// The largest element.
    peak: f32,
    /// The sum of the exponentials of what the elements lack to it.
    total: f32,
}

/// Whether vector `column` of `row` exists. Rows that units share out evenly need not ask.
#[cube]
pub(super) fn is_there(
    row: u32,
    rows: u32,
    column: u32,
    columns: u32,
    #[comptime] blueprint: SoftmaxBlueprint,
) -> bool {
    let mut there = row < rows;
    if comptime!(!blueprint.even) {
        there = there && column < columns;
    }
    there
}

/// The elements of vector `column`, and `other` where the row has none.
#[cube]
pub(super) fn within_row<N: Size>(
    value: Vector<f32, N>,
    column: u32,
    classes: u32,
    other: f32,
    #[comptime] blueprint: SoftmaxBlueprint,
) -> Vector<f32, N> {
    if comptime!(blueprint.ragged) {
        let size = N::value().comptime();
        let first = column * comptime!(size as u32);
        let mut inside = Vector::<f32, N>::empty();
        #[unroll]
        for i in 0..size {
            let there = first + comptime!(i as u32) < classes;
            inside.insert(i, select(there, value.extract(i), other));
        }
        inside
    } else {
        value
    }
}

#[cube]
fn largest<N: Size>(values: Vector<f32, N>, so_far: f32) -> f32 {
    let mut peak = so_far;
    #[unroll]
    for i in 0..N::value().comptime() {
        peak = max(peak, values.extract(i));
    }
    peak
}

#[cube]
fn less_exponential<N: Size>(
    values: Vector<f32, N>,
    peak: f32,
    #[comptime] hardware: bool,
) -> Vector<f32, N> {
    let mut result = Vector::<f32, N>::empty();
    #[unroll]
    for i in 0..N::value().comptime() {
        result.insert(i, exponential_by(values.extract(i) - peak, hardware));
    }
    result
}

#[cube]
pub(super) fn sum_of<N: Size>(values: Vector<f32, N>) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for i in 0..N::value().comptime() {
        sum += values.extract(i);
    }
    sum
}

/// What all units of the row know, of which those of a plane know `plane_peak` and each its `total`,
/// relative to that. All units of the cube have to call it where rows have more than one plane.
#[cube]
fn meet(plane_peak: f32, total: f32, #[comptime] blueprint: SoftmaxBlueprint) -> Met {
    let plane = comptime!(blueprint.plane);
    let planes = comptime!(blueprint.planes);
    let hardware = comptime!(blueprint.hardware);
    let mut peak = plane_peak;
    let mut sum = total;
    if comptime!(plane > 1) {
        sum = plane_sum(total);
    }
    if comptime!(planes > 1) {
        let slots = comptime!((blueprint.planes * blueprint.rows) as usize);
        let mut peaks = Shared::<[f32]>::new_slice(slots);
        let mut sums = Shared::<[f32]>::new_slice(slots);
        let first = UNIT_POS_Y * planes;
        let lane = UNIT_POS_X % plane;
        if lane == 0 {
            let place = (first + UNIT_POS_X / plane) as usize;
            peaks[place] = peak;
            sums[place] = sum;
        }
        sync_cube();
        let mut at = lane;
        while at < planes {
            peak = max(peak, peaks[(first + at) as usize]);
            at += plane;
        }
        if comptime!(plane > 1) {
            peak = plane_max(peak);
        }
        sum = 0.0f32;
        at = lane;
        while at < planes {
            let place = (first + at) as usize;
            sum += sums[place] * exponential_by(peaks[place] - peak, hardware);
            at += plane;
        }
        if comptime!(plane > 1) {
            sum = plane_sum(sum);
        }
        // The next row's are written to the same memory.
        sync_cube();
    }
    Met { peak, total: sum }
}

/// What a pass writes; what is not asked for is not compiled in.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RowOutputs<O: Float, N: Size> {
    pub(crate) y: Box<[Vector<O, N>]>,
    pub(crate) shifted: Box<[Vector<O, N>]>,
    pub(crate) exponentials: Box<[Vector<O, N>]>,
    pub(crate) peaks: Box<[f32]>,
    pub(crate) sums: Box<[f32]>,
}

/// Rows of that many classes; columns and distances of rows count vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) rows: u32,
    pub(crate) classes: u32,
    pub(crate) columns: u32,
    pub(crate) pitch: u32,
}

/// What all vectors of a row are written with.
#[derive(CubeType, Clone, Copy)]
struct RowNumbers {
    peak: f32,
    /// The logarithm of the sum.
    log: f32,
    /// What exponentials are multiplied by.
    inverse: f32,
}

/// Writes what is known of the row.
#[cube]
fn keep<O: Float, N: Size>(met: &Met, row: u32, rows: u32, outputs: &mut RowOutputs<O, N>) {
    if UNIT_POS_X == 0 && row < rows {
        outputs.peaks[row as usize] = met.peak;
        outputs.sums[row as usize] = met.total;
    }
}

/// Writes vector `at`: its elements, their exponentials relative to `peak`, and what is common to the row. y is
/// multiplied by what is `kept`, if it is asked for.
#[cube]
fn write<O: Float, N: Size>(
    at: u32,
    values: Vector<f32, N>,
    exponentials: Vector<f32, N>,
    numbers: &RowNumbers,
    kept: Vector<f32, N>,
    outputs: &mut RowOutputs<O, N>,
    #[comptime] form: SoftmaxForm,
) {
    let less = values - Vector::new(numbers.peak);
    if comptime!(form.shifted) {
        outputs.shifted[at as usize] = Vector::cast_from(less);
    }
    if comptime!(form.exponentials) {
        outputs.exponentials[at as usize] = Vector::cast_from(exponentials);
    }
    let mut result = if comptime!(form.logarithms) {
        less - Vector::new(numbers.log)
    } else {
        exponentials * Vector::new(numbers.inverse)
    };
    if comptime!(form.dropped) {
        result *= kept;
    }
    outputs.y[at as usize] = Vector::cast_from(result);
}

/// y, and what else the form asks for; peak and sum of each row. A mask is of x, and what is kept of y. `lowest` is minus infinity, of which WGSL has no constant. Cubes lie along x.
#[cube(launch_unchecked)]
pub(crate) fn softmax_rows_kernel<F: Float, O: Float, M: Numeric, N: Size, W: Size>(
    x: &[Vector<F, N>],
    mask: &Mask<M, W>,
    kept: &KeptRows<O, N>,
    outputs: &mut RowOutputs<O, N>,
    extent: Extent,
    lowest: f32,
    #[comptime] form: SoftmaxForm,
    #[comptime] blueprint: SoftmaxBlueprint,
    #[define(F, O, M)] _types: [ElemType; 3],
) {
    let (rows, classes, columns) = (extent.rows, extent.classes, extent.columns);
    let units = comptime!(blueprint.plane * blueprint.planes);
    let vectors = comptime!(blueprint.vectors);
    let hardware = comptime!(blueprint.hardware);
    let step = CUBE_COUNT_X * comptime!(blueprint.rows);
    // The same for all units of a cube, which may have to meet.
    let mut first_row = CUBE_POS_X * comptime!(blueprint.rows);
    while first_row < rows {
        let row = first_row + UNIT_POS_Y;
        let start = row * extent.pitch;
        let mask_start = mask.row(row, form.mask);
        let masked_value = F::cast_from(mask.value);
        let kept_start = row * kept.pitch;
        // Finite, so that no difference of infinities comes of nothing.
        let mut peak = f32::min_value();
        if comptime!(vectors > 0) {
            // 1. The row goes to registers, all loads before the first use.
            let mut values = Array::<Vector<F, N>>::new(vectors);
            #[unroll]
            for v in 0..vectors {
                let column = UNIT_POS_X + comptime!(v as u32 * units);
                let mut value = Vector::<F, N>::new(F::cast_from(lowest));
                if is_there(row, rows, column, columns, blueprint) {
                    value = mask.fill::<F, N>(
                        x[(start + column) as usize],
                        masked_value,
                        mask_start,
                        column,
                        classes,
                        form.mask,
                    );
                }
                values[v] = value;
            }
            let mut factors =
                Array::<Vector<O, N>>::new(comptime!(if form.dropped { vectors } else { 1 }));
            if comptime!(form.dropped) {
                #[unroll]
                for v in 0..vectors {
                    let column = UNIT_POS_X + comptime!(v as u32 * units);
                    let mut factor = Vector::<O, N>::new(O::new(0.0));
                    if is_there(row, rows, column, columns, blueprint) {
                        factor = kept.mask[(kept_start + column) as usize];
                    }
                    factors[v] = factor;
                }
            }

            // 2. The largest that the plane has, and the exponentials of what others lack to it.
            #[unroll]
            for v in 0..vectors {
                let column = UNIT_POS_X + comptime!(v as u32 * units);
                let wide = Vector::<f32, N>::cast_from(values[v]);
                peak =
                    largest::<N>(within_row::<N>(wide, column, classes, lowest, blueprint), peak);
            }
            if comptime!(blueprint.plane > 1) {
                peak = plane_max(peak);
            }
            let mut total = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for v in 0..vectors {
                let column = UNIT_POS_X + comptime!(v as u32 * units);
                let wide = Vector::<f32, N>::cast_from(values[v]);
                let inside = within_row::<N>(wide, column, classes, lowest, blueprint);
                total += less_exponential::<N>(inside, peak, hardware);
            }

            // 3. The planes of the row meet.
            let met = meet(peak, sum_of::<N>(total), blueprint);
            keep::<O, N>(&met, row, rows, outputs);

            // 4. The result. Exponentials are computed once more, relative to the row's peak, so that no registers need keep
            // them until then.
            let log = met.total.ln();
            let inverse = 1.0f32 / met.total;
            let numbers = RowNumbers { peak: met.peak, log, inverse };
            #[unroll]
            for v in 0..vectors {
                let column = UNIT_POS_X + comptime!(v as u32 * units);
                if is_there(row, rows, column, columns, blueprint) {
                    let held = Vector::<f32, N>::cast_from(values[v]);
                    let of_vector = less_exponential::<N>(held, met.peak, hardware);
                    let mut factor = Vector::<f32, N>::new(kept.scale);
                    if comptime!(form.dropped) {
                        factor *= Vector::cast_from(factors[v]);
                    }
                    let at = start + column;
                    write::<O, N>(at, held, of_vector, &numbers, factor, outputs, form);
                }
            }
        } else {
            // 1. Each unit goes through its part, keeping the largest so far and the sum relative to it;
            // each vector is asked for before the one ahead of it is looked at.
            let mut total = 0.0f32;
            let mut column = UNIT_POS_X;
            if row < rows && column < columns {
                let mut next = x[(start + column) as usize];
                while column < columns {
                    let filled = mask.fill::<F, N>(
                        next,
                        masked_value,
                        mask_start,
                        column,
                        classes,
                        form.mask,
                    );
                    let wide = Vector::<f32, N>::cast_from(filled);
                    let inside = within_row::<N>(wide, column, classes, lowest, blueprint);
                    column += units;
                    if column < columns {
                        next = x[(start + column) as usize];
                    }
                    let before = peak;
                    peak = largest::<N>(inside, peak);
                    total = total * exponential_by(before - peak, hardware)
                        + sum_of::<N>(less_exponential::<N>(inside, peak, hardware));
                }
            }

            // 2. The units of a plane meet, and then the planes.
            if comptime!(blueprint.plane > 1) {
                let of_plane = plane_max(peak);
                total *= exponential_by(peak - of_plane, hardware);
                peak = of_plane;
            }
            let met = meet(peak, total, blueprint);

            keep::<O, N>(&met, row, rows, outputs);

            // 3. Once more, to write.
            let log = met.total.ln();
            let inverse = 1.0f32 / met.total;
            let numbers = RowNumbers { peak: met.peak, log, inverse };
            if row < rows {
                column = UNIT_POS_X;
                while column < columns {
                    let filled = mask.fill::<F, N>(
                        x[(start + column) as usize],
                        masked_value,
                        mask_start,
                        column,
                        classes,
                        form.mask,
                    );
                    let wide = Vector::<f32, N>::cast_from(filled);
                    let of_vector = less_exponential::<N>(wide, met.peak, hardware);
                    let mut factor = Vector::<f32, N>::new(kept.scale);
                    if comptime!(form.dropped) {
                        factor *= Vector::cast_from(kept.mask[(kept_start + column) as usize]);
                    }
                    let at = start + column;
                    write::<O, N>(at, wide, of_vector, &numbers, factor, outputs, form);
                    column += units;
                }
            }
        }
        first_row += step;
    }
}
