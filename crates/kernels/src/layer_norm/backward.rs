use super::{
    blueprint::{LayerNormBlueprint, LayerNormForm},
    forward::{Extent, is_there},
    row_sums::{row_sums, total},
};
use crate::{
    dropout::{DropoutForm, ElementMask},
    magnitude::{larger, write_largest},
};
use cubecl::prelude::*;

/// Units side by side that add up a parameter's partial sums: 128 bytes.
pub(crate) const SUM_COLUMNS: u32 = 32;

/// What the backward pass reads; what is not compiled in has another tensor of its size in its place. From parts, x
/// is centered, and `rstd` holds deviations.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct BackwardInputs<F: Float, G: Float, N: Size> {
    pub(crate) x: Box<[Vector<F, N>]>,
    pub(crate) dy: Box<[Vector<F, N>]>,
    pub(crate) dsum: Box<[Vector<F, N>]>,
    pub(crate) gamma: Box<[Vector<G, N>]>,
    pub(crate) mean: Box<[f32]>,
    pub(crate) rstd: Box<[f32]>,
    /// What dropout left out of the residual.
    pub(crate) mask: ElementMask,
}

/// What it writes; without dropout, the residual has the gradient of x.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct BackwardOutputs<F: Float, N: Size> {
    pub(crate) dx: Box<[Vector<F, N>]>,
    pub(crate) dresidual: Box<[Vector<F, N>]>,
    /// What a cube's rows add to the gradients of the parameters: `[parameters, cubes, columns]`, as
    /// [`LayerNormForm::parameters`] has them.
    pub(crate) partials: Box<[Vector<f32, N>]>,
    /// The largest magnitude that each cube wrote of the residual's gradient.
    pub(crate) largest: Box<[u32]>,
}

