//! Warpgroup matrix products of Hopper (PTX ISA, "Asynchronous warpgroup level matrix
//! instructions"): 128 units multiply 64 rows by n columns, both operands in shared memory.
//!
//! Register i of a unit's accumulators belongs to row `16 (unit / 32) + (unit mod 32) / 4`, 8 below
//! it where bit 1 of i is set, and to column `8 (i / 4) + 2 (unit mod 4) + (i mod 2)`.

use super::{ROW_BYTES, load};
use cubecl::prelude::*;
use std::ops::Range;

/// What a product multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaOperands {
    /// Columns of the product, a multiple of 8, at most 256.
    pub n: usize,
    /// PTX types of the operands.
    pub lhs: &'static str,
    pub rhs: &'static str,
    /// Whether k runs along the rows of 128 bytes; else m and n do, in [chunks](Self::chunk). Hopper takes
    /// 16-bit operands alone that way, `tcgen05` those of 8 bits, too.
    pub lhs_k_major: bool,
    pub rhs_k_major: bool,
}

impl WgmmaOperands {
    /// Depth of one instruction: 32 bytes of k.
    fn k(self) -> usize {
        match self.lhs {
            "tf32" => 8,
            "e4m3" | "e5m2" => 32,
            "e2m1" => 64,
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

    /// How far the descriptor of an operand moves to the next instruction, in 16 bytes: along the row, or as many
    /// rows down as the instruction is deep.
    pub(super) fn step(self, k_major: bool) -> usize {
        if k_major { 32 / 16 } else { self.k() * ROW_BYTES / 16 }
    }

    /// Elements of a row of 128 bytes. A chunk of an operand that runs across k has so many columns, and as many rows
    /// of k.
    pub(crate) fn chunk(self) -> usize {
        ROW_BYTES / 32 * self.k()
    }
}

pub(super) fn registers(range: Range<usize>) -> String {
    range.map(|register| format!("%{register}")).collect::<Vec<_>>().join(", ")
}

/// `$0 = $1 + A B` over one k block of 128 bytes. The accumulators are held in vectors of `width`
/// registers, of which the first n / 2 are used. Before it returns, all but this block's products
/// are done.
fn block_text(operands: WgmmaOperands, width: usize) -> String {
    let used = operands.n / 2;
    let mut text = String::from(
        "{ // $0 $1\n.reg .pred accumulate;\n.reg .b64 at, bt;\n.reg .b32 lhs, rhs, upper, moved;\n\
         setp.eq.u32 accumulate, 0, 0;\n",
    );
    for register in 0..used {
        text += &format!("mov.f32 %{register}, %{};\n", width + register);
    }
    text += "mov.b64 {lhs, upper}, $2;\nmov.b64 {rhs, upper}, $3;\nwgmma.fence.sync.aligned;\n";
    for step in 0..ROW_BYTES / 32 {
        text += &described_at("at", "lhs", step * operands.step(operands.lhs_k_major));
        text += &described_at("bt", "rhs", step * operands.step(operands.rhs_k_major));
        text += &operands.instruction(&registers(0..used), "at", "bt");
    }
    text + "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;\n}"
}

/// The first registers of `$0 = $1`, once all products but the last `pending` groups are done.
fn drain_text(used: usize, width: usize, pending: usize) -> String {
    let mut text = format!("{{ // $0 $1\nwgmma.wait_group.sync.aligned {pending};\n");
    for register in 0..used {
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
    gpu_asm!("{body}\n// {d}{a}", body = const drain_text(n / 2, width, 0),
        d = out(_) sum, a = in(_) load::<Vector<f32, R>>(accumulators));
    sum
}

/// As [`wgmma_drain`], of the first `used` registers of a vector.
#[cube]
pub(crate) fn wgmma_settle<R: Size>(
    accumulators: Vector<f32, R>,
    #[comptime] used: usize,
) -> Vector<f32, R> {
    wgmma_drain::<R>(accumulators, comptime!(2 * used))
}

/// As [`wgmma_settle`], with the last group of products still under way: `used` registers that it does not touch.
#[cube]
pub(crate) fn wgmma_settle_but_last<R: Size>(
    accumulators: Vector<f32, R>,
    #[comptime] used: usize,
) -> Vector<f32, R> {
    let width = R::value().comptime();
    let sum: Vector<f32, R>;
    gpu_asm!("{body}\n// {d}{a}", body = const drain_text(used, width, 1),
        d = out(_) sum, a = in(_) load::<Vector<f32, R>>(accumulators));
    sum
}

/// A product of 16-bit operands that starts from zero, both along k, over more than one block of 128
/// bytes of k.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaProduct {
    /// Columns.
    pub n: usize,
    /// PTX type of the operands.
    pub dtype: &'static str,
    /// Terms of the sums, a multiple of 16.
    pub k: usize,
    /// Bytes from one block of an operand to the next.
    pub lhs_block_bytes: usize,
    pub rhs_block_bytes: usize,
    /// Registers before the sums in their vector.
    pub first: usize,
}

/// A sum of products whose left operand, 16-bit, lies in registers as accumulators do, packed, and
/// whose right one runs across k: chunks of 64 rows of k by 64 columns, columns first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaWeights {
    /// Columns.
    pub n: usize,
    /// PTX type of the operands.
    pub dtype: &'static str,
    /// Terms of the sums, a multiple of 16.
    pub k: usize,
    /// Bytes of 64 rows of k of the right operand.
    pub rows_bytes: usize,
    /// Registers before the accumulators in their vector.
    pub first: usize,
}

impl WgmmaProduct {
    /// Issues it as a group; its operands' descriptors are the registers `lhs` and `rhs`.
    fn text(self) -> String {
        let Self { n, dtype, k, lhs_block_bytes, rhs_block_bytes, first } = self;
        let sums = registers(first..first + n / 2);
        let mut text = String::new();
        for step in 0..k / 16 {
            let at = |block_bytes: usize| (step / 4 * block_bytes + step % 4 * 32) / 16;
            text += &format!(
                "{}{}wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {{{sums}}}, at, bt, {}, \
                 1, 1, 0, 0;\n",
                described_at("at", "lhs", at(lhs_block_bytes)),
                described_at("bt", "rhs", at(rhs_block_bytes)),
                if step == 0 { "from_zero" } else { "onto" },
            );
        }
        text + "wgmma.commit_group.sync.aligned;\n"
    }
}

impl WgmmaWeights {
    /// Registers of the accumulators, of vectors that hold something else before them.
    fn accumulators(self) -> Range<usize> {
        self.first..self.first + self.n / 2
    }

