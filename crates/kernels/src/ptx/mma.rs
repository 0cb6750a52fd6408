//! Warp matrix products (PTX ISA, "Matrix multiply-accumulate using mma instruction"): 32 units
//! multiply 16 rows by 8 columns, operands in registers, which `ldmatrix` fills from shared memory.
//!
//! The accumulators of a 16 by 8 product lie as those of [`wgmma`](super::wgmma) do within a warp.

use super::{
    ROW_BYTES,
    fragments::{Lying, Side, Terms, fragments},
    load,
};
use crate::{block_format::BlockFormat, device::SCALE_BLOCK_BYTES};
use cubecl::prelude::*;

/// What a warp multiplies: tiles of 16 `m16` rows by 16 `n16` columns, 128 bytes of k deep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaOperands {
    pub m16: usize,
    pub n16: usize,
    /// PTX types of the operands.
    pub lhs: &'static str,
    pub rhs: &'static str,
    /// As in [`WgmmaOperands`](super::wgmma::WgmmaOperands).
    pub lhs_k_major: bool,
    pub rhs_k_major: bool,
    pub scales: Scales,
}

/// What the instruction scales elements of k of a row or a column by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Scales {
    /// It is the instruction without scales.
    None,
    /// By 1, every 32 elements of 8 bits: GPUs of `sm_120a` and `sm_121a` have the instruction with scales at twice
    /// the rate of the other one.
    Ones,
    /// By what shared memory holds, as [`SCALE_BLOCK_BYTES`] says.
    Blocks(BlockFormat),
}

/// Four scales of 1.
const ONES: u32 = 0x7f7f_7f7f;

impl MmaOperands {
    /// Accumulators a unit holds.
    pub(crate) fn registers(self) -> usize {
        self.m16 * self.n16 * 8
    }

    /// How the operand lies that has k along its rows or not.
    pub(crate) fn lying(self, k_major: bool) -> Lying {
        match (k_major, self.lhs) {
            (true, _) => Lying::AlongK,
            (false, "tf32") => {
                let is_alone = self.lhs_k_major || self.rhs_k_major;
                Lying::WordsAcrossK(if is_alone { Terms::InOrder } else { Terms::Paired })
            }
            (false, _) => Lying::AcrossK,
        }
    }

    /// Shape and types of the instruction; every one of them is 32 bytes of k deep.
    fn instruction(self) -> String {
        let (lhs, rhs) = (self.lhs, self.rhs);
        let k = match lhs {
            "tf32" => 8,
            "e4m3" | "e5m2" => 32,
            "e2m1" => 64,
            _ => 16,
        };
        let format = match self.scales {
            Scales::None => {
                return format!("mma.sync.aligned.m16n8k{k}.row.col.f32.{lhs}.{rhs}.f32");
            }
            Scales::Ones => BlockFormat::Mxfp8,
            Scales::Blocks(format) => format,
        };
        let (kind, scale) = (format.kind(), format.scale_type());
        format!("mma.sync.aligned.m16n8k{k}.row.col.{kind}.f32.{lhs}.{rhs}.f32.{scale}")
    }

    /// What follows the registers of the instruction for 16 rows and 8 columns of them, and step `k` of the block. Two
    /// such tiles of rows, and four of columns, have their scales in one register.
    fn scale_operands(self, rows: usize, columns: usize, k: usize) -> String {
        match self.scales {
            Scales::None => String::new(),
            Scales::Ones => ", ones, {0, 0}, ones, {0, 0}".into(),
            Scales::Blocks(format) => {
                let (_, byte) = format.place(k);
                format!(
                    ", ls{}, {{{byte}, {}}}, rs{}, {{{byte}, {}}}",
                    rows / 2,
                    rows % 2,
                    columns / 4,
                    columns % 4
                )
            }
        }
    }

