//! Products of [`tcgen05`](super::tcgen05) by two cubes of a cluster (PTX ISA, "`TensorCore` 5th Generation Family
//! Instructions", `.cta_group::2`; CUTLASS `SM100_MMA_F16BF16_2x1SM_SS`).
//!
//! A unit of one cube has 256 rows by n columns multiplied. Each cube has half of the rows of the left operand and half
//! of the columns of the right one in its shared memory, both at the same place in either cube, and all columns of its
//! 128 rows of the sums in its tensor memory.

use super::{
    load,
    tcgen05::{ROWS, block_text, instruction_descriptor},
    wgmma::WgmmaOperands,
};
use cubecl::prelude::*;

/// Cubes of a pair.
pub(crate) const CUBES: usize = 2;

/// A bit for each cube of a pair.
const BOTH: u32 = 3;

/// What is multiplied: that of one cube, of twice its rows.
pub(super) fn pair_descriptor(operands: WgmmaOperands) -> u32 {
    instruction_descriptor(operands) + ((ROWS as u32 / 16) << 24)
}

/// `.b16` has no constants among the operands of inline PTX.
fn commit_text() -> String {
    format!(
        "{{ // $0\n.reg .b16 both;\nmov.b16 both, {BOTH};\n\
         tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [$0], both;\n}}"
    )
}

/// As [`tensor_alloc`](super::tcgen05::tensor_alloc), of the same columns in both cubes. A warp of each cube calls it,
/// and may wait for the other one.
#[cube]
pub(crate) fn tensor_pair_alloc(address: u32, #[comptime] columns: u32) {
    gpu_asm!(
        "{alloc} [{a}], {n};\n{relinquish}",
        alloc = const "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32",
        a = in(_) load::<u32>(address),
        n = const columns,
        relinquish = const "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;"
    );
}

/// Gives back what [`tensor_pair_alloc`] got. A warp of each cube calls it, and nobody accesses those columns any more
/// in either.
#[cube]
pub(crate) fn tensor_pair_free(place: u32, #[comptime] columns: u32) {
    gpu_asm!(
        "{free} {p}, {n};",
        free = const "tcgen05.dealloc.cta_group::2.sync.aligned.b32",
        p = in(_) load::<u32>(place),
        n = const columns
    );
}

/// As [`tensor_block`](super::tcgen05::tensor_block), of both cubes' rows and columns. One unit of the first cube calls
/// it.
#[cube]
pub(crate) fn tensor_pair_block(
    sums: u32,
    lhs: u64,
    rhs: u64,
    accumulate: u32,
    #[comptime] operands: WgmmaOperands,
) {
    gpu_asm!("{body}\n// {s}{l}{r}{a}", body = const block_text(operands, pair_descriptor(operands), CUBES),
        s = in(_) load::<u32>(sums), l = in(_) load::<u64>(lhs), r = in(_) load::<u64>(rhs),
        a = in(_) load::<u32>(accumulate));
}

/// Has the products that this unit started arrive at the barrier at `barrier` of each cube when they are done.
#[cube]
pub(crate) fn tensor_pair_commit(barrier: u32) {
    gpu_asm!("{body}\n// {b}", body = const commit_text(), b = in(_) load::<u32>(barrier));
}

#[cfg(test)]
mod tests {
    use super::*;

    const BF16: WgmmaOperands =
        WgmmaOperands { n: 256, lhs: "bf16", rhs: "bf16", lhs_k_major: true, rhs_k_major: true };

    #[test]
    fn a_pair_multiplies_twice_the_rows() {
        // CUTLASS's `make_instr_desc` gives the same for 256 rows.
        assert_eq!(pair_descriptor(BF16), 0x1040_0490);
        let text = block_text(BF16, pair_descriptor(BF16), CUBES);
        assert_eq!(text.matches("tcgen05.mma.cta_group::2.kind::f16").count(), 4);
        assert!(text.contains(&format!("mov.b32 what, {};", 0x1040_0490)));
    }
}
