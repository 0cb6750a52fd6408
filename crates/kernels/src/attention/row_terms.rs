//! What the backward passes on tensor cores need of each row of queries, computed once.

use super::rules::{RowStrides, origin};
use cubecl::prelude::*;
use std::f64::consts::LOG2_E;

/// Units of a cube.
pub(crate) const UNITS: u32 = 256;
/// Units that share a row; each reads 16 bytes at a time.
const LANES: u32 = 8;
/// Rows of a cube.
pub(crate) const ROWS: u32 = UNITS / LANES;
/// Elements that a unit reads at once.
pub(crate) const WIDTH: usize = 8;
/// More than any score in powers of two: what a row without weights subtracts.
const NO_WEIGHTS: f32 = 1e30;

/// `delta = rowsum(dout * out)`, and behind all of them `shift`, the logarithm of base two that a row's
/// scores are diminished by. Rows along x, heads along y, batches along z.
#[cube(launch_unchecked)]
pub(crate) fn attention_row_terms_kernel<I: Float, W: Size>(
    out: &[Vector<I, W>],
    dout: &[Vector<I, W>],
    lse: &[f32],
    terms: &mut [f32],
    rows: u32,
    heads: u32,
    head_dim: u32,
    out_strides: RowStrides,
    dout_strides: RowStrides,
    #[define(I)] _element: ElemType,
    #[define(W)] _width: usize,
) {
    let lane = UNIT_POS_X % LANES;
    let row = CUBE_POS_X * ROWS + UNIT_POS_X / LANES;
    let width = comptime!(WIDTH as u32);
    let mut sum = 0.0f32;
    if row < rows {
        let out_at = origin(&out_strides, CUBE_POS_Z, CUBE_POS_Y, row) / width;
        let dout_at = origin(&dout_strides, CUBE_POS_Z, CUBE_POS_Y, row) / width;
        let mut column = lane;
        while column < head_dim / width {
            let a = out[(out_at + column) as usize];
            let b = dout[(dout_at + column) as usize];
            #[unroll]
            for i in 0..WIDTH {
                sum += f32::cast_from(a.extract(i)) * f32::cast_from(b.extract(i));
            }
            column += LANES;
        }
    }
    sum += plane_shuffle_xor(sum, 1u32);
    sum += plane_shuffle_xor(sum, 2u32);
    sum += plane_shuffle_xor(sum, 4u32);
    if row < rows && lane == 0 {
        let all = rows * heads * CUBE_COUNT_Z;
        let at = (CUBE_POS_Z * heads + CUBE_POS_Y) * rows + row;
        let log = lse[at as usize];
        terms[at as usize] = sum;
        terms[(all + at) as usize] =
            select(log < f32::min_value(), NO_WEIGHTS, log * comptime!(LOG2_E as f32));
    }
}
