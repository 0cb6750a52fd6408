//! The forward pass on the tensor cores of Blackwell's data-center GPUs: a persistent cube of three warpgroups on every
//! multiprocessor, each tile of it twice 128 queries of a head.
//!
//! 1. Warp 0 has TMA fetch the queries of a tile, and tiles of keys and of values into a ring, as far ahead as there
//!    is room.
//! 2. Warp 1 has the tensor cores multiply, for one half of the queries and then for the other: the weights of a tile
//!    of keys with its values, and the queries with the next tile of keys.
//! 3. Warpgroups 1 and 2 have a half each. They make weights of its scores while the tensor cores work for the other,
//!    and divide by their sums in the end. Where a row's largest score grew by much, they rescale its sums.
//!
//! Scores and sums lie in tensor memory. Weights take the place of the scores that they were made of, as pairs of 16
//! bits: a product of warp 1 comes behind the ones before it, so that scores overwrite weights that were multiplied. This
//! and the lazy rescaling are as in `FlashAttention-4`, and so are exponentials by [polynomials](super::polynomial). One
//! unit of a warp starts copies and products, which `elect.sync` names. Nobody has run this on such a GPU: its PTX is
//! executed by `crates/simulator` alone, so sizes and the order of the work follow what others published and not
//! measurements.

use super::{
    pipeline::{
        BLOCK, Ring, Slot, TILE_Q, TmaForwardBlueprint, copied_tile, fetch_tile, load_tile, work_at,
    },
    rules::{Heads, Rules, Sequence},
    tcgen05_weights::weigh_and_write,
};
use crate::ptx::{
    access::load_shared_word,
    acquire_registers,
    barrier::{barrier_expect, barrier_init, barrier_init_fence, barrier_wait},
    computed, load, release_registers, shared_address,
    tcgen05::{
        COLUMNS, elect, tensor_alloc, tensor_commit, tensor_descriptor, tensor_fence_after,
        tensor_free, tensor_product, tensor_weights,
    },
};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Units of a cube: a warpgroup whose first warps copy and multiply, and one for each half of the queries.
pub(super) const UNITS: u32 = 384;
/// Queries of a tile.
pub(super) const TILE: usize = 2 * TILE_Q;
/// The most columns of scores, and of sums, of a half.
pub(super) const HALF_COLUMNS: u32 = COLUMNS as u32 / 4;

/// Where a cube's shared memory has what.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Places {
    q: u32,
    /// Tiles of keys and values.
    ring: Ring,
    q_full: u32,
    q_empty: u32,
    /// Barriers of each half: scores are there, weights are there, and all sums are.
    pub(super) scored: u32,
    pub(super) weighed: u32,
    pub(super) summed: u32,
    /// Where the address of tensor memory lies.
    tensor: u32,
}

#[cube]
fn places(q: u32, #[comptime] blueprint: TmaForwardBlueprint) -> Places {
    let ring = q + comptime!(2 * blueprint.q_bytes() as u32);
    let full = ring + comptime!((blueprint.stages * blueprint.kv_bytes()) as u32);
    let empty = full + comptime!(8 * blueprint.stages as u32);
    let q_full = empty + comptime!(8 * blueprint.stages as u32);
    let scored = q_full + 16;
    Places {
        q,
        ring: Ring { tiles: ring, full, empty },
        q_full,
        q_empty: q_full + 8,
        scored,
        weighed: scored + 16,
        summed: scored + 32,
        tensor: scored + 48,
    }
}

/// Tiles of keys that some queries see: the first and the one after the last.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Tiles {
    pub(super) first: u32,
    pub(super) last: u32,
}

#[cube]
pub(super) fn tiles_of<I: Float, M: Numeric>(
    sequence: &Sequence<'_, I, M>,
    first_row: u32,
    #[comptime] rows: usize,
    #[comptime] blueprint: TmaForwardBlueprint,
) -> Tiles {
    let tile_kv = comptime!(blueprint.tile_kv as u32);
    let mut tiles = Tiles { first: 0u32, last: 0u32 };
    if first_row < sequence.seq_q {
        let end = min(first_row + comptime!(rows as u32), sequence.seq_q);
        let keys = sequence.keys_of(first_row, end);
        tiles.first = keys.0 / tile_kv;
        tiles.last = keys.1.div_ceil(tile_kv);
    }
    tiles
}

/// How the copy engine finds q, k and v.
#[derive(CubeType, Clone, Copy)]
struct Maps {
    q: u64,
    k: u64,
    v: u64,
}

