use super::{
    forward::{GeluForm, GeluInputs},
    normal::normal,
};
use crate::{
    column_sum::{ROW_LANES, VECTOR_LANES, write_cube_sum},
    functions::Functions,
};
use cubecl::prelude::*;

/// Phi(x) + x phi(x), the derivative of x Phi(x).
#[cube]
fn derivative<N: Size>(x: Vector<f32, N>, #[comptime] functions: Functions) -> Vector<f32, N> {
    let normal = normal::<N>(x, functions);
    normal.cdf + x * normal.pdf
}

/// dx = dy (Phi(x) + x phi(x)), a vector a unit.
#[cube(launch_unchecked)]
pub(crate) fn gelu_backward_kernel<F: Float, N: Size>(
    inputs: &GeluInputs<F, N>,
    dy: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    #[comptime] form: GeluForm,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= dx.len() {
        terminate!();
    }
    let value = inputs.value(ABSOLUTE_POS, form);
    let grad = inputs.dropped(Vector::cast_from(dy[ABSOLUTE_POS]), ABSOLUTE_POS, form);
    dx[ABSOLUTE_POS] = Vector::cast_from(grad * derivative::<N>(value, comptime!(form.functions)));
}

/// dx as above, and to `sums` those of its columns over the rows that a cube has, which are those of
/// a column sum. `columns` counts vectors. Cubes: columns along x, splits along y.
#[cube(launch_unchecked)]
pub(crate) fn gelu_backward_sum_kernel<F: Float, O: Float, N: Size>(
    inputs: &GeluInputs<F, N>,
    dy: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    sums: &mut [Vector<O, N>],
    rows: u32,
    columns: u32,
    #[comptime] form: GeluForm,
    #[define(F)] _dtype: ElemType,
    #[define(O)] _output: ElemType,
) {
    let column = CUBE_POS_X * VECTOR_LANES + UNIT_POS_X;

    // 1. Each unit works through its rows of one vector of columns.
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut row = CUBE_POS_Y * ROW_LANES + UNIT_POS_Y;
    if column < columns && row < rows {
        let step = CUBE_COUNT_Y * ROW_LANES;
        let mut bias = Vector::<f32, N>::new(0.0f32);
        if comptime!(form.bias) {
            bias = Vector::cast_from(inputs.bias[column as usize]);
        }
        let mut next_x = inputs.x[(row * columns + column) as usize];
        while row < rows {
            let index = row * columns + column;
            let mut value = Vector::<f32, N>::cast_from(next_x);
            if comptime!(form.bias) {
                value += bias;
            }
            // x is fetched a row ahead. The compiler leaves dy until the slope is there, to save
            // registers, so a row would wait for memory twice; so it waits for both at once. dy a row
            // ahead as well takes 79 registers on Blackwell, which leaves room for three cubes.
            row += step;
            if row < rows {
                next_x = inputs.x[(row * columns + column) as usize];
            }
            let grad = Vector::<f32, N>::cast_from(dy[index as usize]);
            let grad = inputs.dropped(grad, index as usize, form);
            let product = grad * derivative::<N>(value, comptime!(form.functions));
            sum += product;
            dx[index as usize] = Vector::cast_from(product);
        }
    }

    // 2. The units of a column meet.
    write_cube_sum::<O, N>(sum, sums, column, columns);
}
