//! What the passes share: where samples and their rows are, and what is loaded of them.

use crate::batch_norm::{Merge, Part, Tile, meet};
use cubecl::prelude::*;

/// The rows of each sample, as a kernel shares them out. Columns count vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Extent {
    /// Of a sample.
    pub(crate) rows: u32,
    pub(crate) columns: u32,
    /// Cubes side by side on the columns of a sample.
    pub(crate) across: u32,
    /// Rows of a split.
    pub(crate) split_rows: u32,
}

/// What splits have left.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Partials {
    /// `[samples, splits, 2, columns]`.
    pub(crate) sums: Box<[f32]>,
    pub(crate) splits: u32,
    pub(crate) rows: u32,
    pub(crate) split_rows: u32,
    /// Columns, in elements.
    pub(crate) columns: u32,
}

/// Channels of a sample and of a group.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Grouping {
    pub(crate) channels: u32,
    pub(crate) of_group: u32,
    /// Columns that belong to the same channel.
    pub(crate) copies: u32,
}

/// The sample and column of a unit, and the rows of its cube's split: the first and the one after the last.
/// Rows are counted from the first one of the first sample.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Share {
    pub(super) sample: u32,
    pub(super) column: u32,
    pub(super) first_row: u32,
    pub(super) end: u32,
}

#[cube]
pub(super) fn share(extent: &Extent, #[comptime] tile: Tile) -> Share {
    let sample = CUBE_POS_X / extent.across;
    let column = CUBE_POS_X % extent.across * tile.lanes + UNIT_POS_X;
    let of_split = CUBE_POS_Y * extent.split_rows;
    let first_row = sample * extent.rows + of_split;
    let end = first_row + min(extent.rows - of_split, extent.split_rows);
    Share { sample, column, first_row, end }
}

/// Merges the parts of a cube's units and writes what comes of them to the place of the cube's split. All units
/// have to call it.
#[cube]
pub(super) fn write_part<N: Size>(
    part: &mut Part<N>,
    partials: &mut [Vector<f32, N>],
    share: &Share,
    columns: u32,
    #[comptime] merge: Merge,
    #[comptime] tile: Tile,
) {
    meet::<N>(part, merge, tile);
    if UNIT_POS_Y == 0 && share.column < columns {
        let place = 2 * (share.sample * CUBE_COUNT_Y + CUBE_POS_Y) * columns + share.column;
        partials[place as usize] = part.first;
        partials[(place + columns) as usize] = part.second;
    }
}

/// Four numbers for each channel of a sample, in f32: `[4, samples, columns]`, in vectors. With pixels last a
/// vector has one number all over.
#[cube]
pub(super) fn coefficient<N: Size>(
    coefficients: &[Vector<f32, N>],
    place: u32,
    #[comptime] which: usize,
) -> Vector<f32, N> {
    let of_one = coefficients.len() / 4;
    coefficients[of_one * which + place as usize]
}
