//! Products of [`tcgen05`](super::tcgen05) whose blocks of elements of k are scaled (PTX ISA, "Block Scaling for
//! `tcgen05.mma`"; CUTLASS `InstrDescriptorBlockScaled` and its copies of scales).
//!
//! Scales lie in tensor memory: those of row r in lane r mod 32 of column r / 32, four of k in a word, in each quarter
//! of the lanes again. A copy brings them from blocks of 512 bytes in shared memory, as
//! [`SCALE_BLOCK_BYTES`](crate::device::SCALE_BLOCK_BYTES) says. Copies and products of one unit are done in the order
//! in which it starts them, so that a copy may write over the scales of the products before.

use super::{
    ROW_BYTES, load,
    tcgen05::{VERSION, instruction_descriptor},
    tcgen05_pair::{CUBES, pair_descriptor},
    wgmma::WgmmaOperands,
};
use crate::{block_format::BlockFormat, device::SCALE_BLOCK_BYTES};
use cubecl::prelude::*;

/// Columns of tensor memory of a block of scales.
pub(crate) const SCALE_COLUMNS: usize = 4;

/// A block of scales for a copy ("Shared memory descriptor"): rows of 16 bytes, every eight of them 8 times 16 bytes
/// behind the eight before, not swizzled.
const SCALE_BLOCK: u64 = VERSION | 8 << 32;

/// A block of k of operands whose blocks of elements are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ScaledBlock {
    pub(crate) operands: WgmmaOperands,
    pub(crate) format: BlockFormat,
    /// Cubes that multiply together: one, or a pair, of which each has the scales of its own rows and of all columns.
    pub(crate) cubes: usize,
}

/// What is multiplied ("Instruction descriptor" of the kinds `mxf8f6f4` and `mxf4nvf4`): that of other products, with the
/// type of scales, and in the place of the type of sums and behind the sizes from which byte of the words on they scale
/// either operand.
fn scaled_descriptor(block: ScaledBlock, byte: u32) -> u32 {
    const SUMS_IN_F32: u32 = 1 << 4;
    let ScaledBlock { operands, format, cubes } = block;
    let what = if cubes == CUBES { pair_descriptor } else { instruction_descriptor };
    let scales = match format {
        BlockFormat::Mxfp8 | BlockFormat::Mxfp4 => 1 << 23,
        BlockFormat::Nvfp4 => 0,
    };
    what(operands) & !SUMS_IN_F32 | scales | byte << 4 | byte << 29
}

/// `[$0] = A B` over one k block of 128 bytes, onto what was there if `$3` is not 0, with the scales at `$4` in shared
/// memory, which go to tensor memory at `$5`: blocks along k for the rows of A, then those for every 128 columns of B.
/// In tensor memory the columns of B lie side by side for each block along k.
fn block_text(block: ScaledBlock) -> String {
    let ScaledBlock { operands, format, cubes } = block;
    let (blocks, groups) = (format.scale_blocks(), operands.n.div_ceil(128));
    let mut text = "{ // $0 $1 $2 $3 $4 $5\n.reg .pred accumulate;\n.reg .b64 lhs, rhs, scales;\n\
         .reg .b32 what, rhs_scales, place;\nmov.b64 lhs, $1;\nmov.b64 rhs, $2;\nmov.b64 scales, $4;\n\
         mov.b32 place, $5;\nsetp.ne.u32 accumulate, $3, 0;\n"
        .to_string();
    let of_columns = (0..groups).flat_map(|group| (0..blocks).map(move |at| at * groups + group));
    for place in (0..blocks).chain(of_columns.map(|place| blocks + place)) {
        text += &format!(
            "tcgen05.cp.cta_group::{cubes}.32x128b.warpx4 [place + {}], scales;\n\
             add.s64 scales, scales, {};\n",
            SCALE_COLUMNS * place,
            SCALE_BLOCK_BYTES >> 4
        );
    }
    text += &format!("add.u32 rhs_scales, place, {};\n", SCALE_COLUMNS * blocks);
    for step in 0..ROW_BYTES / 32 {
        if step > 0 {
            text += &format!("add.s64 lhs, lhs, {};\n", operands.step(operands.lhs_k_major));
            text += &format!("add.s64 rhs, rhs, {};\n", operands.step(operands.rhs_k_major));
        }
        let (along_k, byte) = format.place(step);
        text += &format!(
            "mov.b32 what, {};\n\
             tcgen05.mma.cta_group::{cubes}.{} [$0], lhs, rhs, what, [place + {}], [rhs_scales + {}], accumulate;\n",
            scaled_descriptor(block, byte as u32),
            format.kind(),
            SCALE_COLUMNS * along_k,
            SCALE_COLUMNS * groups * along_k
        );
        if step == 0 {
            text += "setp.eq.u32 accumulate, 0, 0;\n";
        }
    }
    text + "}"
}

/// Tells a copy where blocks of scales lie in shared memory.
#[cube]
pub(crate) fn scales_descriptor(address: u32) -> u64 {
    u64::cast_from(address >> 4) | SCALE_BLOCK.runtime()
}

