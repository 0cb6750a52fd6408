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
    once::{OnceBlueprint, SIDE},
    once_fetch::{Maps, Places, fetch, init_barriers, places},
    once_pairs::{gradient_place, gradient_words, store_gradients, weight_words, weights_of},
    pairs::{GradientRows, PairTile, is_checked, open_keys, pair_tile, store, tiles_of},
    pipeline::{CHUNK_BYTES, UNITS_OF_GROUP, slot_of},
    query_sums::{add_tile, sums_tile},
    rules::{Rules, Side, Strides, origin, score_exponent},
};
use crate::ptx::{
    access::show_to_async,
    acquire_registers,
    barrier::{barrier_arrive, barrier_wait},
    output_address, release_registers, shared_address,
    wgmma::{tile_descriptor, wgmma_products_started, wgmma_settle, wgmma_settle_but_last},
    wgmma_sums::{
        wgmma_across, wgmma_pin_registers, wgmma_sum_started, wgmma_sums, wgmma_sums_clear,
        wgmma_sums_declare, wgmma_wait,
    },
};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

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
fn step<I: Float, M: Numeric>(
    k_tile: u64,
    v_tile: u64,
    stage: &Stage,
    tile: &PairTile<'_, I, M>,
    lane: u32,
    #[comptime] masked: bool,
    #[comptime] blueprint: OnceBlueprint,
) {
    let products = wgmma_products_started::<Const<64>>(
        k_tile,
        tile_descriptor(stage.q, true),
        v_tile,
        tile_descriptor(stage.dout, true),
        comptime!(blueprint.products()),
    );
    let (weights, slopes) = weights_of::<I, M, Const<64>>(products, stage.terms, tile, masked);
    let dtype = comptime!(blueprint.dtype);
    let [of_dv, of_dk] = comptime!(blueprint.sums(blueprint.head_dim));
    let (q_rows, dout_rows) = (tile_descriptor(stage.q, false), tile_descriptor(stage.dout, false));
    let early = comptime!(blueprint.weighs_early(tile.sequence.rules.options));
    let settled = if comptime!(early) {
        let packed = weight_words::<I, M, Const<64>>(weights, tile, dtype);
        wgmma_sum_started::<Const<16>>(packed, dout_rows, of_dv);
        wgmma_settle_but_last::<Const<64>>(weights, 64usize)
    } else {
        wgmma_settle::<Const<64>>(weights, 64usize)
    };
    let gradients = gradient_words::<I, M, Const<64>>(
        settled,
        settled,
        32usize,
        &slopes,
        stage.terms,
        tile,
        dtype,
    );
    if comptime!(!early) {
        let packed = weight_words::<I, M, Const<64>>(settled, tile, dtype);
        wgmma_sum_started::<Const<16>>(packed, dout_rows, of_dv);
    }
    wgmma_sum_started::<Const<16>>(gradients, q_rows, of_dk);
    store_gradients(gradients, &gradient_place(stage.gradients, lane));
    show_to_async();
    sync_plane();
    let in_warp = lane % 32;
    if in_warp == 0 {
        barrier_arrive(stage.gradients_full);
    }
    wgmma_wait();
    if in_warp == 0 {
        barrier_arrive(stage.empty);
    }
}

