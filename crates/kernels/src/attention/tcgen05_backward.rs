//! The backward pass on the tensor cores of Blackwell's data-center GPUs, each pair's products computed once:
//! [`tcgen05_once`](super::tcgen05_once) tells which, and where they lie. A cube has 128 keys.
//!
//! 1. Warp 0 has TMA fetch k and v, and tiles of q and dout into a ring, as far ahead as there is room. Warp 2 copies
//!    the terms of their queries.
//! 2. Warp 1 has the tensor cores multiply: the scores of a tile, then what is left of the tile before, dk and dq, then
//!    the products and dv of the tile.
//! 3. Warpgroup 1 adds dq of each tile to sums in global memory ([`query_sums`](super::query_sums)).
//! 4. Warpgroups 2 and 3 make weights and their gradients of 64 queries of each tile, and in the end write dv and dk:
//!    [`tcgen05_gradients`](super::tcgen05_gradients).
//!
//! One unit of a warp starts copies and products, which `elect.sync` names. Nobody has run this on such a GPU: its PTX
//! is executed by `crates/simulator` alone, so sizes and the order of the work follow what others published and not
//! measurements.

use super::{
    once::SIDE,
    pairs::tiles_of,
    pipeline::{Ring, Slot, copied_tile, fetch_tile, load_tile, slot_of},
    query_sums::{add_tile, sums_tile},
    row_terms::copy_terms,
    rules::{Rules, Side, Strides},
    tcgen05_gradients::weigh_and_write,
    tcgen05_once::{
        CHUNK_BYTES, DV, Layout, PRODUCTS, SCORES, TERM_STAGES, Tcgen05BackwardBlueprint,
    },
};
use crate::ptx::{
    ROW_BYTES,
    access::load_shared_word,
    acquire_registers,
    barrier::{barrier_arrive, barrier_expect, barrier_init, barrier_init_fence, barrier_wait},
    load, output_address, release_registers, shared_address,
    tcgen05::{
        COLUMNS, ROWS, elect, tensor_alloc, tensor_block, tensor_commit, tensor_descriptor,
        tensor_descriptor_across, tensor_fence_after, tensor_fence_before, tensor_free,
        tensor_load, tensor_product, tensor_weights,
    },
};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Units of a cube: a warpgroup whose first warps copy and multiply, one that adds to dq, and one for each half of a
/// tile's queries.
pub(super) const UNITS: u32 = 512;
/// Lanes of tensor memory of half a warp, in addresses.
pub(super) const HALF_WARP: u32 = 16 << 16;
/// Warps that make weights.
const WEIGHING: u32 = 8;
/// Registers of a unit that copies or multiplies, of one that adds to dq, and of one that makes weights. Those of the last
/// wait until they have theirs, for ever if that is more than a launch gives. With 56 the first ones spilled where sequences
/// are packed, and the second ones need their 104 in heads of 128.
const REGISTERS: [u32; 3] = [72, 104, 168];

/// Where a cube's tiles and barriers are in shared memory.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Places {
    k: u32,
    v: u32,
    /// Tiles of q and dout.
    ring: Ring,
    pub(super) gradients: u32,
    /// Terms of queries.
    pub(super) terms: Ring,
    /// Barriers: k and v are there, and of each tile its scores, weights, products, their gradients, dq, and that dq was
    /// read.
    fixed: u32,
    pub(super) scored: u32,
    pub(super) weighed: u32,
    pub(super) multiplied: u32,
    pub(super) graded: u32,
    queried: u32,
    drained: u32,
    /// Barrier: dv and dk are there.
    pub(super) summed: u32,
    /// Where the address of tensor memory lies.
    tensor: u32,
}

#[cube]
fn places(begin: u32, #[comptime] blueprint: Tcgen05BackwardBlueprint) -> Places {
    let Layout { ring, gradients, terms, barriers, tensor, .. } = comptime!(blueprint.layout());
    let full = begin + comptime!(barriers as u32);
    let empty = full + comptime!(8 * blueprint.stages as u32);
    let terms_full = empty + comptime!(8 * blueprint.stages as u32);
    let terms_empty = terms_full + comptime!(8 * TERM_STAGES as u32);
    let fixed = terms_empty + comptime!(8 * TERM_STAGES as u32);
    Places {
        k: begin,
        v: begin + comptime!(blueprint.ring().bytes()),
        ring: Ring { tiles: begin + comptime!(ring as u32), full, empty },
        gradients: begin + comptime!(gradients as u32),
        terms: Ring {
            tiles: begin + comptime!(terms as u32),
            full: terms_full,
            empty: terms_empty,
        },
        fixed,
        scored: fixed + 8,
        weighed: fixed + 16,
        multiplied: fixed + 24,
        graded: fixed + 32,
        queried: fixed + 40,
        drained: fixed + 48,
        summed: fixed + 56,
        tensor: begin + comptime!(tensor as u32),
    }
}

