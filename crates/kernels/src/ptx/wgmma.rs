//! Warpgroup matrix products of Hopper (PTX ISA, "Asynchronous warpgroup level matrix
//! instructions"): 128 units multiply 64 rows by n columns, both operands in shared memory.
//!
//! Register i of a unit's accumulators belongs to row `16 (unit / 32) + (unit mod 32) / 4`, 8 below
//! it where bit 1 of i is set, and to column `8 (i / 4) + 2 (unit mod 4) + (i mod 2)`.

use super::{ROW_BYTES, load};
use cubecl::prelude::*;

/// What a product multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaOperands {
    /// Columns of the product, a multiple of 8, at most 256.
    pub n: usize,
    /// PTX types of the operands.
    pub lhs: &'static str,
    pub rhs: &'static str,
    /// Whether k runs along the rows of 128 bytes; else m and n do, in chunks of 64 by 64, which
    /// only 16-bit operands can.
    pub lhs_k_major: bool,
    pub rhs_k_major: bool,
}

impl WgmmaOperands {
    /// Depth of one instruction: 32 bytes of k.
    fn k(self) -> usize {
        match self.lhs {
            "tf32" => 8,
            "e4m3" | "e5m2" => 32,
            _ => 16,
        }
    }

    fn instruction(self, registers: &str, lhs: &str, rhs: &str) -> String {
        let (n, k) = (self.n, self.k());
        let transposed = if k == 16 {
            format!(", {}, {}", u8::from(!self.lhs_k_major), u8::from(!self.rhs_k_major))
        } else {
            String::new()
        };
        format!(
            "wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{}.{} {{{registers}}}, {lhs}, {rhs}, \
             accumulate, 1, 1{transposed};\n",
            self.lhs, self.rhs
        )
    }

    /// How far the descriptor of an operand moves to the next 32 bytes of k, in 16 bytes: along the
    /// row, or 16 rows down.
    fn step(k_major: bool) -> usize {
        if k_major { 32 / 16 } else { 16 * ROW_BYTES / 16 }
    }
}

fn registers(range: std::ops::Range<usize>) -> String {
    range.map(|register| format!("%{register}")).collect::<Vec<_>>().join(", ")
}

/// `$0 = $1 + A B` over one k block of 128 bytes. The accumulators are held in vectors of `width`
/// registers, of which the first n / 2 are used. Before it returns, all but this block's products
/// are done.
fn block_text(operands: WgmmaOperands, width: usize) -> String {
    let used = operands.n / 2;
    let mut text = String::from(
        "{ // $0 $1\n.reg .pred accumulate;\n.reg .b64 lhs, rhs;\nsetp.eq.u32 accumulate, 0, 0;\n",
    );
    for register in 0..used {
        text += &format!("mov.f32 %{register}, %{};\n", width + register);
    }
    text += "mov.b64 lhs, $2;\nmov.b64 rhs, $3;\nwgmma.fence.sync.aligned;\n";
    for step in 0..ROW_BYTES / 32 {
        if step > 0 {
            text += &format!("add.s64 lhs, lhs, {};\n", WgmmaOperands::step(operands.lhs_k_major));
            text += &format!("add.s64 rhs, rhs, {};\n", WgmmaOperands::step(operands.rhs_k_major));
        }
        text += &operands.instruction(&registers(0..used), "lhs", "rhs");
    }
    text + "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;\n}"
}

/// `$0 = $1`, once all products are done.
fn drain_text(n: usize, width: usize) -> String {
    let mut text = String::from("{ // $0 $1\nwgmma.wait_group.sync.aligned 0;\n");
    for register in 0..n / 2 {
        text += &format!("mov.f32 %{register}, %{};\n", width + register);
    }
    text + "}"
}

/// Adds the product of two tiles, 128 bytes of k deep, to the accumulators. It is still under way
/// when this returns, the one before it no longer. ptxas puts the accumulators in place: the moves
/// cost nothing.
#[cube]
pub(crate) fn wgmma_block<R: Size>(
    accumulators: Vector<f32, R>,
    lhs: u64,
    rhs: u64,
    #[comptime] operands: WgmmaOperands,
) -> Vector<f32, R> {
    let width = R::value().comptime();
    let sum: Vector<f32, R>;
    gpu_asm!("{body}\n// {d}{a}{x}{y}", body = const block_text(operands, width),
        d = out(_) sum, a = in(_) load::<Vector<f32, R>>(accumulators), x = in(_) lhs, y = in(_) rhs);
    sum
}

/// Waits for all products, and orders what reads the accumulators after them.
#[cube]
pub(crate) fn wgmma_drain<R: Size>(
    accumulators: Vector<f32, R>,
    #[comptime] n: usize,
) -> Vector<f32, R> {
    let width = R::value().comptime();
    let sum: Vector<f32, R>;
    gpu_asm!("{body}\n// {d}{a}", body = const drain_text(n, width),
        d = out(_) sum, a = in(_) load::<Vector<f32, R>>(accumulators));
    sum
}

/// 128-byte swizzle; groups of eight rows 1024 bytes apart.
const K_MAJOR: u64 = (1 << 62) | (64 << 32) | (1 << 16);
/// The same, and chunks of 64 columns 8192 bytes apart.
const MN_MAJOR: u64 = (1 << 62) | (64 << 32) | (512 << 16);

/// Tells the instruction where a tile lies and how ("Matrix descriptor format").
#[cube]
pub(crate) fn tile_descriptor(address: u32, #[comptime] k_major: bool) -> u64 {
    let layout = comptime!(if k_major { K_MAJOR } else { MN_MAJOR });
    u64::cast_from((address & 0x3FFFF) >> 4) | layout.runtime()
}
