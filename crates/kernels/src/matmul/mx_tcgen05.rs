//! Products of operands whose blocks of k have scales by Blackwell's data-center GPUs: the `tcgen05` family's pipeline,
//! with scales behind each block of k. TMA brings both. Of a pair of cubes, each copies the scales of its own rows and of
//! all columns.

use super::{
    epilogue::{EpilogueTensors, Outputs},
    tcgen05::{Tcgen05Blueprint, persistent_tensor_product},
    tcgen05_blocks::{TensorBlocks, counting_barrier, own_row, tensor_blocks},
    wgmma::{BulkBlocks, BulkBlocksExpand},
    work::{Extent, LastMatrix, Work},
};
use crate::{
    block_format::BlockFormat,
    device::{BLOCK_ROWS, SCALE_BLOCK_BYTES},
    ptx::{copy::tma_tile_to, tcgen05_pair::CUBES},
};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Blocks of matrices and of their scales.
#[derive(CubeType)]
struct ScaledBlocks {
    elements: TensorBlocks,
    /// Tensors of which a row is a block of scales, and a box those of a block of k.
    lhs_scales: u64,
    rhs_scales: u64,
    /// Blocks of k, and of 128 rows and columns of the output.
    k_blocks: u32,
    row_blocks: u32,
    column_blocks: u32,
    inner_batches: u32,
    last_matrix: LastMatrix,
    #[cube(comptime)]
    blueprint: Tcgen05Blueprint,
    #[cube(comptime)]
    format: BlockFormat,
}

#[cube]
impl BulkBlocks for ScaledBlocks {
    fn load(&self, stage: u32, work: &Work, block: u32, barrier: u32) {
        self.elements.load(stage, work, block, barrier);
        let blueprint = comptime!(self.blueprint);
        let scales = stage + comptime!(blueprint.block_bytes() as u32);
        let rows = comptime!(BLOCK_ROWS as u32);
        let along_k = comptime!(self.format.scale_blocks() as u32);
        let barrier = counting_barrier(barrier, blueprint);
        let mut first_row = own_row(work.row, blueprint) / rows;
        let mut first_column = work.column / rows;
        if comptime!(blueprint.batched) {
            let (lhs, rhs) = self.last_matrix.own_matrices(work.batch, self.inner_batches);
            first_row += lhs * self.row_blocks;
            first_column += rhs * self.column_blocks;
        }
        let of_rows = (first_row * self.k_blocks + block) * along_k;
        tma_tile_to(scales, self.lhs_scales, 0u32, of_rows, barrier, comptime!(blueprint.target()));
        // What lies behind the last block of rows or columns becomes zero, or another matrix's scales: the elements are
        // zeros.
        #[unroll]
        for group in 0..comptime!(blueprint.operands.n as u32 / BLOCK_ROWS as u32) {
            let at = scales + comptime!((group + 1) * along_k * SCALE_BLOCK_BYTES as u32);
            let of_columns = ((first_column + group) * self.k_blocks + block) * along_k;
            tma_tile_to(
                at,
                self.rhs_scales,
                0u32,
                of_columns,
                barrier,
                comptime!(blueprint.target()),
            );
        }
    }
}

/// Blocks of the operands and scales that those maps find.
#[cube]
fn scaled_blocks(
    lhs: &TensorMap<u32, Tiled>,
    rhs: &TensorMap<u32, Tiled>,
    lhs_scales: &TensorMap<u32, Tiled>,
    rhs_scales: &TensorMap<u32, Tiled>,
    extent: &Extent,
    last_matrix: LastMatrix,
    #[comptime] blueprint: Tcgen05Blueprint,
    #[comptime] format: BlockFormat,
) -> ScaledBlocks {
    ScaledBlocks {
        elements: tensor_blocks(lhs, rhs, extent, &last_matrix, blueprint),
        lhs_scales: tensor_map_address::<u32, Tiled>(lhs_scales),
        rhs_scales: tensor_map_address::<u32, Tiled>(rhs_scales),
        k_blocks: extent.k_blocks,
        row_blocks: extent.m.div_ceil(comptime!(BLOCK_ROWS as u32)),
        column_blocks: extent.n.div_ceil(comptime!(BLOCK_ROWS as u32)),
        inner_batches: extent.inner_batches,
        last_matrix,
        blueprint,
        format,
    }
}

/// `out = epilogue((lhs lhs_scales) (rhs rhs_scales))`; with splits, sums of each split to `out[split]`.
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
    #[comptime] format: BlockFormat,
    #[define(O, S)] _types: [ElemType; 2],
    #[define(W, R)] _widths: [usize; 2],
) {
    let source =
        scaled_blocks(lhs, rhs, lhs_scales, rhs_scales, &extent, last_matrix, blueprint, format);
    persistent_tensor_product::<ScaledBlocks, O, S, W, R>(
        &source, epilogue, outputs, &extent, blueprint,
    );
}

/// As [`matmul_mx_tcgen05_kernel`], by pairs of cubes.
#[cube(launch_unchecked, cluster_dim = CubeDim::new_1d(CUBES as u32))]
pub(super) fn matmul_mx_tcgen05_pair_kernel<O: Float, S: Numeric, W: Size, R: Size>(
    lhs: &TensorMap<u32, Tiled>,
    rhs: &TensorMap<u32, Tiled>,
    lhs_scales: &TensorMap<u32, Tiled>,
    rhs_scales: &TensorMap<u32, Tiled>,
    epilogue: &EpilogueTensors<O>,
    outputs: &mut Outputs<Vector<S, W>>,
    extent: Extent,
    last_matrix: LastMatrix,
    #[comptime] blueprint: Tcgen05Blueprint,
    #[comptime] format: BlockFormat,
    #[define(O, S)] _types: [ElemType; 2],
    #[define(W, R)] _widths: [usize; 2],
) {
    let source =
        scaled_blocks(lhs, rhs, lhs_scales, rhs_scales, &extent, last_matrix, blueprint, format);
    persistent_tensor_product::<ScaledBlocks, O, S, W, R>(
        &source, epilogue, outputs, &extent, blueprint,
    );
}