/// A cube's keys, and the queries that they meet.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Share {
    pub(super) batch: u32,
    pub(super) first_key: u32,
    /// Heads of queries that share the keys, and the first of them.
    pub(super) heads: u32,
    pub(super) first_head: u32,
    /// 64 queries of a head at a time: the number of the first, and the one after the last.
    pub(super) first: u32,
    last: u32,
    /// The same by tiles of 128 queries, the first of which is that of the first 64.
    pub(super) tiles: u32,
}

/// How the copy engine finds the tensors.
#[derive(CubeType, Clone, Copy)]
struct Maps {
    k: u64,
    v: u64,
    q: u64,
    dout: u64,
}

/// 1. Copies what the cube reads. One unit calls it.
#[cube]
fn produce<I: Float, M: Numeric>(
    maps: &Maps,
    rules: &Rules<I, M>,
    at: &Places,
    share: &Share,
    #[comptime] blueprint: Tcgen05BackwardBlueprint,
) {
    let ring = comptime!(blueprint.ring());
    let own = rules.sequence(share.batch, share.first_head);
    let mut batch = share.batch;
    if comptime!(rules.options.packed) {
        batch = 0u32;
    }
    let head_kv = share.first_head / share.heads;
    let row = own.first_kv + share.first_key;
    let blocks = comptime!(ring.blocks);
    barrier_expect(at.fixed, comptime!(2 * ring.bytes()));
    load_tile(at.k, maps.k, row, head_kv, load::<u32>(batch), at.fixed, ROWS, ROWS, blocks);
    load_tile(at.v, maps.v, row, head_kv, load::<u32>(batch), at.fixed, ROWS, ROWS, blocks);
    let mut slot = Slot { stage: 0u32, phase: 0u32 };
    for member in 0..share.heads {
        let head = share.first_head + member;
        for tile in 0..share.tiles {
            let batch = load::<u32>(batch);
            let row =
                own.first_q + share.first * comptime!(SIDE as u32) + tile * comptime!(ROWS as u32);
            fetch_tile(&at.ring, &mut slot, maps.q, row, head, batch, ROWS, ring);
            fetch_tile(&at.ring, &mut slot, maps.dout, row, head, batch, ROWS, ring);
        }
    }
}

/// 1. Copies the terms of the queries. A warp calls it.
#[cube]
fn produce_terms<I: Float, M: Numeric>(
    terms: &[f32],
    rules: &Rules<I, M>,
    at: &Places,
    share: &Share,
    #[comptime] blueprint: Tcgen05BackwardBlueprint,
) {
    let (count, terms_bytes) = comptime!((blueprint.terms, blueprint.terms_bytes() as u32));
    let (side, halves) = comptime!((SIDE as u32, (ROWS / SIDE) as u32));
    let mut index = 0u32;
    for member in 0..share.heads {
        let sequence = rules.sequence(share.batch, share.first_head + member);
        for tile in 0..share.tiles {
            let slot = slot_of(index, TERM_STAGES);
            barrier_wait(at.terms.empty + slot.stage * 8, slot.phase ^ 1);
            let to = at.terms.tiles + slot.stage * terms_bytes;
            #[unroll]
            for half in 0..halves {
                let row = (share.first + tile * halves + half) * side;
                let to = to + comptime!(half * blueprint.terms_bytes() as u32 / halves);
                copy_terms::<I, M>(terms, &sequence, row, to, UNIT_POS_PLANE, count);
            }
            sync_plane();
            if UNIT_POS_PLANE == 0 {
                barrier_arrive(at.terms.full + slot.stage * 8);
            }
            index += 1;
        }
    }
}

