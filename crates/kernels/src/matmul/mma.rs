//! The family for Ampere and later: eight warps a cube, fed by `cp.async`.
//!
//! 1. All units copy k blocks of both operands into a ring in shared memory, some blocks ahead.
//! 2. Each warp multiplies its part of the tile out of the oldest block.
//! 3. It finishes and writes its part.

use super::{
    bias_tile::{self, bias_bytes, fetch_bias},
    epilogue::{EpilogueBlueprint, factor},
    store::{StoreWidth, dense_fragment, store_fragment},
    work::{Extent, LastMatrix, work_at},
};
use crate::ptx::{
    ROW_BYTES,
    copy::{copies_commit, copies_wait, copy_16_bytes},
    global_address,
    mma::{MmaOperands, lhs_position, mma_block, rhs_position},
    shared_address,
};
use cubecl::prelude::*;

/// Units of a cube: eight warps.
pub(crate) const UNITS: u32 = 256;
/// Warps of a cube.
const WARPS: u32 = UNITS / 32;
/// Bytes of a chunk of an operand of which k does not run along the rows: 64 rows of k.
pub(crate) const CHUNK_BYTES: u32 = 64 * ROW_BYTES as u32;

/// How the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaBlueprint {
    /// What a warp multiplies.
    pub(crate) operands: MmaOperands,
    /// Warps of a cube along m; the rest lies along n.
    pub(crate) warps_m: u32,
    /// Bytes of an element of the operands.
    pub(crate) element_bytes: u32,
    pub(crate) stages: u32,
    pub(crate) store: StoreWidth,
}

impl MmaBlueprint {
    /// Rows of a cube's tile.
    pub(crate) fn tile_m(self) -> u32 {
        16 * self.operands.m16 as u32 * self.warps_m
    }

    /// Columns of a cube's tile.
    pub(crate) fn tile_n(self) -> u32 {
        16 * self.operands.n16 as u32 * self.warps_n()
    }

    /// Warps of a cube along n.
    pub(crate) fn warps_n(self) -> u32 {
        WARPS / self.warps_m
    }

    /// Warps along m for a cube's tile, and the 16 rows and columns that each has so many times; `None` where
    /// they do not divide it. A warp has at least 32 columns: it writes them 32 at a time.
    pub(crate) fn warp_tiles(tile_m: usize, tile_n: usize) -> Option<(u32, usize, usize)> {
        let warps_m = if tile_n < 128 { 4 } else { 2 };
        let (rows, columns) = (16 * warps_m, 16 * WARPS as usize / warps_m);
        let is_whole = tile_m.is_multiple_of(rows) && tile_n.is_multiple_of(2 * columns);
        is_whole.then_some((warps_m as u32, tile_m / rows, tile_n / columns))
    }

    pub(crate) fn stage_bytes(self) -> u32 {
        (self.tile_m() + self.tile_n()) * ROW_BYTES as u32
    }

    /// The ring and the bias of a tile.
    pub(crate) fn shared_bytes(self) -> usize {
        (self.stages * self.stage_bytes()) as usize + bias_bytes(self.tile_n() as usize)
    }
}

/// Where an operand lies: strides in elements, of whichever of mn and k is not contiguous and of
/// the batches.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Pitch {
    pub(crate) row: u32,
    pub(crate) outer: u32,
    pub(crate) inner: u32,
    /// Rows or columns of the output that the operand has.
    pub(crate) mn: u32,
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
        let at =
            destination + (chunk / 8) * CHUNK_BYTES + row * comptime!(ROW_BYTES as u32) + swizzled;
        let mut bytes = 0u32;
        let mut from = source;
        if row_at < rows && column_at < columns {
            bytes = min(columns - column_at, chunk_elements) * element_bytes;
            from += u64::cast_from(row_at * pitch.row + column_at)
                * comptime!(u64::from(element_bytes)).runtime();
        }
        copy_16_bytes(at, crate::ptx::load::<u64>(from), crate::ptx::load::<u32>(bytes));
    }
}

