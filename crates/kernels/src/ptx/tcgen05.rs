//! Matrix products of Blackwell's data-center GPUs (PTX ISA, "`TensorCore` 5th Generation Family Instructions"): one
//! unit has 128 rows by n columns multiplied, both operands in shared memory, and the sums lie in tensor memory:
//! 128 lanes of 512 columns of 32 bits, of which a cube asks for some.
//!
//! A row of the sums is a lane. Warp w reads lanes `32 (w mod 4)..`, here 16 at once, in the layout of fragments:
//! register i of a unit belongs to row `(unit mod 32) / 4`, 8 below it where bit 1 of i is set, and to column
//! `8 (i / 4) + 2 (unit mod 4) + (i mod 2)`, as with [`wgmma`](super::wgmma).
//!
//! The left operand may lie in tensor memory, too: a row in each lane, in pairs of 16 bits. Fragments whose pairs are
//! packed are stored there by `16x128b`, register by register.

use super::{
    ROW_BYTES, load,
    wgmma::{
        WgmmaOperands, WgmmaProduct, WgmmaWeights, registers, tile_descriptor,
        tile_descriptor_across,
    },
};
use cubecl::prelude::*;

/// Rows of a product: all lanes of tensor memory.
pub(crate) const ROWS: usize = 128;
/// Columns of tensor memory.
pub(crate) const COLUMNS: usize = 512;

/// What tells descriptors of shared memory from Hopper's.
pub(crate) const VERSION: u64 = 1 << 46;

/// How the operands' types are called.
fn kind(operands: WgmmaOperands) -> &'static str {
    match operands.lhs {
        "tf32" => "tf32",
        "e4m3" | "e5m2" => "f8f6f4",
        _ => "f16",
    }
}

/// The number of a type in instruction descriptors.
fn type_number(name: &str) -> u32 {
    match name {
        "bf16" | "e5m2" | "e2m1" => 1,
        "tf32" => 2,
        _ => 0,
    }
}

/// What is multiplied ("Instruction descriptor"), with sums in f32.
pub(crate) fn instruction_descriptor(operands: WgmmaOperands) -> u32 {
    1 << 4
        | type_number(operands.lhs) << 7
        | type_number(operands.rhs) << 10
        | u32::from(!operands.lhs_k_major) << 15
        | u32::from(!operands.rhs_k_major) << 16
        | (operands.n as u32 / 8) << 17
        | (ROWS as u32 / 16) << 24
}

/// `[$0] = A B` over one k block of 128 bytes, onto what was there if `$3` is not 0: what `descriptor` says, by so many
/// cubes together.
pub(super) fn block_text(operands: WgmmaOperands, descriptor: u32, cubes: usize) -> String {
    let kind = kind(operands);
    let mut text = format!(
        "{{ // $0 $1 $2 $3\n.reg .pred accumulate;\n.reg .b64 lhs, rhs;\n.reg .b32 what;\n\
         mov.b32 what, {descriptor};\nmov.b64 lhs, $1;\nmov.b64 rhs, $2;\nsetp.ne.u32 accumulate, $3, 0;\n"
    );
    for step in 0..ROW_BYTES / 32 {
        if step > 0 {
            text += &format!("add.s64 lhs, lhs, {};\n", operands.step(operands.lhs_k_major));
            text += &format!("add.s64 rhs, rhs, {};\n", operands.step(operands.rhs_k_major));
        }
        text += &format!(
            "tcgen05.mma.cta_group::{cubes}.kind::{kind} [$0], lhs, rhs, what, accumulate;\n"
        );
        if step == 0 {
            text += "setp.eq.u32 accumulate, 0, 0;\n";
        }
    }
    text + "}"
}

/// What products of 16-bit operands multiply whose left one lies along k.
fn of_halves(n: usize, dtype: &'static str, rhs_k_major: bool) -> WgmmaOperands {
    WgmmaOperands { n, lhs: dtype, rhs: dtype, lhs_k_major: true, rhs_k_major }
}

/// `[$0] = A B`, from zero; `$1` and `$2` describe the operands.
fn product_text(product: WgmmaProduct) -> String {
    let WgmmaProduct { n, dtype, k, lhs_block_bytes, rhs_block_bytes, .. } = product;
    let what = instruction_descriptor(of_halves(n, dtype, true));
    let mut text = format!(
        "{{ // $0 $1 $2\n.reg .pred accumulate;\n.reg .b64 lhs, rhs, at, bt;\n.reg .b32 what;\n\
         mov.b32 what, {what};\nmov.b64 lhs, $1;\nmov.b64 rhs, $2;\nsetp.ne.u32 accumulate, 0, 0;\n"
    );
    for step in 0..k / 16 {
        let at = |block_bytes: usize| (step / 4 * block_bytes + step % 4 * 32) / 16;
        text += &format!(
            "add.s64 at, lhs, {};\nadd.s64 bt, rhs, {};\n\
             tcgen05.mma.cta_group::1.kind::f16 [$0], at, bt, what, accumulate;\n",
            at(lhs_block_bytes),
            at(rhs_block_bytes)
        );
        if step == 0 {
            text += "setp.eq.u32 accumulate, 0, 0;\n";
        }
    }
    text + "}"
}

