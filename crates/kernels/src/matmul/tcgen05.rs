//! The family for Blackwell's data-center GPUs: a persistent cube of two warpgroups on every multiprocessor.
//!
//! 1. Warp 0 has TMA fill a ring of k blocks in shared memory, as far ahead as it has room.
//! 2. Warp 1 has the tensor cores multiply the blocks. Sums lie in tensor memory, in one of two places in turns;
//!    the products themselves give blocks back.
//! 3. Warpgroup 1 reads the sums of a tile, finishes and writes them, while the next tile is multiplied to the
//!    other place.
//!
//! A cluster of two cubes may share a tile, see [`tcgen05_pair`](super::tcgen05_pair): both copy, the first one
//! multiplies, and each writes its own rows.
//!
//! One unit of a warp starts copies and products, which `elect.sync` names. Tiles are walked as in
//! [`wgmma`](super::wgmma). Nobody has run this on such a GPU: its PTX is executed by `crates/simulator` alone, so
//! sizes and the order of the work follow what others published and not measurements.

use super::{
    bias_tile::{element_bytes, fetch_bias},
    budget::{scale_bytes, stage_bytes, tcgen05_bytes, tcgen05_pair_bytes},
    bulk_ring::{BulkRing, BulkRingBlueprint, fill_bulk_ring},
    epilogue::{EpilogueTensors, Outputs, factor},
    store::{Finish, StoreWidth, fragment_of, store_outputs},
    tcgen05_blocks::{TensorBlocks, own_row, tensor_blocks},
    wgmma::BulkBlocks,
    work::{Extent, LastMatrix, first_work, next_work, work_at, work_count},
};
use crate::ptx::{
    ROW_BYTES,
    access::load_shared_word,
    barrier::{barrier_arrive, barrier_init, barrier_init_fence, barrier_wait, sync_group},
    cluster::{
        barrier_arrive_in_cluster, barrier_wait_for_cluster, cube_rank, in_first_cube, sync_cluster,
    },
    copy::{TmaTarget, copies_wait_all},
    load, shared_address,
    tcgen05::{
        COLUMNS, ROWS, elect, tensor_alloc, tensor_block, tensor_commit, tensor_fence_after,
        tensor_fence_before, tensor_free, tensor_load, tensor_operand,
    },
    tcgen05_pair::{
        CUBES, tensor_pair_alloc, tensor_pair_block, tensor_pair_commit, tensor_pair_free,
    },
    tcgen05_scales::{SCALE_COLUMNS, ScaledBlock, scales_descriptor, tensor_scaled_block},
    wgmma::WgmmaOperands,
};
use crate::{block_format::BlockFormat, device::SCALE_BLOCK_BYTES};
use cubecl::prelude::*;

/// Units of a cube: a warpgroup whose first warps copy and multiply, and one that writes.
pub(super) const UNITS: u32 = 256;
/// Rows of a cube's tile.
pub(super) const TILE_M: usize = ROWS;
/// Columns whose sums a unit holds at once.
const PART: usize = 32;
/// Registers of the sums of 16 rows by that many columns, in each unit of a warp.
pub(super) const PART_REGISTERS: usize = PART / 2;
/// Lanes of tensor memory of half a warp, in addresses.
const HALF_WARP: u32 = 16 << 16;

/// How the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tcgen05Blueprint {
    pub(super) operands: WgmmaOperands,
    /// k of a block of 128 bytes.
    pub(super) block_k: u32,
    pub(super) stages: u32,
    pub(super) batched: bool,
    pub(super) store: StoreWidth,
    /// Of operands whose blocks of k have scales behind them.
    pub(super) format: Option<BlockFormat>,
    /// Whether a pair of cubes shares each tile.
    pub(super) pair: bool,
}

impl Tcgen05Blueprint {
    /// Bytes of the scales of a block of k.
    fn scale_bytes(self) -> usize {
        self.format.map_or(0, |format| scale_bytes(TILE_M, self.operands.n, format))
    }

    /// Cubes that share a tile.
    pub(super) fn cubes(self) -> usize {
        if self.pair { CUBES } else { 1 }
    }

    /// How copies name their destination.
    pub(super) fn target(self) -> TmaTarget {
        if self.pair { TmaTarget::CubeOfPair } else { TmaTarget::Cluster }
    }

