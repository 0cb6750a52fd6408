//! Tiles of rows in shared memory, as `ldmatrix` reads them: blocks of 128 bytes of each row, one behind the other,
//! swizzled.

use super::rules::{Strides, origin};
use crate::ptx::{
    ROW_BYTES,
    copy::copy_16_bytes,
    load,
    mma::{TF32, lhs_position, rhs_position},
};
use cubecl::prelude::*;

/// Rows of a head in global memory.
#[derive(CubeType, Clone, Copy)]
pub(super) struct HeadRows {
    pub(super) memory: u64,
    /// Element where row 0 begins.
    pub(super) origin: u32,
    pub(super) stride: u32,
    /// The first row that is not there.
    pub(super) end: u32,
}

/// The rows of a head of a tensor at `memory`, of which row 0 is the tensor's row `start`.
#[cube]
pub(super) fn head_rows(
    memory: u64,
    strides: &Strides,
    batch: u32,
    head: u32,
    start: u32,
    end: u32,
) -> HeadRows {
    HeadRows { memory, origin: origin(strides, batch, head, start), stride: strides.row, end }
}

/// Where a chunk of 16 bytes of a row lies in a tile of `rows` rows.
#[cube]
pub(super) fn chunk_position(row: u32, chunk: u32, #[comptime] rows: u32) -> u32 {
    let swizzled = ((chunk & 7) ^ (row & 7)) << 4;
    (chunk / 8) * comptime!(rows * ROW_BYTES as u32) + row * comptime!(ROW_BYTES as u32) + swizzled
}

/// Starts copies of `rows` rows from `first` on, by `units` units of which this is `unit`; rows that are not there
/// become zero.
#[cube]
pub(super) fn copy_rows(
    destination: u32,
    source: &HeadRows,
    first: u32,
    unit: u32,
    #[comptime] rows: u32,
    #[comptime] head_dim: usize,
    #[comptime] element_bytes: usize,
    #[comptime] units: u32,
) {
    let chunks = comptime!((head_dim * element_bytes / 16) as u32);
    let all = comptime!(rows * (head_dim * element_bytes / 16) as u32);
    #[unroll]
    for round in 0..comptime!(all.div_ceil(units)) {
        let index = comptime!(round * units) + unit;
        if comptime!((round + 1) * units <= all) || index < all {
            let (row, chunk) = (index / chunks, index % chunks);
            let at = destination + chunk_position(row, chunk, rows);
            let mut bytes = 0u32;
            let mut from = source.memory;
            if first + row < source.end {
                bytes = 16u32.runtime();
                let element = source.origin
                    + (first + row) * source.stride
                    + chunk * comptime!((16 / element_bytes) as u32);
                from += u64::cast_from(element) * comptime!(element_bytes as u64);
            }
            copy_16_bytes(at, load::<u64>(from), load::<u32>(bytes));
        }
    }
}

/// A lane's row, in bytes from the tile, and chunk, for a warp whose rows begin at `first`.
#[cube]
pub(super) fn left_position(lane: u32, first: u32) -> (u32, u32) {
    let (row, chunk) = lhs_position(lane, true);
    ((first + row) * comptime!(ROW_BYTES as u32), chunk << 4)
}

/// As [`left_position`], of the right operand, which all warps share.
#[cube]
pub(super) fn right_position(lane: u32) -> (u32, u32) {
    let (row, chunk) = rhs_position(lane, true);
    (row * comptime!(ROW_BYTES as u32), chunk << 4)
}

/// As [`right_position`], of rows that are weighed. No instruction transposes numbers of 32 bits, so that a lane reads
/// its own: those of a column in rows 2t and 2t + 1, t being its place among four lanes.
#[cube]
pub(super) fn weighed_position(lane: u32, #[comptime] dtype: &'static str) -> (u32, u32) {
    if comptime!(dtype == TF32) {
        let (column, row) = (lane / 4, lane % 4 * 2);
        let in_chunk = column % 4 * 4;
        (row * comptime!(ROW_BYTES as u32) + in_chunk, ((column / 4) ^ row) << 4)
    } else {
        let (row, chunk) = rhs_position(lane, false);
        (row * comptime!(ROW_BYTES as u32), chunk << 4)
    }
}
