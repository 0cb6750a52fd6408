//! How the tiles of an output are divided among cubes.

use crate::DeviceProfile;
use cubecl::prelude::*;

/// Sizes of the problem.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) m: u32,
    pub(crate) n: u32,
    /// Blocks of k.
    pub(crate) k_blocks: u32,
    /// Blocks of k for each split.
    pub(crate) split_blocks: u32,
    pub(crate) splits: u32,
    pub(crate) batches: u32,
    pub(crate) inner_batches: u32,
    /// Rows of tiles in a group.
    pub(crate) group: u32,
}

/// Sizes as an argument: of an output of `m` by `n` in tiles, blocks of k in splits, and outer and inner batches.
pub(crate) fn extent(
    [m, n, k_blocks]: [usize; 3],
    [tile_m, tile_n]: [usize; 2],
    splits: usize,
    [outer, inner]: [usize; 2],
    device: DeviceProfile,
) -> ExtentLaunch {
    // A square of the output for the cubes at work at once: it needs the least of both operands.
    let group = (device.multiprocessors as f64 * tile_n as f64 / tile_m as f64).sqrt().ceil();
    ExtentLaunch {
        m: m as u32,
        n: n as u32,
        k_blocks: k_blocks as u32,
        split_blocks: k_blocks.div_ceil(splits) as u32,
        splits: splits as u32,
        batches: (outer * inner) as u32,
        inner_batches: inner as u32,
        group: group as u32,
    }
}

/// Last matrix of each operand along the outer and inner batch dimension: 0 where it has but one.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct LastMatrix {
    pub(crate) lhs_outer: u32,
    pub(crate) lhs_inner: u32,
    pub(crate) rhs_outer: u32,
    pub(crate) rhs_inner: u32,
}

#[cube]
impl LastMatrix {
    /// Which of its own matrices either operand has for one of the output's.
    pub(super) fn own_matrices(&self, batch: u32, inner_batches: u32) -> (u32, u32) {
        let (outer, inner) = (batch / inner_batches, batch % inner_batches);
        let lhs = min(outer, self.lhs_outer) * (self.lhs_inner + 1) + min(inner, self.lhs_inner);
        let rhs = min(outer, self.rhs_outer) * (self.rhs_inner + 1) + min(inner, self.rhs_inner);
        (lhs, rhs)
    }
}

/// A tile of the output, and which k of it.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Work {
    pub(crate) row: u32,
    pub(crate) column: u32,
    pub(crate) batch: u32,
    pub(crate) split: u32,
    pub(crate) first_block: u32,
    pub(crate) last_block: u32,
}

/// How many pieces of work there are.
#[cube]
pub(super) fn work_count(extent: &Extent, #[comptime] tile_m: u32, #[comptime] tile_n: u32) -> u32 {
    let tiles = extent.m.div_ceil(tile_m) * extent.n.div_ceil(tile_n);
    tiles * extent.splits * extent.batches
}

/// The first piece of work of this cube's, or of the `cubes`' that share each piece: cubes that follow each other.
#[cube]
pub(super) fn first_work(#[comptime] cubes: u32) -> u32 {
    if comptime!(cubes == 1) { CUBE_POS_X } else { CUBE_POS_X / cubes }
}

/// From one piece of this cube's work to the next.
#[cube]
pub(super) fn next_work(#[comptime] cubes: u32) -> u32 {
    if comptime!(cubes == 1) { CUBE_COUNT_X } else { CUBE_COUNT_X / cubes }
}

/// Piece `index` of the work: columns of tiles within a group of rows follow each other, then groups,
/// batches, splits. Pieces at work at the same time so share operands.
#[cube]
pub(crate) fn work_at(
    index: u32,
    extent: &Extent,
    #[comptime] tile_m: u32,
    #[comptime] tile_n: u32,
) -> Work {
    let (tiles_m, tiles_n) = (extent.m.div_ceil(tile_m), extent.n.div_ceil(tile_n));
    let tiles = tiles_m * tiles_n;
    let (matrix, tile) = (index / tiles, index % tiles);
    let (split, batch) = (matrix / extent.batches, matrix % extent.batches);
    let group_tiles = extent.group * tiles_n;
    let first_row = tile / group_tiles * extent.group;
    let rows = min(extent.group, tiles_m - first_row);
    let within = tile % group_tiles;
    let first_block = split * extent.split_blocks;
    Work {
        row: (first_row + within % rows) * tile_m,
        column: within / rows * tile_n,
        batch,
        split,
        first_block,
        last_block: min(first_block + extent.split_blocks, extent.k_blocks),
    }
}
