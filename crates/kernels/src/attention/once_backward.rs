//! The backward pass on Hopper's tensor cores with each pair's products computed once:
//! [`once`](super::once) tells which.
//!
//! A cube keeps 64 rows of k and v for each of its warpgroups that multiply.
//!
//! 1. A warp of warpgroup 0 has TMA fetch k and v, and tiles of q and dout into a ring, as far ahead as there
//!    is room. Another one copies the terms of their queries.
//! 2. The others multiply, weigh, and add to dv and dk in registers. Each writes its part of dS to shared
//!    memory.
//! 3. One warpgroup a tile, in turn, multiplies dS with all keys, and adds to dq in global memory.
//! 4. They write dk and dv.

use super::{
    once::{Layout, OnceBlueprint, SIDE, TERM_BYTES},
    once_pairs::{gradients_of, weights_of},
    pairs::{GradientRows, PairTile, is_checked, pair_tile, store, tiles_of},
    pipeline::{CHUNK_BYTES, Slot, UNITS_OF_GROUP, advance, load_tile},
    query_sums::{add_tile, sums_tile},
    row_terms::NO_WEIGHTS,
    rules::{Rules, Side, Strides, origin, score_exponent},
};
use crate::ptx::{
    access::{show_to_async, store_shared_number, store_shared_word},
    acquire_registers,
    barrier::{barrier_arrive, barrier_expect, barrier_init, barrier_init_fence, barrier_wait},
    load, output_address, release_registers, shared_address,
    wgmma::{
        tile_descriptor, wgmma_across, wgmma_both_weights_started, wgmma_products_started,
        wgmma_settle,
    },
};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Registers that a unit which fetches keeps.
const FETCHING_REGISTERS: u32 = 24;

/// Where a cube is among tiles of queries: those of the first head that its keys meet, then of the next head.
#[derive(CubeType, Clone, Copy)]
struct Walk {
    head: u32,
    tile: u32,
    first: u32,
    end: u32,
}

#[cube]
fn step_on(walk: &mut Walk) {
    walk.tile += 1;
    if walk.tile == walk.end {
        walk.tile = walk.first;
        walk.head += 1;
    }
}

/// Where a cube's tiles and barriers are in shared memory.
#[derive(CubeType, Clone, Copy)]
struct Places {
    k: u32,
    v: u32,
    ring: u32,
    gradients: u32,
    terms: u32,
    fixed_full: u32,
    full: u32,
    empty: u32,
    gradients_full: u32,
    gradients_empty: u32,
}

#[cube]
fn places(begin: u32, #[comptime] blueprint: OnceBlueprint) -> Places {
    let Layout { ring, gradients, terms, barriers, .. } = comptime!(blueprint.layout());
    let fixed_full = begin + comptime!(barriers as u32);
    let full = fixed_full + 8;
    let empty = full + comptime!(8 * blueprint.stages as u32);
    let gradients_full = empty + comptime!(8 * blueprint.stages as u32);
    Places {
        k: begin,
        v: begin + comptime!((blueprint.groups * blueprint.tile_bytes()) as u32),
        ring: begin + comptime!(ring as u32),
        gradients: begin + comptime!(gradients as u32),
        terms: begin + comptime!(terms as u32),
        fixed_full,
        full,
        empty,
        gradients_full,
        gradients_empty: gradients_full + comptime!(8 * blueprint.gradients as u32),
    }
}

/// Copies the terms of a tile's queries. Those beyond the end get no weights.
#[cube]
fn copy_terms<I: Float, M: Numeric>(
    terms: &[f32],
    rules: &Rules<I, M>,
    batch: u32,
    walk: &Walk,
    destination: u32,
    lane: u32,
    #[comptime] count: usize,
) {
    let sequence = rules.sequence(batch, walk.head);
    let (first, all) = (sequence.origin_of_row_values(), rules.all_rows());
    #[unroll]
    for half in 0..2u32 {
        let place = half * 32 + lane;
        let row = walk.tile * comptime!(SIDE as u32) + place;
        let at = first + min(row, sequence.seq_q - 1);
        #[unroll]
        for term in 0..count {
            let mut value = terms[(at + comptime!(term as u32) * all) as usize];
            if row >= sequence.seq_q {
                value = comptime!(if term == 0 { 0.0f32 } else { NO_WEIGHTS }).runtime();
            }
            store_shared_number(destination + 4 * place + comptime!((term * TERM_BYTES) as u32), value);
        }
    }
}

