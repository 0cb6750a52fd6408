//! Philox4x32-10: a generator without state, each weight's word a function of where the weight is
//! (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). Backward computes it again.

use cubecl::prelude::*;

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// The word of the weight of `column` for query `row` of head `head`, counted over all sequences:
/// word `column mod 4` of counter `(column / 4, row, head, 0)`.
#[cube]
pub(super) fn random_word(column: u32, row: u32, head: u32, seed_low: u32, seed_high: u32) -> u32 {
    let mut x0 = column / 4;
    let mut x1 = row;
    let mut x2 = head;
    let mut x3 = 0u32;
    let mut key0 = seed_low;
    let mut key1 = seed_high;
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
    let part = column % 4;
    let low = select(part == 0, x0, x1);
    let high = select(part == 2, x2, x3);
    select(part < 2, low, high)
}
