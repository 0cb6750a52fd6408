use super::{
    blueprint::{LayerNormBlueprint, LayerNormForm},
    row_sums::row_sum_of,
};
use crate::{
    dropout::ElementMask,
    magnitude::{larger, write_largest},
};
use cubecl::prelude::*;

/// Whether vector `column` of `row` exists. Rows that units share out evenly need not ask.
#[cube]
pub(super) fn is_there(
    row: u32,
    rows: u32,
    column: u32,
    columns: u32,
    #[comptime] blueprint: LayerNormBlueprint,
) -> bool {
    let mut there = row < rows;
    if comptime!(!blueprint.even) {
        there = there && column < columns;
    }
    there
}

/// What the forward pass reads; what is not compiled in has gamma in its place.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ForwardInputs<F: Float, G: Float, N: Size> {
    pub(crate) x: Box<[Vector<F, N>]>,
    pub(crate) residual: Box<[Vector<F, N>]>,
    /// Is added to the rows of the residual before dropout.
    pub(crate) residual_bias: Box<[Vector<G, N>]>,
    pub(crate) gamma: Box<[Vector<G, N>]>,
    pub(crate) beta: Box<[Vector<G, N>]>,
    /// What dropout leaves out of the residual.
    pub(crate) mask: ElementMask,
}

/// What it writes; with parts, the centered rows in the place of the sum, and no mean and `rstd`.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ForwardOutputs<F: Float, N: Size> {
    pub(crate) y: Box<[Vector<F, N>]>,
    pub(crate) sum: Box<[Vector<F, N>]>,
    pub(crate) mean: Box<[f32]>,
    pub(crate) rstd: Box<[f32]>,
    pub(crate) normalized: Box<[Vector<F, N>]>,
    pub(crate) variance: Box<[F]>,
    pub(crate) deviation: Box<[F]>,
    /// The largest magnitude of y that each cube wrote.
    pub(crate) largest: Box<[u32]>,
}

/// Rows of that many vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) rows: u32,
    pub(crate) columns: u32,
    /// 1 over the elements of a row.
    pub(crate) of_width: f32,
}

/// y, and what backward reads. Cubes lie along x.
#[cube(launch_unchecked)]
pub(crate) fn layer_norm_forward_kernel<F: Float, G: Float, N: Size>(
    inputs: &ForwardInputs<F, G, N>,
    outputs: &mut ForwardOutputs<F, N>,
    extent: Extent,
    epsilon: f32,
    #[comptime] form: LayerNormForm,
    #[comptime] blueprint: LayerNormBlueprint,
    #[define(F, G)] _types: [ElemType; 2],
) {
    let (rows, columns, of_width) = (extent.rows, extent.columns, extent.of_width);
    let units = comptime!(blueprint.plane * blueprint.planes);
    let vectors = comptime!(blueprint.vectors);
    let step = CUBE_COUNT_X * comptime!(blueprint.rows);
    let mut largest = 0u32;
    // The same for all units of a cube, which may have to meet.
    let mut first_row = CUBE_POS_X * comptime!(blueprint.rows);
    while first_row < rows {
        let row = first_row + UNIT_POS_Y;
        let start = row * columns;

        // 1. The row goes to registers, all loads before the first use.
        let mut values = Array::<Vector<F, N>>::new(vectors);
        #[unroll]
        for v in 0..vectors {
            let column = UNIT_POS_X + comptime!(v as u32 * units);
            let mut value = Vector::<F, N>::new(F::new(0.0));
            if is_there(row, rows, column, columns, blueprint) {
                value = inputs.x[(start + column) as usize];
            }
            values[v] = value;
        }
        if comptime!(form.residual) {
            let mut addends = Array::<Vector<F, N>>::new(vectors);
            #[unroll]
            for v in 0..vectors {
                let column = UNIT_POS_X + comptime!(v as u32 * units);
                let mut addend = Vector::<F, N>::new(F::new(0.0));
                if is_there(row, rows, column, columns, blueprint) {
                    addend = inputs.residual[(start + column) as usize];
                }
                addends[v] = addend;
            }
            #[unroll]
            for v in 0..vectors {
                let column = UNIT_POS_X + comptime!(v as u32 * units);
                let size = N::value().comptime();
                let first = (start + column) * comptime!(size as u32);
                let mut addend = Vector::<f32, N>::cast_from(addends[v]);
                if comptime!(form.residual_bias) {
                    if is_there(row, rows, column, columns, blueprint) {
                        addend += Vector::cast_from(inputs.residual_bias[column as usize]);
                    }
                }
                let addend = inputs.mask.dropped::<N>(addend, first, form.dropout);
                let wide = Vector::<f32, N>::cast_from(values[v]) + addend;
                // Rounded first: what backward reads is what is normalized.
                let value = Vector::<F, N>::cast_from(wide);
                values[v] = value;
                if is_there(row, rows, column, columns, blueprint) {
                    outputs.sum[(start + column) as usize] = value;
                }
            }
        }

        // 2. The mean. Vectors that are not there are zeros.
        let mut center = 0.0f32;
        if comptime!(!form.rms) {
            let mut total = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for v in 0..vectors {
                total += Vector::cast_from(values[v]);
            }
            center = row_sum_of::<N>(total, blueprint) * of_width;
        }

        // 3. The variance around it.
        let mut squares = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for v in 0..vectors {
            let column = UNIT_POS_X + comptime!(v as u32 * units);
            if is_there(row, rows, column, columns, blueprint) {
                let distance = Vector::<f32, N>::cast_from(values[v]) - Vector::new(center);
                squares += distance * distance;
            }
        }
        let variance = row_sum_of::<N>(squares, blueprint) * of_width;
        let scale = (variance + epsilon).inverse_sqrt();

        // 4. The result.
        #[unroll]
        for v in 0..vectors {
            let column = UNIT_POS_X + comptime!(v as u32 * units);
            if is_there(row, rows, column, columns, blueprint) {
                let distance = Vector::<f32, N>::cast_from(values[v]) - Vector::new(center);
                let normalized = distance * Vector::new(scale);
                let mut result =
                    normalized * Vector::<f32, N>::cast_from(inputs.gamma[column as usize]);
                if comptime!(form.bias) {
                    result += Vector::<f32, N>::cast_from(inputs.beta[column as usize]);
                }
                outputs.y[(start + column) as usize] = Vector::cast_from(result);
                if comptime!(form.watched) {
                    largest = larger::<N>(largest, result);
                }
                if comptime!(form.parts) {
                    outputs.sum[(start + column) as usize] = Vector::cast_from(distance);
                    outputs.normalized[(start + column) as usize] = Vector::cast_from(normalized);
                }
            }
        }
        if UNIT_POS_X == 0 && row < rows {
            if comptime!(form.parts) {
                outputs.variance[row as usize] = F::cast_from(variance + epsilon);
                outputs.deviation[row as usize] = F::cast_from((variance + epsilon).sqrt());
            } else {
                outputs.rstd[row as usize] = scale;
                if comptime!(!form.rms) {
                    outputs.mean[row as usize] = center;
                }
            }
        }
        first_row += step;
    }
    if comptime!(form.watched) {
        write_largest::<F>(largest, &mut outputs.largest, comptime!(units * blueprint.rows));
    }
}
