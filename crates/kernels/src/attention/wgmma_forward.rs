//! The forward pass on Hopper's tensor cores: a persistent cube of three or four warpgroups on every
//! multiprocessor, each tile of it 128 or 192 queries of a head.
//!
//! 1. Warpgroup 0 has TMA fetch the queries of a tile, and tiles of keys and of values into a ring, as far ahead as
//!    there is room.
//! 2. The other warpgroups have 64 queries each. The tensor cores multiply the queries with the next
//!    tile of keys, and the weights, which stay in registers, with the values of the last one, while
//!    other warpgroups make weights of their scores (Shah et al., "FlashAttention-3", 2024,
//!    section 3.2).
//! 3. They divide by the sums of their weights and write.

use super::{
    kept_bits::{kept_words, pack_kept},
    pipeline::{CHUNK_BYTES, Slot, TmaForwardBlueprint, advance, index_in, load_tile, work_at},
    rules::{Heads, Rules, keys_of_all, score_exponent},
    softmax::{
        Queries, RowState, apply_rules, apply_rules_to, queries_at, rescale, unseen, weigh_kept,
        write_rows,
    },
};
use crate::ptx::{
    acquire_registers,
    barrier::{barrier_arrive, barrier_expect, barrier_init, barrier_init_fence, barrier_wait},
    load, release_registers, shared_address,
    wgmma::{
        Turn, pass_turn, tile_descriptor, wgmma_overlapped, wgmma_product, wgmma_settle,
        wgmma_weights,
    },
};
use cubecl::prelude::{Sequence as Elements, *};
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// The ring that tiles come in by, and the barriers that give its stages back. A stage has room for a tile of keys and
/// for the tile of values before it, which are needed together.
#[derive(CubeType, Clone, Copy)]
struct KeyValueRing {
    k: u32,
    v: u32,
    empty: u32,
    turn: Turn,
}

/// Waits for both tiles, and then, without a branch, has the tensor cores multiply queries and keys,
/// and the last weights and values, makes weights of the scores meanwhile, and gives both back.
#[cube]
fn step<I: Float, M: Numeric, R: Size, P: Size>(
    sums: Vector<f32, R>,
    weights: Vector<u32, P>,
    q_tile: u64,
    ring: &KeyValueRing,
    stage: u32,
    state: &mut RowState,
    queries: &Queries<'_, I, M>,
    first_key: u32,
    #[comptime] masked: bool,
    #[comptime] blueprint: TmaForwardBlueprint,
) -> (Vector<f32, R>, Vector<u32, P>) {
    let kv_bytes = comptime!(blueprint.kv_bytes() as u32);
    let (k_tile, v_tile) = (ring.k + stage * kv_bytes, ring.v + stage * kv_bytes);
    let drawn = kept_words(queries, first_key);
    let both = wgmma_overlapped::<R, P>(
        sums,
        weights,
        q_tile,
        tile_descriptor(k_tile, true),
        tile_descriptor(v_tile, false),
        ring.turn,
        comptime!(blueprint.scores()),
        comptime!(blueprint.weights()),
        comptime!(blueprint.takes_turns),
    );
    let ruled = apply_rules_to::<I, M, R>(both, queries, first_key, masked);
    let carried = weigh_kept::<I, M, R>(ruled, state, queries, first_key, &drawn, false, false);
    let (first, used) = comptime!((blueprint.score_registers(), blueprint.out_registers()));
    // Packed only then: the tensor cores still read the registers of the last weights.
    let settled = wgmma_settle::<R>(carried, comptime!(first + used));
    if UNIT_POS & 127 == 0 {
        barrier_arrive(ring.empty + stage * 8);
    }
    let sums = rescale::<R>(settled, state.rescale_upper, state.rescale_lower, first, used);
    (sums, packed_weights::<R, P>(settled, &drawn, blueprint))
}

/// Whether a query of the warpgroup may not see a key of the tile. From `all_from` to `all_to` all see all.
#[cube]
fn is_partly_hidden(first_key: u32, tile_kv: u32, all_from: u32, all_to: u32) -> bool {
    first_key < all_from || first_key + tile_kv > all_to
}

#[cube]
fn packed_weights<R: Size, P: Size>(
    weights: Vector<f32, R>,
    drawn: &Elements<u32>,
    #[comptime] blueprint: TmaForwardBlueprint,
) -> Vector<u32, P> {
    let count = comptime!(blueprint.tile_kv / 2);
    pack_kept::<R, P>(weights, drawn, count, comptime!(blueprint.dtype))
}

