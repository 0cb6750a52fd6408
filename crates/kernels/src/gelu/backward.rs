use super::forward::{normal_cdf, normal_pdf};
use cubecl::prelude::*;

/// dx = dy (Phi(x) + x phi(x)), a vector a unit.
#[cube(launch_unchecked)]
pub(crate) fn gelu_backward_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= dx.len() {
        terminate!();
    }
    let value = Vector::<f32, N>::cast_from(x[ABSOLUTE_POS]);
    let grad = Vector::<f32, N>::cast_from(dy[ABSOLUTE_POS]);
    let slope = normal_cdf::<N>(value) + value * normal_pdf::<N>(value);
    dx[ABSOLUTE_POS] = Vector::cast_from(grad * slope);
}