/// `out = epilogue(lhs rhs)`; with splits, sums of each split to `out[split]`.
#[cube(launch_unchecked)]
pub(crate) fn matmul_mma_kernel<O: Float, S: Numeric, W: Size, R: Size>(
    lhs: &[u32],
    rhs: &[u32],
    lhs_scale: &[f32],
    rhs_scale: &[f32],
    bias: &[O],
    residual: &[O],
    preactivation: &mut [Vector<S, W>],
    out: &mut [Vector<S, W>],
    extent: Extent,
    last_matrix: LastMatrix,
    lhs_pitch: Pitch,
    rhs_pitch: Pitch,
    k: u32,
    alpha: f32,
    beta: f32,
    #[comptime] blueprint: MmaBlueprint,
    #[comptime] epilogue: EpilogueBlueprint,
    #[define(O)] _output: ElemType,
    #[define(S)] _stored: ElemType,
    #[define(R)] _registers: usize,
) {
    let operands = comptime!(blueprint.operands);
    let (tile_m, tile_n) = comptime!((blueprint.tile_m(), blueprint.tile_n()));
    let stages = comptime!(blueprint.stages);
    let stage_bytes = comptime!(blueprint.stage_bytes());
    let lhs_bytes = comptime!(blueprint.tile_m() * ROW_BYTES as u32);
    let element_bytes = comptime!(blueprint.element_bytes);
    let block_k = comptime!(ROW_BYTES as u32 / blueprint.element_bytes);
    let memory: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(blueprint.shared_bytes() / 4), 1024usize);
    let ring = shared_address::<u32>(memory.as_slice());

    let work = work_at(CUBE_POS_X, &extent, tile_m, tile_n);
    let outer = work.batch / extent.inner_batches;
    let inner = work.batch % extent.inner_batches;
    let lhs_origin = min(outer, last_matrix.lhs_outer) * lhs_pitch.outer
        + min(inner, last_matrix.lhs_inner) * lhs_pitch.inner;
    let rhs_origin = min(outer, last_matrix.rhs_outer) * rhs_pitch.outer
        + min(inner, last_matrix.rhs_inner) * rhs_pitch.inner;
    let size = comptime!(u64::from(blueprint.element_bytes)).runtime();
    let lhs_from = global_address::<u32>(lhs) + u64::cast_from(lhs_origin) * size;
    let rhs_from = global_address::<u32>(rhs) + u64::cast_from(rhs_origin) * size;

    // Where this unit reads fragments: its warp's part of either tile, then its own row and chunk.
    let (warp, lane) = (UNIT_POS / 32, UNIT_POS % 32);
    let warps_n = comptime!(blueprint.warps_n());
    let (warp_m, warp_n) = (warp / warps_n, warp % warps_n);
    let (rows, columns) = comptime!((16 * operands.m16 as u32, 16 * operands.n16 as u32));
    let lhs_lane = lhs_position(lane, comptime!(operands.lhs_k_major));
    let rhs_lane = rhs_position(lane, comptime!(operands.rhs_k_major));
    let (lhs_row, lhs_chunk) =
        warp_position(warp_m * rows, lhs_lane.0, lhs_lane.1, comptime!(operands.lhs_k_major));
    let (rhs_row, rhs_chunk) =
        warp_position(warp_n * columns, rhs_lane.0, rhs_lane.1, comptime!(operands.rhs_k_major));

    // It arrives with the first block.
    let bias_at = ring + comptime!(blueprint.stages * blueprint.stage_bytes());
    if comptime!(epilogue.bias) {
        fetch_bias::<O>(
            bias,
            bias_at,
            work.column,
            extent.n,
            UNIT_POS,
            UNITS,
            tile_n,
            comptime!(blueprint.store.half()),
        );
    }

    // 1. The first blocks. A group of copies is closed for every block, also where there is none
    // left, so that counting groups counts blocks.
    let blocks = work.last_block - work.first_block;
    #[unroll]
    for stage in 0..comptime!(stages - 1) {
        if stage < blocks {
            let at = ring + comptime!(stage * stage_bytes);
            let first_k = (work.first_block + stage) * block_k;
            load_operand(
                at,
                lhs_from,
                &lhs_pitch,
                work.row,
                first_k,
                k,
                tile_m,
                comptime!(operands.lhs_k_major),
                element_bytes,
            );
            load_operand(
                at + lhs_bytes,
                rhs_from,
                &rhs_pitch,
                work.column,
                first_k,
                k,
                tile_n,
                comptime!(operands.rhs_k_major),
                element_bytes,
            );
        }
        copies_commit();
    }

    // 2. Multiply.
    let mut sums = Vector::<f32, R>::new(0.0f32);
    let mut stage = 0u32;
    let mut ahead_stage = comptime!(stages - 1).runtime();
    for block in 0..blocks {
        copies_wait(comptime!(stages - 2));
        // Everyone's copies are there, and everyone has read the block that is overwritten next.
        sync_cube();
        let ahead = block + comptime!(stages - 1);
        if ahead < blocks {
            let at = ring + ahead_stage * stage_bytes;
            let first_k = (work.first_block + ahead) * block_k;
            load_operand(
                at,
                lhs_from,
                &lhs_pitch,
                work.row,
                first_k,
                k,
                tile_m,
                comptime!(operands.lhs_k_major),
                element_bytes,
            );
            load_operand(
                at + lhs_bytes,
                rhs_from,
                &rhs_pitch,
                work.column,
                first_k,
                k,
                tile_n,
                comptime!(operands.rhs_k_major),
                element_bytes,
            );
        }
        copies_commit();
        ahead_stage += 1;
        if ahead_stage == stages {
            ahead_stage = 0u32;
        }
        let at = ring + stage * stage_bytes;
        sums = mma_block::<R>(
            sums,
            at + lhs_row,
            lhs_chunk,
            at + lhs_bytes + rhs_row,
            rhs_chunk,
            operands,
        );
        stage += 1;
        if stage == stages {
            stage = 0u32;
        }
    }

    // 3. Finish and write.
    let bias_bytes = comptime!(bias_tile::element_bytes(blueprint.store.half()));
    let bias_at = bias_at + warp_n * columns * bias_bytes;
    let scale = factor(alpha, lhs_scale, rhs_scale, epilogue);
    #[unroll]
    for i in 0..comptime!(operands.m16) {
        let place = dense_fragment(
            (work.split * extent.batches + work.batch) * extent.m,
            work.row + warp_m * rows + comptime!(16 * i as u32) + lane / 4,
            work.column + warp_n * columns,
            lane % 4,
            extent.m,
            extent.n,
        );
        let first = comptime!(i * operands.n16 * 8);
        if comptime!(epilogue.preactivation) {
            store_fragment::<O, S, W, R>(
                sums,
                preactivation,
                bias_at,
                residual,
                &place,
                scale,
                beta,
                first,
                comptime!(16 * operands.n16),
                comptime!(blueprint.store),
                epilogue,
                true,
            );
        }
        store_fragment::<O, S, W, R>(
            sums,
            out,
            bias_at,
            residual,
            &place,
            scale,
            beta,
            first,
            comptime!(16 * operands.n16),
            comptime!(blueprint.store),
            epilogue,
            false,
        );
    }
}

/// A lane's row and chunk, in bytes from the operand's tile, for a warp whose part begins at
/// `first` of m or n. Across k, parts are chunks of 64 columns or lie within one.
#[cube]
pub(crate) fn warp_position(
    first: u32,
    row: u32,
    chunk: u32,
    #[comptime] k_major: bool,
) -> (u32, u32) {
    let row_bytes = comptime!(ROW_BYTES as u32);
    if comptime!(k_major) {
        ((first + row) * row_bytes, chunk << 4)
    } else {
        let within = first % 64 / 8;
        (first / 64 * CHUNK_BYTES + row * row_bytes, (chunk ^ within) << 4)
    }
}
