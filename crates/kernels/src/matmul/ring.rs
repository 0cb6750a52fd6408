//! The loop of the families that `cp.async` feeds: blocks of k go through a ring in shared memory, and each of
//! eight warps multiplies its part of the tile.

use super::{
    budget::{mma_bytes, scale_bytes, stage_bytes},
    store::StoreWidth,
    work::Work,
};
use crate::device::SCALE_BLOCK_BYTES;
use crate::ptx::{
    ROW_BYTES,
    copy::{copies_commit, copies_wait},
    fragments::{Lying, word_position},
    mma::{
        MmaOperands, Scales, lhs_position, mma_block, mma_scaled_block, rhs_position, scale_word,
    },
};
use cubecl::prelude::*;

/// Units of a cube: eight warps.
pub(crate) const UNITS: u32 = 256;
/// Warps of a cube.
const WARPS: u32 = UNITS / 32;

/// Bytes of a chunk of an operand of which k does not run along the rows: 128 bytes of the rows of a block of k.
pub(crate) const fn chunk_bytes(element_bytes: u32) -> u32 {
    let row_bytes = ROW_BYTES as u32;
    row_bytes / element_bytes * row_bytes
}

/// How the loop is compiled.
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
    /// they do not divide it. A warp has whole 32 rows and columns: it writes 32 columns at a time, and words across k
    /// lie in chunks of 32 of either.
    pub(crate) fn warp_tiles(tile_m: usize, tile_n: usize) -> Option<(u32, usize, usize)> {
        let warps_m = if tile_n < 128 { 4 } else { 2 };
        let (rows, columns) = (16 * warps_m, 16 * WARPS as usize / warps_m);
        let is_whole = tile_m.is_multiple_of(2 * rows) && tile_n.is_multiple_of(2 * columns);
        is_whole.then_some((warps_m as u32, tile_m / rows, tile_n / columns))
    }

    /// Bytes of a block of both operands, without its scales.
    pub(crate) fn block_bytes(self) -> u32 {
        stage_bytes(self.tile_m() as usize, self.tile_n() as usize) as u32
    }

    pub(crate) fn stage_bytes(self) -> u32 {
        let (tile_m, tile_n) = (self.tile_m() as usize, self.tile_n() as usize);
        self.block_bytes()
            + match self.operands.scales {
                Scales::Blocks(format) => scale_bytes(tile_m, tile_n, format) as u32,
                Scales::None | Scales::Ones => 0,
            }
    }

    pub(crate) fn shared_bytes(self) -> usize {
        let (tile_m, tile_n) = (self.tile_m() as usize, self.tile_n() as usize);
        let scales = self.stages * (self.stage_bytes() - self.block_bytes());
        mma_bytes(tile_m, tile_n, self.stages as usize) + scales as usize
    }

    /// Bytes of the scales of 128 rows or columns, of operands that have any.
    pub(crate) fn group_scale_bytes(self) -> u32 {
        match self.operands.scales {
            Scales::Blocks(format) => (format.scale_blocks() * SCALE_BLOCK_BYTES) as u32,
            Scales::None | Scales::Ones => 0,
        }
    }
}

/// Where blocks of both operands come from.
#[cube]
pub(crate) trait Blocks {
    /// Starts copies of block `block` of both operands to `stage` in shared memory.
    fn load(&self, stage: u32, block: u32);
}

/// Where a unit reads fragments: its warp's part of either tile, then its own row and chunk.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Fragments {
    pub(crate) lane: u32,
    /// First row and first column of the warp's part of the tile.
    pub(crate) row: u32,
    pub(crate) column: u32,
    lhs_row: u32,
    lhs_chunk: u32,
    rhs_row: u32,
    rhs_chunk: u32,
}

#[cube]
pub(crate) fn fragments(#[comptime] blueprint: MmaBlueprint) -> Fragments {
    let operands = comptime!(blueprint.operands);
    let (warp, lane) = (UNIT_POS / 32, UNIT_POS % 32);
    let warps_n = comptime!(blueprint.warps_n());
    let (warp_m, warp_n) = (warp / warps_n, warp % warps_n);
    let (rows, columns) = comptime!((16 * operands.m16 as u32, 16 * operands.n16 as u32));
    let lhs = lhs_position(lane, comptime!(operands.lhs_k_major));
    let rhs = rhs_position(lane, comptime!(operands.rhs_k_major));
    let row = warp_m * rows;
    let lhs_lies = comptime!(operands.lying(operands.lhs_k_major));
    let (lhs_row, lhs_chunk) = warp_position(row, lane, lhs.0, lhs.1, lhs_lies);
    let column = warp_n * columns;
    let rhs_lies = comptime!(operands.lying(operands.rhs_k_major));
    let (rhs_row, rhs_chunk) = warp_position(column, lane, rhs.0, rhs.1, rhs_lies);
    Fragments { lane, row, column, lhs_row, lhs_chunk, rhs_row, rhs_chunk }
}

