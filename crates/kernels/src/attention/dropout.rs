//! Which weights are left out: each one's draw is a function of where the weight is, so that backward makes it again.
//!
//! A call of the generator has four words, and each half of a word is a draw of 15 bits. A call is for the weights of two
//! queries, 8 apart, and of two pairs of neighboring keys, 8 apart. Those are what a unit has of a tensor core's tile
//! whose rows are queries. Where keys are the rows, a unit has one key of each pair, and its neighbor has the other.

use crate::philox::philox4x32;
use cubecl::prelude::*;

/// What separates the two queries, and the two pairs of keys, of a call.
const APART: u32 = 8;
/// What separates the keys of a pair.
const NEIGHBOR: u32 = 1;
/// The draws in a word.
pub(super) const DRAWS: u32 = 0x7fff_7fff;

/// What the words depend on.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Seeds {
    /// Of the head, counted over all sequences.
    pub(super) head: u32,
    pub(super) low: u32,
    pub(super) high: u32,
}

/// The words of counter `(key, query, head, 0)`.
#[cube]
pub(super) fn random_words(query: u32, key: u32, seeds: &Seeds) -> (u32, u32, u32, u32) {
    philox4x32((key, query, seeds.head, 0u32), seeds.low, seeds.high)
}

/// The draw of one weight: of the counter of the first of its call's queries and keys, word 2 for the second query, one
/// more for the second pair of keys; there the low half for the first key of the pair.
#[cube]
pub(super) fn random_draw(query: u32, key: u32, seeds: &Seeds) -> u32 {
    let first_key = key & comptime!(!(APART | NEIGHBOR));
    let words = random_words(query & comptime!(!APART), first_key, seeds);
    let is_second_pair = key & APART != 0;
    let of_first_query = select(is_second_pair, words.1, words.0);
    let of_second_query = select(is_second_pair, words.3, words.2);
    let word = select(query & APART != 0, of_second_query, of_first_query);
    select(key & NEIGHBOR != 0, word >> 16, word) & comptime!(DRAWS & 0xffff)
}