/// 1. Copies what the tiles of this cube read. One unit calls it.
#[cube]
fn produce<I: Float, M: Numeric>(
    maps: &Maps,
    rules: &Rules<I, M>,
    at: &Places,
    tiles: u32,
    work_items: u32,
    #[comptime] blueprint: TmaForwardBlueprint,
) {
    let (tile_kv, q_bytes) = comptime!((blueprint.tile_kv as u32, blueprint.q_bytes() as u32));
    let ring = comptime!(blueprint.ring());
    let mut slot = Slot { stage: 0u32, phase: 0u32 };
    let mut q_phase = 0u32;
    let mut index = CUBE_POS_X;
    while index < work_items {
        let work = work_at(index, tiles, rules.sizes.heads_q, TILE);
        let sequence = rules.sequence(work.batch, work.head);
        let seen = tiles_of(&sequence, work.first_row, TILE, blueprint);
        if seen.first < seen.last {
            let mut batch = work.batch;
            if comptime!(rules.options.packed) {
                batch = 0u32;
            }
            let head_kv = work.head / rules.sizes.group;
            barrier_wait(at.q_empty, load::<u32>(q_phase) ^ 1);
            barrier_expect(at.q_full, 2 * q_bytes);
            #[unroll]
            for half in 0..2u32 {
                load_tile(
                    at.q + half * q_bytes,
                    maps.q,
                    sequence.first_q + work.first_row + comptime!(half * TILE_Q as u32),
                    work.head,
                    load::<u32>(batch),
                    at.q_full,
                    TILE_Q,
                    TILE_Q,
                    comptime!(blueprint.blocks()),
                );
            }
            q_phase ^= 1;
            // One round more than tiles, as they are multiplied: the first has no values, the last no keys.
            for tile in seen.first..seen.last + 1 {
                let row = sequence.first_kv + tile * tile_kv;
                let batch = load::<u32>(batch);
                if tile < seen.last {
                    let rows = comptime!(blueprint.tile_kv);
                    fetch_tile(&at.ring, &mut slot, maps.k, row, head_kv, batch, rows, ring);
                }
                if tile > seen.first {
                    let row = row - tile_kv;
                    // Chunks of 64 keys are what the product steps through.
                    fetch_tile(&at.ring, &mut slot, maps.v, row, head_kv, batch, BLOCK, ring);
                }
            }
        }
        index += CUBE_COUNT_X;
    }
}

/// What is multiplied for a half of the queries in the round of a tile of keys: the weights of the tile before, and
/// the queries.
#[cube]
fn multiply_half(
    at: &Places,
    tensor: u32,
    seen: &Tiles,
    tile: u32,
    k_tile: u32,
    v_tile: u32,
    phase: &mut u32,
    #[comptime] half: u32,
    #[comptime] blueprint: TmaForwardBlueprint,
) {
    let scores = tensor + comptime!(half * HALF_COLUMNS);
    if tile > seen.first && tile <= seen.last {
        barrier_wait(at.weighed + comptime!(8 * half), load::<u32>(*phase));
        *phase ^= 1;
        tensor_fence_after();
        tensor_weights(
            tensor + comptime!((2 + half) * HALF_COLUMNS),
            scores,
            tensor_descriptor(v_tile, false),
            u32::cast_from(tile > seen.first + 1),
            comptime!(blueprint.weights()),
            // Keys follow each other.
            32usize,
        );
        if tile == seen.last {
            tensor_commit(at.summed + comptime!(8 * half));
        }
    }
    if tile >= seen.first && tile < seen.last {
        tensor_product(
            scores,
            tensor_descriptor(at.q + comptime!(half * blueprint.q_bytes() as u32), true),
            tensor_descriptor(k_tile, true),
            comptime!(blueprint.scores()),
        );
        tensor_commit(at.scored + comptime!(8 * half));
    }
}