/// What a warpgroup has of a stage of the ring, and where its part of dS goes.
#[derive(CubeType, Clone, Copy)]
struct Stage {
    q: u32,
    dout: u32,
    terms: u32,
    /// Tells that the stage is empty.
    empty: u32,
    gradients: u32,
    /// Tells that dS is there.
    gradients_full: u32,
}

/// Computes a tile's products, and adds to dv and dk. There is no branch in between: the tensor cores would
/// have to be done before it.
#[cube]
fn step<I: Float, M: Numeric, R: Size>(
    sums: Vector<f32, R>,
    k_tile: u64,
    v_tile: u64,
    stage: &Stage,
    tile: &PairTile<'_, I, M>,
    lane: u32,
    #[comptime] masked: bool,
    #[comptime] blueprint: OnceBlueprint,
) -> Vector<f32, R> {
    let products = wgmma_products_started::<Const<64>>(
        k_tile,
        tile_descriptor(stage.q, true),
        v_tile,
        tile_descriptor(stage.dout, true),
        comptime!(blueprint.products()),
    );
    let (weights, slopes) = weights_of::<I, M>(products, stage.terms, tile, masked);
    let settled = wgmma_settle::<Const<64>>(weights, 64usize);
    let dtype = comptime!(blueprint.dtype);
    let packed = gradients_of::<I, M>(settled, &slopes, stage.terms, tile, dtype);
    let started = wgmma_both_weights_started::<R, Const<32>>(
        sums,
        packed,
        tile_descriptor(stage.dout, false),
        tile_descriptor(stage.q, false),
        comptime!(blueprint.sums()),
    );
    // Rows of the unit's keys, chunks of 8 queries: as TMA would swizzle them.
    let in_warp = lane % 32;
    let (key, quad) = (lane / 32 * 16 + in_warp / 4, in_warp % 4);
    let row_at = stage.gradients + key * 128 + quad * 4;
    let swizzle = in_warp / 4 * 16;
    #[unroll]
    for pair in 0..16usize {
        let chunk = comptime!((pair / 2 * 16) as u32) ^ swizzle;
        let address = row_at + chunk + comptime!((pair % 2 * 8 * 128) as u32);
        store_shared_word(address, packed.extract(comptime!(16 + pair)));
    }
    show_to_async();
    sync_plane();
    if in_warp == 0 {
        barrier_arrive(stage.gradients_full);
    }
    let sums = wgmma_settle::<R>(started, comptime!(blueprint.head_dim));
    if in_warp == 0 {
        barrier_arrive(stage.empty);
    }
    sums
}

/// The tile of dS that a warpgroup may have to multiply.
#[derive(CubeType, Clone, Copy)]
struct Behind {
    /// Tile of the sums.
    tile: u32,
    stage: u32,
    phase: u32,
}

/// Multiplies dS with all keys, and adds to dq.
#[cube]
fn add_to_queries<R: Size>(
    places: &Places,
    behind: &Behind,
    base: u64,
    lane: u32,
    #[comptime] blueprint: OnceBlueprint,
) {
    let stage = load::<u32>(behind.stage);
    barrier_wait(places.gradients_full + stage * 8, load::<u32>(behind.phase));
    let gradients = places.gradients + stage * comptime!(blueprint.gradient_bytes() as u32);
    let sums = wgmma_across::<R>(
        tile_descriptor(gradients, false),
        tile_descriptor(places.k, false),
        comptime!(blueprint.queries()),
    );
    if lane % 32 == 0 {
        barrier_arrive(places.gradients_empty + stage * 8);
    }
    add_tile::<R>(sums, base, behind.tile, lane, comptime!(blueprint.head_dim));
}

