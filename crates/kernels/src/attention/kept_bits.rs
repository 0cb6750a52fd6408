//! What dropout leaves of a part of a tile, a bit for each weight.
#![allow(clippy::manual_rotate, reason = "kernels have shifts, and no rotation")]

use super::{
    dropout::{KEYS_OF_WORD, NEXT_KEY, Seeds, kept_word},
    rules::{Sequence, Side},
    softmax::{Queries, pack_registers},
};
use crate::ptx::{bytes_of_two, computed, sign_masks, transposed_halves, vector_of};
use cubecl::prelude::{Sequence as Elements, *};

/// Which weights dropout leaves of the 32 that a unit has of 64 columns: four to eight columns, two for its first row
/// and two for the row 8 below. [`is_kept`] tells it of each.
///
/// `row` and `column` are the unit's first; columns begin at a multiple of 16. All units of a plane have to ask.
#[cube]
pub(super) fn kept_bits<I: Float, M: Numeric>(
    sequence: &Sequence<'_, I, M>,
    row: u32,
    column: u32,
    #[comptime] rows: Side,
) -> u32 {
    kept_bits_of(&sequence.seeds(), &sequence.rules.zeros, row, column, rows)
}

/// What the generator is given besides a pair, computed anew: what it makes of it would else be kept in registers from
/// tile to tile.
#[cube]
pub(super) fn seeds_anew<I: Float, M: Numeric>(sequence: &Sequence<'_, I, M>) -> Seeds {
    let Seeds { head, low, high } = sequence.seeds();
    Seeds { head, low: computed(low), high: computed(high) }
}

/// As [`kept_bits`], drawn in front of the inline PTX that follows and with nothing kept from tile to tile.
#[cube]
pub(super) fn kept_bits_anew<I: Float, M: Numeric>(
    sequence: &Sequence<'_, I, M>,
    row: u32,
    column: u32,
    #[comptime] rows: Side,
) -> u32 {
    let (seeds, row) = (seeds_anew(sequence), computed(row));
    computed(kept_bits_of(&seeds, &sequence.rules.zeros, row, column, rows))
}

/// As [`kept_bits`], of seeds that are at hand.
///
/// The 64 columns are four blocks of 16 by 16 weights. Each of the four units of a row draws the word of one of them,
/// and they exchange what the others need.
#[cube]
pub(super) fn kept_bits_of(
    seeds: &Seeds,
    zeros: &Elements<u32>,
    row: u32,
    column: u32,
    #[comptime] rows: Side,
) -> u32 {
    let quad = column % KEYS_OF_WORD / 2;
    let block = column / KEYS_OF_WORD + quad;
    match comptime!(rows) {
        Side::Queries => of_all_blocks(kept_word(row, block, seeds, zeros), quad),
        // Drawn as if queries were the rows: a unit has one query of a block then, and keys side by side.
        Side::Keys => {
            let query = block * KEYS_OF_WORD + row % 8;
            let drawn = kept_word(query, row / KEYS_OF_WORD, seeds, zeros);
            transposed_halves(of_all_blocks(drawn, quad))
        }
    }
}

/// Of the words that four units have of a block each, what this one needs: half bytes, of which each half of a word has
/// one for each unit, become half bytes of each block.
#[cube]
fn of_all_blocks(word: u32, quad: u32) -> u32 {
    let is_odd = quad % 2 == 1;
    let received = plane_shuffle_xor(word, 1u32);
    let turn = select(is_odd, 28u32, 4u32);
    let own = select(is_odd, 0xf0f0_f0f0u32, 0x0f0f_0f0fu32);
    let pairs = (word & own) | (((received << turn) | (received >> (32 - turn))) & !own);
    let received = plane_shuffle_xor(pairs, 2u32);
    bytes_of_two(pairs, received, select(quad < 2, 0x6240u32, 0x3715u32))
}

/// The bit of register `i` in a half of the word, if the rows are those.
fn bit_of(i: usize, rows: Side) -> u32 {
    let (columns, row) = (i % 32 / 4, i / 2 % 2);
    let bit = match rows {
        Side::Queries => 2 * columns + row,
        Side::Keys => columns / 2 * 4 + 2 * row + columns % 2,
    };
    bit as u32
}

/// Whether dropout leaves the weight of register `i`, of the `bits` that [`kept_bits`] gives for 32 of them.
#[cube]
pub(super) fn is_kept(bits: u32, #[comptime] i: usize, #[comptime] rows: Side) -> bool {
    bits & comptime!(1u32 << (i as u32 % 2 * NEXT_KEY + bit_of(i, rows))) != 0
}

/// The bits of two packed weights where both stay: those of the registers `2 * pair` and the next one.
#[cube]
pub(super) fn kept_pair_mask(bits: u32, #[comptime] pair: usize, #[comptime] rows: Side) -> u32 {
    let bit = comptime!(bit_of(2 * pair, rows));
    // Two pairs share what is shifted.
    sign_masks(bits << comptime!(7 - bit % 8), comptime!(bit >= 8))
}

/// What dropout leaves of a tile of weights, 64 columns in a word, drawn before the instructions of inline PTX that
/// follow: the generator takes registers, which scores need.
#[cube]
pub(super) fn kept_words<I: Float, M: Numeric>(
    queries: &Queries<'_, I, M>,
    first_key: u32,
) -> Elements<u32> {
    let mut words = Elements::<u32>::new();
    if comptime!(queries.sequence.rules.options.dropout) {
        let seeds = seeds_anew(&queries.sequence);
        let row = computed(queries.row);
        #[unroll]
        for word in 0..comptime!(queries.tile_kv / 64) {
            let column = first_key + comptime!(64 * word as u32) + 2 * queries.quad;
            let kept =
                kept_bits_of(&seeds, &queries.sequence.rules.zeros, row, column, Side::Queries);
            words.push(computed(kept));
        }
    }
    words
}

/// Packs the first `count` registers in pairs, without what dropout leaves out by the [`kept_words`], if there are any.
#[cube]
pub(super) fn pack_kept<R: Size, P: Size>(
    weights: Vector<f32, R>,
    drawn: &Elements<u32>,
    #[comptime] count: usize,
    #[comptime] dtype: &'static str,
) -> Vector<u32, P> {
    let packed = pack_registers::<R, P>(weights, 0usize, count, dtype);
    if comptime!(drawn.len() * 32 == count) {
        let mut left = Elements::<u32>::new();
        #[unroll]
        for pair in 0..comptime!(count / 2) {
            let kept = drawn[comptime!(pair / 16)];
            let mask = kept_pair_mask(kept, comptime!(pair % 16), Side::Queries);
            left.push(packed.extract(pair) & mask);
        }
        vector_of::<u32, P>(left)
    } else {
        packed
    }
}