/// 2. Multiplies for the tiles of this cube. One unit calls it.
#[cube]
fn multiply<I: Float, M: Numeric>(
    rules: &Rules<I, M>,
    at: &Places,
    tensor: u32,
    tiles: u32,
    work_items: u32,
    #[comptime] blueprint: TmaForwardBlueprint,
) {
    let (kv_bytes, ring) = comptime!((blueprint.kv_bytes() as u32, blueprint.ring()));
    let mut slot = Slot { stage: 0u32, phase: 0u32 };
    let mut q_phase = 0u32;
    let mut first_phase = 0u32;
    let mut second_phase = 0u32;
    let mut index = CUBE_POS_X;
    while index < work_items {
        let work = work_at(index, tiles, rules.sizes.heads_q, TILE);
        let sequence = rules.sequence(work.batch, work.head);
        let seen = tiles_of(&sequence, work.first_row, TILE, blueprint);
        let first = tiles_of(&sequence, work.first_row, TILE_Q, blueprint);
        let second_row = work.first_row + comptime!(TILE_Q as u32);
        let second = tiles_of(&sequence, second_row, TILE_Q, blueprint);
        if seen.first < seen.last {
            barrier_wait(at.q_full, load::<u32>(q_phase));
            q_phase ^= 1;
            for tile in seen.first..seen.last + 1 {
                let mut k_stage = 0u32;
                let mut v_stage = 0u32;
                if tile < seen.last {
                    k_stage = copied_tile(&at.ring, &mut slot, ring);
                }
                if tile > seen.first {
                    v_stage = copied_tile(&at.ring, &mut slot, ring);
                }
                let k_tile = at.ring.tiles + load::<u32>(k_stage) * kv_bytes;
                let v_tile = at.ring.tiles + load::<u32>(v_stage) * kv_bytes;
                multiply_half(
                    at,
                    tensor,
                    &first,
                    tile,
                    k_tile,
                    v_tile,
                    &mut first_phase,
                    0u32,
                    blueprint,
                );
                multiply_half(
                    at,
                    tensor,
                    &second,
                    tile,
                    k_tile,
                    v_tile,
                    &mut second_phase,
                    1u32,
                    blueprint,
                );
                if tile > seen.first {
                    tensor_commit(at.ring.empty + load::<u32>(v_stage) * 8);
                }
                if tile < seen.last {
                    tensor_commit(at.ring.empty + load::<u32>(k_stage) * 8);
                }
                if tile + 1 == seen.last {
                    tensor_commit(at.q_empty);
                }
            }
        }
        index += CUBE_COUNT_X;
    }
    // The cube's memory has to stay until the last tile was given back: nobody else waits for that.
    if slot.stage == 0 {
        slot.stage = comptime!(blueprint.stages as u32).runtime();
        slot.phase ^= 1;
    }
    barrier_wait(at.ring.empty + load::<u32>(slot.stage) * 8 - 8, load::<u32>(slot.phase));
}

/// The forward pass; see [`attention_forward_portable_kernel`] for what it computes. The scale has to
/// be positive.
///
/// [`attention_forward_portable_kernel`]: super::forward::attention_forward_portable_kernel
#[cube(launch_unchecked)]
pub(crate) fn attention_forward_tcgen05_kernel<I: Float, M: Numeric, R: Size, P: Size>(
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
    // The swizzle repeats every 1024 bytes.
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.tcgen05_bytes() / 4), 1024usize);
    let at = places(shared_address::<u32>(memory.as_slice()), blueprint);
    let warp = UNIT_POS / 32;
    if UNIT_POS == 0 {
        #[unroll]
        for stage in 0..comptime!(blueprint.stages as u32) {
            barrier_init(at.ring.full + comptime!(8 * stage), 1u32);
            barrier_init(at.ring.empty + comptime!(8 * stage), 1u32);
        }
        barrier_init(at.q_full, 1u32);
        barrier_init(at.q_empty, 1u32);
        #[unroll]
        for half in 0..2u32 {
            barrier_init(at.scored + comptime!(8 * half), 1u32);
            // A unit of each warp.
            barrier_init(at.weighed + comptime!(8 * half), 4u32);
            barrier_init(at.summed + comptime!(8 * half), 1u32);
        }
        barrier_init_fence();
    }
    if warp == 2 {
        tensor_alloc(at.tensor, comptime!(COLUMNS as u32));
    }
    sync_cube();
    let tensor = load_shared_word(at.tensor);
    if warp < 4 {
        release_registers(40u32);
        if warp == 0 {
            if elect() == 1 {
                let maps = Maps {
                    q: tensor_map_address::<u32, Tiled>(q),
                    k: tensor_map_address::<u32, Tiled>(k),
                    v: tensor_map_address::<u32, Tiled>(v),
                };
                produce(&maps, rules, &at, tiles, work_items, blueprint);
            }
        } else if warp == 1 {
            if elect() == 1 {
                multiply(rules, &at, tensor, tiles, work_items, blueprint);
            }
        }
    } else {
        acquire_registers(232u32);
        weigh_and_write::<I, M, R, P>(rules, out, lse, &at, tensor, tiles, work_items, blueprint);
    }
    sync_cube();
    // Computed again: a predicate that is kept until here takes a register from the weights.
    if computed(UNIT_POS) / 32 == 2 {
        tensor_free(tensor, comptime!(COLUMNS as u32));
    }
}