/// 2. Multiplies so many tiles of queries. One unit calls it.
#[cube]
fn multiply(at: &Places, tensor: u32, tiles: u32, #[comptime] blueprint: Tcgen05BackwardBlueprint) {
    let (ring, is_apart) = comptime!((blueprint.ring(), blueprint.is_apart()));
    let tile_bytes = comptime!(ring.bytes());
    let (scores, products) = (tensor + SCORES, tensor + PRODUCTS);
    let dq = tensor + comptime!(blueprint.dq());
    let mut slot = Slot { stage: 0u32, phase: 0u32 };
    // Where q of the tile before lies.
    let mut before = 0u32;
    barrier_wait(at.fixed, 0u32);
    // One round more than tiles: the first has nothing to finish, the last nothing to begin.
    for round in 0..tiles + 1 {
        let mut q_stage = 0u32;
        if round < tiles {
            // The scores overwrite weights that were multiplied.
            q_stage = copied_tile(&at.ring, &mut slot, ring);
            tensor_product(
                scores,
                tensor_descriptor(at.k, true),
                tensor_descriptor(at.ring.tiles + load::<u32>(q_stage) * tile_bytes, true),
                comptime!(blueprint.products()),
            );
            tensor_commit(at.scored);
        }
        if round > 0 {
            barrier_wait(at.graded, (round - 1) % 2);
            tensor_fence_after();
            let stage = load::<u32>(before);
            tensor_weights(
                tensor + comptime!(blueprint.dk()),
                products,
                tensor_descriptor_across(at.ring.tiles + stage * tile_bytes, CHUNK_BYTES),
                u32::cast_from(round > 1),
                comptime!(blueprint.sums()),
                SIDE,
            );
            tensor_commit(at.ring.empty + stage * 8);
            if comptime!(is_apart) {
                if round > 1 {
                    barrier_wait(at.drained, round % 2);
                    tensor_fence_after();
                }
            }
            #[unroll]
            for part in 0..comptime!((ROWS / SIDE) as u32) {
                let rows = comptime!(part * (SIDE * ROW_BYTES) as u32);
                tensor_block(
                    dq,
                    tensor_descriptor_across(at.gradients + rows, CHUNK_BYTES),
                    tensor_descriptor_across(at.k + rows, CHUNK_BYTES),
                    comptime!(u32::from(part > 0)).runtime(),
                    comptime!(blueprint.queries()),
                );
            }
            tensor_commit(at.queried);
        }
        if round < tiles {
            let stage = copied_tile(&at.ring, &mut slot, ring);
            let dout = at.ring.tiles + stage * tile_bytes;
            if comptime!(!is_apart) {
                if round > 0 {
                    barrier_wait(at.drained, (round - 1) % 2);
                    tensor_fence_after();
                }
            }
            // The products overwrite gradients that were multiplied.
            tensor_product(
                products,
                tensor_descriptor(at.v, true),
                tensor_descriptor(dout, true),
                comptime!(blueprint.products()),
            );
            tensor_commit(at.multiplied);
            barrier_wait(at.weighed, round % 2);
            tensor_fence_after();
            tensor_weights(
                tensor + DV,
                scores,
                tensor_descriptor_across(dout, CHUNK_BYTES),
                u32::cast_from(round > 0),
                comptime!(blueprint.sums()),
                SIDE,
            );
            tensor_commit(at.ring.empty + stage * 8);
        }
        before = load::<u32>(q_stage);
    }
    // What was started before is done, too, and has told the barriers.
    tensor_commit(at.summed);
}

/// 3. Adds each tile of dq to the sums of its queries. A warpgroup calls it.
#[cube]
fn add_queries<I: Float, M: Numeric, R: Size>(
    rules: &Rules<I, M>,
    at: &Places,
    tensor: u32,
    share: &Share,
    query_sums: &mut [f32],
    #[comptime] blueprint: Tcgen05BackwardBlueprint,
) {
    let base = output_address::<f32>(query_sums);
    let warp = UNIT_POS % 128 / 32;
    let dq = tensor + comptime!(blueprint.dq()) + ((warp * 32) << 16);
    let mut phase = 0u32;
    for member in 0..share.heads {
        let sequence = rules.sequence(share.batch, share.first_head + member);
        for tile in 0..share.tiles {
            // Two warps have 64 queries, of which one has the upper half.
            let number = share.first + 2 * tile + warp / 2;
            let to = sums_tile::<I, M>(&sequence, number);
            barrier_wait(at.queried, load::<u32>(phase));
            phase ^= 1;
            tensor_fence_after();
            #[unroll]
            for half in 0..2u32 {
                let sums = tensor_load::<R>(dq + comptime!(half * HALF_WARP));
                if comptime!(half == 1) {
                    tensor_fence_before();
                    if UNIT_POS_PLANE == 0 {
                        barrier_arrive(at.drained);
                    }
                }
                if number < share.last {
                    let unit = (warp % 2 * 2 + half) * 32 + UNIT_POS_PLANE;
                    let head_dim = comptime!(blueprint.head_dim);
                    add_tile::<R>(sums, base, to, unit, head_dim, 0usize, head_dim);
                }
            }
        }
    }
}

