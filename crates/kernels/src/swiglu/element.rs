use crate::{
    functions::{Functions, sigmoid},
    magnitude::{larger, write_largest},
};
use cubecl::prelude::*;

/// silu(gate) up, before it is rounded.
#[cube]
fn forward<F: Float, N: Size>(
    gate: Vector<F, N>,
    up: Vector<F, N>,
    #[comptime] functions: Functions,
) -> Vector<f32, N> {
    let g = Vector::<f32, N>::cast_from(gate);
    let u = Vector::<f32, N>::cast_from(up);
    g * sigmoid::<N>(g, functions) * u
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
    let at = ABSOLUTE_POS;
    if at >= y.len() {
        terminate!();
    }
    y[at] = Vector::cast_from(forward::<F, N>(gate[at], up[at], functions));
}

/// The same by fewer cubes of so many `units`, side by side, each of which writes the largest magnitude of its part of y.
#[cube(launch_unchecked)]
pub(crate) fn swiglu_forward_watched_kernel<F: Float, N: Size>(
    gate: &[Vector<F, N>],
    up: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    largest: &mut [u32],
    #[comptime] functions: Functions,
    #[comptime] units: u32,
    #[define(F)] _dtype: ElemType,
) {
    let step = (CUBE_COUNT_X * units) as usize;
    let mut of_y = 0u32;
    let mut at = ABSOLUTE_POS;
    // Two vectors at once, so that the loads of both are on their way together.
    while at + step < y.len() {
        let (g, u) = (gate[at], up[at]);
        let (next_g, next_u) = (gate[at + step], up[at + step]);
        let first = forward::<F, N>(g, u, functions);
        let second = forward::<F, N>(next_g, next_u, functions);
        y[at] = Vector::cast_from(first);
        y[at + step] = Vector::cast_from(second);
        of_y = larger::<N>(larger::<N>(of_y, first), second);
        at += 2 * step;
    }
    if at < y.len() {
        let last = forward::<F, N>(gate[at], up[at], functions);
        y[at] = Vector::cast_from(last);
        of_y = larger::<N>(of_y, last);
    }
    write_largest::<F>(of_y, largest, units);
}

/// Both gradients, before they are rounded: dy up (s + gate s (1 - s)), and dy gate s.
#[cube]
fn backward<F: Float, N: Size>(
    gate: Vector<F, N>,
    up: Vector<F, N>,
    dy: Vector<F, N>,
    #[comptime] functions: Functions,
) -> (Vector<f32, N>, Vector<f32, N>) {
    let g = Vector::<f32, N>::cast_from(gate);
    let u = Vector::<f32, N>::cast_from(up);
    let grad = Vector::<f32, N>::cast_from(dy);
    let s = sigmoid::<N>(g, functions);
    let silu = g * s;
    let slope = s + silu * (Vector::new(1.0f32) - s);
    (grad * u * slope, grad * silu)
}

/// The gradients, a vector of each a unit.
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
    let at = ABSOLUTE_POS;
    if at >= dgate.len() {
        terminate!();
    }
    let (of_gate, of_up) = backward::<F, N>(gate[at], up[at], dy[at], functions);
    dgate[at] = Vector::cast_from(of_gate);
    dup[at] = Vector::cast_from(of_up);
}

/// The same by fewer cubes of so many `units`, side by side, each of which writes the largest magnitudes of its parts.
#[cube(launch_unchecked)]
pub(crate) fn swiglu_backward_watched_kernel<F: Float, N: Size>(
    gate: &[Vector<F, N>],
    up: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    dgate: &mut [Vector<F, N>],
    dup: &mut [Vector<F, N>],
    largest_dgate: &mut [u32],
    largest_dup: &mut [u32],
    #[comptime] functions: Functions,
    #[comptime] units: u32,
    #[define(F)] _dtype: ElemType,
) {
    let step = (CUBE_COUNT_X * units) as usize;
    let mut of_gate = 0u32;
    let mut of_up = 0u32;
    let mut at = ABSOLUTE_POS;
    // As forward.
    while at + step < dgate.len() {
        let next = at + step;
        let (g, u, d) = (gate[at], up[at], dy[at]);
        let (next_g, next_u, next_d) = (gate[next], up[next], dy[next]);
        let (by_gate, by_up) = backward::<F, N>(g, u, d, functions);
        let (next_by_gate, next_by_up) = backward::<F, N>(next_g, next_u, next_d, functions);
        dgate[at] = Vector::cast_from(by_gate);
        dup[at] = Vector::cast_from(by_up);
        dgate[next] = Vector::cast_from(next_by_gate);
        dup[next] = Vector::cast_from(next_by_up);
        of_gate = larger::<N>(larger::<N>(of_gate, by_gate), next_by_gate);
        of_up = larger::<N>(larger::<N>(of_up, by_up), next_by_up);
        at += 2 * step;
    }
    if at < dgate.len() {
        let (by_gate, by_up) = backward::<F, N>(gate[at], up[at], dy[at], functions);
        dgate[at] = Vector::cast_from(by_gate);
        dup[at] = Vector::cast_from(by_up);
        of_gate = larger::<N>(of_gate, by_gate);
        of_up = larger::<N>(of_up, by_up);
    }
    write_largest::<F>(of_gate, largest_dgate, units);
    write_largest::<F>(of_up, largest_dup, units);
}
