//! What dropout leaves out, in plain Rust: the words that kernels draw, so that devices agree.

use crate::random::{Draw, KeyId};
#[cfg(feature = "gpu")]
use blackburn_kernels::dropout::DropoutMask;

const ROUNDS: usize = 7;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Of Philox2x32.
const MULTIPLIER: u32 = 0xD256_D193;
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Elements are left out with probability `rate`, and those that stay are multiplied by
/// `1 / (1 - rate)`. The rate counts in steps of 2^-16, or 2^-32 within 1/64 of 0 and of 1. Elements of attention are its
/// weights, for which it counts in steps of 2^-16.
///
/// Which ones is a function of the seed, of the key and of the place of the element alone. Without a key it is
/// the same on every device: take another seed each step, and for each layer. [`Dropout::next`] does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// At least 0 and below 1.
    pub rate: f64,
    /// The same seed leaves out the same elements.
    pub seed: u64,
    /// What the device combines the seed with, in a [`KeyedPass`](crate::random::KeyedPass). GPUs alone have
    /// keys.
    pub key: Option<KeyId>,
}

impl Dropout {
    /// By a seed alone.
    pub const fn new(rate: f64, seed: u64) -> Self {
        Self { rate, seed, key: None }
    }

    /// As no other operation leaves elements out, of this pass or of the process.
    pub fn next(rate: f64) -> Self {
        let Draw { seed, key } = Draw::next();
        Self { rate, seed, key }
    }

    /// What kernels draw that leave elements out on their way.
    #[cfg(feature = "gpu")]
    pub(in crate::ops) fn mask(self) -> DropoutMask {
        let Self { rate, seed, key } = self;
        DropoutMask { rate, seed, key: key.and_then(KeyId::words) }
    }

    /// What elements that stay are multiplied by.
    pub(in crate::ops) fn kept(self) -> f64 {
        1.0 / (1.0 - self.rate)
    }

    /// The key of the generator.
    pub(in crate::ops) fn key(self) -> [u32; 2] {
        [self.seed as u32, (self.seed >> 32) as u32]
    }

    /// What so many elements are multiplied by, one after the other: 0 where they are left out. Draws are
    /// those of `blackburn_kernels::dropout`.
    pub(super) fn factors(self, elements: usize) -> Vec<f32> {
        /// Rates this near to 0 or 1 take whole words.
        const RAREST_OF_BYTES: f64 = 1.0 / 64.0;
        let by_bytes = self.rate.min(1.0 - self.rate) >= RAREST_OF_BYTES;
        let digits = if by_bytes { 16 } else { 32 };
        // A rate below 1 stays below 2^32; the cast stops at the largest.
        let threshold = (self.rate * 2f64.powi(digits)).round() as u32;
        let (kept, [key, high]) = (self.kept() as f32, self.key());
        let mut factors = vec![kept; elements];
        for (call, factors) in factors.chunks_mut(if by_bytes { 8 } else { 2 }).enumerate() {
            let words = philox2x32([call as u32, high], key);
            for (place, factor) in factors.iter_mut().enumerate() {
                let draw = if by_bytes { byte_draw(words, place) } else { words[place] };
                if draw < threshold {
                    *factor = 0.0;
                }
            }
        }
        factors
    }
}

/// Byte `place` of two words, and below it its neighbor's, from the lowest digit on.
fn byte_draw(words: [u32; 2], place: usize) -> u32 {
    let byte = |place: usize| (words[place / 4] >> (place % 4 * 8)) as u8;
    u16::from_be_bytes([byte(place), byte(place ^ 1).reverse_bits()]).into()
}

/// The upper and the lower word of a product.
fn product(a: u32, b: u32) -> (u32, u32) {
    let wide = u64::from(a) * u64::from(b);
    ((wide >> 32) as u32, wide as u32)
}

/// Philox2x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
fn philox2x32(counter: [u32; 2], mut key: u32) -> [u32; 2] {
    let mut words = counter;
    for _ in 0..ROUNDS {
        let (high, low) = product(words[0], MULTIPLIER);
        words = [high ^ words[1] ^ key, low];
        key = key.wrapping_add(KEY_STEPS[0]);
    }
    words
}

/// Philox4x32-7, of the same paper.
pub(in crate::ops) fn philox(counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let mut words = counter;
    for _ in 0..ROUNDS {
        let (high0, low0) = product(words[0], MULTIPLIERS[0]);
        let (high1, low1) = product(words[2], MULTIPLIERS[1]);
        words = [high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_words_are_the_known_answers_of_random123() {
        assert_eq!(philox2x32([0; 2], 0), [0x257a_3673, 0xcd26_be2a]);
        assert_eq!(philox2x32([u32::MAX; 2], u32::MAX), [0xab30_2c4d, 0x3dc9_d239]);
        let zeros = philox([0; 4], [0; 2]);
        assert_eq!(zeros, [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]);
        let ones = philox([u32::MAX; 4], [u32::MAX; 2]);
        assert_eq!(ones, [0x5207_ddc2, 0x4516_5e59, 0x4d8e_e751, 0x8c52_f662]);
    }
}
