//! Fragments of [`mma`](super::mma): registers of a warp's operands, loaded from shared memory.

use super::ROW_BYTES;
use cubecl::prelude::*;

/// How an operand lies in rows of 128 bytes of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Lying {
    /// Its rows run along k.
    AlongK,
    /// Its rows run along rows or columns of the output, in elements of 16 bits, which `ldmatrix` turns.
    AcrossK,
    /// The same in elements of 32 bits, which nothing turns: each unit loads its own.
    WordsAcrossK(Terms),
}

impl Lying {
    /// Those of words; of others `ldmatrix` takes them.
    pub(crate) fn terms(self) -> Terms {
        match self {
            Self::WordsAcrossK(terms) => terms,
            Self::AlongK | Self::AcrossK => Terms::InOrder,
        }
    }
}

/// From which of eight rows of k the instruction's terms t and t + 4 are taken, t being the unit's place in its quad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Terms {
    /// From rows t and t + 4, as `ldmatrix` takes those of an operand along k.
    InOrder,
    /// From rows 2t and 2t + 1, where both operands are taken so: with the swizzle, the units of a warp read 32 banks.
    Paired,
}

impl Terms {
    /// From the first term's row to the second one's.
    fn distance(self) -> usize {
        match self {
            Self::InOrder => 4,
            Self::Paired => 1,
        }
    }
}

/// Which operand of the instruction.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Lhs,
    Rhs,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Lhs => "a",
            Self::Rhs => "b",
        }
    }
}

/// Bytes of 32 columns of words, in the 32 rows of a block of k.
const WORD_CHUNK_BYTES: usize = 32 * ROW_BYTES;

/// Loads fragments of one operand for step `k` of the block: `count` tiles of 16, to the registers `a0..` or `b0..`.
/// The registers `ar` and `ac`, or `br` and `bc`, are the unit's row in the tile and its chunk of 16 bytes there,
/// swizzled, in bytes.
pub(super) fn fragments(side: Side, count: usize, k: usize, lying: Lying) -> String {
    match lying {
        Lying::AlongK | Lying::AcrossK => matrix_fragments(side, count, k, lying),
        Lying::WordsAcrossK(terms) => word_fragments(side, count, k, terms),
    }
}

/// Where k runs along the rows, tiles lie 16 rows apart and steps 32 bytes; else the other way around. Moving by 32
/// bytes turns bits of the chunk over, because of the swizzle.
fn matrix_fragments(side: Side, count: usize, k: usize, lying: Lying) -> String {
    let x = side.name();
    let mut text = String::new();
    for tile in 0..count {
        let (along, down, transposed) = match lying {
            Lying::AlongK => (k, tile, ""),
            _ => (tile, k, ".trans"),
        };
        let at = 4 * tile;
        text += &format!(
            "xor.b32 t, {x}c, {};\nadd.u32 t, t, {x}r;\n\
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

/// Rows of k, and of eight columns, turn bits of the chunk over, too.
fn word_fragments(side: Side, count: usize, k: usize, terms: Terms) -> String {
    let x = side.name();
    let mut text = String::new();
    for (tile, register) in (0..count).flat_map(|tile| (0..4).map(move |register| (tile, register)))
    {
        let (low, high) = (register % 2, register / 2);
        let (eight_on, second) = match side {
            Side::Lhs => (low, high),
            Side::Rhs => (high, low),
        };
        let down = second * terms.distance();
        let turn = (16 * down) ^ (32 * eight_on) ^ (64 * (tile % 2));
        let offset = tile / 2 * WORD_CHUNK_BYTES + (8 * k + down) * ROW_BYTES;
        text += &format!(
            "xor.b32 t, {x}c, {turn};\nadd.u32 t, t, {x}r;\nld.shared.b32 {x}{}, [t + {offset}];\n",
            4 * tile + register
        );
    }
    text
}

/// Row and chunk from which `lane` of a warp loads words of either operand that lies across k, both in bytes, of a part
/// that begins at a multiple of 32 rows or columns of the output.
#[cube]
pub(crate) fn word_position(lane: u32, #[comptime] terms: Terms) -> (u32, u32) {
    let (group, term) = (lane >> 2, lane & 3);
    let row = if comptime!(terms == Terms::Paired) { 2 * term } else { term };
    (row * comptime!(ROW_BYTES as u32), (((group >> 2) ^ row) << 4) + ((group & 3) << 2))
}
