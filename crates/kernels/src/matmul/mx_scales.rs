//! Arranges the scales of operands as tensor cores take them: blocks of 512 bytes, each of four scales of 128 rows or
//! columns of the output, one after another along k.

use super::{BlockScales, MatmulProblem, layout::OperandWalk};
use crate::{
    KernelError, ahead,
    block_format::BlockFormat,
    buffer::Buffer,
    device::{BLOCK_ROWS, ROW_BYTES, SCALE_BLOCK_BYTES, grid},
};
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
    prelude::*,
};

/// Words of a block, and units of a cube.
const WORDS: u32 = SCALE_BLOCK_BYTES as u32 / 4;
/// Scales of a row in a block.
const BLOCK_SCALES: u32 = BlockFormat::WORD_SCALES as u32;

/// The scales of both operands as blocks.
pub(super) struct ArrangedScales {
    pub(super) format: BlockFormat,
    pub(super) lhs: Buffer,
    pub(super) rhs: Buffer,
}

impl ArrangedScales {
    /// Of scales in any order.
    pub(super) fn of(
        client: &Client,
        problem: &MatmulProblem,
        format: BlockFormat,
        [lhs, rhs]: [BlockScales<'_>; 2],
    ) -> Result<Self, KernelError> {
        let of = |scales: BlockScales<'_>, walk: OperandWalk| match scales {
            BlockScales::Arranged(scales) => Ok(scales.clone()),
            BlockScales::Rows(scales) => {
                let matrices = walk.matrices.iter().product();
                arrange(client, format, scales, [matrices, walk.mn], walk.k)
            }
        };
        Ok(Self {
            format,
            lhs: of(lhs, OperandWalk::lhs(problem))?,
            rhs: of(rhs, OperandWalk::rhs(problem))?,
        })
    }
}

/// The blocks of `scales`, of `matrices` matrices with so many rows, of which each has scales for `k_bytes` bytes of k.
/// Every matrix has whole blocks of rows, and every row scales for whole blocks of k.
fn arrange(
    client: &Client,
    format: BlockFormat,
    scales: &Buffer,
    [matrices, rows]: [usize; 2],
    k_bytes: usize,
) -> Result<Buffer, KernelError> {
    let along_k = k_bytes.div_ceil(ROW_BYTES) * format.scale_blocks();
    let blocks = [along_k, rows.div_ceil(BLOCK_ROWS), matrices];
    let words = matrices * format.scale_words(rows, k_bytes);
    if u32::try_from(words * 4).is_err() {
        let reason = format!("{words} words of scales, more than 4 GiB");
        return Err(KernelError::unsupported(format.op(), reason));
    }
    let arranged = Buffer::empty(client, words, ElemType::UInt(UIntKind::U32));
    // SAFETY: the scales were checked to be as many as the rows have, and the blocks were allocated for them; the
    // kernel stops at the scales' ends.
    ahead::launch(client, |client| unsafe {
        matmul_mx_scales_kernel::launch_unchecked(
            client,
            grid(format.op(), client, blocks)?,
            CubeDim::new_1d(WORDS),
            scales.arg(1),
            arranged.arg(1),
            rows as u32,
            format.scales(k_bytes) as u32,
            u32::from(format.one()),
        );
        Ok(())
    })?;
    Ok(arranged)
}

/// A word of a block each unit, blocks along k in x, along rows in y, and matrices in z. Where there is no scale it
/// becomes `one`: the elements are zeros there.
#[cube(launch_unchecked)]
pub(super) fn matmul_mx_scales_kernel(
    scales: &[u8],
    arranged: &mut [u32],
    rows: u32,
    row_scales: u32,
    #[comptime] one: u32,
) {
    let row = CUBE_POS_Y * comptime!(BLOCK_ROWS as u32) + UNIT_POS % 4 * 32 + UNIT_POS / 4;
    let first = CUBE_POS_X * BLOCK_SCALES;
    let mut word = 0u32;
    #[unroll]
    for at in 0..BLOCK_SCALES {
        let mut scale = one.runtime();
        if row < rows && first + at < row_scales {
            let row = CUBE_POS_Z * rows + row;
            scale = u32::cast_from(scales[(row * row_scales + first + at) as usize]);
        }
        word |= scale << (8 * at);
    }
    let block = (CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) * CUBE_COUNT_X + CUBE_POS_X;
    arranged[(block * WORDS + UNIT_POS) as usize] = word;
}
