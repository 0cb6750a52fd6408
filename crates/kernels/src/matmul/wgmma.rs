//! The family for Hopper: a persistent cube of three warpgroups on every multiprocessor.
//!
//! 1. Warpgroup 0 has TMA fill a ring of k blocks in shared memory, as far ahead as it has room.
//! 2. Warpgroups 1 and 2 multiply 64 rows of the tile each, one block behind the tensor cores, and
//!    give blocks back.
//! 3. They finish and write the tile while the ring fills for the next one.
//!
//! Tiles are walked in groups of rows, so that cubes at work at the same time share operands in L2.
//! Measured on an H200 (see benches/results): two cubes of a cluster that share one operand by
//! multicast are slower than this.

use super::{
    bias_tile::fetch_bias,
    budget::{bias_bytes, stage_bytes, wgmma_bytes},
    bulk_ring::{BulkRing, BulkRingBlueprint, fill_bulk_ring},
    epilogue::{EpilogueTensors, Outputs, factor},
    store::{Finish, Fragment, StoreWidth, fragment_of, store_outputs},
    work::{Extent, LastMatrix, Work, work_at, work_count},
};
use crate::ptx::{
    ROW_BYTES,
    barrier::{barrier_arrive, barrier_init, barrier_init_fence, barrier_wait, sync_group},
    copy::{TmaTarget, copies_wait_all, tma_batched_tile_to, tma_tile_to},
    load, shared_address,
    wgmma::{WgmmaOperands, tile_descriptor, wgmma_block, wgmma_drain},
};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Units of a cube: the producer's warpgroup and two that multiply.
pub(crate) const UNITS: u32 = 384;
/// Rows of a cube's tile, 64 for each warpgroup that multiplies.
pub(crate) const TILE_M: usize = 128;
/// Bytes of 64 rows of an operand along k, and of a chunk of a 16-bit one across k: 64 rows of k.
pub(crate) const CHUNK_BYTES: usize = 64 * ROW_BYTES;

/// How the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaBlueprint {
    pub(crate) operands: WgmmaOperands,
    /// k of a block of 128 bytes.
    pub(crate) block_k: u32,
    pub(crate) stages: u32,
    pub(crate) batched: bool,
    pub(crate) store: StoreWidth,
    /// Blocks after which sums are moved from the tensor cores' accumulators, which cut bits of
    /// 8-bit products off, to others in f32; 0 for never.
    pub(crate) promotion: u32,
}

impl WgmmaBlueprint {
    fn stage_bytes(self) -> usize {
        stage_bytes(TILE_M, self.operands.n)
    }

    fn ring(self) -> BulkRingBlueprint {
        BulkRingBlueprint {
            stages: self.stages,
            stage_bytes: self.stage_bytes() as u32,
            tile_m: TILE_M as u32,
            tile_n: self.operands.n as u32,
            cubes: 1,
        }
    }

    pub(crate) fn shared_bytes(self) -> usize {
        wgmma_bytes(TILE_M, self.operands.n, self.stages as usize)
    }
}

/// Registers of a vector of accumulators: a power of two, which CubeCL's vectors have to be.
pub(crate) fn accumulator_width(tile_n: usize) -> usize {
    (tile_n / 2).next_power_of_two()
}

/// Has TMA copy one operand's part of a k block; across k, as chunks of so many columns and as many rows of k.
#[cube]
fn load_operand(
    destination: u32,
    map: u64,
    mn: u32,
    k: u32,
    inner: u32,
    outer: u32,
    barrier: u32,
    #[comptime] tile: usize,
    #[comptime] k_major: bool,
    #[comptime] columns: usize,
    #[comptime] batched: bool,
    #[comptime] target: TmaTarget,
) {
    // Along k the tile is one box; across k it is a box for every chunk.
    #[unroll]
    for chunk in 0..comptime!(if k_major { 1 } else { tile / columns }) {
        let at = destination + comptime!((chunk * columns * ROW_BYTES) as u32);
        let column = mn + comptime!((chunk * columns) as u32);
        let (x, y) = if comptime!(k_major) { (k, column) } else { (column, k) };
        if comptime!(batched) {
            tma_batched_tile_to(at, map, x, y, inner, outer, barrier, target);
        } else {
            tma_tile_to(at, map, x, y, barrier, target);
        }
    }
}

/// Where blocks of k come from.
#[cube]
pub(crate) trait BulkBlocks {
    /// Starts copies of block `block` of both operands for a piece of work to `stage` in shared memory, as many
    /// bytes as a stage has; `barrier` counts them. One unit calls it.
    fn load(&self, stage: u32, work: &Work, block: u32, barrier: u32);
}

