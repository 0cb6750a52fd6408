//! Arranges the scales of MX operands as tensor cores take them: blocks of 512 bytes, each of 128 rows or columns of the
//! output and of 128 of k, one after another along k.

use super::mx::SCALED_BY;
use crate::{
    KernelError,
    buffer::Buffer,
    device::{ROW_BYTES, SCALE_BLOCK_BYTES, grid},
};
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
    prelude::*,
};

/// Words of a block, and units of a cube.
const WORDS: u32 = SCALE_BLOCK_BYTES as u32 / 4;
/// Rows or columns of a block.
pub(super) const BLOCK_ROWS: usize = 128;
/// Scales of a row in a block.
const BLOCK_SCALES: u32 = (ROW_BYTES / SCALED_BY) as u32;

/// The blocks of `scales`, of `rows` rows with a scale for each 32 of `k`.
pub(super) fn arrange(
    client: &Client,
    op: &'static str,
    scales: &Buffer,
    rows: usize,
    k: usize,
) -> Result<Buffer, KernelError> {
    let blocks = [k.div_ceil(ROW_BYTES), rows.div_ceil(BLOCK_ROWS), 1];
    let words = blocks[0] * blocks[1] * WORDS as usize;
    let arranged = Buffer::empty(client, words, ElemType::UInt(UIntKind::U32));
    // SAFETY: the scales were checked to be as many as the rows have, and the blocks were allocated for them; the
    // kernel stops at the scales' ends.
    unsafe {
        matmul_mx_scales_kernel::launch_unchecked(
            client,
            grid(op, client, blocks)?,
            CubeDim::new_1d(WORDS),
            scales.arg(1),
            arranged.arg(1),
            rows as u32,
            k.div_ceil(SCALED_BY) as u32,
        );
    }
    Ok(arranged)
}

/// A word of a block each unit, blocks along k in x and along rows in y. Where there is no scale it becomes 1: the
/// elements are zeros there.
#[cube(launch_unchecked)]
pub(super) fn matmul_mx_scales_kernel(
    scales: &[u8],
    arranged: &mut [u32],
    rows: u32,
    row_scales: u32,
) {
    let row = CUBE_POS_Y * comptime!(BLOCK_ROWS as u32) + UNIT_POS % 4 * 32 + UNIT_POS / 4;
    let first = CUBE_POS_X * BLOCK_SCALES;
    let mut word = 0u32;
    #[unroll]
    for at in 0..BLOCK_SCALES {
        let mut scale = 0x7fu32;
        if row < rows && first + at < row_scales {
            scale = u32::cast_from(scales[(row * row_scales + first + at) as usize]);
        }
        word |= scale << (8 * at);
    }
    let block = CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X;
    arranged[(block * WORDS + UNIT_POS) as usize] = word;
}