/// `[$0] = A B`, onto what was there if `$3` is not 0; A lies at `$1` in tensor memory, 64 of k in every so many
/// `columns`, and `$2` describes B.
fn weights_text(weights: WgmmaWeights, columns: usize) -> String {
    let WgmmaWeights { n, dtype, k, rows_bytes, .. } = weights;
    let what = instruction_descriptor(of_halves(n, dtype, false));
    let mut text = format!(
        "{{ // $0 $1 $2 $3\n.reg .pred accumulate;\n.reg .b64 weighed, bt;\n.reg .b32 what, at;\n\
         mov.b32 what, {what};\nmov.b64 weighed, $2;\nsetp.ne.u32 accumulate, $3, 0;\n"
    );
    for step in 0..k / 16 {
        // 16 elements of a row in 8 columns.
        text += &format!(
            "add.s32 at, $1, {};\nadd.s64 bt, weighed, {};\n\
             tcgen05.mma.cta_group::1.kind::f16 [$0], [at], bt, what, accumulate;\n",
            step / 4 * columns + step % 4 * 8,
            (step / 4 * rows_bytes + step % 4 * 16 * ROW_BYTES) / 16
        );
        if step == 0 {
            text += "setp.eq.u32 accumulate, 0, 0;\n";
        }
    }
    text + "}"
}

/// Stores `width` registers, of which `count` make up the shape once.
fn store_text(shape: &str, width: usize, count: usize) -> String {
    let (list, times) = (registers(1..width + 1), width / count);
    format!("{{ // $0 $1\ntcgen05.st.sync.aligned.{shape}.x{times}.b32 [%0], {{{list}}};\n}}")
}

/// The wait is part of it: else the compiler may move what uses the registers in front of it.
fn load_text(width: usize) -> String {
    let (list, times) = (registers(0..width), width / 4);
    format!(
        "{{ // $0 $1\ntcgen05.ld.sync.aligned.16x256b.x{times}.b32 {{{list}}}, [$1];\n\
         tcgen05.wait::ld.sync.aligned;\n}}"
    )
}

/// Never runs where `$0` is 0.
fn pin_text() -> String {
    let pinned = (0..64).map(|register| format!("pin{register}")).collect::<Vec<_>>().join(", ");
    format!(
        "{{ // $0 $1\n.reg .pred unused;\n.reg .b32 pin<64>;\nsetp.eq.u32 unused, $0, 0;\n\
         @unused bra PINNED;\ntcgen05.st.sync.aligned.16x256b.x16.b32 [$1], {{{pinned}}};\nPINNED:\n}}"
    )
}

/// 1 for one unit of a warp whose units all call it, the same one each time, and 0 for the others. Of what only that
/// unit runs ptxas makes no loop over units.
#[cube]
pub(crate) fn elect() -> u32 {
    let elected: u32;
    gpu_asm!(
        "{body}\n// {e}",
        body = const "{ // $0\n.reg .pred elected;\nelect.sync _|elected, 0xffffffff;\n\
            selp.u32 $0, 1, 0, elected;\n}",
        e = out(_) elected
    );
    elected
}

/// Waits until the cube has that many columns of tensor memory, a power of two from 32 on, and writes to shared
/// memory at `address` where they begin. All units of a warp call it, and the cube asks for no more.
#[cube]
pub(crate) fn tensor_alloc(address: u32, #[comptime] columns: u32) {
    gpu_asm!(
        "{alloc} [{a}], {n};\n{relinquish}",
        alloc = const "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32",
        a = in(_) load::<u32>(address),
        n = const columns,
        relinquish = const "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
    );
}

/// Gives back what [`tensor_alloc`] got. All units of a warp call it, and nobody accesses those columns any more.
#[cube]
pub(crate) fn tensor_free(place: u32, #[comptime] columns: u32) {
    gpu_asm!(
        "{free} {p}, {n};",
        free = const "tcgen05.dealloc.cta_group::1.sync.aligned.b32",
        p = in(_) load::<u32>(place),
        n = const columns
    );
}

