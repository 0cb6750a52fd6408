//! Warpgroup products whose sums stay in registers that PTX names, and those of operands that both run across k.
//!
//! CUDA C++ has no name for them. What it names is copied where a block of instructions takes it, adds to it and
//! gives it back, unless ptxas sees that both may have the same place. It did not see it where other products come
//! in between: 128 copies a tile in attention's backward pass, a third of its instructions.

use super::{
    ROW_BYTES, load,
    wgmma::{DECLARATIONS, WgmmaWeights, described_at, registers},
};
use cubecl::prelude::*;
use std::ops::Range;

/// A product of 16-bit operands that starts from zero, both in shared memory and both across k: the left one
/// in rows of 128 bytes of its 64 rows, the right one as in [`WgmmaWeights`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaAcross {
    /// Columns.
    pub n: usize,
    /// PTX type of the operands.
    pub dtype: &'static str,
    /// Terms of the sums, a multiple of 16.
    pub k: usize,
    /// Bytes of 64 rows of k of the right operand.
    pub rows_bytes: usize,
}

impl WgmmaAcross {
    /// Issues it as a group; its operands' descriptors are the registers `lhs` and `rhs`.
    fn text(self) -> String {
        let Self { n, dtype, k, rows_bytes } = self;
        let sums = registers(0..n / 2);
        let mut text = String::new();
        for step in 0..k / 16 {
            let at = |rows_bytes: usize| (step / 4 * rows_bytes + step % 4 * 16 * ROW_BYTES) / 16;
            text += &format!(
                "{}{}wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {{{sums}}}, at, bt, {}, \
                 1, 1, 1, 1;\n",
                described_at("at", "lhs", at(64 * ROW_BYTES)),
                described_at("bt", "rhs", at(rows_bytes)),
                if step == 0 { "from_zero" } else { "onto" },
            );
        }
        text + "wgmma.commit_group.sync.aligned;\n"
    }
}

/// As [`registers`], of those that [`wgmma_sums_declare`] names.
fn named(range: Range<usize>) -> String {
    range.map(|register| format!("sum{register}")).collect::<Vec<_>>().join(", ")
}

fn clear_text(count: usize) -> String {
    (0..count).map(|register| format!("mov.f32 sum{register}, 0f00000000;\n")).collect()
}

fn read_text(count: usize) -> String {
    let moved = (0..count).map(|register| format!("mov.f32 %{register}, sum{register};\n"));
    format!("{{ // $0\n{}}}", moved.collect::<String>())
}

/// A group that adds to named sums; `$0` are the registers of A, `$1` describes B.
fn sum_text(weights: WgmmaWeights) -> String {
    let sums = named(weights.first..weights.first + weights.n / 2);
    format!(
        "{{ // $0\n{DECLARATIONS}wgmma.fence.sync.aligned;\nmov.b64 {{weighed, upper}}, $1;\n{}}}",
        weights.text_onto(&sums, 0)
    )
}

fn pin_text() -> String {
    let sums = (0..64).map(|register| format!("pin{register}")).collect::<Vec<_>>().join(", ");
    format!(
        "{{ // $0\n{DECLARATIONS}.reg .f32 pin<64>;\nsetp.eq.u32 from_zero, $0, 0;\n\
         @from_zero bra PINNED;\nmov.b64 at, 0;\nwgmma.fence.sync.aligned;\n\
         wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{{sums}}}, at, at, from_zero, 1, 1, 0, 0;\n\
         wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\nPINNED:\n}}"
    )
}

/// `$0 = A B`; `$1` and `$2` describe the operands.
fn across_text(product: WgmmaAcross) -> String {
    format!(
        "{{ // $0\n{DECLARATIONS}mov.b64 {{lhs, upper}}, $1;\nmov.b64 {{rhs, upper}}, $2;\nwgmma.fence.sync.aligned;\n{}\
         wgmma.wait_group.sync.aligned 0;\n}}",
        product.text()
    )
}

/// Names `count` registers for sums, at the beginning of a kernel. [`wgmma_sums_clear`] makes them zero.
#[cube]
pub(crate) fn wgmma_sums_declare(#[comptime] count: usize) {
    gpu_asm!("{text}", text = const format!(".reg .f32 sum<{count}>;"));
}

/// Makes the named sums zero.
#[cube]
pub(crate) fn wgmma_sums_clear(#[comptime] count: usize) {
    gpu_asm!("{text}", text = const clear_text(count));
}

/// Adds weighed rows to named sums, from register `first` of the weights' on. They are still under way when this
/// returns: [`wgmma_wait`] waits for them.
#[cube]
pub(crate) fn wgmma_sum_started<P: Size>(
    packed: Vector<u32, P>,
    rhs: u64,
    #[comptime] weights: WgmmaWeights,
) {
    gpu_asm!("{body}\n// {p}{x}", body = const sum_text(weights),
        p = in(_) load::<Vector<u32, P>>(packed), x = in(_) rhs);
}

/// Waits for all products.
#[cube]
pub(crate) fn wgmma_wait() {
    gpu_asm!("wgmma.wait_group.sync.aligned 0;");
}

/// The first `count` named sums, once [`wgmma_wait`] has waited for them.
#[cube]
pub(crate) fn wgmma_sums<R: Size>(#[comptime] count: usize) -> Vector<f32, R> {
    let sums: Vector<f32, R>;
    gpu_asm!("{body}\n// {d}", body = const read_text(count), d = out(_) sums);
    sums
}

/// Tells ptxas how many registers a launch gives each unit, which [`acquire_registers`](super::acquire_registers)
/// needs. It leaves that out if it does not know, and it knows from launch bounds with a number of blocks, which
/// `CubeCL` does not write, or from a product of at least 128 columns (CUDA 13.0). This one never runs, because
/// `never` is 0.
#[cube]
pub(crate) fn wgmma_pin_registers(never: u32) {
    gpu_asm!("{body}\n// {n}", body = const pin_text(), n = in(_) never);
}

/// A product both operands of which run across k.
#[cube]
pub(crate) fn wgmma_across<R: Size>(
    lhs: u64,
    rhs: u64,
    #[comptime] product: WgmmaAcross,
) -> Vector<f32, R> {
    let sum: Vector<f32, R>;
    gpu_asm!("{body}\n// {d}{x}{y}", body = const across_text(product),
        d = out(_) sum, x = in(_) lhs, y = in(_) rhs);
    sum
}
