use cubecl::prelude::*;
use std::f32::consts::{FRAC_1_SQRT_2, PI};

/// Phi(x), the cumulative distribution of the standard normal.
#[cube]
pub(super) fn normal_cdf<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let half = Vector::new(0.5f32);
    half + half * (x * Vector::new(FRAC_1_SQRT_2)).erf()
}

/// phi(x) = Phi'(x), the density of the standard normal.
#[cube]
pub(super) fn normal_pdf<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let scale = comptime!(1.0 / (2.0 * PI).sqrt());
    Vector::new(scale) * (x * x * Vector::new(-0.5f32)).exp()
}

/// y = x Phi(x), a vector a unit.
#[cube(launch_unchecked)]
pub(crate) fn gelu_forward_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= y.len() {
        terminate!();
    }
    let value = Vector::<f32, N>::cast_from(x[ABSOLUTE_POS]);
    y[ABSOLUTE_POS] = Vector::cast_from(value * normal_cdf::<N>(value));
}
