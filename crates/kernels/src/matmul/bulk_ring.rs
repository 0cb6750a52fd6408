//! A ring of blocks of k in shared memory that TMA fills, as far ahead of the products as it has room.

use super::{
    wgmma::{BulkBlocks, BulkBlocksExpand},
    work::{Extent, first_work, next_work, work_at, work_count},
};
use crate::ptx::{
    barrier::{barrier_expect, barrier_init, barrier_init_fence, barrier_wait},
    cluster::cube_rank,
    load,
};
use cubecl::prelude::*;

/// Where the ring and its barriers lie, two of 8 bytes a stage: copied, and given back.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct BulkRing {
    pub(crate) blocks: u32,
    pub(crate) full: u32,
    pub(crate) empty: u32,
}

/// How the ring is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BulkRingBlueprint {
    pub(crate) stages: u32,
    pub(crate) stage_bytes: u32,
    pub(crate) tile_m: u32,
    pub(crate) tile_n: u32,
    /// Cubes that share a tile: the barriers of the first one count what all of them copy.
    pub(crate) cubes: u32,
}

/// The ring at `blocks`, with its barriers behind it.
#[cube]
pub(crate) fn bulk_ring(blocks: u32, #[comptime] blueprint: BulkRingBlueprint) -> BulkRing {
    let full = blocks + comptime!(blueprint.stages * blueprint.stage_bytes);
    BulkRing { blocks, full, empty: full + comptime!(8 * blueprint.stages) }
}

/// Makes the ring's barriers, of which those that are given back expect so many `readers`. One unit calls it, and the
/// others meet it before they use them.
#[cube]
pub(crate) fn make_bulk_ring(
    ring: &BulkRing,
    readers: u32,
    #[comptime] blueprint: BulkRingBlueprint,
) {
    #[unroll]
    for stage in 0..comptime!(blueprint.stages) {
        barrier_init(ring.full + comptime!(8 * stage), 1u32);
        barrier_init(ring.empty + comptime!(8 * stage), readers);
    }
    barrier_init_fence();
}

/// Copies the blocks of every tile of this cube's. One unit calls it.
#[cube]
pub(crate) fn fill_bulk_ring<B: BulkBlocks>(
    source: &B,
    ring: &BulkRing,
    extent: &Extent,
    #[comptime] blueprint: BulkRingBlueprint,
) {
    let (tile_m, tile_n) = comptime!((blueprint.tile_m, blueprint.tile_n));
    let stage_bytes = comptime!(blueprint.stage_bytes);
    let work_items = work_count(extent, tile_m, tile_n);
    let mut stage = 0u32;
    let mut phase = 0u32;
    let mut index = first_work(blueprint.cubes);
    while index < work_items {
        let work = work_at(index, extent, tile_m, tile_n);
        for block in work.first_block..work.last_block {
            barrier_wait(ring.empty + load::<u32>(stage) * 8, load::<u32>(phase) ^ 1);
            let barrier = ring.full + load::<u32>(stage) * 8;
            expect_stage(barrier, blueprint);
            source.load(ring.blocks + load::<u32>(stage) * stage_bytes, &work, block, barrier);
            stage += 1;
            if stage == comptime!(blueprint.stages) {
                stage = 0u32;
                phase ^= 1;
            }
        }
        index += next_work(blueprint.cubes);
    }
    if comptime!(blueprint.cubes > 1) {
        // The cube that multiplies gives blocks back here: this one may not end before.
        for _ in 0..comptime!(blueprint.stages) {
            barrier_wait(ring.empty + load::<u32>(stage) * 8, load::<u32>(phase) ^ 1);
            stage += 1;
            if stage == comptime!(blueprint.stages) {
                stage = 0u32;
                phase ^= 1;
            }
        }
    }
}

/// Has a stage's barrier expect what is copied to the stage.
#[cube]
fn expect_stage(barrier: u32, #[comptime] blueprint: BulkRingBlueprint) {
    let bytes = comptime!(blueprint.cubes * blueprint.stage_bytes);
    if comptime!(blueprint.cubes > 1) {
        if cube_rank(blueprint.cubes) == 0 {
            barrier_expect(barrier, bytes);
        }
    } else {
        barrier_expect(barrier, bytes);
    }
}
