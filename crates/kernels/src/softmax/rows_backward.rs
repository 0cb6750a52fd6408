use super::{
    blueprint::SoftmaxBlueprint,
    row_mask::{Mask, MaskForm},
    rows_forward::{Extent, is_there, sum_of, within_row},
};
use cubecl::prelude::*;

/// The sum of what the units of a row hold, which each of them gets. All units of the cube have to call it
/// where rows have more than one plane.
#[cube]
fn row_sum(value: f32, #[comptime] blueprint: SoftmaxBlueprint) -> f32 {
    let plane = comptime!(blueprint.plane);
    let planes = comptime!(blueprint.planes);
    let mut sum = value;
    if comptime!(plane > 1) {
        sum = plane_sum(value);
    }
    if comptime!(planes > 1) {
        let slots = comptime!((blueprint.planes * blueprint.rows) as usize);
        let mut sums = Shared::<[f32]>::new_slice(slots);
        let first = UNIT_POS_Y * planes;
        let lane = UNIT_POS_X % plane;
        if lane == 0 {
            sums[(first + UNIT_POS_X / plane) as usize] = sum;
        }
        sync_cube();
        sum = 0.0f32;
        let mut at = lane;
        while at < planes {
            sum += sums[(first + at) as usize];
            at += plane;
        }
        if comptime!(plane > 1) {
            sum = plane_sum(sum);
        }
        // The next row's are written to the same memory.
        sync_cube();
    }
    sum
}

/// What is compiled in of the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GradientForm {
    /// y are exponentials, which sums divide.
    pub(crate) scaled: bool,
    /// Which elements of dx are masked.
    pub(crate) mask: MaskForm,
}

/// dx from y, or where the form says so from exponentials whose sums over rows are `sums`, and dy. Rows of y and dx
/// are as far apart as the extent says, those of dy `dy_pitch` vectors. dx is multiplied by `factor`. Cubes lie
/// along x.
#[cube(launch_unchecked)]
pub(crate) fn softmax_rows_backward_kernel<F: Float, M: Numeric, N: Size, W: Size>(
    y: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    sums: &[f32],
    mask: &Mask<M, W>,
    dx: &mut [Vector<F, N>],
    extent: Extent,
    dy_pitch: u32,
    factor: f32,
    #[comptime] form: GradientForm,
    #[comptime] blueprint: SoftmaxBlueprint,
    #[define(F, M)] _types: [ElemType; 2],
) {
    let (rows, classes, columns) = (extent.rows, extent.classes, extent.columns);
    let units = comptime!(blueprint.plane * blueprint.planes);
    let vectors = comptime!(blueprint.vectors);
    let step = CUBE_COUNT_X * comptime!(blueprint.rows);
    // The same for all units of a cube, which may have to meet.
    let mut first_row = CUBE_POS_X * comptime!(blueprint.rows);
    while first_row < rows {
        let row = first_row + UNIT_POS_Y;
        let (start, start_of_dy) = (row * extent.pitch, row * dy_pitch);
        let mut scale = 1.0f32.runtime();
        let mask_start = mask.row(row, form.mask);
        if comptime!(form.scaled) {
            if row < rows {
                scale = 1.0f32 / sums[row as usize];
            }
        }
        if comptime!(vectors > 0) {
            // 1. The rows go to registers, all loads before the first use.
            let mut values = Array::<Vector<F, N>>::new(vectors);
            let mut grads = Array::<Vector<F, N>>::new(vectors);
            #[unroll]
            for v in 0..vectors {
                let column = UNIT_POS_X + comptime!(v as u32 * units);
                let mut value = Vector::<F, N>::new(F::new(0.0));
                let mut grad = Vector::<F, N>::new(F::new(0.0));
                if is_there(row, rows, column, columns, blueprint) {
                    value = y[(start + column) as usize];
                    grad = dy[(start_of_dy + column) as usize];
                }
                values[v] = value;
                grads[v] = grad;
            }

            // 2. The mean of the gradient by the probabilities.
            let mut products = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for v in 0..vectors {
                let column = UNIT_POS_X + comptime!(v as u32 * units);
                let product =
                    Vector::<f32, N>::cast_from(values[v]) * Vector::<f32, N>::cast_from(grads[v]);
                products += within_row::<N>(product, column, classes, 0.0f32, blueprint);
            }
            let mean = row_sum(sum_of::<N>(products), blueprint) * scale;

            // 3. The gradient.
            #[unroll]
            for v in 0..vectors {
                let column = UNIT_POS_X + comptime!(v as u32 * units);
                if is_there(row, rows, column, columns, blueprint) {
                    let result = mask.fill::<f32, N>(
                        of_vector::<F, N>(values[v], grads[v], mean, scale, factor),
                        0.0f32,
                        mask_start,
                        column,
                        classes,
                        form.mask,
                    );
                    dx[(start + column) as usize] = Vector::cast_from(result);
                }
            }
        } else {
            // 1. Each unit goes through its part.
            let mut total = 0.0f32;
            let mut column = UNIT_POS_X;
            if row < rows {
                while column < columns {
                    let product = Vector::<f32, N>::cast_from(y[(start + column) as usize])
                        * Vector::<f32, N>::cast_from(dy[(start_of_dy + column) as usize]);
                    let inside = within_row::<N>(product, column, classes, 0.0f32, blueprint);
                    total += sum_of::<N>(inside);
                    column += units;
                }
            }

            // 2. The units of the row meet.
            let mean = row_sum(total, blueprint) * scale;

            // 3. Once more, to write.
            if row < rows {
                column = UNIT_POS_X;
                while column < columns {
                    let gradient = of_vector::<F, N>(
                        y[(start + column) as usize],
                        dy[(start_of_dy + column) as usize],
                        mean,
                        scale,
                        factor,
                    );
                    let result = mask
                        .fill::<f32, N>(gradient, 0.0f32, mask_start, column, classes, form.mask);
                    dx[(start + column) as usize] = Vector::cast_from(result);
                    column += units;
                }
            }
        }
        first_row += step;
    }
}

/// `y scale (dy - mean) factor`.
#[cube]
fn of_vector<F: Float, N: Size>(
    y: Vector<F, N>,
    dy: Vector<F, N>,
    mean: f32,
    scale: f32,
    factor: f32,
) -> Vector<f32, N> {
    let probability = Vector::<f32, N>::cast_from(y) * Vector::new(scale);
    Vector::new(factor) * probability * (Vector::<f32, N>::cast_from(dy) - Vector::new(mean))
}
