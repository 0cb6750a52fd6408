//! Formats of operands whose blocks along k have scales, as tensor cores multiply them.

use crate::device::{BLOCK_ROWS, ROW_BYTES, SCALE_BLOCK_BYTES};
use cubecl::ir::{ElemType, FloatKind};

/// What operands' elements are, and what blocks of them along k are scaled by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum BlockFormat {
    /// E4M3 or E5M2, 32 of which share a power of two.
    Mxfp8,
    /// E2M1, two in a byte, 32 of which share a power of two.
    Mxfp4,
    /// E2M1, two in a byte, 16 of which share a number in E4M3 without a sign.
    Nvfp4,
}

impl BlockFormat {
    /// Scales of a row in a word, and in a row of a block of scales.
    pub(crate) const WORD_SCALES: usize = 4;

    /// What its products are called.
    pub(crate) const fn op(self) -> &'static str {
        match self {
            Self::Mxfp8 | Self::Mxfp4 => "mx_matmul",
            Self::Nvfp4 => "nvfp4_matmul",
        }
    }

    /// Elements along k that share a scale.
    pub(crate) const fn scaled_by(self) -> usize {
        match self {
            Self::Mxfp8 | Self::Mxfp4 => 32,
            Self::Nvfp4 => 16,
        }
    }

    /// The type of scales: of [`Nvfp4`](Self::Nvfp4), CubeCL has none without a sign.
    pub(crate) const fn scale_dtype(self) -> ElemType {
        ElemType::Float(match self {
            Self::Mxfp8 | Self::Mxfp4 => FloatKind::UE8M0,
            Self::Nvfp4 => FloatKind::E4M3,
        })
    }

    /// Scales of so many bytes of k of a row.
    pub(crate) const fn scales(self, k_bytes: usize) -> usize {
        let in_byte = match self {
            Self::Mxfp8 => 1,
            Self::Mxfp4 | Self::Nvfp4 => 2,
        };
        (k_bytes * in_byte).div_ceil(self.scaled_by())
    }

    /// Words of arranged scales of so many rows of so many bytes of k.
    pub(crate) const fn scale_words(self, rows: usize, k_bytes: usize) -> usize {
        let blocks = rows.div_ceil(BLOCK_ROWS) * k_bytes.div_ceil(ROW_BYTES) * self.scale_blocks();
        blocks * SCALE_BLOCK_BYTES / 4
    }

    /// [Blocks of scales](crate::device::SCALE_BLOCK_BYTES) of 128 rows for a block of k.
    pub(crate) const fn scale_blocks(self) -> usize {
        self.scales(ROW_BYTES) / Self::WORD_SCALES
    }
}

#[cfg(feature = "cuda")]
impl BlockFormat {
    /// Bytes of k of an instruction.
    const STEP_BYTES: usize = 32;

    /// The code of a scale of 1.
    pub(crate) const fn one(self) -> u8 {
        match self {
            Self::Mxfp8 | Self::Mxfp4 => 0x7f,
            Self::Nvfp4 => 0x38,
        }
    }

    /// How PTX calls such products, between layouts and types of `mma.sync` and at the end of `tcgen05.mma`.
    pub(crate) const fn kind(self) -> &'static str {
        match self {
            Self::Mxfp8 => "kind::mxf8f6f4.block_scale.scale_vec::1X",
            Self::Mxfp4 => "kind::mxf4nvf4.block_scale.scale_vec::2X",
            Self::Nvfp4 => "kind::mxf4nvf4.block_scale.scale_vec::4X",
        }
    }

    /// How PTX calls the type of scales.
    pub(crate) const fn scale_type(self) -> &'static str {
        match self {
            Self::Mxfp8 | Self::Mxfp4 => "ue8m0",
            Self::Nvfp4 => "ue4m3",
        }
    }

    /// Of which block of scales an instruction takes which byte of the words, and those behind it: that of step `step`
    /// of a block of k.
    pub(crate) const fn place(self, step: usize) -> (usize, usize) {
        let first = step * self.scales(Self::STEP_BYTES);
        (first / Self::WORD_SCALES, first % Self::WORD_SCALES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [BlockFormat; 3] = [BlockFormat::Mxfp8, BlockFormat::Mxfp4, BlockFormat::Nvfp4];

    #[test]
    fn blocks_of_k_have_as_many_blocks_of_scales_as_an_instruction_has_scales() {
        assert_eq!(ALL.map(BlockFormat::scale_blocks), [1, 2, 4]);
        assert_eq!(ALL.map(|format| format.scales(32)), [1, 2, 4]);
        // Rows may end anywhere.
        assert_eq!(ALL.map(|format| format.scales(33)), [2, 3, 5]);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn instructions_take_their_scales_one_after_another() {
        let places = |format: BlockFormat| [0, 1, 2, 3].map(|step| format.place(step));
        assert_eq!(places(BlockFormat::Mxfp8), [(0, 0), (0, 1), (0, 2), (0, 3)]);
        assert_eq!(places(BlockFormat::Mxfp4), [(0, 0), (0, 2), (1, 0), (1, 2)]);
        assert_eq!(places(BlockFormat::Nvfp4), [(0, 0), (1, 0), (2, 0), (3, 0)]);
    }
}