/// dk and dv, and dq added to `query_sums`; see [`attention_backward_kv_portable_kernel`] for what they are.
/// Cubes: tiles of 64 keys for each warpgroup along x, heads of keys along y, sequences along z. The scale has
/// to be positive.
///
/// [`attention_backward_kv_portable_kernel`]: super::backward::attention_backward_kv_portable_kernel
#[cube(launch_unchecked)]
pub(crate) fn attention_backward_once_wgmma_kernel<I: Float, M: Numeric, R: Size>(
    k: &TensorMap<u32, Tiled>,
    v: &TensorMap<u32, Tiled>,
    q: &TensorMap<u32, Tiled>,
    dout: &TensorMap<u32, Tiled>,
    rules: &Rules<I, M>,
    terms: &[f32],
    query_sums: &mut [f32],
    dk: &mut [I],
    dv: &mut [I],
    out_strides: Strides,
    #[comptime] blueprint: OnceBlueprint,
    #[define(I, M)] _types: [ElemType; 2],
    #[define(R)] _width: usize,
) {
    let (stages, held) = comptime!((blueprint.stages as u32, blueprint.gradients as u32));
    let groups = comptime!(blueprint.groups as u32);
    let (tile_bytes, terms_bytes) =
        comptime!((blueprint.tile_bytes() as u32, blueprint.terms_bytes() as u32));
    // The swizzle repeats every 1024 bytes.
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.shared_bytes() / 4), 1024usize);
    let places = places(shared_address::<u32>(memory.as_slice()), blueprint);
    let unit = UNIT_POS;
    if unit == 0 {
        barrier_init(places.fixed_full, 1u32);
        #[unroll]
        for stage in 0..stages {
            // TMA, and the warp that copies terms.
            barrier_init(places.full + comptime!(8 * stage), 2u32);
            barrier_init(places.empty + comptime!(8 * stage), comptime!(4 * groups));
        }
        #[unroll]
        for stage in 0..held {
            barrier_init(places.gradients_full + comptime!(8 * stage), comptime!(4 * groups));
            barrier_init(places.gradients_empty + comptime!(8 * stage), 4u32);
        }
        barrier_init_fence();
    }
    sync_cube();

    let keys = comptime!(blueprint.keys() as u32);
    let (first_row, batch) = (CUBE_POS_X * keys, rules.batch_of(CUBE_POS_Z));
    let group = rules.sizes.group;
    let own = rules.sequence(batch, CUBE_POS_Y * group);
    if first_row < own.seq_kv {
        let tiles = tiles_of(&own, first_row, keys, Side::Keys);
        let count = (tiles.1 - min(tiles.0, tiles.1)) * group;
        let mut walk =
            Walk { head: CUBE_POS_Y * group, tile: tiles.0, first: tiles.0, end: tiles.1 };
        let mut slot = Slot { stage: 0u32, phase: 0u32 };
        if unit < 128 {
            // 1. Fetch.
            release_registers(FETCHING_REGISTERS);
            if unit == 0 {
                let tensor_batch =
                    if comptime!(rules.options.packed) { 0u32.runtime() } else { batch };
                let (q_map, dout_map) = (
                    tensor_map_address::<u32, Tiled>(q),
                    tensor_map_address::<u32, Tiled>(dout),
                );
                barrier_expect(places.fixed_full, 2 * groups * tile_bytes);
                load_tile(
                    places.k,
                    tensor_map_address::<u32, Tiled>(k),
                    own.first_kv + first_row,
                    CUBE_POS_Y,
                    load::<u32>(tensor_batch),
                    places.fixed_full,
                    comptime!(blueprint.keys()),
                    SIDE,
                    comptime!(blueprint.blocks()),
                );
                load_tile(
                    places.v,
                    tensor_map_address::<u32, Tiled>(v),
                    own.first_kv + first_row,
                    CUBE_POS_Y,
                    load::<u32>(tensor_batch),
                    places.fixed_full,
                    comptime!(blueprint.keys()),
                    SIDE,
                    comptime!(blueprint.blocks()),
                );
                for _ in 0..count {
                    let stage = load::<u32>(slot.stage);
                    barrier_wait(places.empty + stage * 8, load::<u32>(slot.phase) ^ 1);
                    let full = places.full + stage * 8;
                    let at = places.ring + stage * 2 * tile_bytes;
                    let row = own.first_q + walk.tile * comptime!(SIDE as u32);
                    let head = load::<u32>(walk.head);
                    barrier_expect(full, 2 * tile_bytes);
                    load_tile(
                        at,
                        q_map,
                        row,
                        head,
                        load::<u32>(tensor_batch),
                        full,
                        SIDE,
                        SIDE,
                        comptime!(blueprint.blocks()),
                    );
                    load_tile(
                        at + tile_bytes,
                        dout_map,
                        row,
                        head,
                        load::<u32>(tensor_batch),
                        full,
                        SIDE,
                        SIDE,
                        comptime!(blueprint.blocks()),
                    );
                    advance(&mut slot, stages);
                    step_on(&mut walk);
                }
            } else if unit >= 32 && unit < 64 {
                for _ in 0..count {
                    let stage = load::<u32>(slot.stage);
                    barrier_wait(places.empty + stage * 8, load::<u32>(slot.phase) ^ 1);
                    copy_terms::<I, M>(
                        terms,
                        rules,
                        batch,
                        &walk,
                        places.terms + stage * terms_bytes,
                        unit - 32,
                        comptime!(blueprint.terms),
                    );
                    sync_plane();
                    if unit == 32 {
                        barrier_arrive(places.full + stage * 8);
                    }
                    advance(&mut slot, stages);
                    step_on(&mut walk);
                }
            }
        } else {
            // 2. Multiply and weigh.
            acquire_registers(comptime!(blueprint.registers()));
            let warpgroup = unit / UNITS_OF_GROUP - 1;
            let lane = unit % UNITS_OF_GROUP;
            let quad = lane % 4;
            let group_row = first_row + warpgroup * comptime!(SIDE as u32);
            let row = group_row + lane / 32 * 16 + lane % 32 / 4;
            let exponent = score_exponent(rules);
            let k_tile = tile_descriptor(places.k + warpgroup * tile_bytes, true);
            let v_tile = tile_descriptor(places.v + warpgroup * tile_bytes, true);
            let gradients_at = places.gradients + warpgroup * comptime!(CHUNK_BYTES as u32);
            let base = output_address::<f32>(query_sums);
            let mut sums = Vector::<f32, R>::new(0.0f32);
            let mut written = Slot { stage: 0u32, phase: 0u32 };
            let mut behind = Behind { tile: 0u32, stage: 0u32, phase: 0u32 };
            // Whose turn it is to multiply the tile before.
            let mut turn = 0u32;
            barrier_wait(places.fixed_full, 0u32);
            for index in 0..count {
                let sequence = rules.sequence(batch, load::<u32>(walk.head));
                let first_column = walk.tile * comptime!(SIDE as u32);
                let tile_of_sums = sums_tile::<I, M>(&sequence, load::<u32>(walk.tile));
                let tile = pair_tile::<I, M>(
                    sequence,
                    row,
                    first_column,
                    quad,
                    exponent,
                    Side::Keys,
                );
                let checked =
                    is_checked(&tile.sequence, group_row, first_column, 64u32, Side::Keys);
                let (at, to) = (load::<u32>(slot.stage), load::<u32>(written.stage));
                let q_at = places.ring + at * 2 * tile_bytes;
                let stage = Stage {
                    q: q_at,
                    dout: q_at + tile_bytes,
                    terms: places.terms + at * terms_bytes,
                    empty: places.empty + at * 8,
                    gradients: gradients_at + to * comptime!(blueprint.gradient_bytes() as u32),
                    gradients_full: places.gradients_full + to * 8,
                };
                barrier_wait(places.gradients_empty + to * 8, load::<u32>(written.phase) ^ 1);
                barrier_wait(places.full + at * 8, load::<u32>(slot.phase));
                let options = comptime!(rules.options);
                // Both ways write the registers themselves: none is left for a copy.
                if comptime!(options.mask || options.dropout) || checked {
                    sums = step::<I, M, R>(
                        sums, k_tile, v_tile, &stage, &tile, lane, true, blueprint,
                    );
                } else {
                    sums = step::<I, M, R>(
                        sums, k_tile, v_tile, &stage, &tile, lane, false, blueprint,
                    );
                }
                // 3. Add to dq, a tile behind.
                if index > 0 {
                    if turn == warpgroup {
                        add_to_queries::<R>(&places, &behind, base, lane, blueprint);
                    }
                    turn += 1;
                    if turn == groups {
                        turn = 0u32;
                    }
                }
                behind.tile = tile_of_sums;
                behind.stage = load::<u32>(written.stage);
                behind.phase = load::<u32>(written.phase);
                advance(&mut written, held);
                advance(&mut slot, stages);
                step_on(&mut walk);
            }
            if count > 0 && turn == warpgroup {
                add_to_queries::<R>(&places, &behind, base, lane, blueprint);
            }
            // 4. Write.
            let origin = origin(&out_strides, batch, CUBE_POS_Y, own.first_kv);
            let rows = GradientRows {
                origin,
                stride: out_strides.row,
                row,
                end: own.seq_kv,
                quad,
            };
            let (head_dim, dtype) = comptime!((blueprint.head_dim, blueprint.dtype));
            store::<I, R>(sums, 0usize, dv, &rows, 1.0f32, head_dim, dtype);
            let behind_dv = comptime!(blueprint.head_dim / 2);
            store::<I, R>(sums, behind_dv, dk, &rows, rules.numbers.scale, head_dim, dtype);
        }
    }
}
