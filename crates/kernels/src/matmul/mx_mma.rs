//! Products of operands whose blocks of k have scales, by warp products that take them: the `mma` family's loop, with
//! scales behind each block of k.

use super::{
    bias_tile::fetch_bias,
    epilogue::{EpilogueTensors, Outputs},
    mma::{MatrixBlocks, PitchedOperand, matrix_blocks},
    mma_tile::write_part,
    ring::{Blocks, BlocksExpand, MmaBlueprint, UNITS, fragments, multiply},
    work::{Extent, LastMatrix, work_at},
};
use crate::{
    block_format::BlockFormat,
    device::{BLOCK_ROWS, SCALE_BLOCK_BYTES},
    ptx::{copy::copy_16_bytes, global_address, load, shared_address},
};
use cubecl::prelude::*;

/// Blocks of two matrices and of their scales.
#[derive(CubeType)]
struct ScaledBlocks {
    matrices: MatrixBlocks,
    /// Scales of either matrix.
    lhs_scales: u64,
    rhs_scales: u64,
    /// Blocks of k, and of 128 columns of the output.
    k_blocks: u32,
    column_blocks: u32,
    row: u32,
    column: u32,
    #[cube(comptime)]
    blueprint: MmaBlueprint,
    #[cube(comptime)]
    format: BlockFormat,
}

#[cube]
impl Blocks for ScaledBlocks {
    fn load(&self, stage: u32, block: u32) {
        self.matrices.load(stage, block);
        // A warp copies a block of scales: those of the tile's rows along k, then those of its columns.
        let along_k = comptime!(self.format.scale_blocks() as u32);
        let groups = comptime!(1 + self.blueprint.tile_n() / BLOCK_ROWS as u32);
        comptime!(assert!(groups * along_k <= UNITS / 32, "a warp for each block of scales"));
        let (warp, lane) = (UNIT_POS / 32, UNIT_POS % 32);
        let (group, at_k) = (warp / along_k, warp % along_k);
        if group < groups {
            let rows = comptime!(BLOCK_ROWS as u32);
            let mut from = self.lhs_scales;
            let mut first = self.row / rows;
            let mut bytes = 16u32;
            if group > 0 {
                from = self.rhs_scales;
                first = self.column / rows + group - 1;
                if first >= self.column_blocks {
                    // The last tile may have more columns than the output.
                    first = 0u32;
                    bytes = 0u32;
                }
            }
            let index = (first * self.k_blocks + block) * along_k + at_k;
            let index = index * comptime!(SCALE_BLOCK_BYTES as u32);
            let source = from + u64::cast_from(index + 16 * lane);
            let at = stage
                + comptime!(self.blueprint.block_bytes())
                + warp * comptime!(SCALE_BLOCK_BYTES as u32)
                + 16 * lane;
            copy_16_bytes(at, load::<u64>(source), load::<u32>(bytes));
        }
    }
}

/// `out = epilogue((lhs lhs_scales) (rhs rhs_scales))`; with splits, sums of each split to `out[split]`.
/// Scales lie as [`matmul_mx_scales_kernel`](super::mx_scales::matmul_mx_scales_kernel) arranges them.
#[cube(launch_unchecked)]
pub(super) fn matmul_mx_mma_kernel<O: Float, S: Numeric, W: Size, R: Size>(
    lhs: &PitchedOperand,
    rhs: &PitchedOperand,
    lhs_scales: &[u32],
    rhs_scales: &[u32],
    epilogue: &EpilogueTensors<O>,
    outputs: &mut Outputs<Vector<S, W>>,
    extent: Extent,
    last_matrix: LastMatrix,
    k: u32,
    #[comptime] blueprint: MmaBlueprint,
    #[comptime] format: BlockFormat,
    #[define(O, S)] _types: [ElemType; 2],
    #[define(W, R)] _widths: [usize; 2],
) {
    let (tile_m, tile_n) = comptime!((blueprint.tile_m(), blueprint.tile_n()));
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.shared_bytes() / 4), 1024usize);
    let ring = shared_address::<u32>(memory.as_slice());

    let work = work_at(CUBE_POS_X, &extent, tile_m, tile_n);
    let matrices = matrix_blocks(lhs, rhs, &extent, &last_matrix, &work, k, blueprint);
    let (lhs_matrix, rhs_matrix) = last_matrix.own_matrices(work.batch, extent.inner_batches);
    let rows = comptime!(BLOCK_ROWS as u32);
    let column_blocks = extent.n.div_ceil(rows);
    let block_bytes = comptime!((format.scale_blocks() * SCALE_BLOCK_BYTES) as u32);
    let row_bytes = extent.k_blocks * block_bytes;
    let lhs_origin = lhs_matrix * extent.m.div_ceil(rows) * row_bytes;
    let rhs_origin = rhs_matrix * column_blocks * row_bytes;
    let source = ScaledBlocks {
        matrices,
        lhs_scales: global_address::<u32>(lhs_scales) + u64::cast_from(lhs_origin),
        rhs_scales: global_address::<u32>(rhs_scales) + u64::cast_from(rhs_origin),
        k_blocks: extent.k_blocks,
        column_blocks,
        row: work.row,
        column: work.column,
        blueprint,
        format,
    };
    let fragments = fragments(blueprint);

    // It arrives with the first block.
    let bias_at = ring + comptime!(blueprint.stages * blueprint.stage_bytes());
    if comptime!(epilogue.steps.bias) {
        let half = comptime!(blueprint.store.half());
        let (column, columns) = (work.column, epilogue.bias_columns);
        fetch_bias::<O>(&epilogue.bias, bias_at, column, columns, UNIT_POS, UNITS, tile_n, half);
    }
    let sums = multiply::<ScaledBlocks, R>(&source, ring, &work, &fragments, blueprint);
    write_part::<O, S, W, R>(
        sums, outputs, epilogue, &extent, &work, &fragments, bias_at, blueprint,
    );
}