/// As [`tensor_block`](super::tcgen05::tensor_block), with blocks of scales from [`scales_descriptor`], which are copied
/// to tensor memory at `place` first. One unit calls it; where a pair multiplies, one of the first cube, and both cubes
/// have their scales at the same places.
#[cube]
pub(crate) fn tensor_scaled_block(
    sums: u32,
    lhs: u64,
    rhs: u64,
    accumulate: u32,
    scales: u64,
    place: u32,
    #[comptime] block: ScaledBlock,
) {
    gpu_asm!("{body}\n// {s}{l}{r}{a}{d}{p}", body = const block_text(block),
        s = in(_) load::<u32>(sums), l = in(_) load::<u64>(lhs), r = in(_) load::<u64>(rhs),
        a = in(_) load::<u32>(accumulate), d = in(_) load::<u64>(scales), p = in(_) load::<u32>(place));
}

#[cfg(test)]
mod tests {
    use super::*;

    const FP8: WgmmaOperands =
        WgmmaOperands { n: 128, lhs: "e4m3", rhs: "e5m2", lhs_k_major: true, rhs_k_major: true };

    const FP4: WgmmaOperands = WgmmaOperands { lhs: "e2m1", rhs: "e2m1", ..FP8 };

    fn alone(operands: WgmmaOperands, format: BlockFormat) -> ScaledBlock {
        ScaledBlock { operands, format, cubes: 1 }
    }

    #[test]
    fn a_pair_scales_twice_the_rows() {
        for (operands, format) in [(FP8, BlockFormat::Mxfp8), (FP4, BlockFormat::Nvfp4)] {
            let one = alone(operands, format);
            let pair = ScaledBlock { cubes: CUBES, ..one };
            // M / 16 at 24 of the kinds of 8 bits, M / 128 at 27 of those of 4.
            assert_eq!(scaled_descriptor(pair, 1), scaled_descriptor(one, 1) + (8 << 24));
            let text = block_text(pair);
            assert_eq!(
                text.matches("cta_group::2").count(),
                block_text(one).matches("cta_group::1").count()
            );
            assert!(!text.contains("cta_group::1"));
        }
    }

    #[test]
    fn descriptors_say_scales_and_their_bytes() {
        // CUTLASS's `InstrDescriptorBlockScaled`: types at 7 and 10, N / 8 at 17, the scales' type at 23, M / 16 at 24, and
        // the bytes at 4 and 29.
        let mxfp8 = |byte| scaled_descriptor(alone(FP8, BlockFormat::Mxfp8), byte);
        assert_eq!(mxfp8(0), 1 << 10 | 16 << 17 | 1 << 23 | 8 << 24);
        assert_eq!(mxfp8(3), mxfp8(0) | 3 << 4 | 3 << 29);
        // Of the kinds of 4 bits, M / 128 at 27, and the only type of elements is 1.
        let nvfp4 = scaled_descriptor(alone(FP4, BlockFormat::Nvfp4), 0);
        assert_eq!(nvfp4, 1 << 7 | 1 << 10 | 16 << 17 | 1 << 27);
        let mxfp4 = scaled_descriptor(alone(FP4, BlockFormat::Mxfp4), 2);
        assert_eq!(mxfp4, nvfp4 | 1 << 23 | 2 << 4 | 2 << 29);
        assert_eq!(SCALE_BLOCK, 1 << 46 | 8 << 32);
    }

    #[test]
    fn every_step_of_k_has_its_scales() {
        let block = alone(FP8, BlockFormat::Mxfp8);
        let text = block_text(block);
        assert_eq!(text.matches("tcgen05.cp").count(), 2);
        assert_eq!(text.matches("tcgen05.mma").count(), 4);
        for byte in 0..4 {
            let what = scaled_descriptor(block, byte);
            assert!(text.contains(&format!("mov.b32 what, {what};")));
        }
        let text = block_text(alone(FP4, BlockFormat::Nvfp4));
        assert_eq!(text.matches("tcgen05.cp").count(), 8);
        for block in 0..4 {
            let scales = format!("[place + {}], [rhs_scales + {}]", 4 * block, 4 * block);
            assert_eq!(text.matches(&scales).count(), 1, "{scales}");
        }
        assert!(text.contains("add.u32 rhs_scales, place, 16;"));
    }

    #[test]
    fn columns_of_b_lie_side_by_side() {
        let text = block_text(alone(WgmmaOperands { n: 256, ..FP4 }, BlockFormat::Mxfp4));
        let places: Vec<_> = text.lines().filter(|line| line.starts_with("tcgen05.cp")).collect();
        // Both blocks of A; both of the first 128 columns, then of the others.
        for (line, column) in places.iter().zip([0, 4, 8, 16, 12, 20]) {
            assert!(line.contains(&format!("[place + {column}]")), "{line}");
        }
        assert_eq!(text.matches("[place + 4], [rhs_scales + 8]").count(), 2);
    }
}