/// Multiplies the cube's tile `index` of dS with all keys, and adds to tile `to` of the sums of dq.
#[cube]
fn add_to_queries<R: Size>(
    places: &Places,
    index: u32,
    query_sums: &mut [f32],
    to: u32,
    lane: u32,
    #[comptime] blueprint: OnceBlueprint,
) {
    let slot = slot_of(index, comptime!(blueprint.gradients));
    barrier_wait(places.gradients_full + slot.stage * 8, slot.phase);
    let gradients = places.gradients + slot.stage * comptime!(blueprint.gradient_bytes() as u32);
    let sums = wgmma_across::<R>(
        tile_descriptor(gradients, false),
        tile_descriptor(places.k, false),
        comptime!(blueprint.queries(blueprint.head_dim)),
    );
    let in_warp = lane % 32;
    if in_warp == 0 {
        barrier_arrive(places.gradients_empty + slot.stage * 8);
    }
    let base = output_address::<f32>(query_sums);
    let head_dim = comptime!(blueprint.head_dim);
    add_tile::<R>(sums, base, to, lane, head_dim, 0usize, head_dim);
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
    let groups = comptime!(blueprint.groups as u32);
    let (tile_bytes, terms_bytes) =
        comptime!((blueprint.tile_bytes() as u32, blueprint.terms_bytes() as u32));
    // The swizzle repeats every 1024 bytes.
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.shared_bytes() / 4), 1024usize);
    let places = places(shared_address::<u32>(memory.as_slice()), blueprint);
    wgmma_sums_declare(comptime!(blueprint.head_dim));
    let unit = UNIT_POS;
    init_barriers(&places, blueprint);
    sync_cube();

    let (keys, side) = comptime!((blueprint.keys() as u32, SIDE as u32));
    let (first_row, batch) = (CUBE_POS_X * keys, rules.batch_of(CUBE_POS_Z));
    let group = rules.sizes.group;
    let own = rules.sequence(batch, CUBE_POS_Y * group);
    if first_row < own.seq_kv {
        let tiles = tiles_of(&own, first_row, keys, Side::Keys);
        // The compiler sees that units of a warp go the same way, and keeps what they share once: less than a
        // tenth of the registers that it ran short of were left to spill.
        let warpgroup = plane_shuffle(unit / UNITS_OF_GROUP, 0u32);
        let mut index = 0u32;
        if warpgroup == 0 {
            // 1. Fetch.
            release_registers(comptime!(blueprint.registers().1));
            let maps = Maps {
                k: tensor_map_address::<u32, Tiled>(k),
                v: tensor_map_address::<u32, Tiled>(v),
                q: tensor_map_address::<u32, Tiled>(q),
                dout: tensor_map_address::<u32, Tiled>(dout),
            };
            fetch::<I, M>(&maps, rules, terms, &places, &own, first_row, tiles, batch, blueprint);
        } else {
            // 2. Multiply and weigh.
            acquire_registers(comptime!(blueprint.registers().0));
            wgmma_pin_registers(u32::cast_from(rules.sizes.batch == 0));
            let own_group = warpgroup - 1;
            let lane = unit % UNITS_OF_GROUP;
            let quad = lane % 4;
            let group_row = first_row + own_group * side;
            let row = group_row + lane / 32 * 16 + lane % 32 / 4;
            let exponent = score_exponent(rules);
            let k_tile = tile_descriptor(places.k + own_group * tile_bytes, true);
            let v_tile = tile_descriptor(places.v + own_group * tile_bytes, true);
            let gradients_at = places.gradients + own_group * comptime!(CHUNK_BYTES as u32);
            wgmma_sums_clear(comptime!(blueprint.head_dim));
            // Tile of the sums of dq of the tile before, and whose turn it is to multiply that one.
            let mut before = 0u32;
            let mut turn = 0u32;
            let mut open = open_keys(&own, group_row, tiles.0 * side, side, Side::Keys);
            let anew = comptime!(blueprint.groups == 3);
            barrier_wait(places.fixed_full, 0u32);
            for member in 0..group {
                for at in tiles.0..tiles.1 {
                    let sequence = rules.sequence(batch, CUBE_POS_Y * group + member);
                    let of_sums = sums_tile::<I, M>(&sequence, at);
                    let column = at * side;
                    let tile =
                        pair_tile::<I, M>(sequence, row, column, quad, exponent, Side::Keys, anew);
                    let checked =
                        is_checked(&tile.sequence, group_row, column, open, side, Side::Keys);
                    // Of the next tile, which so need not wait for it. All heads have one mask.
                    let next = select(at + 1 < tiles.1, at + 1, tiles.0);
                    open = open_keys(&own, group_row, next * side, side, Side::Keys);
                    let from = slot_of(index, comptime!(blueprint.stages));
                    let to = slot_of(index, comptime!(blueprint.gradients));
                    let q_at = places.ring + from.stage * 2 * tile_bytes;
                    let gradient_bytes = comptime!(blueprint.gradient_bytes() as u32);
                    let stage = Stage {
                        q: q_at,
                        dout: q_at + tile_bytes,
                        terms: places.terms + from.stage * terms_bytes,
                        empty: places.empty + from.stage * 8,
                        gradients: gradients_at + to.stage * gradient_bytes,
                        gradients_full: places.gradients_full + to.stage * 8,
                    };
                    barrier_wait(places.gradients_empty + to.stage * 8, to.phase ^ 1);
                    barrier_wait(places.full + from.stage * 8, from.phase);
                    let options = comptime!(rules.options);
                    // Both ways write the registers themselves: none is left for a copy.
                    if comptime!(options.looks_up_pairs()) || checked {
                        step::<I, M>(k_tile, v_tile, &stage, &tile, lane, true, blueprint);
                    } else {
                        step::<I, M>(k_tile, v_tile, &stage, &tile, lane, false, blueprint);
                    }
                    // 3. Add to dq, a tile behind.
                    if index > 0 {
                        if turn == own_group {
                            add_to_queries::<R>(
                                &places,
                                index - 1,
                                query_sums,
                                before,
                                lane,
                                blueprint,
                            );
                        }
                        turn += 1;
                        if turn == groups {
                            turn = 0u32;
                        }
                    }
                    before = of_sums;
                    index += 1;
                }
            }
            if index > 0 && turn == own_group {
                add_to_queries::<R>(&places, index - 1, query_sums, before, lane, blueprint);
            }
            // 4. Write.
            let sums = wgmma_sums::<R>(comptime!(blueprint.head_dim));
            let origin = origin(&out_strides, batch, CUBE_POS_Y, own.first_kv);
            let (stride, end) = (out_strides.row, own.seq_kv);
            let rows = GradientRows { origin, stride, row, end, quad };
            let (head_dim, dtype) = comptime!((blueprint.head_dim, blueprint.dtype));
            store::<I, R>(sums, 0usize, dv, &rows, 1.0f32, head_dim, dtype);
            let behind_dv = comptime!(blueprint.head_dim / 2);
            store::<I, R>(sums, behind_dv, dk, &rows, rules.numbers.scale, head_dim, dtype);
        }
    }
}