/// Tells a product where a tile lies and how ("Shared memory descriptor").
#[cube]
pub(crate) fn tensor_descriptor(address: u32, #[comptime] k_major: bool) -> u64 {
    tile_descriptor(address, k_major) | VERSION.runtime()
}

/// As [`tensor_descriptor`], of an operand in blocks of 128 bytes of k.
#[cube]
pub(crate) fn tensor_operand(
    address: u32,
    #[comptime] k_major: bool,
    #[comptime] operands: WgmmaOperands,
) -> u64 {
    if comptime!(k_major) {
        tensor_descriptor(address, true)
    } else {
        tensor_descriptor_across(address, comptime!(operands.chunk() * ROW_BYTES))
    }
}

/// As [`tensor_descriptor`], of a tile that runs across k: chunks of 128 bytes of columns so many bytes apart.
#[cube]
pub(crate) fn tensor_descriptor_across(address: u32, #[comptime] chunk_bytes: usize) -> u64 {
    tile_descriptor_across(address, chunk_bytes) | VERSION.runtime()
}

/// Starts the product of two tiles, 128 bytes of k deep; with `accumulate` it is added to what lies at `sums`. One
/// unit calls it.
#[cube]
pub(crate) fn tensor_block(
    sums: u32,
    lhs: u64,
    rhs: u64,
    accumulate: u32,
    #[comptime] operands: WgmmaOperands,
) {
    gpu_asm!("{body}\n// {s}{l}{r}{a}", body = const block_text(operands, instruction_descriptor(operands), 1), s = in(_) load::<u32>(sums),
        l = in(_) load::<u64>(lhs), r = in(_) load::<u64>(rhs), a = in(_) load::<u32>(accumulate));
}

/// Has the products that this unit started arrive at the barrier at `barrier` when they are done.
#[cube]
pub(crate) fn tensor_commit(barrier: u32) {
    gpu_asm!(
        "{commit} [{b}];",
        commit = const "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64",
        b = in(_) load::<u32>(barrier)
    );
}

/// Reads 16 lanes of sums: two columns for each register. All units of a warp call it.
#[cube]
pub(crate) fn tensor_load<R: Size>(place: u32) -> Vector<f32, R> {
    let width = R::value().comptime();
    let sums: Vector<f32, R>;
    gpu_asm!("{body}\n// {d}{p}", body = const load_text(width), d = out(_) sums,
        p = in(_) load::<u32>(place));
    sums
}

/// Starts the product of two tiles of 16-bit operands, both along k. One unit calls it.
#[cube]
pub(crate) fn tensor_product(sums: u32, lhs: u64, rhs: u64, #[comptime] product: WgmmaProduct) {
    gpu_asm!("{body}\n// {s}{l}{r}", body = const product_text(product), s = in(_) load::<u32>(sums),
        l = in(_) load::<u64>(lhs), r = in(_) load::<u64>(rhs));
}

/// Starts a sum of rows whose weights, 16-bit, lie in tensor memory, those of 64 rows in every so many `columns`, and
/// which run across k; with `accumulate` it is added to what lies at `sums`. One unit calls it.
#[cube]
pub(crate) fn tensor_weights(
    sums: u32,
    lhs: u32,
    rhs: u64,
    accumulate: u32,
    #[comptime] weights: WgmmaWeights,
    #[comptime] columns: usize,
) {
    gpu_asm!("{body}\n// {s}{l}{r}{a}", body = const weights_text(weights, columns), s = in(_) load::<u32>(sums),
        l = in(_) load::<u32>(lhs), r = in(_) load::<u64>(rhs), a = in(_) load::<u32>(accumulate));
}

/// Starts to write 16 lanes of sums, as [`tensor_load`] reads them. All units of a warp call it.
#[cube]
pub(crate) fn tensor_store<R: Size>(place: u32, sums: Vector<f32, R>) {
    let width = R::value().comptime();
    gpu_asm!("{body}\n// {p}{v}", body = const store_text("16x256b", width, 4),
        p = in(_) load::<u32>(place), v = in(_) load::<Vector<f32, R>>(sums));
}

/// Starts to write 16 lanes of a left operand: fragments whose pairs were packed, a column for each pair. All units
/// of a warp call it.
#[cube]
pub(crate) fn tensor_store_packed<P: Size>(place: u32, packed: Vector<u32, P>) {
    let width = P::value().comptime();
    gpu_asm!("{body}\n// {p}{v}", body = const store_text("16x128b", width, 2),
        p = in(_) load::<u32>(place), v = in(_) load::<Vector<u32, P>>(packed));
}

