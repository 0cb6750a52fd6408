//! What a cube of the `tcgen05` family copies of each block of k: all of its tile, or of a pair's tile its own half of both
//! operands, counted by the barriers of the first cube.

use super::{
    tcgen05::{TILE_M, Tcgen05Blueprint},
    wgmma::{BulkBlocks, BulkBlocksExpand, MatrixBlocks},
    work::{Extent, LastMatrix, Work},
};
use crate::ptx::{
    cluster::{cube_rank, in_first_cube},
    tcgen05_pair::CUBES,
};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// The first row that this cube multiplies and writes of a tile that begins at `row`.
#[cube]
pub(super) fn own_row(row: u32, #[comptime] blueprint: Tcgen05Blueprint) -> u32 {
    if comptime!(blueprint.pair) {
        row + cube_rank(comptime!(CUBES as u32)) * comptime!(TILE_M as u32)
    } else {
        row
    }
}

/// The barrier that counts what this cube copies.
#[cube]
pub(super) fn counting_barrier(barrier: u32, #[comptime] blueprint: Tcgen05Blueprint) -> u32 {
    if comptime!(blueprint.pair) { in_first_cube(barrier) } else { barrier }
}

/// A cube's blocks of matrices.
#[derive(CubeType)]
pub(super) struct TensorBlocks {
    matrices: MatrixBlocks,
    #[cube(comptime)]
    blueprint: Tcgen05Blueprint,
}

#[cube]
impl BulkBlocks for TensorBlocks {
    fn load(&self, stage: u32, work: &Work, block: u32, barrier: u32) {
        let blueprint = comptime!(self.blueprint);
        let column = if comptime!(blueprint.pair) {
            let columns = comptime!(blueprint.copied().n as u32);
            work.column + cube_rank(comptime!(CUBES as u32)) * columns
        } else {
            work.column
        };
        let own = Work {
            row: own_row(work.row, blueprint),
            column,
            batch: work.batch,
            split: work.split,
            first_block: work.first_block,
            last_block: work.last_block,
        };
        self.matrices.load(stage, &own, block, counting_barrier(barrier, blueprint));
    }
}

/// Blocks of the operands that those maps find.
#[cube]
pub(super) fn tensor_blocks(
    lhs: &TensorMap<u32, Tiled>,
    rhs: &TensorMap<u32, Tiled>,
    extent: &Extent,
    last_matrix: &LastMatrix,
    #[comptime] blueprint: Tcgen05Blueprint,
) -> TensorBlocks {
    let matrices = MatrixBlocks {
        lhs: tensor_map_address::<u32, Tiled>(lhs),
        rhs: tensor_map_address::<u32, Tiled>(rhs),
        inner_batches: extent.inner_batches,
        last_matrix: LastMatrix {
            lhs_outer: last_matrix.lhs_outer,
            lhs_inner: last_matrix.lhs_inner,
            rhs_outer: last_matrix.rhs_outer,
            rhs_inner: last_matrix.rhs_inner,
        },
        operands: comptime!(blueprint.copied()),
        block_k: comptime!(blueprint.block_k),
        batched: comptime!(blueprint.batched),
        target: comptime!(blueprint.target()),
    };
    TensorBlocks { matrices, blueprint }
}
