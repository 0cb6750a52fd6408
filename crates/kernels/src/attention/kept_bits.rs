//! What dropout leaves of a part of a tile, a bit for each weight.

use super::{
    dropout::{Seeds, random_words},
    rules::{Sequence, Side},
};
use crate::ptx::computed;
use cubecl::prelude::*;

/// Bit `i` tells whether dropout leaves the weight of register `i` of the 32 that a unit has of 64
/// columns: four to eight columns, two for its first row and two for the row 8 below.
///
/// `row` and `column` are the unit's first; columns begin at a multiple of 16.
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
    let mut bits = 0u32;
    #[unroll]
    for call in 0..8usize {
        let at = column + comptime!((call / 2 * 16 + call % 2) as u32);
        let (query, key) = match comptime!(rows) {
            Side::Queries => (row, at),
            Side::Keys => (at, row),
        };
        let (w0, w1, w2, w3) = random_words(query, key, seeds);
        // In the order of registers: both columns of the first row, both of the second.
        let (second_column, second_row) = match comptime!(rows) {
            Side::Queries => (w1, w2),
            Side::Keys => (w2, w1),
        };
        let first = comptime!(call / 2 * 8 + call % 2);
        bits |= kept_bit(w0, threshold, first);
        bits |= kept_bit(second_column, threshold, comptime!(first + 4));
        bits |= kept_bit(second_row, threshold, comptime!(first + 2));
        bits |= kept_bit(w3, threshold, comptime!(first + 6));
    }
    bits
}

#[cube]
fn kept_bit(word: u32, threshold: u32, #[comptime] bit: usize) -> u32 {
    select(word >= threshold, comptime!(1u32 << bit), 0u32)
}