/// Waits for what this warp's units store to tensor memory. All of them call it.
#[cube]
pub(crate) fn tensor_wait_stores() {
    gpu_asm!("tcgen05.wait::st.sync.aligned;");
}

/// Tells ptxas how many registers a launch gives each unit, as
/// [`wgmma_pin_registers`](super::wgmma_sums::wgmma_pin_registers) does: a store of 64 registers, too, has it know (CUDA
/// 13.0). This one never runs, because `never` is 0.
#[cube]
pub(crate) fn tensor_pin_registers(place: u32, never: u32) {
    gpu_asm!("{body}\n// {n}{p}", body = const pin_text(), n = in(_) never, p = in(_) load::<u32>(place));
}

/// Orders accesses of tensor memory behind the barriers that this unit has waited for.
#[cube]
pub(crate) fn tensor_fence_after() {
    gpu_asm!("tcgen05.fence::after_thread_sync;");
}

/// Orders accesses of tensor memory in front of the barriers that this unit arrives at next.
#[cube]
pub(crate) fn tensor_fence_before() {
    gpu_asm!("tcgen05.fence::before_thread_sync;");
}

#[cfg(test)]
mod tests {
    use super::*;

    const BF16: WgmmaOperands =
        WgmmaOperands { n: 256, lhs: "bf16", rhs: "bf16", lhs_k_major: true, rhs_k_major: true };

    #[test]
    fn instruction_descriptors_say_types_layouts_and_sizes() {
        // CUTLASS's `make_instr_desc` gives the same.
        assert_eq!(instruction_descriptor(BF16), 0x0840_0490);
        let across = WgmmaOperands { lhs_k_major: false, rhs_k_major: false, n: 64, ..BF16 };
        assert_eq!(instruction_descriptor(across), 0x0811_8490);
        let fp8 = WgmmaOperands { lhs: "e4m3", rhs: "e5m2", ..BF16 };
        assert_eq!((kind(fp8), instruction_descriptor(fp8)), ("f8f6f4", 0x0840_0410));
    }

    #[test]
    fn steps_across_k_are_as_many_rows_as_an_instruction_is_deep() {
        let steps = |lhs| {
            let operands = WgmmaOperands { lhs, rhs: lhs, lhs_k_major: false, ..BF16 };
            let text = block_text(operands, instruction_descriptor(operands), 1);
            let step = |bytes| text.matches(&format!("add.s64 lhs, lhs, {bytes};")).count();
            (operands.chunk(), [16 * 128 / 16, 32 * 128 / 16].map(step))
        };
        // Chunks of 128 bytes by as many rows of k as a block has.
        assert_eq!(steps("bf16"), (64, [3, 0]));
        assert_eq!(steps("e4m3"), (128, [0, 3]));
    }

    #[test]
    fn only_the_first_product_of_a_block_may_begin_anew() {
        let text = block_text(BF16, instruction_descriptor(BF16), 1);
        assert_eq!(text.matches("tcgen05.mma").count(), 4);
        assert!(text.find("setp.ne").unwrap() < text.find("tcgen05.mma").unwrap());
        assert_eq!(text.matches("setp.eq.u32 accumulate, 0, 0;").count(), 1);
    }

    #[test]
    fn weights_of_tensor_memory_are_taken_sixteen_keys_at_a_time() {
        let weights = WgmmaWeights {
            n: 128,
            dtype: "bf16",
            k: 128,
            rows_bytes: 2 * 64 * ROW_BYTES,
            first: 0,
        };
        let text = weights_text(weights, 32);
        assert_eq!(text.matches("tcgen05.mma.cta_group::1.kind::f16 [$0], [at], bt").count(), 8);
        // B runs across k, and its second 64 rows of k follow both blocks of the first.
        assert!(text.contains(&format!("mov.b32 what, {};", 0x0820_0490 | 1 << 16)));
        assert!(text.contains("add.s32 at, $1, 32;\nadd.s64 bt, weighed, 1024;"));
        assert_eq!(text.matches("setp.eq.u32 accumulate, 0, 0;").count(), 1);
        // Weights that lie apart, as the scores did that they were made of.
        let apart = weights_text(WgmmaWeights { rows_bytes: 64 * ROW_BYTES, ..weights }, 64);
        assert!(apart.contains("add.s32 at, $1, 64;\nadd.s64 bt, weighed, 512;"));
    }

    #[test]
    fn stores_name_as_many_registers_as_their_shape_has() {
        assert!(store_text("16x128b", 4, 2).contains("16x128b.x2.b32 [%0], {%1, %2, %3, %4};"));
        assert!(store_text("16x256b", 4, 4).contains("16x256b.x1.b32 [%0], {%1, %2, %3, %4};"));
    }
}