    /// Rows of a tile.
    fn tile_m(self) -> usize {
        TILE_M * self.cubes()
    }

    /// What a cube copies of each block.
    pub(super) fn copied(self) -> WgmmaOperands {
        WgmmaOperands { n: self.operands.n / self.cubes(), ..self.operands }
    }

    /// Bytes of what a cube copies of a block of both operands, without its scales.
    pub(super) fn block_bytes(self) -> usize {
        stage_bytes(TILE_M, self.copied().n)
    }

    fn stage_bytes(self) -> usize {
        self.block_bytes() + self.scale_bytes()
    }

    fn ring(self) -> BulkRingBlueprint {
        BulkRingBlueprint {
            stages: self.stages,
            stage_bytes: self.stage_bytes() as u32,
            tile_m: self.tile_m() as u32,
            tile_n: self.operands.n as u32,
            cubes: self.cubes() as u32,
        }
    }

    pub(super) fn shared_bytes(self) -> usize {
        let stages = self.stages as usize;
        let bytes = if self.pair { tcgen05_pair_bytes } else { tcgen05_bytes };
        bytes(TILE_M, self.operands.n, stages) + stages * self.scale_bytes()
    }

    /// Columns of tensor memory for the sums of two tiles, and behind them for scales.
    fn tensor_columns(self) -> u32 {
        let scales = self.scale_bytes() / SCALE_BLOCK_BYTES * SCALE_COLUMNS;
        let columns = (2 * self.operands.n + scales).next_power_of_two();
        assert!(columns <= COLUMNS, "tiles of {} columns", self.operands.n);
        columns as u32
    }
}

/// Where a cube's shared memory has what.
#[derive(CubeType, Clone, Copy)]
struct Places {
    /// The blocks of k, and their barriers: copied, and given back.
    ring: u32,
    full: u32,
    empty: u32,
    /// Barriers of both places for sums: multiplied, and read.
    summed: u32,
    read: u32,
    /// Where the address of tensor memory lies.
    tensor: u32,
    bias: u32,
}

#[cube]
fn places(ring: u32, #[comptime] blueprint: Tcgen05Blueprint) -> Places {
    let full = ring + comptime!(blueprint.stages * blueprint.stage_bytes() as u32);
    let empty = full + comptime!(8 * blueprint.stages);
    let summed = empty + comptime!(8 * blueprint.stages);
    Places { ring, full, empty, summed, read: summed + 16, tensor: summed + 32, bias: summed + 48 }
}

/// Tells all cubes that share the tile of the products before.
#[cube]
fn commit(barrier: u32, #[comptime] blueprint: Tcgen05Blueprint) {
    if comptime!(blueprint.pair) {
        tensor_pair_commit(barrier);
    } else {
        tensor_commit(barrier);
    }
}

