//! Shared memory of products on tensor cores: planners count with it, and kernels divide it up.

use crate::{
    block_format::BlockFormat,
    device::{ROW_BYTES, SCALE_BLOCK_BYTES},
};

/// A block of k of both operands, whose rows are 128 bytes deep.
pub(crate) const fn stage_bytes(tile_m: usize, tile_n: usize) -> usize {
    (tile_m + tile_n) * ROW_BYTES
}

/// A tile's bias, for outputs of any type.
pub(crate) const fn bias_bytes(tile_n: usize) -> usize {
    4 * tile_n
}

/// Of the `mma` family: the ring, and the bias of a tile.
pub(crate) const fn mma_bytes(tile_m: usize, tile_n: usize, stages: usize) -> usize {
    stages * stage_bytes(tile_m, tile_n) + bias_bytes(tile_n)
}

/// Of the `mma` family fed by TMA: the ring, two barriers a stage, and the bias of a tile.
pub(crate) const fn mma_bulk_bytes(tile_m: usize, tile_n: usize, stages: usize) -> usize {
    mma_bytes(tile_m, tile_n, stages) + 16 * stages
}

/// The scales of a block of k, in blocks of 128 rows or columns.
pub(crate) const fn scale_bytes(tile_m: usize, tile_n: usize, format: BlockFormat) -> usize {
    let groups = tile_m.div_ceil(128) + tile_n.div_ceil(128);
    groups * format.scale_blocks() * SCALE_BLOCK_BYTES
}

/// Of the `wgmma` family: the ring, two barriers a stage, and the bias of a tile for both warpgroups that multiply.
pub(crate) const fn wgmma_bytes(tile_m: usize, tile_n: usize, stages: usize) -> usize {
    stages * (stage_bytes(tile_m, tile_n) + 16) + 2 * bias_bytes(tile_n)
}

/// Of the `tcgen05` family: the ring, two barriers a stage, two for each place of sums, the address of tensor memory,
/// and the bias of a tile.
pub(crate) const fn tcgen05_bytes(tile_m: usize, tile_n: usize, stages: usize) -> usize {
    stages * (stage_bytes(tile_m, tile_n) + 16) + 2 * 16 + 16 + bias_bytes(tile_n)
}

/// As [`tcgen05_bytes`], of each cube of a pair that shares a tile of `tile_n` columns: it has `tile_m` rows and half of
/// the columns in its ring, and the bias of all columns.
pub(crate) const fn tcgen05_pair_bytes(tile_m: usize, tile_n: usize, stages: usize) -> usize {
    tcgen05_bytes(tile_m, tile_n / 2, stages) + bias_bytes(tile_n) - bias_bytes(tile_n / 2)
}

/// As many stages as fit, up to `most`; `None` where a ring of two does not.
pub(crate) fn most_stages(
    most: usize,
    shared_bytes: usize,
    bytes: impl Fn(usize) -> usize,
) -> Option<usize> {
    (2..=most).rev().find(|stages| bytes(*stages) <= shared_bytes)
}