/// dk and dv, and dq added to `query_sums`; see [`attention_backward_kv_portable_kernel`] for what they are. Cubes:
/// tiles of 128 keys along x, heads of keys along y, sequences along z. The scale has to be positive.
///
/// [`attention_backward_kv_portable_kernel`]: super::backward::attention_backward_kv_portable_kernel
#[cube(launch_unchecked)]
pub(crate) fn attention_backward_tcgen05_kernel<I: Float, M: Numeric, R: Size>(
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
    #[comptime] blueprint: Tcgen05BackwardBlueprint,
    #[define(I, M)] _types: [ElemType; 2],
    #[define(R)] _width: usize,
) {
    // The swizzle repeats every 1024 bytes.
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.shared_bytes() / 4), 1024usize);
    let at = places(shared_address::<u32>(memory.as_slice()), blueprint);
    let warp = UNIT_POS / 32;
    if UNIT_POS == 0 {
        #[unroll]
        for stage in 0..comptime!(blueprint.stages as u32) {
            barrier_init(at.ring.full + comptime!(8 * stage), 1u32);
            barrier_init(at.ring.empty + comptime!(8 * stage), 1u32);
        }
        #[unroll]
        for stage in 0..comptime!(TERM_STAGES as u32) {
            barrier_init(at.terms.full + comptime!(8 * stage), 1u32);
            // A unit of each warp.
            barrier_init(at.terms.empty + comptime!(8 * stage), WEIGHING);
        }
        barrier_init(at.fixed, 1u32);
        barrier_init(at.scored, 1u32);
        barrier_init(at.weighed, WEIGHING);
        barrier_init(at.multiplied, 1u32);
        barrier_init(at.graded, WEIGHING);
        barrier_init(at.queried, 1u32);
        barrier_init(at.drained, 4u32);
        barrier_init(at.summed, 1u32);
        barrier_init_fence();
    }
    if warp == 3 {
        tensor_alloc(at.tensor, comptime!(COLUMNS as u32));
    }
    sync_cube();
    let tensor = load_shared_word(at.tensor);
    let (batch, heads) = (rules.batch_of(CUBE_POS_Z), rules.sizes.group);
    let first_head = CUBE_POS_Y * heads;
    let first_key = CUBE_POS_X * comptime!(ROWS as u32);
    let own = rules.sequence(batch, first_head);
    if first_key < own.seq_kv {
        let (first, last) = tiles_of(&own, first_key, ROWS as u32, Side::Keys);
        let tiles = (last - min(first, last)).div_ceil(comptime!((ROWS / SIDE) as u32));
        let share = Share { batch, first_key, heads, first_head, first, last, tiles };
        if warp < 4 {
            release_registers(comptime!(REGISTERS[0]));
            if warp == 0 {
                if elect() == 1 {
                    let maps = Maps {
                        k: tensor_map_address::<u32, Tiled>(k),
                        v: tensor_map_address::<u32, Tiled>(v),
                        q: tensor_map_address::<u32, Tiled>(q),
                        dout: tensor_map_address::<u32, Tiled>(dout),
                    };
                    produce(&maps, rules, &at, &share, blueprint);
                }
            } else if warp == 1 {
                if elect() == 1 {
                    multiply(&at, tensor, heads * tiles, blueprint);
                }
            } else if warp == 2 {
                produce_terms(terms, rules, &at, &share, blueprint);
            }
        } else if warp < 8 {
            release_registers(comptime!(REGISTERS[1]));
            add_queries::<I, M, R>(rules, &at, tensor, &share, query_sums, blueprint);
        } else {
            acquire_registers(comptime!(REGISTERS[2]));
            weigh_and_write::<I, M, R>(rules, &at, tensor, &share, dk, dv, &out_strides, blueprint);
        }
    }
    sync_cube();
    if warp == 3 {
        tensor_free(tensor, comptime!(COLUMNS as u32));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warpgroups_share_the_registers_that_a_launch_gives() {
        let [copying, adding, weighing] = REGISTERS;
        // A launch gives each unit as many of a multiprocessor's 64 Ki as there are, a multiple of 8.
        let given = UNITS / 128 * ((1 << 16) / UNITS / 8 * 8);
        assert!(copying + adding + 2 * weighing <= given);
        assert!(REGISTERS.iter().all(|count| count.is_multiple_of(8)));
    }
}