    /// Copies the accumulators of a vector of `width` to the result, before anything is issued.
    fn moves(self, width: usize) -> String {
        let moved = |register| format!("mov.f32 %{register}, %{};\n", width + register);
        self.accumulators().map(moved).collect()
    }

    /// Issues it as a group; the left operand lies in the registers from `packed` on, the right one's
    /// descriptor is the register `weighed`.
    fn text(self, packed: usize) -> String {
        self.text_onto(&registers(self.accumulators()), packed)
    }

    /// The same, with names for the accumulators.
    pub(super) fn text_onto(self, sums: &str, packed: usize) -> String {
        let Self { n, dtype, k, rows_bytes, .. } = self;
        let mut text = String::new();
        for step in 0..k / 16 {
            text += &format!(
                "{}wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {{{sums}}}, {{{}}}, bt, \
                 onto, 1, 1, 1;\n",
                described_at(
                    "bt",
                    "weighed",
                    (step / 4 * rows_bytes + step % 4 * 16 * ROW_BYTES) / 16
                ),
                registers(packed + 4 * step..packed + 4 * step + 4),
            );
        }
        text + "wgmma.commit_group.sync.aligned;\n"
    }
}

/// What the texts of products refer to.
pub(super) const DECLARATIONS: &str = ".reg .pred from_zero, onto;\n.reg .b64 at, bt;\n\
     .reg .b32 lhs, rhs, weighed, upper, moved;\nsetp.ne.u32 from_zero, 0, 0;\nsetp.eq.u32 onto, 0, 0;\n";

/// The descriptor `target`: that of `operand`, so many times 16 bytes on. The address is in the lower word, which the
/// sum does not leave. The upper one is the same of every descriptor and known to the compiler, so that an instruction
/// costs the units one addition and one move instead of four and two, which take longer than a product of 64 columns.
pub(super) fn described_at(target: &str, operand: &str, steps: usize) -> String {
    format!("add.u32 moved, {operand}, {steps};\nmov.b64 {target}, {{moved, upper}};\n")
}

/// `$0 = A B`; `$1` and `$2` describe the operands.
fn product_text(product: WgmmaProduct) -> String {
    format!(
        "{{ // $0\n{DECLARATIONS}mov.b64 {{lhs, upper}}, $1;\nmov.b64 {{rhs, upper}}, $2;\nwgmma.fence.sync.aligned;\n{}\
         wgmma.wait_group.sync.aligned 0;\n}}",
        product.text()
    )
}

/// Two products of the same sizes, the second behind the first in `$0`; `$1` to `$4` describe the
/// operands of the one and of the other. Ends with all but the last `pending`.
fn products_text(product: WgmmaProduct, pending: usize) -> String {
    let second = WgmmaProduct { first: product.first + product.n / 2, ..product };
    format!(
        "{{ // $0\n{DECLARATIONS}mov.b64 {{lhs, upper}}, $1;\nmov.b64 {{rhs, upper}}, $2;\nwgmma.fence.sync.aligned;\n{}\
         mov.b64 {{lhs, upper}}, $3;\nmov.b64 {{rhs, upper}}, $4;\n{}wgmma.wait_group.sync.aligned {pending};\n}}",
        product.text(),
        second.text()
    )
}

/// `$0 = $1 + A B`; `$2` are A's registers, `$3` describes B.
fn weights_text(weights: WgmmaWeights, width: usize) -> String {
    format!(
        "{{ // $0 $1 $2\n{DECLARATIONS}mov.b64 {{weighed, upper}}, $3;\n{}wgmma.fence.sync.aligned;\n{}\
         wgmma.wait_group.sync.aligned 0;\n}}",
        weights.moves(width),
        weights.text(2 * width)
    )
}

/// Both at once: `$1` are the accumulators, `$2` the weights; `$3`, `$4` and `$5` describe the
/// product's operands and what is weighed. Ends with the product.
fn overlapped_text(
    product: WgmmaProduct,
    weights: WgmmaWeights,
    width: usize,
    takes_turns: bool,
) -> String {
    let turn = |instruction, barrier| match takes_turns {
        true => format!("{instruction} {barrier}, {UNITS_OF_BOTH};\n"),
        false => String::new(),
    };
    format!(
        "{{ // $0 $1 $2\n{DECLARATIONS}mov.b64 {{lhs, upper}}, $3;\nmov.b64 {{rhs, upper}}, $4;\n\
         mov.b64 {{weighed, upper}}, $5;\n{}{}wgmma.fence.sync.aligned;\n{}{}{}\
         wgmma.wait_group.sync.aligned 1;\n}}",
        weights.moves(width),
        turn("bar.sync", "$6"),
        product.text(),
        weights.text(2 * width),
        turn("bar.arrive", "$7"),
    )
}

/// The product of two tiles.
#[cube]
pub(crate) fn wgmma_product<R: Size>(
    lhs: u64,
    rhs: u64,
    #[comptime] product: WgmmaProduct,
) -> Vector<f32, R> {
    let sum: Vector<f32, R>;
    gpu_asm!("{body}\n// {d}{x}{y}", body = const product_text(product),
        d = out(_) sum, x = in(_) lhs, y = in(_) rhs);
    sum
}

/// Two products of the same sizes, one behind the other.
#[cube]
pub(crate) fn wgmma_products<R: Size>(
    first_lhs: u64,
    first_rhs: u64,
    second_lhs: u64,
    second_rhs: u64,
    #[comptime] product: WgmmaProduct,
) -> Vector<f32, R> {
    let sum: Vector<f32, R>;
    gpu_asm!("{body}\n// {d}{w}{x}{y}{z}", body = const products_text(product, 0),
        d = out(_) sum, w = in(_) first_lhs, x = in(_) first_rhs,
        y = in(_) second_lhs, z = in(_) second_rhs);
    sum
}

/// As [`wgmma_products`], with the second still under way: [`wgmma_settle`] waits for it.
#[cube]
pub(crate) fn wgmma_products_started<R: Size>(
    first_lhs: u64,
    first_rhs: u64,
    second_lhs: u64,
    second_rhs: u64,
    #[comptime] product: WgmmaProduct,
) -> Vector<f32, R> {
    let sum: Vector<f32, R>;
    gpu_asm!("{body}\n// {d}{w}{x}{y}{z}", body = const products_text(product, 1),
        d = out(_) sum, w = in(_) first_lhs, x = in(_) first_rhs,
        y = in(_) second_lhs, z = in(_) second_rhs);
    sum
}

/// Adds weighed rows to the accumulators.
#[cube]
pub(crate) fn wgmma_weights<R: Size, P: Size>(
    accumulators: Vector<f32, R>,
    lhs: Vector<u32, P>,
    rhs: u64,
    #[comptime] weights: WgmmaWeights,
) -> Vector<f32, R> {
    let width = R::value().comptime();
    let sum: Vector<f32, R>;
    gpu_asm!("{body}\n// {d}{a}{p}{y}", body = const weights_text(weights, width),
        d = out(_) sum, a = in(_) load::<Vector<f32, R>>(accumulators),
        p = in(_) load::<Vector<u32, P>>(lhs), y = in(_) rhs);
    sum
}

/// Units of a warpgroup that waits for its turn, and of the one that passes it on.
const UNITS_OF_BOTH: u32 = 256;

/// Barriers of warpgroups that take turns, 1 to 15: a warpgroup waits at its own for the one before it, and arrives at
/// that of the next. The exponentials of one then run beside the products of another.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Turn {
    pub(crate) own: u32,
    pub(crate) next: u32,
}