    /// Declares what the instructions name as scales, and loads those of the first one.
    fn scales_text(self) -> String {
        match self.scales {
            Scales::None => String::new(),
            Scales::Ones => format!(".reg .b32 ones;\nmov.b32 ones, {ONES};\n"),
            Scales::Blocks(_) => format!(
                ".reg .b32 ls<{}>, rs<{}>;\n{}",
                self.m16 / 2,
                self.n16 / 2,
                self.scale_words(0)
            ),
        }
    }

    /// Loads a block of scales: `$6` and `$7` are where this unit's words lie in the first one, one for each 32 rows or
    /// columns.
    fn scale_words(self, block: usize) -> String {
        let words = |name: &str, count: usize, from: &str| {
            let list: Vec<_> = (0..count).map(|at| format!("{name}{at}")).collect();
            let width = if count == 1 { String::new() } else { format!(".v{count}") };
            let offset = block * SCALE_BLOCK_BYTES;
            format!("ld.shared{width}.b32 {{{}}}, [{from} + {offset}];\n", list.join(", "))
        };
        words("ls", self.m16 / 2, "$6") + &words("rs", self.n16 / 2, "$7")
    }
}

/// `$0 = $1 + A B`; `$2` and `$3` are row and chunk in A's tile, `$4` and `$5` in B's.
fn block_text(operands: MmaOperands) -> String {
    let MmaOperands { m16, n16, .. } = operands;
    let registers = operands.registers();
    let mut text = format!(
        "{{ // $0 $1\n.reg .b32 t, a<{}>, b<{}>, ar, ac, br, bc;\nmov.b32 ar, $2;\nmov.b32 ac, $3;\n\
         mov.b32 br, $4;\nmov.b32 bc, $5;\n",
        4 * m16,
        4 * n16
    );
    for register in 0..registers {
        text += &format!("mov.f32 %{register}, %{};\n", registers + register);
    }
    text += &operands.scales_text();
    let instruction = operands.instruction();
    for k in 0..ROW_BYTES / 32 {
        if let Scales::Blocks(format) = operands.scales
            && let (block @ 1.., 0) = format.place(k)
        {
            text += &operands.scale_words(block);
        }
        text += &fragments(Side::Lhs, m16, k, operands.lying(operands.lhs_k_major));
        text += &fragments(Side::Rhs, n16, k, operands.lying(operands.rhs_k_major));
        for (i, j) in (0..m16).flat_map(|i| (0..2 * n16).map(move |j| (i, j))) {
            let at = 4 * (i * 2 * n16 + j);
            let sums = format!("{{%{at}, %{}, %{}, %{}}}", at + 1, at + 2, at + 3);
            let (a, b) = (4 * i, 2 * j);
            let scales = operands.scale_operands(i, j, k);
            text += &format!(
                "{instruction} {sums}, {{a{a}, a{}, a{}, a{}}}, {{b{b}, b{}}}, {sums}{scales};\n",
                a + 1,
                a + 2,
                a + 3,
                b + 1
            );
        }
    }
    text + "}"
}

/// Adds the product of two tiles in shared memory to the accumulators. Rows and chunks are this
/// unit's, from [`lhs_position`] and [`rhs_position`].
#[cube]
pub(crate) fn mma_block<R: Size>(
    accumulators: Vector<f32, R>,
    lhs_row: u32,
    lhs_chunk: u32,
    rhs_row: u32,
    rhs_chunk: u32,
    #[comptime] operands: MmaOperands,
) -> Vector<f32, R> {
    let sum: Vector<f32, R>;
    gpu_asm!("{body}\n// {d}{a}{lr}{lc}{rr}{rc}", body = const block_text(operands),
        d = out(_) sum, a = in(_) load::<Vector<f32, R>>(accumulators),
        lr = in(_) lhs_row, lc = in(_) lhs_chunk, rr = in(_) rhs_row, rc = in(_) rhs_chunk);
    sum
}