/// The gradients of rows, and the partial sums of the parameters'.
#[cube(launch_unchecked)]
pub(crate) fn layer_norm_backward_kernel<F: Float, G: Float, N: Size>(
    inputs: &BackwardInputs<F, G, N>,
    outputs: &mut BackwardOutputs<F, N>,
    extent: Extent,
    #[comptime] form: LayerNormForm,
    #[comptime] blueprint: LayerNormBlueprint,
    #[define(F, G)] _types: [ElemType; 2],
) {
    let (rows, columns, of_width) = (extent.rows, extent.columns, extent.of_width);
    let units = comptime!(blueprint.plane * blueprint.planes);
    let vectors = comptime!(blueprint.vectors);
    let step = CUBE_COUNT_X * comptime!(blueprint.rows);

    // 1. What all rows share.
    let early = comptime!(form.adds_early());
    let mut factors = Array::<Vector<G, N>>::new(vectors);
    let mut dgamma = Array::<Vector<f32, N>>::new(vectors);
    let mut dbeta = Array::<Vector<f32, N>>::new(vectors);
    let mut dbias = Array::<Vector<f32, N>>::new(vectors);
    let mut largest = 0u32;
    #[unroll]
    for v in 0..vectors {
        if comptime!(!early) {
            let column = UNIT_POS_X + comptime!(v as u32 * units);
            let has = is_there(0u32, rows, column, columns, blueprint);
            factors[v] = factor_of(inputs, column, has, form);
        }
        dgamma[v] = Vector::new(0.0f32);
        dbeta[v] = Vector::new(0.0f32);
        dbias[v] = Vector::new(0.0f32);
    }

    // The same for all units of a cube, which may have to meet.
    let mut first_row = CUBE_POS_X * comptime!(blueprint.rows);
    while first_row < rows {
        let row = first_row + UNIT_POS_Y;
        let start = row * columns;

        // 2. The row goes to registers, all loads before the first use.
        let mut values = Array::<Vector<F, N>>::new(vectors);
        let mut grads = Array::<Vector<F, N>>::new(vectors);
        let mut added = Array::<Vector<F, N>>::new(vectors);
        #[unroll]
        for v in 0..vectors {
            let column = UNIT_POS_X + comptime!(v as u32 * units);
            let mut value = Vector::<F, N>::new(F::new(0.0));
            let mut grad = Vector::<F, N>::new(F::new(0.0));
            let mut other = Vector::<F, N>::new(F::new(0.0));
            if is_there(row, rows, column, columns, blueprint) {
                value = inputs.x[(start + column) as usize];
                grad = inputs.dy[(start + column) as usize];
                if comptime!(early) {
                    other = inputs.dsum[(start + column) as usize];
                }
            }
            values[v] = value;
            grads[v] = grad;
            added[v] = other;
        }
        let mut center = 0.0f32;
        let mut scale = 0.0f32;
        if row < rows {
            scale = inputs.rstd[row as usize];
            if comptime!(form.parts) {
                scale = 1.0f32 / scale;
            }
            if comptime!(!form.rms && !form.parts) {
                center = inputs.mean[row as usize];
            }
        }

        // 3. The means of the gradient and of its product with the normalized row; and the row's part
        // in the gradients of the parameters. Vectors that are not there have a gradient of zero.
        let mut plain = Vector::<f32, N>::new(0.0f32);
        let mut weighted = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for v in 0..vectors {
            let grad = Vector::<f32, N>::cast_from(grads[v]);
            let normal = normalized::<F, N>(values[v], center, scale);
            if comptime!(early) {
                let column = UNIT_POS_X + comptime!(v as u32 * units);
                let has = is_there(0u32, rows, column, columns, blueprint);
                factors[v] = factor_of(inputs, column, has, form);
            }
            let product = grad * Vector::<f32, N>::cast_from(factors[v]);
            plain += product;
            weighted += product * normal;
            if comptime!(form.scaled) {
                dgamma[v] += grad * normal;
            }
            if comptime!(form.bias) {
                dbeta[v] += grad;
            }
        }
        let (plain, weighted) = (total::<N>(plain), total::<N>(weighted));
        let (plain, weighted) = row_sums(plain, weighted, comptime!(!form.rms), blueprint);
        let mean_plain = plain * of_width;
        let mean_weighted = weighted * of_width;

        // 4. The gradient of the row.
        #[unroll]
        for v in 0..vectors {
            let column = UNIT_POS_X + comptime!(v as u32 * units);
            if is_there(row, rows, column, columns, blueprint) {
                if comptime!(early) {
                    factors[v] = factor_of(inputs, column, true, form);
                }
                let product =
                    Vector::<f32, N>::cast_from(grads[v]) * Vector::<f32, N>::cast_from(factors[v]);
                let normal = normalized::<F, N>(values[v], center, scale);
                let mut result =
                    product - Vector::new(mean_plain) - normal * Vector::new(mean_weighted);
                result *= Vector::new(scale);
                if comptime!(form.residual) {
                    if comptime!(!early) {
                        added[v] = inputs.dsum[(start + column) as usize];
                    }
                    result += Vector::<f32, N>::cast_from(added[v]);
                }
                outputs.dx[(start + column) as usize] = Vector::cast_from(result);
                if comptime!(form.dropout != DropoutForm::None) {
                    let size = N::value().comptime();
                    let first = (start + column) * comptime!(size as u32);
                    result = inputs.mask.dropped::<N>(result, first, form.dropout);
                    outputs.dresidual[(start + column) as usize] = Vector::cast_from(result);
                }
                if comptime!(form.residual_bias) {
                    dbias[v] += result;
                }
                if comptime!(form.watched) {
                    largest = larger::<N>(largest, result);
                }
            }
        }
        first_row += step;
    }

    // 5. The rows of a cube meet.
    let slots = comptime!(if blueprint.rows > 1 { (units * blueprint.rows) as usize } else { 1 });
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(slots);
    #[unroll]
    for v in 0..vectors {
        let column = UNIT_POS_X + comptime!(v as u32 * units);
        if comptime!(form.scaled) {
            let sum = cube_sum::<N>(dgamma[v], &mut shared, blueprint);
            write_partial::<F, N>(outputs, 0u32, column, columns, sum);
        }
        if comptime!(form.bias) {
            let sum = cube_sum::<N>(dbeta[v], &mut shared, blueprint);
            write_partial::<F, N>(outputs, 1u32, column, columns, sum);
        }
        if comptime!(form.residual_bias) {
            let sum = cube_sum::<N>(dbias[v], &mut shared, blueprint);
            let last = comptime!(form.parameters() - 1);
            write_partial::<F, N>(outputs, last, column, columns, sum);
        }
    }
    if comptime!(form.watched) {
        write_largest::<F>(largest, &mut outputs.largest, comptime!(units * blueprint.rows));
    }
}