/// Gives the next warpgroup its turn.
#[cube]
pub(crate) fn pass_turn(turn: Turn) {
    gpu_asm!("bar.arrive {b}, {n};", b = in(_) load::<u32>(turn.next), n = const UNITS_OF_BOTH);
}

/// [`wgmma_product`], which is done when this returns, and [`wgmma_weights`], which is not: its
/// accumulators have to be settled. One block of instructions has to issue both: where registers are
/// written in between, the compiler has each instruction wait for the one before it. With `takes_turns` it waits for its
/// turn first, and passes it on once both are issued.
#[cube]
pub(crate) fn wgmma_overlapped<R: Size, P: Size>(
    accumulators: Vector<f32, R>,
    packed: Vector<u32, P>,
    lhs: u64,
    rhs: u64,
    weighed: u64,
    turn: Turn,
    #[comptime] product: WgmmaProduct,
    #[comptime] weights: WgmmaWeights,
    #[comptime] takes_turns: bool,
) -> Vector<f32, R> {
    let width = R::value().comptime();
    let sum: Vector<f32, R>;
    gpu_asm!("{body}\n// {d}{a}{p}{x}{y}{z}{v}{w}",
        body = const overlapped_text(product, weights, width, takes_turns),
        d = out(_) sum, a = in(_) load::<Vector<f32, R>>(accumulators),
        p = in(_) load::<Vector<u32, P>>(packed), x = in(_) lhs, y = in(_) rhs, z = in(_) weighed,
        v = in(_) load::<u32>(turn.own), w = in(_) load::<u32>(turn.next));
    sum
}

