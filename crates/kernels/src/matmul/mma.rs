//! The family for Ampere and later: eight warps a cube, fed by `cp.async`.
//!
//! 1. All units copy k blocks of both operands into a ring in shared memory, some blocks ahead.
//! 2. Each warp multiplies its part of the tile out of the oldest block.
//! 3. It finishes and writes its part.

use super::{
    bias_tile::fetch_bias,
    epilogue::{EpilogueTensors, Outputs},
    mma_tile::write_part,
    ring::{Blocks, BlocksExpand, MmaBlueprint, UNITS, chunk_bytes, fragments, multiply},
    work::{Extent, LastMatrix, Work, work_at},
};
use crate::ptx::{ROW_BYTES, copy::copy_16_bytes, global_address, load, shared_address};
use cubecl::prelude::*;

/// Where an operand lies: strides in elements, of whichever of mn and k is not contiguous and of
/// the batches.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Pitch {
    pub(crate) row: u32,
    pub(crate) outer: u32,
    pub(crate) inner: u32,
    /// Rows or columns of the output that the operand has.
    pub(crate) mn: u32,
}

/// An operand, in words.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PitchedOperand {
    pub(crate) memory: Box<[u32]>,
    pub(crate) pitch: Pitch,
}

/// Starts copies of one operand's part of a k block; what lies beyond its ends becomes zero.
#[cube]
pub(crate) fn load_operand(
    destination: u32,
    source: u64,
    pitch: &Pitch,
    first_mn: u32,
    first_k: u32,
    limit_k: u32,
    #[comptime] tile: u32,
    #[comptime] k_major: bool,
    #[comptime] element_bytes: u32,
) {
    // Elements of a chunk of 16 bytes, and chunks of a row.
    let chunk_elements = comptime!(16 / element_bytes);
    let row_chunks = comptime!(if k_major { 8 } else { tile / chunk_elements });
    #[unroll]
    for round in 0..comptime!(tile * 8 / UNITS) {
        let index = round * UNITS + UNIT_POS;
        let (row, chunk) = (index / row_chunks, index % row_chunks);
        let (row_at, column_at, rows, columns) = if comptime!(k_major) {
            (first_mn + row, first_k + chunk * chunk_elements, pitch.mn, limit_k)
        } else {
            (first_k + row, first_mn + chunk * chunk_elements, limit_k, pitch.mn)
        };
        let swizzled = ((chunk & 7) ^ (row & 7)) << 4;
        let at = destination
            + (chunk / 8) * comptime!(chunk_bytes(element_bytes))
            + row * comptime!(ROW_BYTES as u32)
            + swizzled;
        let mut bytes = 0u32;
        let mut from = source;
        if row_at < rows && column_at < columns {
            bytes = min(columns - column_at, chunk_elements) * element_bytes;
            from += u64::cast_from(row_at * pitch.row + column_at)
                * comptime!(u64::from(element_bytes)).runtime();
        }
        copy_16_bytes(at, load::<u64>(from), load::<u32>(bytes));
    }
}

/// Blocks of two matrices.
#[derive(CubeType)]
pub(super) struct MatrixBlocks {
    pub(super) lhs: u64,
    pub(super) rhs: u64,
    pub(super) lhs_pitch: Pitch,
    pub(super) rhs_pitch: Pitch,
    pub(super) row: u32,
    pub(super) column: u32,
    pub(super) k: u32,
    #[cube(comptime)]
    pub(super) blueprint: MmaBlueprint,
}

#[cube]
impl Blocks for MatrixBlocks {
    fn load(&self, stage: u32, block: u32) {
        let operands = comptime!(self.blueprint.operands);
        let element_bytes = comptime!(self.blueprint.element_bytes);
        let first_k = block * comptime!(ROW_BYTES as u32 / element_bytes);
        load_operand(
            stage,
            self.lhs,
            &self.lhs_pitch,
            self.row,
            first_k,
            self.k,
            comptime!(self.blueprint.tile_m()),
            comptime!(operands.lhs_k_major),
            element_bytes,
        );
        load_operand(
            stage + comptime!(self.blueprint.tile_m() * ROW_BYTES as u32),
            self.rhs,
            &self.rhs_pitch,
            self.column,
            first_k,
            self.k,
            comptime!(self.blueprint.tile_n()),
            comptime!(operands.rhs_k_major),
            element_bytes,
        );
    }
}

/// The blocks of two matrices of batches, for a tile of the output.
#[cube]
pub(super) fn matrix_blocks(
    lhs: &PitchedOperand,
    rhs: &PitchedOperand,
    extent: &Extent,
    last_matrix: &LastMatrix,
    work: &Work,
    k: u32,
    #[comptime] blueprint: MmaBlueprint,
) -> MatrixBlocks {
    let outer = work.batch / extent.inner_batches;
    let inner = work.batch % extent.inner_batches;
    let lhs_origin = min(outer, last_matrix.lhs_outer) * lhs.pitch.outer
        + min(inner, last_matrix.lhs_inner) * lhs.pitch.inner;
    let rhs_origin = min(outer, last_matrix.rhs_outer) * rhs.pitch.outer
        + min(inner, last_matrix.rhs_inner) * rhs.pitch.inner;
    let size = comptime!(u64::from(blueprint.element_bytes)).runtime();
    MatrixBlocks {
        lhs: global_address::<u32>(&lhs.memory) + u64::cast_from(lhs_origin) * size,
        rhs: global_address::<u32>(&rhs.memory) + u64::cast_from(rhs_origin) * size,
        lhs_pitch: lhs.pitch,
        rhs_pitch: rhs.pitch,
        row: work.row,
        column: work.column,
        k,
        blueprint,
    }
}

/// `out = epilogue(lhs rhs)`; with splits, sums of each split to `out[split]`.
#[cube(launch_unchecked)]
pub(crate) fn matmul_mma_kernel<O: Float, S: Numeric, W: Size, R: Size>(
    lhs: &PitchedOperand,
    rhs: &PitchedOperand,
    epilogue: &EpilogueTensors<O>,
    outputs: &mut Outputs<Vector<S, W>>,
    extent: Extent,
    last_matrix: LastMatrix,
    k: u32,
    #[comptime] blueprint: MmaBlueprint,
    #[define(O, S)] _types: [ElemType; 2],
    #[define(W, R)] _widths: [usize; 2],
) {
    let (tile_m, tile_n) = comptime!((blueprint.tile_m(), blueprint.tile_n()));
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.shared_bytes() / 4), 1024usize);
    let ring = shared_address::<u32>(memory.as_slice());

    let work = work_at(CUBE_POS_X, &extent, tile_m, tile_n);
    let source = matrix_blocks(lhs, rhs, &extent, &last_matrix, &work, k, blueprint);
    let fragments = fragments(blueprint);

    // It arrives with the first block.
    let half = comptime!(blueprint.store.half());
    let bias_at = ring + comptime!(blueprint.stages * blueprint.stage_bytes());
    if comptime!(epilogue.steps.bias) {
        let (column, columns) = (work.column, epilogue.bias_columns);
        fetch_bias::<O>(&epilogue.bias, bias_at, column, columns, UNIT_POS, UNITS, tile_n, half);
    }

    // 1. and 2.
    let sums = multiply::<MatrixBlocks, R>(&source, ring, &work, &fragments, blueprint);

    // 3. Finish and write.
    write_part::<O, S, W, R>(
        sums, outputs, epilogue, &extent, &work, &fragments, bias_at, blueprint,
    );
}
