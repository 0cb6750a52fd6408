//! Philox4x32-7 and Philox2x32-7: generators without state, whose words are a function of a counter and a key (Salmon et
//! al., "Parallel random numbers: as easy as 1, 2, 3", 2011; seven rounds are the fewest of either that pass their
//! tests).

use cubecl::prelude::*;

const ROUNDS: usize = 7;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Of [`philox2x32`].
const MULTIPLIER: u32 = 0xD256_D193;
/// The bits of a word's first half.
pub(crate) const LOW_HALF: u32 = 0xffff;
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// The generator's key: a seed that the host told, and two words that lie on the device, if there are any.
#[cube]
pub(crate) fn combined(
    seed_low: u32,
    seed_high: u32,
    key: &[u32],
    #[comptime] has_key: bool,
) -> (u32, u32) {
    let mut low = seed_low;
    let mut high = seed_high;
    if comptime!(has_key) {
        low ^= key[0];
        high ^= key[1];
    }
    (low, high)
}

/// The words of `counter` under the key `(low, high)`.
#[cube]
pub(crate) fn philox4x32(
    counter: (u32, u32, u32, u32),
    low: u32,
    high: u32,
) -> (u32, u32, u32, u32) {
    let mut x0 = counter.0;
    let mut x1 = counter.1;
    let mut x2 = counter.2;
    let mut x3 = counter.3;
    let mut key0 = low;
    let mut key1 = high;
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

/// The words of `counter` under `key`: half as many as [`philox4x32`] has, for half the work.
#[cube]
pub(crate) fn philox2x32(counter: (u32, u32), key: u32) -> (u32, u32) {
    let mut x0 = counter.0;
    let mut x1 = counter.1;
    let mut round_key = key;
    #[unroll]
    for round in 0..ROUNDS {
        if comptime!(round > 0) {
            round_key += comptime!(KEY_STEPS[0]);
        }
        let factor = MULTIPLIER;
        let high = u32::mul_hi(x0, factor.runtime());
        let low = x0 * factor;
        x0 = high ^ x1 ^ round_key;
        x1 = low;
    }
    (x0, x1)
}
