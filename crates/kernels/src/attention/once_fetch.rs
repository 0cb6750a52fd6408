//! Where a cube of the backward pass that computes each pair's products once has its tiles, and how they come in.

use super::{
    once::{Layout, OnceBlueprint, SIDE},
    pipeline::{load_tile, slot_of},
    row_terms::copy_terms,
    rules::{Rules, Sequence},
};
use crate::ptx::{
    barrier::{barrier_arrive, barrier_expect, barrier_init, barrier_init_fence, barrier_wait},
    load,
};
use cubecl::prelude::*;

/// Where a cube's tiles and barriers are in shared memory.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Places {
    pub(super) k: u32,
    pub(super) v: u32,
    pub(super) ring: u32,
    pub(super) gradients: u32,
    pub(super) weights: u32,
    pub(super) terms: u32,
    pub(super) fixed_full: u32,
    pub(super) full: u32,
    pub(super) empty: u32,
    pub(super) gradients_full: u32,
    pub(super) gradients_empty: u32,
    pub(super) weights_full: u32,
}

#[cube]
pub(super) fn places(begin: u32, #[comptime] blueprint: OnceBlueprint) -> Places {
    let Layout { ring, gradients, weights, terms, barriers, .. } = comptime!(blueprint.layout());
    let fixed_full = begin + comptime!(barriers as u32);
    let full = fixed_full + 8;
    let empty = full + comptime!(8 * blueprint.stages as u32);
    let gradients_full = empty + comptime!(8 * blueprint.stages as u32);
    let gradients_empty = gradients_full + comptime!(8 * blueprint.gradients as u32);
    Places {
        k: begin,
        v: begin + comptime!((ring / 2) as u32),
        ring: begin + comptime!(ring as u32),
        gradients: begin + comptime!(gradients as u32),
        weights: begin + comptime!(weights as u32),
        terms: begin + comptime!(terms as u32),
        fixed_full,
        full,
        empty,
        gradients_full,
        gradients_empty,
        weights_full: gradients_empty + comptime!(8 * blueprint.gradients as u32),
    }
}

/// Readies all barriers; the cube has to wait for it.
#[cube]
pub(super) fn init_barriers(places: &Places, #[comptime] blueprint: OnceBlueprint) {
    // Of a warpgroup each warp arrives.
    let (all, group) = comptime!((4 * blueprint.groups as u32, 4u32));
    let shares = comptime!(blueprint.shares_keys());
    let (writing, reading) = comptime!(if shares { (group, all) } else { (all, group) });
    if UNIT_POS == 0 {
        barrier_init(places.fixed_full, 1u32);
        #[unroll]
        for stage in 0..comptime!(blueprint.stages as u32) {
            // TMA, and the warp that copies terms.
            barrier_init(places.full + comptime!(8 * stage), 2u32);
            barrier_init(places.empty + comptime!(8 * stage), all);
        }
        #[unroll]
        for stage in 0..comptime!(blueprint.gradients as u32) {
            barrier_init(places.gradients_full + comptime!(8 * stage), writing);
            barrier_init(places.gradients_empty + comptime!(8 * stage), reading);
        }
        if comptime!(shares) {
            barrier_init(places.weights_full, group);
        }
        barrier_init_fence();
    }
}

/// Addresses of the tensor maps.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Maps {
    pub(super) k: u64,
    pub(super) v: u64,
    pub(super) q: u64,
    pub(super) dout: u64,
}

/// What warpgroup 0 does: its first unit has TMA fetch k and v, and tiles of q and dout into the ring, as far ahead as
/// there is room. Its second warp copies the terms of their queries.
#[cube]
pub(super) fn fetch<I: Float, M: Numeric>(
    maps: &Maps,
    rules: &Rules<I, M>,
    terms: &[f32],
    places: &Places,
    own: &Sequence<'_, I, M>,
    first_row: u32,
    tiles: (u32, u32),
    batch: u32,
    #[comptime] blueprint: OnceBlueprint,
) {
    let unit = UNIT_POS;
    let side = comptime!(SIDE as u32);
    let (tile_bytes, terms_bytes) =
        comptime!((blueprint.tile_bytes() as u32, blueprint.terms_bytes() as u32));
    let (keys, blocks) = comptime!((blueprint.keys(), blueprint.blocks()));
    let group = rules.sizes.group;
    let mut index = 0u32;
    if unit == 0 {
        let tensor_batch = if comptime!(rules.options.packed) { 0u32.runtime() } else { batch };
        barrier_expect(places.fixed_full, comptime!(blueprint.layout().ring as u32));
        load_tile(
            places.k,
            maps.k,
            own.first_kv + first_row,
            CUBE_POS_Y,
            load::<u32>(tensor_batch),
            places.fixed_full,
            keys,
            SIDE,
            blocks,
        );
        load_tile(
            places.v,
            maps.v,
            own.first_kv + first_row,
            CUBE_POS_Y,
            load::<u32>(tensor_batch),
            places.fixed_full,
            keys,
            SIDE,
            blocks,
        );
        for member in 0..group {
            for tile in tiles.0..tiles.1 {
                let slot = slot_of(index, comptime!(blueprint.stages));
                barrier_wait(places.empty + slot.stage * 8, slot.phase ^ 1);
                let full = places.full + slot.stage * 8;
                let at = places.ring + slot.stage * 2 * tile_bytes;
                let row = own.first_q + tile * side;
                let head = CUBE_POS_Y * group + member;
                barrier_expect(full, 2 * tile_bytes);
                load_tile(
                    at,
                    maps.q,
                    row,
                    head,
                    load::<u32>(tensor_batch),
                    full,
                    SIDE,
                    SIDE,
                    blocks,
                );
                load_tile(
                    at + tile_bytes,
                    maps.dout,
                    row,
                    head,
                    load::<u32>(tensor_batch),
                    full,
                    SIDE,
                    SIDE,
                    blocks,
                );
                index += 1;
            }
        }
    } else if unit / 32 == 1 {
        for member in 0..group {
            let sequence = rules.sequence(batch, CUBE_POS_Y * group + member);
            for tile in tiles.0..tiles.1 {
                let slot = slot_of(index, comptime!(blueprint.stages));
                barrier_wait(places.empty + slot.stage * 8, slot.phase ^ 1);
                copy_terms::<I, M>(
                    terms,
                    &sequence,
                    tile * side,
                    places.terms + slot.stage * terms_bytes,
                    unit - 32,
                    comptime!(blueprint.terms),
                );
                sync_plane();
                if unit == 32 {
                    barrier_arrive(places.full + slot.stage * 8);
                }
                index += 1;
            }
        }
    }
}