/// 2. Multiplies every tile of this cube's, or of its pair's. One unit calls it.
#[cube]
fn multiply(extent: &Extent, at: &Places, sums: u32, #[comptime] blueprint: Tcgen05Blueprint) {
    let operands = comptime!(blueprint.operands);
    let (tile_m, tile_n) = comptime!((blueprint.tile_m() as u32, operands.n as u32));
    let cubes = comptime!(blueprint.cubes() as u32);
    let stage_bytes = comptime!(blueprint.stage_bytes() as u32);
    let work_items = work_count(extent, tile_m, tile_n);
    let mut stage = 0u32;
    let mut phase = 0u32;
    let mut half = 0u32;
    let mut half_phase = 0u32;
    let mut index = first_work(cubes);
    while index < work_items {
        let work = work_at(index, extent, tile_m, tile_n);
        // The sums of the tile before the last one are read.
        let read = at.read + load::<u32>(half) * 8;
        if comptime!(blueprint.pair) {
            barrier_wait_for_cluster(read, load::<u32>(half_phase) ^ 1);
        } else {
            barrier_wait(read, load::<u32>(half_phase) ^ 1);
        }
        tensor_fence_after();
        let target = sums + load::<u32>(half) * tile_n;
        for block in work.first_block..work.last_block {
            barrier_wait(at.full + load::<u32>(stage) * 8, load::<u32>(phase));
            tensor_fence_after();
            let stage_at = at.ring + load::<u32>(stage) * stage_bytes;
            let lhs = load::<u32>(stage_at);
            let rhs = stage_at + comptime!((TILE_M * ROW_BYTES) as u32);
            let lhs = tensor_operand(lhs, comptime!(operands.lhs_k_major), operands);
            let rhs = tensor_operand(rhs, comptime!(operands.rhs_k_major), operands);
            let accumulate = u32::cast_from(block > work.first_block);
            match comptime!(blueprint.format) {
                Some(format) => {
                    let scales =
                        scales_descriptor(stage_at + comptime!(blueprint.block_bytes() as u32));
                    let place = sums + 2 * tile_n;
                    let what =
                        comptime!(ScaledBlock { operands, format, cubes: blueprint.cubes() });
                    tensor_scaled_block(target, lhs, rhs, accumulate, scales, place, what);
                }
                None => {
                    if comptime!(blueprint.pair) {
                        tensor_pair_block(target, lhs, rhs, accumulate, operands);
                    } else {
                        tensor_block(target, lhs, rhs, accumulate, operands);
                    }
                }
            }
            commit(at.empty + load::<u32>(stage) * 8, blueprint);
            stage += 1;
            if stage == comptime!(blueprint.stages) {
                stage = 0u32;
                phase ^= 1;
            }
        }
        commit(at.summed + load::<u32>(half) * 8, blueprint);
        half ^= 1;
        if half == 0 {
            half_phase ^= 1;
        }
        index += next_work(cubes);
    }
}

/// 3. Finishes and writes every tile of this cube's, of a pair's tiles its own rows. A warpgroup calls it.
#[cube]
fn write<O: Float, S: Numeric, W: Size, R: Size>(
    epilogue: &EpilogueTensors<O>,
    outputs: &mut Outputs<Vector<S, W>>,
    extent: &Extent,
    at: &Places,
    sums: u32,
    #[comptime] blueprint: Tcgen05Blueprint,
) {
    let (tile_m, tile_n) = comptime!((blueprint.tile_m() as u32, blueprint.operands.n as u32));
    let cubes = comptime!(blueprint.cubes() as u32);
    let work_items = work_count(extent, tile_m, tile_n);
    let lane = UNIT_POS % 128;
    let row = lane / 32 * 32;
    let scale = factor(epilogue);
    let bias_bytes = comptime!(element_bytes(blueprint.store.half()));
    let mut half = 0u32;
    let mut half_phase = 0u32;
    let mut index = first_work(cubes);
    while index < work_items {
        let work = work_at(index, extent, tile_m, tile_n);
        if comptime!(epilogue.steps.bias) {
            // Until all units have written the tile before, they need its bias.
            sync_group(1u32, 128u32);
            fetch_bias::<O>(
                &epilogue.bias,
                at.bias,
                work.column,
                epilogue.bias_columns,
                lane,
                128u32,
                tile_n,
                comptime!(blueprint.store.half()),
            );
        }
        barrier_wait(at.summed + load::<u32>(half) * 8, load::<u32>(half_phase));
        tensor_fence_after();
        if comptime!(epilogue.steps.bias) {
            copies_wait_all();
            sync_group(1u32, 128u32);
        }
        let tile = sums + (row << 16) + load::<u32>(half) * tile_n;
        let first_row = own_row(work.row, blueprint);
        // Both halves of a warp's rows of some columns before the next columns.
        for part in 0..comptime!(2 * blueprint.operands.n as u32 / PART as u32) {
            let (rows, column) = (part % 2, part / 2 * comptime!(PART as u32));
            let part_sums = tensor_load::<R>(tile + rows * HALF_WARP + column);
            let place = fragment_of(
                &work,
                extent,
                first_row + row + rows * 16 + lane % 32 / 4,
                work.column + column,
                lane % 4,
                comptime!(epilogue.steps.interleaved),
            );
            let finish =
                Finish { bias_at: at.bias + column * bias_bytes, scale, beta: epilogue.beta };
            store_outputs::<O, S, W, R>(
                outputs,
                part_sums,
                epilogue,
                &place,
                &finish,
                0usize,
                PART,
                comptime!(blueprint.store),
            );
        }
        tensor_fence_before();
        if UNIT_POS_PLANE == 0 {
            let read = at.read + load::<u32>(half) * 8;
            if comptime!(blueprint.pair) {
                barrier_arrive_in_cluster(in_first_cube(read));
            } else {
                barrier_arrive(read);
            }
        }
        half ^= 1;
        if half == 0 {
            half_phase ^= 1;
        }
        index += next_work(cubes);
    }
}

