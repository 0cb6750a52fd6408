use crate::functions::{Functions, exponential_by, reciprocal_by};
use cubecl::prelude::*;

/// 1 / (1 + exp(-x)).
#[cube]
fn sigmoid<N: Size>(x: Vector<f32, N>, #[comptime] functions: Functions) -> Vector<f32, N> {
    match comptime!(functions) {
        Functions::Library => {
            let one = Vector::new(1.0f32);
            one / (one + (x * Vector::new(-1.0f32)).exp())
        }
        Functions::Approximate { hardware } => {
            let mut all = Vector::<f32, N>::empty();
            #[unroll]
            for lane in 0..N::value().comptime() {
                let power = exponential_by(-x.extract(lane), hardware);
                all.insert(lane, reciprocal_by(1.0f32 + power, hardware));
            }
            all
        }
    }
}

/// y = silu(gate) up, a vector a unit.
#[cube(launch_unchecked)]
pub(crate) fn swiglu_forward_kernel<F: Float, N: Size>(
    gate: &[Vector<F, N>],
    up: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    #[comptime] functions: Functions,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= y.len() {
        terminate!();
    }
    let g = Vector::<f32, N>::cast_from(gate[ABSOLUTE_POS]);
    let u = Vector::<f32, N>::cast_from(up[ABSOLUTE_POS]);
    y[ABSOLUTE_POS] = Vector::cast_from(g * sigmoid::<N>(g, functions) * u);
}

/// dgate = dy up (s + gate s (1 - s)) and dup = dy gate s, a vector of each a unit.
#[cube(launch_unchecked)]
pub(crate) fn swiglu_backward_kernel<F: Float, N: Size>(
    gate: &[Vector<F, N>],
    up: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    dgate: &mut [Vector<F, N>],
    dup: &mut [Vector<F, N>],
    #[comptime] functions: Functions,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= dgate.len() {
        terminate!();
    }
    let g = Vector::<f32, N>::cast_from(gate[ABSOLUTE_POS]);
    let u = Vector::<f32, N>::cast_from(up[ABSOLUTE_POS]);
    let grad = Vector::<f32, N>::cast_from(dy[ABSOLUTE_POS]);
    let s = sigmoid::<N>(g, functions);
    let silu = g * s;
    let slope = s + silu * (Vector::new(1.0f32) - s);
    dgate[ABSOLUTE_POS] = Vector::cast_from(grad * u * slope);
    dup[ABSOLUTE_POS] = Vector::cast_from(grad * silu);
}