/// Writes what the rows of this cube add to a column of a parameter's gradient.
#[cube]
fn write_partial<F: Float, N: Size>(
    outputs: &mut BackwardOutputs<F, N>,
    parameter: u32,
    column: u32,
    columns: u32,
    sum: Vector<f32, N>,
) {
    if UNIT_POS_Y == 0 && column < columns {
        let place = parameter * CUBE_COUNT_X + CUBE_POS_X;
        outputs.partials[(place * columns + column) as usize] = sum;
    }
}

/// Gamma where a row has that column, and 0 beyond; 1 where it has no gamma.
#[cube]
fn factor_of<F: Float, G: Float, N: Size>(
    inputs: &BackwardInputs<F, G, N>,
    column: u32,
    has_column: bool,
    #[comptime] form: LayerNormForm,
) -> Vector<G, N> {
    let mut factor = Vector::<G, N>::new(G::new(1.0));
    if comptime!(form.scaled) {
        factor = Vector::<G, N>::new(G::new(0.0));
        if has_column {
            factor = inputs.gamma[column as usize];
        }
    }
    factor
}

/// (x - mean) / deviation.
#[cube]
fn normalized<F: Float, N: Size>(value: Vector<F, N>, center: f32, scale: f32) -> Vector<f32, N> {
    (Vector::<f32, N>::cast_from(value) - Vector::new(center)) * Vector::new(scale)
}

/// What the units of a column hold in the rows of a cube, added up for those of the first row. All
/// units of the cube have to call it.
#[cube]
fn cube_sum<N: Size>(
    sum: Vector<f32, N>,
    shared: &mut Shared<[Vector<f32, N>]>,
    #[comptime] blueprint: LayerNormBlueprint,
) -> Vector<f32, N> {
    let units = comptime!(blueprint.plane * blueprint.planes);
    let rows = comptime!(blueprint.rows);
    let mut total = sum;
    if comptime!(rows > 1) {
        shared[(UNIT_POS_Y * units + UNIT_POS_X) as usize] = sum;
        sync_cube();
        total = Vector::new(0.0f32);
        #[unroll]
        for row in 0..rows {
            total += shared[(row * units + UNIT_POS_X) as usize];
        }
        // The next sum is written to the same memory.
        sync_cube();
    }
    total
}

/// The gradients of the parameters from the partial sums `[parameters, cubes, width]`: a parameter for each cube along y,
/// dgamma, then dbeta and dbias where they are there.
#[cube(launch_unchecked)]
pub(crate) fn layer_norm_parameters_kernel<G: Float>(
    partials: &[f32],
    dgamma: &mut [G],
    dbeta: &mut [G],
    dbias: &mut [G],
    cubes: u32,
    width: u32,
    #[comptime] lanes: u32,
    #[comptime] bias: bool,
    #[comptime] residual_bias: bool,
    #[define(G)] _parameter: ElemType,
) {
    let column = CUBE_POS_X * SUM_COLUMNS + UNIT_POS_X;
    let mut sum = 0.0f32;
    if column < width {
        let mut place = UNIT_POS_Y;
        while place < cubes {
            sum += partials[((CUBE_POS_Y * cubes + place) * width + column) as usize];
            place += lanes;
        }
    }
    let mut shared = Shared::<[f32]>::new_slice(comptime!((SUM_COLUMNS * lanes) as usize));
    shared[(UNIT_POS_Y * SUM_COLUMNS + UNIT_POS_X) as usize] = sum;
    sync_cube();
    if UNIT_POS_Y == 0 && column < width {
        let mut total = 0.0f32;
        #[unroll]
        for lane in 0..lanes {
            total += shared[(lane * SUM_COLUMNS + UNIT_POS_X) as usize];
        }
        if CUBE_POS_Y == 0 {
            dgamma[column as usize] = G::cast_from(total);
        }
        if comptime!(bias) {
            if CUBE_POS_Y == 1 {
                dbeta[column as usize] = G::cast_from(total);
            }
        }
        if comptime!(residual_bias) {
            if CUBE_POS_Y == comptime!(1 + u32::from(bias)) {
                dbias[column as usize] = G::cast_from(total);
            }
        }
    }
}
