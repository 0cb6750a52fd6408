//! Products of [`tcgen05`](super::tcgen05) whose blocks of 32 elements of k are scaled (PTX ISA, "Block Scaling for
//! `tcgen05.mma`"; CUTLASS `InstrDescriptorBlockScaled` and its copies of scales).
//!
//! Scales lie in tensor memory: those of row r in lane r mod 32 of column r / 32, four of k in a word, in each quarter
//! of the lanes again. A copy brings them from blocks of 512 bytes in shared memory, as
//! [`SCALE_BLOCK_BYTES`](crate::device::SCALE_BLOCK_BYTES) says. Copies and products of one unit are done in the order
//! in which it starts them, so that a copy may write over the scales of the products before.

use super::{
    ROW_BYTES, load,
    tcgen05::{VERSION, instruction_descriptor},
    wgmma::WgmmaOperands,
};
use crate::device::SCALE_BLOCK_BYTES;
use cubecl::prelude::*;

/// Columns of tensor memory of a block of scales.
pub(crate) const SCALE_COLUMNS: usize = 4;

/// A block of scales for a copy ("Shared memory descriptor"): rows of 16 bytes, every eight of them 8 times 16 bytes
/// behind the eight before, not swizzled.
const SCALE_BLOCK: u64 = VERSION | 8 << 32;

/// What is multiplied ("Instruction descriptor" of the kind `mxf8f6f4`): that of other products, with the type of
/// scales, and in the place of the type of sums and behind the sizes which byte of the words scales either operand.
fn scaled_descriptor(operands: WgmmaOperands, byte: u32) -> u32 {
    const SUMS_IN_F32: u32 = 1 << 4;
    const UE8M0: u32 = 1 << 23;
    instruction_descriptor(operands) & !SUMS_IN_F32 | UE8M0 | byte << 4 | byte << 29
}

/// `[$0] = A B` over one k block of 128 bytes, onto what was there if `$3` is not 0, with the scales at `$4` in shared
/// memory, which go to tensor memory at `$5`: a block for the rows of A, and one for every 128 columns of B.
fn block_text(operands: WgmmaOperands) -> String {
    let mut text = "{ // $0 $1 $2 $3 $4 $5\n.reg .pred accumulate;\n.reg .b64 lhs, rhs, scales;\n\
         .reg .b32 what, rhs_scales, place;\nmov.b64 lhs, $1;\nmov.b64 rhs, $2;\nmov.b64 scales, $4;\n\
         mov.b32 place, $5;\nsetp.ne.u32 accumulate, $3, 0;\n"
        .to_string();
    for block in 0..1 + operands.n.div_ceil(128) {
        text += &format!(
            "tcgen05.cp.cta_group::1.32x128b.warpx4 [place + {}], scales;\n\
             add.s64 scales, scales, {};\n",
            SCALE_COLUMNS * block,
            SCALE_BLOCK_BYTES >> 4
        );
    }
    text += &format!("add.u32 rhs_scales, place, {SCALE_COLUMNS};\n");
    for step in 0..ROW_BYTES / 32 {
        if step > 0 {
            text += &format!("add.s64 lhs, lhs, {};\n", WgmmaOperands::step(operands.lhs_k_major));
            text += &format!("add.s64 rhs, rhs, {};\n", WgmmaOperands::step(operands.rhs_k_major));
        }
        text += &format!(
            "mov.b32 what, {};\n\
             tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X [$0], lhs, rhs, what, [place], \
             [rhs_scales], accumulate;\n",
            scaled_descriptor(operands, step as u32)
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
/// to tensor memory at `place` first. One unit calls it.
#[cube]
pub(crate) fn tensor_scaled_block(
    sums: u32,
    lhs: u64,
    rhs: u64,
    accumulate: u32,
    scales: u64,
    place: u32,
    #[comptime] operands: WgmmaOperands,
) {
    gpu_asm!("{body}\n// {s}{l}{r}{a}{d}{p}", body = const block_text(operands),
        s = in(_) load::<u32>(sums), l = in(_) load::<u64>(lhs), r = in(_) load::<u64>(rhs),
        a = in(_) load::<u32>(accumulate), d = in(_) load::<u64>(scales), p = in(_) load::<u32>(place));
}

#[cfg(test)]
mod tests {
    use super::*;

    const FP8: WgmmaOperands =
        WgmmaOperands { n: 128, lhs: "e4m3", rhs: "e5m2", lhs_k_major: true, rhs_k_major: true };

    #[test]
    fn descriptors_say_scales_and_their_bytes() {
        // CUTLASS's `InstrDescriptorBlockScaled`: types at 7 and 10, N / 8 at 17, the scales' type at 23, M / 16 at 24, and
        // the bytes at 4 and 29.
        assert_eq!(scaled_descriptor(FP8, 0), 1 << 10 | 16 << 17 | 1 << 23 | 8 << 24);
        assert_eq!(scaled_descriptor(FP8, 3), scaled_descriptor(FP8, 0) | 3 << 4 | 3 << 29);
        assert_eq!(SCALE_BLOCK, 1 << 46 | 8 << 32);
    }

    #[test]
    fn every_step_of_k_has_its_scales() {
        let text = block_text(FP8);
        assert_eq!(text.matches("tcgen05.cp").count(), 2);
        assert_eq!(text.matches("tcgen05.mma").count(), 4);
        for byte in 0..4 {
            assert!(text.contains(&format!("mov.b32 what, {};", scaled_descriptor(FP8, byte))));
        }
    }
}