/// Meets all units that work on the same tiles.
#[cube]
fn meet(#[comptime] blueprint: Tcgen05Blueprint) {
    if comptime!(blueprint.pair) {
        sync_cluster();
    } else {
        sync_cube();
    }
}

/// Every tile of this cube's, from its blocks to the output; with splits, sums of each split to `out[split]`.
#[cube]
pub(super) fn persistent_tensor_product<B: BulkBlocks, O: Float, S: Numeric, W: Size, R: Size>(
    source: &B,
    epilogue: &EpilogueTensors<O>,
    outputs: &mut Outputs<Vector<S, W>>,
    extent: &Extent,
    #[comptime] blueprint: Tcgen05Blueprint,
) {
    let columns = comptime!(blueprint.tensor_columns());
    // The swizzle repeats every 1024 bytes.
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.shared_bytes() / 4), 1024usize);
    let at = places(shared_address::<u32>(memory.as_slice()), blueprint);
    let warp = UNIT_POS / 32;
    if UNIT_POS == 0 {
        #[unroll]
        for stage in 0..comptime!(blueprint.stages) {
            barrier_init(at.full + comptime!(8 * stage), 1u32);
            barrier_init(at.empty + comptime!(8 * stage), 1u32);
        }
        #[unroll]
        for half in 0..2u32 {
            barrier_init(at.summed + comptime!(8 * half), 1u32);
            // A unit of each warp that reads.
            barrier_init(
                at.read + comptime!(8 * half),
                comptime!(4 * blueprint.cubes() as u32).runtime(),
            );
        }
        barrier_init_fence();
    }
    if warp == 2 {
        if comptime!(blueprint.pair) {
            tensor_pair_alloc(at.tensor, columns);
        } else {
            tensor_alloc(at.tensor, columns);
        }
    }
    meet(blueprint);
    let sums = load_shared_word(at.tensor);
    if warp == 0 {
        if elect() == 1 {
            let ring = BulkRing { blocks: at.ring, full: at.full, empty: at.empty };
            fill_bulk_ring::<B>(source, &ring, extent, comptime!(blueprint.ring()));
        }
    } else if warp == 1 {
        if comptime!(blueprint.pair) {
            if cube_rank(comptime!(CUBES as u32)) == 0 && elect() == 1 {
                multiply(extent, &at, sums, blueprint);
            }
        } else if elect() == 1 {
            multiply(extent, &at, sums, blueprint);
        }
    } else if warp >= 4 {
        write::<O, S, W, R>(epilogue, outputs, extent, &at, sums, blueprint);
    }
    meet(blueprint);
    if warp == 2 {
        if comptime!(blueprint.pair) {
            tensor_pair_free(sums, columns);
        } else {
            tensor_free(sums, columns);
        }
    }
}

/// `out = epilogue(lhs rhs)`; with splits, sums of each split to `out[split]`.
#[cube(launch_unchecked)]
pub(super) fn matmul_tcgen05_kernel<O: Float, S: Numeric, W: Size, R: Size>(
    lhs: &TensorMap<u32, Tiled>,
    rhs: &TensorMap<u32, Tiled>,
    epilogue: &EpilogueTensors<O>,
    outputs: &mut Outputs<Vector<S, W>>,
    extent: Extent,
    last_matrix: LastMatrix,
    #[comptime] blueprint: Tcgen05Blueprint,
    #[define(O, S)] _types: [ElemType; 2],
    #[define(W, R)] _widths: [usize; 2],
) {
    let blocks = tensor_blocks(lhs, rhs, &extent, &last_matrix, blueprint);
    persistent_tensor_product::<TensorBlocks, O, S, W, R>(
        &blocks, epilogue, outputs, &extent, blueprint,
    );
}
