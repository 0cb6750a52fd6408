//! What the backward passes on tensor cores need of each row of queries, computed once.

use super::{
    once::TERM_BYTES,
    rules::{Sequence, Strides, origin},
};
use crate::ptx::access::store_shared_number;
use cubecl::prelude::*;
use std::f64::consts::LOG2_E;

/// Units of a cube.
pub(crate) const UNITS: u32 = 256;
/// Units that share a row; each reads 16 bytes at a time.
const LANES: u32 = 8;
/// Rows of a cube.
pub(crate) const ROWS: u32 = UNITS / LANES;
/// More than any score in powers of two: what a row without weights subtracts.
const NO_WEIGHTS: f32 = 1e30;

/// `delta = rowsum(dout * out)`, and behind all of them `shift`: what a row's scores are diminished by, as
/// powers of two. It is the largest score and the logarithm of the sum, added up.
///
/// With dropout the powers are to be weights times what kept ones are multiplied by, `1 / share`. A shift is less by
/// `log2_kept`, the logarithm of that number, and delta is multiplied by `share`, so that its products with weights stay.
///
/// With a bias they stay `apart`, two terms one behind the other, and the largest score is not turned into
/// a power. Added to a mask of -1e9 the logarithm would be lost, and the weights of a masked row would not
/// add up to one.
///
/// Besides, cubes write zeros to the sums of dq, if there are any: `zeros` vectors, `share` by each cube. The
/// memory is written while rows are read, which a kernel of its own would do afterwards.
///
/// Rows along x, heads along y, batches from `first_batch` of `batches` on along z.
#[cube(launch_unchecked)]
pub(crate) fn attention_row_terms_kernel<I: Float, W: Size>(
    out: &[Vector<I, W>],
    dout: &[Vector<I, W>],
    lse: &[f32],
    terms: &mut [f32],
    query_sums: &mut [Vector<f32, Const<4>>],
    zeros: u32,
    share: u32,
    rows: u32,
    heads: u32,
    head_dim: u32,
    share_kept: f32,
    log2_kept: f32,
    first_batch: u32,
    batches: u32,
    out_strides: Strides,
    dout_strides: Strides,
    #[comptime] apart: bool,
    #[define(I)] _element: ElemType,
    #[define(W)] _width: usize,
) {
    let lane = UNIT_POS_X % LANES;
    let row = CUBE_POS_X * ROWS + UNIT_POS_X / LANES;
    let batch = CUBE_POS_Z + first_batch;
    let width = W::value().comptime() as u32;
    let first = (CUBE_POS_X + CUBE_COUNT_X * (CUBE_POS_Y + CUBE_COUNT_Y * batch)) * share;
    let mut at = first + UNIT_POS_X;
    while at < min(first + share, zeros) {
        query_sums[at as usize] = Vector::<f32, Const<4>>::new(0.0f32);
        at += UNITS;
    }
    let mut sum = 0.0f32;
    if row < rows {
        let out_at = origin(&out_strides, batch, CUBE_POS_Y, row) / width;
        let dout_at = origin(&dout_strides, batch, CUBE_POS_Y, row) / width;
        let mut column = lane;
        while column < head_dim / width {
            let a = out[(out_at + column) as usize];
            let b = dout[(dout_at + column) as usize];
            #[unroll]
            for i in 0..W::value().comptime() {
                sum += f32::cast_from(a.extract(i)) * f32::cast_from(b.extract(i));
            }
            column += LANES;
        }
    }
    sum += plane_shuffle_xor(sum, 1u32);
    sum += plane_shuffle_xor(sum, 2u32);
    sum += plane_shuffle_xor(sum, 4u32);
    if row < rows && lane == 0 {
        let all = rows * heads * batches;
        let at = (batch * heads + CUBE_POS_Y) * rows + row;
        let largest = lse[at as usize];
        let log = lse[(all + at) as usize];
        let has_none = log < f32::min_value();
        let to_powers = comptime!(LOG2_E as f32);
        terms[at as usize] = sum * share_kept;
        if comptime!(apart) {
            terms[(all + at) as usize] = largest;
            terms[(2 * all + at) as usize] =
                select(has_none, NO_WEIGHTS, log * to_powers - log2_kept);
        } else {
            terms[(all + at) as usize] =
                select(has_none, NO_WEIGHTS, (largest + log) * to_powers - log2_kept);
        }
    }
}

/// Copies the terms of 64 queries to shared memory, each term's behind those of the one before. A warp calls it. Those beyond the end get no weights.
#[cube]
pub(super) fn copy_terms<I: Float, M: Numeric>(
    terms: &[f32],
    sequence: &Sequence<'_, I, M>,
    first_row: u32,
    destination: u32,
    lane: u32,
    #[comptime] count: usize,
) {
    let rules = sequence.rules;
    let (first, all) = (sequence.origin_of_row_values(), rules.all_rows());
    #[unroll]
    for half in 0..2u32 {
        let place = half * 32 + lane;
        let row = first_row + place;
        let at = first + min(row, sequence.seq_q - 1);
        #[unroll]
        for term in 0..count {
            let mut value = terms[(at + comptime!(term as u32) * all) as usize];
            if row >= sequence.seq_q {
                value = comptime!(if term == 0 { 0.0f32 } else { NO_WEIGHTS }).runtime();
            }
            store_shared_number(
                destination + 4 * place + comptime!((term * TERM_BYTES) as u32),
                value,
            );
        }
    }
}
