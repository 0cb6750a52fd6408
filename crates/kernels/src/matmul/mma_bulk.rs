//! The `mma` family fed by TMA, for Blackwell's workstations: a persistent cube of nine warps on every multiprocessor.
//!
//! 1. A unit of the last warp has TMA fill a ring of k blocks in shared memory.
//! 2. The other warps multiply their parts of the tile, and give blocks back.
//! 3. They finish and write the tile while the ring fills for the next one.
//!
//! Tiles are walked as in [`wgmma`](super::wgmma), and blocks are the same boxes. Nobody has measured it: see
//! [`workstation`](super::workstation).

use super::{
    bias_tile::fetch_bias,
    budget::mma_bulk_bytes,
    bulk_ring::{BulkRing, BulkRingBlueprint, bulk_ring, fill_bulk_ring, make_bulk_ring},
    epilogue::{EpilogueTensors, Outputs},
    mma_tile::write_part,
    ring::{MmaBlueprint, UNITS, fragments, multiply_block},
    wgmma::MatrixBlocks,
    work::{Extent, LastMatrix, work_at, work_count},
};
use crate::ptx::{
    barrier::{barrier_arrive, barrier_wait, sync_group},
    copy::{TmaTarget, copies_wait_all},
    load, shared_address,
    tcgen05::elect,
    wgmma::WgmmaOperands,
};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Units of a cube: those that multiply, and a warp that copies.
pub(super) const BULK_UNITS: u32 = UNITS + 32;

/// How the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct MmaBulkBlueprint {
    pub(super) mma: MmaBlueprint,
    /// k of a block of 128 bytes.
    pub(super) block_k: u32,
    pub(super) batched: bool,
}

impl MmaBulkBlueprint {
    fn ring(self) -> BulkRingBlueprint {
        BulkRingBlueprint {
            stages: self.mma.stages,
            stage_bytes: self.mma.stage_bytes(),
            tile_m: self.mma.tile_m(),
            tile_n: self.mma.tile_n(),
            cubes: 1,
        }
    }

    pub(super) fn shared_bytes(self) -> usize {
        let MmaBlueprint { stages, .. } = self.mma;
        mma_bulk_bytes(self.mma.tile_m() as usize, self.mma.tile_n() as usize, stages as usize)
    }

    /// What the copies are told of the operands.
    fn operands(self) -> WgmmaOperands {
        let operands = self.mma.operands;
        WgmmaOperands {
            n: self.mma.tile_n() as usize,
            lhs: operands.lhs,
            rhs: operands.rhs,
            lhs_k_major: operands.lhs_k_major,
            rhs_k_major: operands.rhs_k_major,
        }
    }
}

/// 2. and 3. of every tile of this cube's.
#[cube]
fn multiply_and_write<O: Float, S: Numeric, W: Size, R: Size>(
    epilogue: &EpilogueTensors<O>,
    outputs: &mut Outputs<Vector<S, W>>,
    extent: &Extent,
    ring: &BulkRing,
    #[comptime] blueprint: MmaBlueprint,
) {
    let (tile_m, tile_n) = comptime!((blueprint.tile_m(), blueprint.tile_n()));
    let stage_bytes = comptime!(blueprint.stage_bytes());
    let half = comptime!(blueprint.store.half());
    let bias_at = ring.empty + comptime!(8 * blueprint.stages);
    let fragments = fragments(blueprint);
    let work_items = work_count(extent, tile_m, tile_n);
    let mut stage = 0u32;
    let mut phase = 0u32;
    let mut index = CUBE_POS_X;
    while index < work_items {
        let work = work_at(index, extent, tile_m, tile_n);
        if comptime!(epilogue.steps.bias) {
            // Until all units have written the tile before, they need its bias.
            sync_group(1u32, UNITS);
            let (column, columns) = (work.column, epilogue.bias_columns);
            fetch_bias::<O>(
                &epilogue.bias,
                bias_at,
                column,
                columns,
                UNIT_POS,
                UNITS,
                tile_n,
                half,
            );
        }
        let mut sums = Vector::<f32, R>::new(0.0f32);
        for _block in work.first_block..work.last_block {
            barrier_wait(ring.full + load::<u32>(stage) * 8, load::<u32>(phase));
            let at = ring.blocks + load::<u32>(stage) * stage_bytes;
            sums = multiply_block::<R>(sums, at, work.row, &fragments, blueprint);
            // All units of the warp have read the block.
            sync_plane();
            if UNIT_POS_PLANE == 0 {
                barrier_arrive(ring.empty + load::<u32>(stage) * 8);
            }
            stage += 1;
            if stage == comptime!(blueprint.stages) {
                stage = 0u32;
                phase ^= 1;
            }
        }
        if comptime!(epilogue.steps.bias) {
            copies_wait_all();
            sync_group(1u32, UNITS);
        }
        write_part::<O, S, W, R>(
            sums, outputs, epilogue, extent, &work, &fragments, bias_at, blueprint,
        );
        index += CUBE_COUNT_X;
    }
}

/// `out = epilogue(lhs rhs)`; with splits, sums of each split to `out[split]`.
#[cube(launch_unchecked)]
pub(super) fn matmul_mma_bulk_kernel<O: Float, S: Numeric, W: Size, R: Size>(
    lhs: &TensorMap<u32, Tiled>,
    rhs: &TensorMap<u32, Tiled>,
    epilogue: &EpilogueTensors<O>,
    outputs: &mut Outputs<Vector<S, W>>,
    extent: Extent,
    last_matrix: LastMatrix,
    #[comptime] blueprint: MmaBulkBlueprint,
    #[define(O, S)] _types: [ElemType; 2],
    #[define(W, R)] _widths: [usize; 2],
) {
    let blocks = MatrixBlocks {
        lhs: tensor_map_address::<u32, Tiled>(lhs),
        rhs: tensor_map_address::<u32, Tiled>(rhs),
        inner_batches: extent.inner_batches,
        last_matrix,
        operands: comptime!(blueprint.operands()),
        block_k: comptime!(blueprint.block_k),
        batched: comptime!(blueprint.batched),
        target: comptime!(TmaTarget::Cube),
    };
    let ring_blueprint = comptime!(blueprint.ring());
    // The swizzle repeats every 1024 bytes.
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.shared_bytes() / 4), 1024usize);
    let ring = bulk_ring(shared_address::<u32>(memory.as_slice()), ring_blueprint);
    if UNIT_POS == 0 {
        // A unit of each warp that multiplies gives a block back.
        make_bulk_ring(&ring, comptime!(UNITS / 32).runtime(), ring_blueprint);
    }
    sync_cube();
    if UNIT_POS < UNITS {
        multiply_and_write::<O, S, W, R>(
            epilogue,
            outputs,
            &extent,
            &ring,
            comptime!(blueprint.mma),
        );
    } else if elect() == 1 {
        fill_bulk_ring::<MatrixBlocks>(&blocks, &ring, &extent, ring_blueprint);
    }
}
