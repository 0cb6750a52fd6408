//! The second launch of a product whose k was split: adds the sums of the splits and finishes them.

use super::epilogue::{EpilogueBlueprint, activate, factor};
use cubecl::prelude::*;

/// `out[i] = epilogue(sum_s partial[s, i])`, a vector a unit; splits are added in order, so that the
/// same input gives the same bits. `vectors` counts those of the output.
#[cube(launch_unchecked)]
pub(crate) fn matmul_split_sum_kernel<O: Float, N: Size>(
    partial: &[Vector<f32, N>],
    lhs_scale: &[f32],
    rhs_scale: &[f32],
    bias: &[Vector<O, N>],
    residual: &[Vector<O, N>],
    preactivation: &mut [Vector<O, N>],
    out: &mut [Vector<O, N>],
    vectors: u32,
    row_vectors: u32,
    splits: u32,
    alpha: f32,
    beta: f32,
    #[comptime] epilogue: EpilogueBlueprint,
    #[define(O)] _output: ElemType,
) {
    let index = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    if index >= vectors {
        terminate!();
    }
    let mut sum = partial[index as usize];
    for split in 1..splits {
        sum += partial[(split * vectors + index) as usize];
    }
    let scale = factor(alpha, lhs_scale, rhs_scale, epilogue);
    let mut value = sum * Vector::new(scale);
    if comptime!(epilogue.bias) {
        value += Vector::cast_from(bias[(index % row_vectors) as usize]);
    }
    if comptime!(epilogue.preactivation) {
        preactivation[index as usize] = Vector::cast_from(value);
    }
    let mut finished = Vector::<f32, N>::empty();
    #[unroll]
    for lane in 0..N::value().comptime() {
        finished.insert(lane, activate(value.extract(lane), comptime!(epilogue.activation)));
    }
    if comptime!(epilogue.residual) {
        let added = Vector::<f32, N>::cast_from(residual[index as usize]);
        finished = fma(added, Vector::new(beta), finished);
    }
    out[index as usize] = Vector::cast_from(finished);
}