/// 128-byte swizzle; groups of eight rows 1024 bytes apart.
const K_MAJOR: u64 = (1 << 62) | (64 << 32) | (1 << 16);
/// The same, for chunks of 64 columns: how far they are apart is missing.
const MN_MAJOR: u64 = (1 << 62) | (64 << 32);
/// Bytes of a chunk of 64 rows of k.
const CHUNK_BYTES: usize = 64 * ROW_BYTES;

/// Tells the instruction where a tile lies and how ("Matrix descriptor format").
#[cube]
pub(crate) fn tile_descriptor(address: u32, #[comptime] k_major: bool) -> u64 {
    if comptime!(k_major) {
        described(address, K_MAJOR)
    } else {
        tile_descriptor_across(address, CHUNK_BYTES)
    }
}

/// As [`tile_descriptor`], of a tile that runs across k: chunks of 64 columns so many bytes apart.
#[cube]
pub(super) fn tile_descriptor_across(address: u32, #[comptime] chunk_bytes: usize) -> u64 {
    described(address, comptime!(MN_MAJOR | (chunk_bytes as u64 / 16) << 16))
}

#[cube]
fn described(address: u32, #[comptime] layout: u64) -> u64 {
    u64::cast_from((address & 0x3FFFF) >> 4) | layout.runtime()
}
