//! What the warpgroups of the [forward pass by `tcgen05`](super::tcgen05_forward) do with scores: weights, and in the
//! end the output.

use super::{
    kept_bits::{kept_words, pack_kept},
    pipeline::{TILE_Q, TmaForwardBlueprint, work_at},
    rules::{Heads, Rules, keys_of_all, score_exponent},
    softmax::{
        Queries, RowState, apply_rules_to, queries_at, rescale, row_totals, unseen, weigh_kept,
        write_columns, write_row_values,
    },
    tcgen05_forward::{HALF_COLUMNS, Places, TILE, tiles_of},
};
use crate::ptx::{
    barrier::{barrier_arrive, barrier_wait},
    tcgen05::{
        tensor_fence_after, tensor_fence_before, tensor_load, tensor_store, tensor_store_packed,
        tensor_wait_stores,
    },
};
use cubecl::prelude::{Sequence as Elements, *};

/// Columns of sums that a unit holds at once.
const PART: usize = 32;
/// Registers of these, of half a warp's rows.
const PART_REGISTERS: usize = PART / 2;
/// Lanes of tensor memory of half a warp, in addresses.
const HALF_WARP: u32 = 16 << 16;

/// Makes weights of the scores of half a warp's queries and one tile of keys, and rescales the sums of the tiles
/// before, if there are any.
#[cube]
fn make_weights<I: Float, M: Numeric, R: Size, P: Size>(
    scores: u32,
    sums: u32,
    state: &mut RowState,
    queries: &Queries<'_, I, M>,
    first_key: u32,
    kept: &Elements<u32>,
    has_sums: bool,
    #[comptime] masked: bool,
    #[comptime] blueprint: TmaForwardBlueprint,
) {
    let ruled = apply_rules_to::<I, M, R>(tensor_load::<R>(scores), queries, first_key, masked);
    let polynomials = comptime!(blueprint.polynomials);
    let weights = weigh_kept::<I, M, R>(ruled, state, queries, first_key, kept, true, polynomials);
    let count = comptime!(blueprint.score_registers());
    let packed = pack_kept::<R, P>(weights, kept, count, comptime!(blueprint.dtype));
    tensor_store_packed::<P>(scores, packed);
    if has_sums {
        let (upper, lower) = (state.rescale_upper, state.rescale_lower);
        if plane_any(upper != 1.0f32 || lower != 1.0f32) {
            #[unroll]
            for part in 0..comptime!(blueprint.head_dim.div_ceil(PART) as u32) {
                let place = sums + comptime!(part * PART as u32);
                let part_sums = tensor_load::<Const<PART_REGISTERS>>(place);
                let rescaled = rescale::<Const<PART_REGISTERS>>(
                    part_sums,
                    upper,
                    lower,
                    0usize,
                    PART_REGISTERS,
                );
                tensor_store::<Const<PART_REGISTERS>>(place, rescaled);
            }
        }
    }
}

/// Divides the sums of half a warp's queries, if there are any, and writes them.
#[cube]
fn write<I: Float, M: Numeric>(
    sums: u32,
    state: &RowState,
    queries: &Queries<'_, I, M>,
    has_sums: bool,
    out: &mut Heads<I>,
    lse: &mut [f32],
    #[comptime] head_dim: usize,
) {
    let totals = row_totals(state, queries);
    write_row_values(state, &totals, queries, lse);
    #[unroll]
    for part in 0..comptime!(head_dim.div_ceil(PART)) {
        let mut part_sums = Vector::<f32, Const<PART_REGISTERS>>::new(0.0f32);
        if has_sums {
            part_sums =
                tensor_load::<Const<PART_REGISTERS>>(sums + comptime!((part * PART) as u32));
        }
        let (column, columns) = comptime!((part * PART, (head_dim - part * PART).min(PART)));
        write_columns::<I, M, Const<PART_REGISTERS>>(
            part_sums, 0usize, &totals, queries, out, column, columns,
        );
    }
}

