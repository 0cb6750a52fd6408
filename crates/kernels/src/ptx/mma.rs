//! Warp matrix products (PTX ISA, "Matrix multiply-accumulate using mma instruction"): 32 units
//! multiply 16 rows by 8 columns, operands in registers, which `ldmatrix` fills from shared memory.
//!
//! The accumulators of a 16 by 8 product lie as those of [`wgmma`](super::wgmma) do within a warp.

use super::{ROW_BYTES, load};
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
}

impl MmaOperands {
    /// Accumulators a unit holds.
    pub(crate) fn registers(self) -> usize {
        self.m16 * self.n16 * 8
    }

    /// Shape and types of the instruction; every one of them is 32 bytes of k deep.
    fn instruction(self) -> String {
        let (lhs, rhs) = (self.lhs, self.rhs);
        let k = match lhs {
            "tf32" => 8,
            "e4m3" | "e5m2" => 32,
            _ => 16,
        };
        format!("mma.sync.aligned.m16n8k{k}.row.col.f32.{lhs}.{rhs}.f32")
    }
}

/// Loads fragments `x0..` of one operand for step `k` of the block: `count` tiles of 16.
///
/// `row` is the unit's row in the tile, `chunk` its chunk of 16 bytes there, swizzled, in bytes.
/// Where k runs along the rows, tiles lie 16 rows apart and steps 32 bytes; else the other way
/// around. Moving by 32 bytes turns bits of the chunk over, because of the swizzle.
fn fragments(x: &str, count: usize, k: usize, k_major: bool, row: &str, chunk: &str) -> String {
    let mut text = String::new();
    for tile in 0..count {
        let (along, down) = if k_major { (k, tile) } else { (tile, k) };
        let transposed = if k_major { "" } else { ".trans" };
        let at = 4 * tile;
        text += &format!(
            "xor.b32 t, {chunk}, {};\nadd.u32 t, t, {row};\n\
             ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{{x}{at}, {x}{}, {x}{}, {x}{}}}, \
             [t + {}];\n",
            32 * along,
            at + 1,
            at + 2,
            at + 3,
            16 * ROW_BYTES * down,
        );
    }
    text
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
    let instruction = operands.instruction();
    for k in 0..ROW_BYTES / 32 {
        text += &fragments("a", m16, k, operands.lhs_k_major, "ar", "ac");
        text += &fragments("b", n16, k, operands.rhs_k_major, "br", "bc");
        for (i, j) in (0..m16).flat_map(|i| (0..2 * n16).map(move |j| (i, j))) {
            let at = 4 * (i * 2 * n16 + j);
            let sums = format!("{{%{at}, %{}, %{}, %{}}}", at + 1, at + 2, at + 3);
            let (a, b) = (4 * i, 2 * j);
            text += &format!(
                "{instruction} {sums}, {{a{a}, a{}, a{}, a{}}}, {{b{b}, b{}}}, {sums};\n",
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
