//! What dropout leaves of a part of a tile, a bit for each weight.
#![allow(clippy::manual_rotate, reason = "kernels have shifts, and no rotation")]

use super::{
    dropout::{DRAWS, Seeds, random_words},
    rules::{Sequence, Side},
};
use crate::ptx::computed;
use cubecl::prelude::*;

/// The highest bit of each half of a word.
const HIGHEST: u32 = 0x8000_8000;
/// What separates the units of two neighboring rows of a tile.
const NEXT_ROW: u32 = 4;

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
    kept_bits_of(&sequence.seeds(), sequence.rules.numbers.threshold, row, column, rows)
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
    let threshold = sequence.rules.numbers.threshold;
    computed(kept_bits_of(&seeds, threshold, row, column, rows))
}

/// As [`kept_bits`], of seeds that are at hand.
#[cube]
pub(super) fn kept_bits_of(
    seeds: &Seeds,
    threshold: u32,
    row: u32,
    column: u32,
    #[comptime] rows: Side,
) -> u32 {
    // A draw and this reach the highest bit of a half where the draw reaches the threshold.
    let addend = (0x8000 - threshold) * 0x0001_0001;
    match comptime!(rows) {
        Side::Queries => {
            let mut bits = 0u32;
            #[unroll]
            for group in 0..4usize {
                let key = column + comptime!(16 * group as u32);
                let (first, second_keys, second_query, both) = random_words(row, key, seeds);
                let words = (first, second_query, second_keys, both);
                bits |= group_bits(words, addend, group);
            }
            bits
        }
        Side::Keys => {
            // The unit has two neighboring queries of each group, and one of two neighboring keys. It draws for both
            // keys and one of the queries, its neighbor for the other query; they exchange what the other one needs.
            let is_odd = row % 2 == 1;
            let mut bits = 0u32;
            #[unroll]
            for group in 0..4usize {
                let query = column + comptime!(16 * group as u32) + row % 2;
                let words = random_words(query, row - row % 2, seeds);
                bits |= group_bits(words, addend, group);
            }
            let received = plane_shuffle_xor(bits, NEXT_ROW);
            let turned = (received << 16) | (received >> 16);
            let own = select(is_odd, 0xffff_0000u32, 0x0000_ffffu32);
            (bits & own) | (turned & !own)
        }
    }
}

/// The bits of 16 columns, of which `words` are in the order of registers: the unit's first row and the one 8 below in
/// its first columns, and both 8 columns further.
#[cube]
fn group_bits(words: (u32, u32, u32, u32), addend: u32, #[comptime] group: usize) -> u32 {
    let place = comptime!(4 * group as u32);
    (reached(words.0, addend) >> place)
        | (reached(words.1, addend) >> comptime!(place + 1))
        | (reached(words.2, addend) >> comptime!(place + 2))
        | (reached(words.3, addend) >> comptime!(place + 3))
}

/// The highest bit of each half whose draw reaches the threshold.
#[cube]
fn reached(word: u32, addend: u32) -> u32 {
    ((word & DRAWS) + addend) & HIGHEST
}

/// Whether dropout leaves the weight of register `i`, of the `bits` that [`kept_bits`] gives for 32 of them: two
/// neighboring columns are in the two halves, and go from the highest bit down.
#[cube]
pub(super) fn is_kept(bits: u32, #[comptime] i: usize) -> bool {
    bits & comptime!(1u32 << (i % 2 * 16 + 15 - i % 32 / 2)) != 0
}
