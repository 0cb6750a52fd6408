//! Seeds of operations that draw random numbers in their kernels: dropout.

use std::{
    hash::{BuildHasher, RandomState},
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
};

/// One for the process, as Burn's devices have one each. It begins anywhere.
static STATE: LazyLock<AtomicU64> =
    LazyLock::new(|| AtomicU64::new(RandomState::new().hash_one(0u64)));

/// The step of `SplitMix64`, 2^64 over the golden ratio (Steele et al., "Fast splittable
/// pseudorandom number generators", 2014).
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Seeds the dropout of Blackburn's modules and functions, as `Device::seed` seeds Burn's random numbers. Call both to repeat a step.
///
/// This generator is the host's, because Burn's live on devices: asking one for a number would wait for the device
/// in every layer.
pub fn seed(seed: u64) {
    // Mixed, so that neighboring seeds do not give sequences that are each other's, shifted.
    STATE.store(mixed(seed), Ordering::Relaxed);
}

/// The seed of the next call.
pub fn next_seed() -> u64 {
    mixed(STATE.fetch_add(STEP, Ordering::Relaxed))
}

fn mixed(mut z: u64) -> u64 {
    z = z.wrapping_add(STEP);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
