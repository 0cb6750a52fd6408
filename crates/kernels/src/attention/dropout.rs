//! Philox4x32-7: a generator without state, each weight's word a function of where the weight is
//! (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; seven rounds are the fewest
//! that pass their tests). Backward computes it again.
//!
//! A call's four words are for the weights of two queries and two keys, both 8 apart: those are what
//! a unit has of a tensor core's tile, whether queries or keys are its rows.

use cubecl::prelude::*;

const ROUNDS: usize = 7;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
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
    let mut x0 = key;
    let mut x1 = query;
    let mut x2 = seeds.head;
    let mut x3 = 0u32;
    let mut key0 = seeds.low;
    let mut key1 = seeds.high;
    #[unroll]
    for round in 0..ROUNDS {
        if comptime!(round > 0) {
            key0 += comptime!(KEY_STEPS[0]);
            key1 += comptime!(KEY_STEPS[1]);
        }
        let (factor0, factor1) = comptime!((MULTIPLIERS[0], MULTIPLIERS[1]));
        let high0 = u32::mul_hi(x0, factor0.runtime());
        let low0 = x0 * factor0;
        let high1 = u32::mul_hi(x2, factor1.runtime());
        let low1 = x2 * factor1;
        x0 = high1 ^ x1 ^ key0;
        x1 = low1;
        x2 = high0 ^ x3 ^ key1;
        x3 = low0;
    }
    (x0, x1, x2, x3)
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