/// 3. Makes weights for a half of this cube's tiles, finishes and writes it. A warpgroup calls it.
#[cube]
pub(super) fn weigh_and_write<I: Float, M: Numeric, R: Size, P: Size>(
    rules: &Rules<I, M>,
    out: &mut Heads<I>,
    lse: &mut [f32],
    at: &Places,
    tensor: u32,
    tiles: u32,
    work_items: u32,
    #[comptime] blueprint: TmaForwardBlueprint,
) {
    let (tile_kv, head_dim) = comptime!((blueprint.tile_kv, blueprint.head_dim));
    let dtype = comptime!(blueprint.dtype);
    let half = UNIT_POS / 256;
    let first_lane = UNIT_POS % 128 / 32 * 32;
    let (row_of_unit, quad) = (UNIT_POS_PLANE / 4, UNIT_POS_PLANE % 4);
    let scores = tensor + (first_lane << 16) + half * HALF_COLUMNS;
    let sums = scores + 2 * HALF_COLUMNS;
    let exponent = score_exponent(rules);
    // Of the scores in bit 0, of the sums in bit 1: one register.
    let mut phases = 0u32;
    let mut index = CUBE_POS_X;
    while index < work_items {
        let work = work_at(index, tiles, rules.sizes.heads_q, TILE);
        let half_row = work.first_row + half * comptime!(TILE_Q as u32);
        let sequence = rules.sequence(work.batch, work.head);
        if half_row < sequence.seq_q {
            let seen = tiles_of(&sequence, half_row, TILE_Q, blueprint);
            let warp_row = half_row + first_lane;
            // Keys that all queries of the warp see need no check.
            let (all_from, all_to) = keys_of_all(&sequence, warp_row, 32u32);
            let row = warp_row + row_of_unit;
            let upper = queries_at::<I, M>(sequence, row, quad, exponent, tile_kv, dtype);
            let again = rules.sequence(work.batch, work.head);
            let lower = queries_at::<I, M>(again, row + 16, quad, exponent, tile_kv, dtype);
            let mut upper_state = unseen();
            let mut lower_state = unseen();
            // The weights of the first tile also tell that the sums of the tile of queries before were read.
            for tile in seen.first..seen.last {
                let first_key = tile * comptime!(tile_kv as u32);
                let upper_kept = kept_words(&upper, first_key);
                let lower_kept = kept_words(&lower, first_key);
                barrier_wait(at.scored + half * 8, phases & 1);
                phases ^= 1;
                tensor_fence_after();
                let has_sums = tile > seen.first;
                let checked =
                    first_key < all_from || first_key + comptime!(tile_kv as u32) > all_to;
                let options = comptime!(rules.options);
                if comptime!(options.looks_up_pairs()) || checked {
                    make_weights::<I, M, R, P>(
                        scores,
                        sums,
                        &mut upper_state,
                        &upper,
                        first_key,
                        &upper_kept,
                        has_sums,
                        true,
                        blueprint,
                    );
                    make_weights::<I, M, R, P>(
                        scores + HALF_WARP,
                        sums + HALF_WARP,
                        &mut lower_state,
                        &lower,
                        first_key,
                        &lower_kept,
                        has_sums,
                        true,
                        blueprint,
                    );
                } else {
                    make_weights::<I, M, R, P>(
                        scores,
                        sums,
                        &mut upper_state,
                        &upper,
                        first_key,
                        &upper_kept,
                        has_sums,
                        false,
                        blueprint,
                    );
                    make_weights::<I, M, R, P>(
                        scores + HALF_WARP,
                        sums + HALF_WARP,
                        &mut lower_state,
                        &lower,
                        first_key,
                        &lower_kept,
                        has_sums,
                        false,
                        blueprint,
                    );
                }
                tensor_wait_stores();
                tensor_fence_before();
                if UNIT_POS_PLANE == 0 {
                    barrier_arrive(at.weighed + half * 8);
                }
            }
            let has_sums = seen.first < seen.last;
            if has_sums {
                barrier_wait(at.summed + half * 8, phases >> 1);
                phases ^= 2;
                tensor_fence_after();
            }
            write(sums, &upper_state, &upper, has_sums, out, lse, head_dim);
            write(sums + HALF_WARP, &lower_state, &lower, has_sums, out, lse, head_dim);
        }
        index += CUBE_COUNT_X;
    }
}
