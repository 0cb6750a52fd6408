//! The kernel of the `tcgen05` family by which a cluster of two cubes shares each tile of 256 rows.
//!
//! 1. Warp 0 of each cube has TMA copy the cube's own half of both operands: 128 rows of the left one, half of the
//!    tile's columns of the right one. The barriers of the first cube count what both copy.
//! 2. Warp 1 of the first cube has the tensor cores of both multiply, and tells both cubes.
//! 3. Each cube reads, finishes and writes its own 128 rows. The first cube is told when both have read them.

use super::{
    epilogue::{EpilogueTensors, Outputs},
    tcgen05::{Tcgen05Blueprint, own_row, persistent_tensor_product},
    wgmma::{BulkBlocks, BulkBlocksExpand, MatrixBlocks},
    work::{Extent, LastMatrix, Work},
};
use crate::ptx::{
    cluster::{cube_rank, in_first_cube},
    copy::TmaTarget,
    tcgen05_pair::CUBES,
};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// A cube's half of blocks of matrices.
#[derive(CubeType)]
struct PairBlocks {
    matrices: MatrixBlocks,
    #[cube(comptime)]
    blueprint: Tcgen05Blueprint,
}

#[cube]
impl BulkBlocks for PairBlocks {
    fn load(&self, stage: u32, work: &Work, block: u32, barrier: u32) {
        let columns = comptime!(self.blueprint.copied().n as u32);
        let own = Work {
            row: own_row(work.row, comptime!(self.blueprint)),
            column: work.column + cube_rank(comptime!(CUBES as u32)) * columns,
            batch: work.batch,
            split: work.split,
            first_block: work.first_block,
            last_block: work.last_block,
        };
        self.matrices.load(stage, &own, block, in_first_cube(barrier));
    }
}

/// As [`matmul_tcgen05_kernel`](super::tcgen05::matmul_tcgen05_kernel), by pairs of cubes.
#[cube(launch_unchecked, cluster_dim = CubeDim::new_1d(CUBES as u32))]
pub(super) fn matmul_tcgen05_pair_kernel<O: Float, S: Numeric, W: Size, R: Size>(
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
    let matrices = MatrixBlocks {
        lhs: tensor_map_address::<u32, Tiled>(lhs),
        rhs: tensor_map_address::<u32, Tiled>(rhs),
        inner_batches: extent.inner_batches,
        last_matrix,
        operands: comptime!(blueprint.copied()),
        block_k: comptime!(blueprint.block_k),
        batched: comptime!(blueprint.batched),
        target: comptime!(TmaTarget::CubeOfPair),
    };
    let source = PairBlocks { matrices, blueprint };
    persistent_tensor_product::<PairBlocks, O, S, W, R>(
        &source, epilogue, outputs, &extent, blueprint,
    );
}