/// As [`mma_block`], with scales at those addresses in shared memory: where the first word lies of this unit's, from
/// [`scale_word`].
#[cube]
pub(crate) fn mma_scaled_block<R: Size>(
    accumulators: Vector<f32, R>,
    lhs_row: u32,
    lhs_chunk: u32,
    rhs_row: u32,
    rhs_chunk: u32,
    lhs_scales: u32,
    rhs_scales: u32,
    #[comptime] operands: MmaOperands,
) -> Vector<f32, R> {
    let sum: Vector<f32, R>;
    gpu_asm!("{body}\n// {d}{a}{lr}{lc}{rr}{rc}{ls}{rs}", body = const block_text(operands),
        d = out(_) sum, a = in(_) load::<Vector<f32, R>>(accumulators),
        lr = in(_) lhs_row, lc = in(_) lhs_chunk, rr = in(_) rhs_row, rc = in(_) rhs_chunk,
        ls = in(_) lhs_scales, rs = in(_) rhs_scales);
    sum
}

/// Where a block of scales has the word of `lane` for 32 rows or columns from `first` on, in bytes. Of four lanes the
/// first pair has rows g and g + 8 of 16, the second pair those of the next 16; each of them has a column of 8
/// (PTX ISA, "Block Scaling for mma.sync").
#[cube]
pub(crate) fn scale_word(lane: u32, first: u32) -> u32 {
    16 * (8 * (lane % 4) + lane / 4) + first / 32 * 4
}

/// A product that a warp computes of 16 rows and `n` columns, both k-major in shared memory in blocks
/// of 64 elements of k.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaProduct {
    /// Columns, a multiple of 16.
    pub n: usize,
    /// A multiple of 16.
    pub k: usize,
    /// PTX type of the operands: `bf16`, `f16` or `tf32`.
    pub dtype: &'static str,
    /// Bytes from block to block.
    pub lhs_block_bytes: usize,
    pub rhs_block_bytes: usize,
}

impl MmaProduct {
    /// Sums to the registers from `first` on; row and chunk of a unit are the registers `ar` and `ac`
    /// in A's tile, `br` and `bc` in B's.
    fn text(self, first: usize) -> String {
        let Self { n, k, dtype, lhs_block_bytes, rhs_block_bytes } = self;
        let zero = |register| format!("mov.f32 %{register}, 0f00000000;\n");
        let mut text: String = (first..first + n / 2).map(zero).collect();
        for step in 0..k / depth(dtype) {
            let (block, turn) = (step / 4, 32 * (step % 4));
            text += &load_matrices("a", "", "ar", "ac", turn, block * lhs_block_bytes);
            for tile in 0..n / 16 {
                let offset = block * rhs_block_bytes + 16 * ROW_BYTES * tile;
                text += &load_matrices("b", "", "br", "bc", turn, offset);
                text += &mma_pair(dtype, first + 8 * tile, "a0, a1, a2, a3");
            }
        }
        text
    }
}

/// What a warp adds to 16 rows of `n` columns: weights in registers times rows in shared memory, in
/// blocks of 128 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaWeights {
    /// Columns, a multiple of 16.
    pub n: usize,
    /// Rows that are weighed, a multiple of 16.
    pub k: usize,
    /// PTX type of weights and rows: `bf16`, `f16` or `tf32`.
    pub dtype: &'static str,
    /// Bytes from block to block.
    pub block_bytes: usize,
}

/// `ldmatrix` of four 8 by 8 matrices to `x0` to `x3`, from `row` and `offset` on, at `chunk` turned
/// over by `turn`.
fn load_matrices(
    x: &str,
    transposed: &str,
    row: &str,
    chunk: &str,
    turn: usize,
    offset: usize,
) -> String {
    format!(
        "xor.b32 t, {chunk}, {turn};\nadd.u32 t, t, {row};\n\
         ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{{x}0, {x}1, {x}2, {x}3}}, \
         [t + {offset}];\n"
    )
}

/// What the instructions call the type of f32 numbers of which they read 19 bits.
pub(crate) const TF32: &str = "tf32";

/// Bytes of an element.
pub(crate) fn element_bytes(dtype: &str) -> usize {
    if dtype == TF32 { 4 } else { 2 }
}