/// The forward pass; see [`attention_forward_portable_kernel`] for what it computes. The scale has to
/// be positive.
///
/// [`attention_forward_portable_kernel`]: super::forward::attention_forward_portable_kernel
#[cube(launch_unchecked)]
pub(crate) fn attention_forward_wgmma_kernel<I: Float, M: Numeric, R: Size, P: Size>(
    q: &TensorMap<u32, Tiled>,
    k: &TensorMap<u32, Tiled>,
    v: &TensorMap<u32, Tiled>,
    rules: &Rules<I, M>,
    out: &mut Heads<I>,
    lse: &mut [f32],
    tiles: u32,
    work_items: u32,
    #[comptime] blueprint: TmaForwardBlueprint,
    #[define(I, M)] _types: [ElemType; 2],
    #[define(R, P)] _widths: [usize; 2],
) {
    let stages = comptime!(blueprint.stages as u32);
    let (tile_q, tile_kv) = comptime!((blueprint.rows_q() as u32, blueprint.tile_kv as u32));
    let groups = comptime!(blueprint.groups as u32);
    let (q_bytes, kv_bytes) = comptime!((blueprint.q_bytes() as u32, blueprint.kv_bytes() as u32));
    // The swizzle repeats every 1024 bytes.
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.shared_bytes() / 4), 1024usize);
    let q_at = shared_address::<u32>(memory.as_slice());
    let k_ring = q_at + q_bytes;
    let v_ring = k_ring + comptime!(blueprint.stages as u32 * blueprint.kv_bytes() as u32);
    let q_full = v_ring + comptime!(blueprint.stages as u32 * blueprint.kv_bytes() as u32);
    let q_empty = q_full + 8;
    let full = q_empty + 8;
    let empty = full + comptime!(8 * blueprint.stages as u32);
    let unit = UNIT_POS;
    if unit == 0 {
        barrier_init(q_full, 1u32);
        barrier_init(q_empty, groups);
        #[unroll]
        for stage in 0..stages {
            barrier_init(full + comptime!(8 * stage), 1u32);
            barrier_init(empty + comptime!(8 * stage), groups);
        }
        barrier_init_fence();
    }
    sync_cube();

    let mut round = 0u32;
    let mut index = index_in(round);
    let mut q_phase = 0u32;
    if unit < 128 {
        // 1. Produce. Values are fetched one tile behind keys, as they are needed.
        release_registers(24u32);
        if unit == 0 {
            let q_map = tensor_map_address::<u32, Tiled>(q);
            let k_map = tensor_map_address::<u32, Tiled>(k);
            let v_map = tensor_map_address::<u32, Tiled>(v);
            let mut slot = Slot { stage: 0u32, phase: 0u32 };
            while index < work_items {
                let work =
                    work_at(index, tiles, rules.sizes.heads_q, comptime!(blueprint.rows_q()));
                let sequence = rules.sequence(work.batch, work.head);
                let mut tensor_batch = work.batch;
                if comptime!(rules.options.packed) {
                    tensor_batch = 0u32;
                }
                let head_kv = work.head / rules.sizes.group;
                if work.first_row < sequence.seq_q {
                    barrier_wait(q_empty, load::<u32>(q_phase) ^ 1);
                    barrier_expect(q_full, q_bytes);
                    load_tile(
                        q_at,
                        q_map,
                        sequence.first_q + work.first_row,
                        work.head,
                        load::<u32>(tensor_batch),
                        q_full,
                        comptime!(blueprint.rows_q()),
                        comptime!(blueprint.rows_q()),
                        comptime!(blueprint.blocks()),
                    );
                    q_phase ^= 1;
                    let end = min(work.first_row + tile_q, sequence.seq_q);
                    let keys = sequence.keys_of(work.first_row, end);
                    let first = keys.0 / tile_kv;
                    let last = keys.1.div_ceil(tile_kv);
                    // One round more than tiles: the first has no values, the last no keys.
                    if first < last {
                        for tile in first..last + 1 {
                            let stage = load::<u32>(slot.stage);
                            let barrier = full + stage * 8;
                            barrier_wait(empty + stage * 8, load::<u32>(slot.phase) ^ 1);
                            let copied = u32::cast_from(tile < last) + u32::cast_from(tile > first);
                            barrier_expect(barrier, copied * kv_bytes);
                            if tile < last {
                                load_tile(
                                    k_ring + stage * kv_bytes,
                                    k_map,
                                    sequence.first_kv + tile * tile_kv,
                                    head_kv,
                                    load::<u32>(tensor_batch),
                                    barrier,
                                    comptime!(blueprint.tile_kv),
                                    comptime!(blueprint.tile_kv),
                                    comptime!(blueprint.blocks()),
                                );
                            }
                            if tile > first {
                                load_tile(
                                    v_ring + stage * kv_bytes,
                                    v_map,
                                    sequence.first_kv + (tile - 1) * tile_kv,
                                    head_kv,
                                    load::<u32>(tensor_batch),
                                    barrier,
                                    comptime!(blueprint.tile_kv),
                                    64usize,
                                    comptime!(blueprint.blocks()),
                                );
                            }
                            advance(&mut slot, stages);
                        }
                    }
                }
                round += 1;
                index = index_in(round);
            }
        }
    } else {
        // 2. Multiply and weigh.
        acquire_registers(comptime!(blueprint.registers()));
        // The compiler sees that units of a warp go the same way.
        let group = plane_shuffle(unit / 128, 0u32) - 1;
        let lane = unit % 128;
        let quad = lane % 4;
        let q_tile = tile_descriptor(q_at + group * comptime!(CHUNK_BYTES as u32), true);
        let exponent = score_exponent(rules);
        let turn = Turn { own: 1 + group, next: 1 + (group + 1) % groups };
        let ring = KeyValueRing { k: k_ring, v: v_ring, empty, turn };
        let mut slot = Slot { stage: 0u32, phase: 0u32 };
        if comptime!(blueprint.takes_turns) {
            // The first turn is the first warpgroup's.
            if group == groups - 1 {
                pass_turn(turn);
            }
        }
        while index < work_items {
            let work = work_at(index, tiles, rules.sizes.heads_q, comptime!(blueprint.rows_q()));
            let sequence = rules.sequence(work.batch, work.head);
            if work.first_row < sequence.seq_q {
                let end = min(work.first_row + tile_q, sequence.seq_q);
                let keys = sequence.keys_of(work.first_row, end);
                let first = keys.0 / tile_kv;
                let last = keys.1.div_ceil(tile_kv);
                let group_row = work.first_row + group * 64;
                let row = group_row + lane / 32 * 16 + lane % 32 / 4;
                let queries = queries_at::<I, M>(
                    sequence,
                    row,
                    quad,
                    exponent,
                    comptime!(blueprint.tile_kv),
                    comptime!(blueprint.dtype),
                );
                // Keys that all queries of the group see need no check.
                let (all_from, all_to) = keys_of_all(&queries.sequence, group_row, 64u32);

                let mut state = unseen();
                let mut sums = Vector::<f32, R>::new(0.0f32);
                barrier_wait(q_full, load::<u32>(q_phase));
                if first < last {
                    // The first tile of keys has no weights to multiply values with.
                    let stage = load::<u32>(slot.stage);
                    let first_key = first * tile_kv;
                    let drawn = kept_words(&queries, first_key);
                    barrier_wait(full + stage * 8, load::<u32>(slot.phase));
                    let scores = wgmma_product::<R>(
                        q_tile,
                        tile_descriptor(k_ring + stage * kv_bytes, true),
                        comptime!(blueprint.scores()),
                    );
                    if lane == 0 {
                        barrier_arrive(empty + stage * 8);
                    }
                    advance(&mut slot, stages);
                    let checked = is_partly_hidden(first_key, tile_kv, all_from, all_to);
                    let ruled = apply_rules::<I, M, R>(scores, &queries, first_key, checked);
                    let weighed = weigh_kept::<I, M, R>(
                        ruled, &mut state, &queries, first_key, &drawn, false, false,
                    );
                    let mut weights = packed_weights::<R, P>(weighed, &drawn, blueprint);
                    for tile in first + 1..last {
                        let stage = load::<u32>(slot.stage);
                        barrier_wait(full + stage * 8, load::<u32>(slot.phase));
                        let first_key = tile * tile_kv;
                        let checked = is_partly_hidden(first_key, tile_kv, all_from, all_to);
                        let options = comptime!(rules.options);
                        // Both ways write the registers themselves: none is left for a copy.
                        if comptime!(options.looks_up_pairs()) || checked {
                            let stepped = step::<I, M, R, P>(
                                sums, weights, q_tile, &ring, stage, &mut state, &queries,
                                first_key, true, blueprint,
                            );
                            sums = stepped.0;
                            weights = stepped.1;
                        } else {
                            let stepped = step::<I, M, R, P>(
                                sums, weights, q_tile, &ring, stage, &mut state, &queries,
                                first_key, false, blueprint,
                            );
                            sums = stepped.0;
                            weights = stepped.1;
                        }
                        advance(&mut slot, stages);
                    }
                    // Products with the queries are done.
                    let early = comptime!(blueprint.frees_queries_early());
                    if comptime!(early) && lane == 0 {
                        barrier_arrive(q_empty);
                    }
                    let stage = load::<u32>(slot.stage);
                    barrier_wait(full + stage * 8, load::<u32>(slot.phase));
                    sums = wgmma_weights::<R, P>(
                        sums,
                        weights,
                        tile_descriptor(v_ring + stage * kv_bytes, false),
                        comptime!(blueprint.weights()),
                    );

                    if lane == 0 {
                        barrier_arrive(empty + stage * 8);
                    }
                    advance(&mut slot, stages);
                    if comptime!(!early) && lane == 0 {
                        barrier_arrive(q_empty);
                    }
                } else if lane == 0 {
                    barrier_arrive(q_empty);
                }
                q_phase ^= 1;

                // 3. Finish and write.
                let (first, head_dim) =
                    comptime!((blueprint.score_registers(), blueprint.head_dim));
                write_rows::<I, M, R>(sums, first, &state, &queries, out, lse, head_dim);
            }
            round += 1;
            index = index_in(round);
        }
    }
}