/// A lane's row and chunk, in bytes from the operand's tile, for a warp whose part begins at
/// `first` of m or n, where `ldmatrix` has it at `row` and `chunk`. Across k, parts are chunks of 128 bytes or lie
/// within one; those of words are whole ones.
#[cube]
fn warp_position(
    first: u32,
    lane: u32,
    row: u32,
    chunk: u32,
    #[comptime] lying: Lying,
) -> (u32, u32) {
    let row_bytes = comptime!(ROW_BYTES as u32);
    if comptime!(lying == Lying::AlongK) {
        ((first + row) * row_bytes, chunk << 4)
    } else if comptime!(lying == Lying::AcrossK) {
        let within = first % 64 / 8;
        (first / 64 * comptime!(chunk_bytes(2)) + row * row_bytes, (chunk ^ within) << 4)
    } else {
        let terms = comptime!(lying.terms());
        let (word_row, word_chunk) = word_position(lane, terms);
        (first / 32 * comptime!(chunk_bytes(4)) + word_row, word_chunk)
    }
}

/// Adds the product of a block at `stage` in shared memory to the warp's sums, of the tile whose first row is
/// `first_row` of the output.
#[cube]
pub(crate) fn multiply_block<R: Size>(
    sums: Vector<f32, R>,
    stage: u32,
    first_row: u32,
    fragments: &Fragments,
    #[comptime] blueprint: MmaBlueprint,
) -> Vector<f32, R> {
    let operands = comptime!(blueprint.operands);
    let lhs_row = stage + fragments.lhs_row;
    let rhs_row = stage + comptime!(blueprint.tile_m() * ROW_BYTES as u32) + fragments.rhs_row;
    if comptime!(matches!(operands.scales, Scales::Blocks(_))) {
        let (lane, column) = (fragments.lane, fragments.column);
        let scales = stage + comptime!(blueprint.block_bytes());
        let group = comptime!(blueprint.group_scale_bytes());
        let columns = column / 128 * group;
        mma_scaled_block::<R>(
            sums,
            lhs_row,
            fragments.lhs_chunk,
            rhs_row,
            fragments.rhs_chunk,
            // Tiles of 64 rows begin in the middle of a block of scales, too.
            scales + scale_word(lane, first_row % 128 + fragments.row),
            scales + group + columns + scale_word(lane, column % 128),
            operands,
        )
    } else {
        mma_block::<R>(sums, lhs_row, fragments.lhs_chunk, rhs_row, fragments.rhs_chunk, operands)
    }
}

/// The warp's sums over the blocks of its work, with a ring at `ring` in shared memory. What was copied before
/// has arrived with the first block.
#[cube]
pub(crate) fn multiply<B: Blocks, R: Size>(
    source: &B,
    ring: u32,
    work: &Work,
    fragments: &Fragments,
    #[comptime] blueprint: MmaBlueprint,
) -> Vector<f32, R> {
    let stages = comptime!(blueprint.stages);
    let stage_bytes = comptime!(blueprint.stage_bytes());

    // The first blocks. A group of copies is closed for every block, also where there is none left, so that
    // counting groups counts blocks.
    let blocks = work.last_block - work.first_block;
    #[unroll]
    for stage in 0..comptime!(stages - 1) {
        if stage < blocks {
            source.load(ring + comptime!(stage * stage_bytes), work.first_block + stage);
        }
        copies_commit();
    }

    let mut sums = Vector::<f32, R>::new(0.0f32);
    let mut stage = 0u32;
    let mut ahead_stage = comptime!(stages - 1).runtime();
    for block in 0..blocks {
        copies_wait(comptime!(stages - 2));
        // Everyone's copies are there, and everyone has read the block that is overwritten next.
        sync_cube();
        let ahead = block + comptime!(stages - 1);
        if ahead < blocks {
            source.load(ring + ahead_stage * stage_bytes, work.first_block + ahead);
        }
        copies_commit();
        ahead_stage += 1;
        if ahead_stage == stages {
            ahead_stage = 0u32;
        }
        let at = ring + stage * stage_bytes;
        sums = multiply_block::<R>(sums, at, work.row, fragments, blueprint);
        stage += 1;
        if stage == stages {
            stage = 0u32;
        }
    }
    sums
}