/// How far along k an instruction goes: 32 bytes.
fn depth(dtype: &str) -> usize {
    32 / element_bytes(dtype)
}

/// An instruction onto the four registers from `first` on.
fn mma_text(dtype: &str, first: usize, lhs: &str, rhs: &str) -> String {
    let sums = format!("{{%{first}, %{}, %{}, %{}}}", first + 1, first + 2, first + 3);
    format!(
        "mma.sync.aligned.m16n8k{}.row.col.f32.{dtype}.{dtype}.f32 {sums}, {{{lhs}}}, {{{rhs}}}, {sums};\n",
        depth(dtype)
    )
}

/// Two instructions: fragments `a` with both halves of fragments `b`, onto eight registers.
fn mma_pair(dtype: &str, first: usize, lhs: &str) -> String {
    mma_text(dtype, first, lhs, "b0, b1") + &mma_text(dtype, first + 4, lhs, "b2, b3")
}

/// What the texts of products refer to.
const DECLARATIONS: &str = ".reg .b32 t, a<4>, b<4>, ar, ac, br, bc;\n";

/// `$0 = A B`; `$1` and `$2` are row and chunk in A's tile, `$3` and `$4` in B's.
fn product_text(product: MmaProduct) -> String {
    format!(
        "{{ // $0\n{DECLARATIONS}mov.b32 ar, $1;\nmov.b32 ac, $2;\nmov.b32 br, $3;\n\
         mov.b32 bc, $4;\n{}}}",
        product.text(0)
    )
}

/// Two products of the same sizes, the second behind the first in `$0`; `$1` to `$4` are the rows of
/// both operands of the one and of the other, `$5` and `$6` the chunks of all left and right ones.
fn products_text(product: MmaProduct) -> String {
    format!(
        "{{ // $0\n{DECLARATIONS}mov.b32 ac, $5;\nmov.b32 bc, $6;\nmov.b32 ar, $1;\n\
         mov.b32 br, $2;\n{}mov.b32 ar, $3;\nmov.b32 br, $4;\n{}}}",
        product.text(0),
        product.text(product.n / 2)
    )
}

/// `$0 = $1 + A B`; `$2` are A's registers, `$3` and `$4` row and chunk in B's tile.
fn weights_text(weights: MmaWeights, width: usize) -> String {
    let MmaWeights { n, k, dtype, block_bytes } = weights;
    let mut text = format!("{{ // $0 $1 $2\n{DECLARATIONS}mov.b32 br, $3;\nmov.b32 bc, $4;\n");
    for register in 0..n / 2 {
        text += &format!("mov.f32 %{register}, %{};\n", width + register);
    }
    if dtype == TF32 {
        return text + &tf32_weights_text(weights, 2 * width) + "}";
    }
    for step in 0..k / 16 {
        let packed = 2 * width + 4 * step;
        let lhs = format!("%{packed}, %{}, %{}, %{}", packed + 1, packed + 2, packed + 3);
        for tile in 0..n / 16 {
            let offset = tile / 4 * block_bytes + 16 * ROW_BYTES * step;
            text += &load_matrices("b", ".trans", "br", "bc", 32 * (tile % 4), offset);
            text += &mma_pair(dtype, 8 * tile, &lhs);
        }
    }
    text + "}"
}

/// As [`weights_text`], of TF32 weights from register `packed` on. As products leave them, a lane has columns 2t and 2t + 1
/// of them, where it should have t and t + 4 of a left operand: rows are weighed in that order.
fn tf32_weights_text(weights: MmaWeights, packed: usize) -> String {
    let MmaWeights { n, k, dtype, block_bytes } = weights;
    let mut text = String::new();
    for step in 0..k / 8 {
        let at = packed + 4 * step;
        let lhs = format!("%{at}, %{}, %{}, %{}", at + 2, at + 1, at + 3);
        for tile in 0..n / 8 {
            let offset = tile / 4 * block_bytes + 8 * ROW_BYTES * step;
            for (row, turn) in [(0, 32 * (tile % 4)), (1, 32 * (tile % 4) + 16)] {
                text += &format!(
                    "xor.b32 t, bc, {turn};\nadd.u32 t, t, br;\nld.shared.b32 b{row}, [t + {}];\n",
                    offset + row * ROW_BYTES
                );
            }
            text += &mma_text(dtype, 4 * tile, &lhs, "b0, b1");
        }
    }
    text
}

