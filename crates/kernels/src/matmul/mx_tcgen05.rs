//! Products of MX operands by Blackwell's data-center GPUs: the `tcgen05` family's pipeline, whose blocks of k have their
//! scales behind them. TMA brings both.

use super::{
    epilogue::{EpilogueTensors, Outputs},
    mx_scales::BLOCK_ROWS,
    tcgen05::{Tcgen05Blueprint, persistent_tensor_product},
    wgmma::{BulkBlocks, BulkBlocksExpand, MatrixBlocks},
    work::{Extent, LastMatrix, Work},
};
use crate::{
    device::SCALE_BLOCK_BYTES,
    ptx::copy::{TmaTarget, tma_tile},
};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Blocks of matrices and of their scales.
#[derive(CubeType)]
struct ScaledBulkBlocks {
    matrices: MatrixBlocks,
    /// Tensors of which a row is a block of scales.
    lhs_scales: u64,
    rhs_scales: u64,
    k_blocks: u32,
    #[cube(comptime)]
    blueprint: Tcgen05Blueprint,
}

#[cube]
impl BulkBlocks for ScaledBulkBlocks {
    fn load(&self, stage: u32, work: &Work, block: u32, barrier: u32) {
        self.matrices.load(stage, work, block, barrier);
        let scales = stage + comptime!(self.blueprint.block_bytes() as u32);
        let rows = comptime!(BLOCK_ROWS as u32);
        let of_rows = work.row / rows * self.k_blocks + block;
        tma_tile(scales, self.lhs_scales, 0u32, of_rows, barrier);
        // What lies behind the last block of columns becomes zero.
        #[unroll]
        for group in 0..comptime!(self.blueprint.operands.n as u32 / BLOCK_ROWS as u32) {
            let at = scales + comptime!((group + 1) * SCALE_BLOCK_BYTES as u32);
            let of_columns = (work.column / rows + group) * self.k_blocks + block;
            tma_tile(at, self.rhs_scales, 0u32, of_columns, barrier);
        }
    }
}

/// `out = epilogue((lhs lhs_scales) (rhs rhs_scales))` of one matrix; with splits, sums of each split to `out[split]`.
/// Scales lie as [`matmul_mx_scales_kernel`](super::mx_scales::matmul_mx_scales_kernel) arranges them.
#[cube(launch_unchecked)]
pub(super) fn matmul_mx_tcgen05_kernel<O: Float, S: Numeric, W: Size, R: Size>(
    lhs: &TensorMap<u32, Tiled>,
    rhs: &TensorMap<u32, Tiled>,
    lhs_scales: &TensorMap<u32, Tiled>,
    rhs_scales: &TensorMap<u32, Tiled>,
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
        operands: comptime!(blueprint.operands),
        block_k: comptime!(blueprint.block_k),
        batched: false,
        target: comptime!(TmaTarget::Cluster),
    };
    let source = ScaledBulkBlocks {
        matrices,
        lhs_scales: tensor_map_address::<u32, Tiled>(lhs_scales),
        rhs_scales: tensor_map_address::<u32, Tiled>(rhs_scales),
        k_blocks: extent.k_blocks,
        blueprint,
    };
    persistent_tensor_product::<ScaledBulkBlocks, O, S, W, R>(
        &source, epilogue, outputs, &extent, blueprint,
    );
}