/// Where the rows of the output lie.
#[cube]
pub(crate) trait OutputRows {
    /// Of row `row` and the one 8 below it, from `column` on, those of `work`.
    fn fragment(
        &self,
        work: &Work,
        extent: &Extent,
        row: u32,
        column: u32,
        quad: u32,
        #[comptime] interleaved: bool,
    ) -> Fragment;
}

/// Blocks of matrices.
#[derive(CubeType)]
pub(super) struct MatrixBlocks {
    pub(super) lhs: u64,
    pub(super) rhs: u64,
    pub(super) inner_batches: u32,
    pub(super) last_matrix: LastMatrix,
    #[cube(comptime)]
    pub(super) operands: WgmmaOperands,
    /// k of a block of 128 bytes.
    #[cube(comptime)]
    pub(super) block_k: u32,
    #[cube(comptime)]
    pub(super) batched: bool,
    #[cube(comptime)]
    pub(super) target: TmaTarget,
}

#[cube]
impl BulkBlocks for MatrixBlocks {
    fn load(&self, stage: u32, work: &Work, block: u32, barrier: u32) {
        let (operands, batched) = comptime!((self.operands, self.batched));
        let target = comptime!(self.target);
        let last = &self.last_matrix;
        let outer = work.batch / self.inner_batches;
        let inner = work.batch % self.inner_batches;
        let k = block * comptime!(self.block_k);
        load_operand(
            stage,
            self.lhs,
            work.row,
            k,
            min(inner, last.lhs_inner),
            min(outer, last.lhs_outer),
            barrier,
            TILE_M,
            comptime!(operands.lhs_k_major),
            comptime!(operands.chunk()),
            batched,
            target,
        );
        load_operand(
            stage + comptime!((TILE_M * ROW_BYTES) as u32),
            self.rhs,
            work.column,
            k,
            min(inner, last.rhs_inner),
            min(outer, last.rhs_outer),
            barrier,
            comptime!(operands.n),
            comptime!(operands.rhs_k_major),
            comptime!(operands.chunk()),
            batched,
            target,
        );
    }
}

#[cube]
impl OutputRows for MatrixBlocks {
    fn fragment(
        &self,
        work: &Work,
        extent: &Extent,
        row: u32,
        column: u32,
        quad: u32,
        #[comptime] interleaved: bool,
    ) -> Fragment {
        fragment_of(work, extent, row, column, quad, interleaved)
    }
}

/// Every tile of this cube's, from its blocks to the output; with splits, sums of each split to `out[split]`. A product
/// without blocks is zero.
#[cube]
pub(crate) fn persistent_product<
    B: BulkBlocks + OutputRows,
    O: Float,
    S: Numeric,
    W: Size,
    R: Size,