/// The product of 16 rows and a tile. Rows and chunks are this unit's, from [`lhs_position`] and
/// [`rhs_position`], both k-major.
#[cube]
pub(crate) fn mma_product<R: Size>(
    lhs_row: u32,
    lhs_chunk: u32,
    rhs_row: u32,
    rhs_chunk: u32,
    #[comptime] product: MmaProduct,
) -> Vector<f32, R> {
    let sum: Vector<f32, R>;
    gpu_asm!("{body}\n// {d}{lr}{lc}{rr}{rc}", body = const product_text(product),
        d = out(_) sum, lr = in(_) lhs_row, lc = in(_) lhs_chunk, rr = in(_) rhs_row,
        rc = in(_) rhs_chunk);
    sum
}

/// Two products of the same sizes, one behind the other; the chunks are those of both.
#[cube]
pub(crate) fn mma_products<R: Size>(
    first_lhs: u32,
    first_rhs: u32,
    second_lhs: u32,
    second_rhs: u32,
    lhs_chunk: u32,
    rhs_chunk: u32,
    #[comptime] product: MmaProduct,
) -> Vector<f32, R> {
    let sum: Vector<f32, R>;
    gpu_asm!("{body}\n// {d}{w}{x}{y}{z}{l}{r}", body = const products_text(product),
        d = out(_) sum, w = in(_) first_lhs, x = in(_) first_rhs, y = in(_) second_lhs,
        z = in(_) second_rhs, l = in(_) lhs_chunk, r = in(_) rhs_chunk);
    sum
}

/// Adds weighed rows to the accumulators; `packed` as
/// [`wgmma_weights`](super::wgmma::wgmma_weights) takes them. Row and chunk are this unit's, from
/// [`rhs_position`], not k-major.
#[cube]
pub(crate) fn mma_weights<R: Size, P: Size>(
    accumulators: Vector<f32, R>,
    packed: Vector<u32, P>,
    rhs_row: u32,
    rhs_chunk: u32,
    #[comptime] weights: MmaWeights,
) -> Vector<f32, R> {
    let width = R::value().comptime();
    let sum: Vector<f32, R>;
    gpu_asm!("{body}\n// {d}{a}{p}{r}{c}", body = const weights_text(weights, width),
        d = out(_) sum, a = in(_) load::<Vector<f32, R>>(accumulators),
        p = in(_) load::<Vector<u32, P>>(packed), r = in(_) rhs_row, c = in(_) rhs_chunk);
    sum
}

/// Row and chunk from which `lane` of a warp loads the left operand: of the four 8 by 8 matrices
/// of a fragment, the first two lie below each other, then 16 bytes of k on.
#[cube]
pub(crate) fn lhs_position(lane: u32, #[comptime] k_major: bool) -> (u32, u32) {
    let low = lane & 7;
    let (row, chunk) = if comptime!(k_major) {
        (lane & 15, lane >> 4)
    } else {
        (((lane >> 4) << 3) + low, (lane >> 3) & 1)
    };
    (row, chunk ^ low)
}

/// As [`lhs_position`], of the right operand: the first two matrices follow each other along k.
#[cube]
pub(crate) fn rhs_position(lane: u32, #[comptime] k_major: bool) -> (u32, u32) {
    let low = lane & 7;
    let (row, chunk) = if comptime!(k_major) {
        (((lane >> 4) << 3) + low, (lane >> 3) & 1)
    } else {
        (lane & 15, lane >> 4)
    };
    (row, chunk ^ low)
}
