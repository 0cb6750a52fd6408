//! Which weights are left out: a function of where a weight is, so that backward draws the same again.
//!
//! 32 weights share two calls of the generator: those of two queries, 8 apart, and of 16 keys from a multiple of 16 on.
//! A weight has a bit of each of the eight words, and so a draw of 8 digits of its own. 8 more digits below them are its
//! neighbor's own in reverse order: they decide only where its own equal those of the rate, once in 256 draws. All 32
//! draws are compared with the rate at once, digit by digit.

use crate::philox::philox4x32;
use cubecl::prelude::{Sequence as Elements, *};

/// What separates the two queries of a word.
const APART: u32 = 8;
/// Keys of a word.
pub(super) const KEYS_OF_WORD: u32 = 16;
/// What separates the bits of two neighboring keys.
pub(super) const NEXT_KEY: u32 = 16;
/// Digits of a draw, of which half are its own.
pub(super) const DIGITS: u32 = 16;

/// What the words depend on.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Seeds {
    /// Of the head, counted over all sequences.
    pub(super) head: u32,
    pub(super) low: u32,
    pub(super) high: u32,
}

/// Which of 32 weights stay, a bit for each: the queries `query` and the one 8 below, `query / 8` even, and the keys from
/// `16 * key_block` on. A draw below the threshold, of which `zeros` are the digits ([`zero_digits`]), leaves a weight out.
///
/// The bit of a key and a query is at
/// `16 * (key % 2) + 4 * (key % 8 / 2) + 2 * (key % 16 / 8) + query % 16 / 8`.
#[cube]
pub(super) fn kept_word(query: u32, key_block: u32, seeds: &Seeds, zeros: &Elements<u32>) -> u32 {
    let (w0, w1, w2, w3) = philox4x32((key_block, query, seeds.head, 0u32), seeds.low, seeds.high);
    let (w4, w5, w6, w7) = philox4x32((key_block, query, seeds.head, 1u32), seeds.low, seeds.high);
    // Draws that are equal so far stay.
    let mut kept = 0xffff_ffffu32.runtime();
    kept = with_digits(kept, (w7, w6, w5, w4), zeros, 0usize);
    kept = with_digits(kept, (w3, w2, w1, w0), zeros, 4usize);
    kept = (kept << NEXT_KEY) | (kept >> NEXT_KEY);
    kept = with_digits(kept, (w0, w1, w2, w3), zeros, 8usize);
    with_digits(kept, (w4, w5, w6, w7), zeros, 12usize)
}

/// Which draws are at least the threshold by the digits up to four more, the first of which is number `digit`, if `kept`
/// tells it of the digits below.
#[cube]
fn with_digits(
    kept: u32,
    drawn: (u32, u32, u32, u32),
    zeros: &Elements<u32>,
    #[comptime] digit: usize,
) -> u32 {
    let first = majority(kept, drawn.0, zeros[digit]);
    let second = majority(first, drawn.1, zeros[comptime!(digit + 1)]);
    let third = majority(second, drawn.2, zeros[comptime!(digit + 2)]);
    majority(third, drawn.3, zeros[comptime!(digit + 3)])
}

/// What was stays where the digits are equal: a draw's is 1 where the threshold's is 0, or the other way round, else.
#[cube]
fn majority(kept: u32, drawn: u32, is_zero: u32) -> u32 {
    (kept & drawn) | (is_zero & (kept | drawn))
}

/// For each digit of a threshold, from the lowest one on, a word of it for [`kept_word`]: all bits where it is 0.
pub(super) fn zero_digits(threshold: u32) -> impl Iterator<Item = u32> {
    (0..DIGITS).map(move |digit| (threshold >> digit & 1).wrapping_sub(1))
}

/// Whether the weight of a pair stays.
#[cube]
pub(super) fn is_pair_kept(query: u32, key: u32, seeds: &Seeds, zeros: &Elements<u32>) -> bool {
    let word = kept_word(query & comptime!(!APART), key / KEYS_OF_WORD, seeds, zeros);
    let of_key = key % 2 * NEXT_KEY + key % 8 / 2 * 4 + key % KEYS_OF_WORD / 8 * 2;
    (word >> (of_key + query % 16 / APART)) & 1 != 0
}
