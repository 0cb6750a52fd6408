//! Which weights are left out: each one's word is a function of where the weight is, so that backward
//! computes it again.
//!
//! A call's four words are for the weights of two queries and two keys, both 8 apart: those are what
//! a unit has of a tensor core's tile, whether queries or keys are its rows.

use crate::philox::philox4x32;
use cubecl::prelude::*;

/// What separates the two queries, and the two keys, of a call.
const APART: u32 = 8;

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

/// The word of one weight: of the counter of the first of both queries and keys, word 2 for the
/// second query, one more for the second key.
#[cube]
pub(super) fn random_word(query: u32, key: u32, seeds: &Seeds) -> u32 {
    let words = random_words(query & comptime!(!APART), key & comptime!(!APART), seeds);
    let is_second_key = key & APART != 0;
    let of_first_query = select(is_second_key, words.1, words.0);
    let of_second_query = select(is_second_key, words.3, words.2);
    select(query & APART != 0, of_second_query, of_first_query)
}