>(
    source: &B,
    epilogue: &EpilogueTensors<O>,
    outputs: &mut Outputs<Vector<S, W>>,
    extent: &Extent,
    #[comptime] blueprint: WgmmaBlueprint,
) {
    let operands = comptime!(blueprint.operands);
    let stages = comptime!(blueprint.stages);
    let (tile_m, tile_n) = comptime!((TILE_M as u32, operands.n as u32));
    let stage_bytes = comptime!(blueprint.stage_bytes() as u32);
    let lhs_bytes = comptime!((TILE_M * ROW_BYTES) as u32);
    // The swizzle repeats every 1024 bytes.
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.shared_bytes() / 4), 1024usize);
    let ring = shared_address::<u32>(memory.as_slice());
    let full = ring + comptime!(blueprint.stages * blueprint.stage_bytes() as u32);
    let empty = full + comptime!(8 * blueprint.stages);
    let unit = UNIT_POS;
    if unit == 0 {
        #[unroll]
        for stage in 0..stages {
            barrier_init(full + comptime!(8 * stage), 1u32);
            barrier_init(empty + comptime!(8 * stage), 2u32);
        }
        barrier_init_fence();
    }
    sync_cube();

    let work_items = work_count(extent, tile_m, tile_n);
    let mut stage = 0u32;
    let mut phase = 0u32;
    let mut index = CUBE_POS_X;
    if unit < 128 {
        // 1. Produce.
        if unit == 0 {
            let at = BulkRing { blocks: ring, full, empty };
            fill_bulk_ring::<B>(source, &at, extent, comptime!(blueprint.ring()));
        }
    } else {
        // 2. Multiply. Either operand's 64 rows of a warpgroup are 8192 bytes.
        let group = unit / 128 - 1;
        let lane = unit % 128;
        let lhs_at = ring + group * comptime!(CHUNK_BYTES as u32);
        let rhs_at = ring + lhs_bytes;
        let bias_at = empty
            + comptime!(8 * blueprint.stages)
            + group * comptime!(bias_bytes(operands.n) as u32);
        let scale = factor(epilogue);
        while index < work_items {
            let work = work_at(index, extent, tile_m, tile_n);
            if comptime!(epilogue.steps.bias) {
                // Until all units of the warpgroup have written the tile before, they need its bias.
                sync_group(group + 1, 128u32);
                fetch_bias::<O>(
                    &epilogue.bias,
                    bias_at,
                    work.column,
                    epilogue.bias_columns,
                    lane,
                    128u32,
                    comptime!(operands.n as u32),
                    comptime!(blueprint.store.half()),
                );
            }
            let mut sums = Vector::<f32, R>::new(0.0f32);
            let mut promoted = Vector::<f32, R>::new(0.0f32);
            let mut previous = 0u32;
            let mut since_promotion = 0u32;
            for block in work.first_block..work.last_block {
                barrier_wait(full + load::<u32>(stage) * 8, load::<u32>(phase));
                let offset = load::<u32>(stage) * stage_bytes;
                sums = wgmma_block::<R>(
                    sums,
                    tile_descriptor(lhs_at + offset, comptime!(operands.lhs_k_major)),
                    tile_descriptor(rhs_at + offset, comptime!(operands.rhs_k_major)),
                    operands,
                );
                // The block before is done with.
                if block > work.first_block && lane == 0 {
                    barrier_arrive(empty + load::<u32>(previous) * 8);
                }
                if comptime!(blueprint.promotion > 0) {
                    since_promotion += 1;
                    if since_promotion == comptime!(blueprint.promotion) {
                        sums = wgmma_drain::<R>(sums, comptime!(operands.n));
                        promoted += sums;
                        sums = Vector::<f32, R>::new(0.0f32);
                        since_promotion = 0u32;
                    }
                }
                previous = load::<u32>(stage);
                stage += 1;
                if stage == stages {
                    stage = 0u32;
                    phase ^= 1;
                }
            }
            sums = wgmma_drain::<R>(sums, comptime!(operands.n));
            if work.last_block > work.first_block && lane == 0 {
                barrier_arrive(empty + load::<u32>(previous) * 8);
            }
            if comptime!(blueprint.promotion > 0) {
                sums += promoted;
            }

            // 3. Finish and write.
            if comptime!(epilogue.steps.bias) {
                copies_wait_all();
                sync_group(group + 1, 128u32);
            }
            let place = source.fragment(
                &work,
                extent,
                work.row + group * 64 + lane / 32 * 16 + lane % 32 / 4,
                work.column,
                lane % 4,
                comptime!(epilogue.steps.interleaved),
            );
            let finish = Finish { bias_at, scale, beta: epilogue.beta };
            let (columns, store) = comptime!((operands.n, blueprint.store));
            store_outputs::<O, S, W, R>(
                outputs, sums, epilogue, &place, &finish, 0usize, columns, store,
            );
            index += CUBE_COUNT_X;
        }
    }
}

/// `out = epilogue(lhs rhs)`; with splits, sums of each split to `out[split]`.
#[cube(launch_unchecked)]
pub(crate) fn matmul_wgmma_kernel<O: Float, S: Numeric, W: Size, R: Size>(
    lhs: &TensorMap<u32, Tiled>,
    rhs: &TensorMap<u32, Tiled>,
    epilogue: &EpilogueTensors<O>,
    outputs: &mut Outputs<Vector<S, W>>,
    extent: Extent,
    last_matrix: LastMatrix,
    #[comptime] blueprint: WgmmaBlueprint,
    #[define(O, S)] _types: [ElemType; 2],
    #[define(W, R)] _widths: [usize; 2],
) {
    let blocks = MatrixBlocks {
        lhs: tensor_map_address::<u32, Tiled>(lhs),
        rhs: tensor_map_address::<u32, Tiled>(rhs),
        inner_batches: extent.inner_batches,
        last_matrix,
        operands: comptime!(blueprint.operands),
        block_k: comptime!(blueprint.block_k),
        batched: comptime!(blueprint.batched),
        target: comptime!(TmaTarget::Cluster),
    };
    persistent_product::<MatrixBlocks, O, S, W, R>(&blocks, epilogue, outputs, &extent, blueprint);
}
