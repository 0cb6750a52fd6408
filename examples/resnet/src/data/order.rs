//! Random numbers and orders that follow from a seed and a position alone, so that a resumed run needs no state
//! but the number of its next image.

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

/// Draws that are a function of (seed, stream, position). `ChaCha8` is specified down to the bit, and the numbers
/// are drawn by the functions below, so that a release of `rand` does not change the data under a run.
pub(crate) fn rng(seed: u64, stream: Stream, position: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&(stream as u64).to_le_bytes());
    key[16..24].copy_from_slice(&position.to_le_bytes());
    ChaCha8Rng::from_seed(key)
}

/// What numbers are drawn for; what is drawn for one does not change another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    /// How a training image is changed.
    Augmentation = 1,
    /// How an image of the validation set is made; the run's seed has no part in it.
    Validation = 2,
}

/// Uniform in `0..1`, in steps of 2^-24, which f32 holds exactly.
pub(crate) fn unit(rng: &mut impl Rng) -> f32 {
    (rng.next_u32() >> 8) as f32 / (1 << 24) as f32
}

/// Uniform between two numbers.
pub(crate) fn between(rng: &mut impl Rng, [low, high]: [f32; 2]) -> f32 {
    low + (high - low) * unit(rng)
}

/// Uniform in `0..bound` up to a bias of bound / 2^64.
pub(crate) fn below(rng: &mut impl Rng, bound: usize) -> usize {
    // Less than `bound`, so it fits again.
    ((u128::from(rng.next_u64()) * bound as u128) >> 64) as usize
}

/// Mean 0, deviation 1: the sum of four uniform numbers, which is near enough for noise in pictures and needs no
/// logarithm.
pub(crate) fn noise(rng: &mut impl Rng) -> f32 {
    let sum: f32 = (0..2)
        .map(|_| {
            let bits = rng.next_u32();
            (bits & 0xffff) as f32 + (bits >> 16) as f32
        })
        .sum();
    // The variance of a uniform number is a twelfth of its range squared.
    (sum / 65536.0 - 2.0) * f32::sqrt(3.0)
}

/// The same number for the same numbers, and otherwise unlike: the finalizer of Steele, Lea and Flood,
/// "Fast splittable pseudorandom number generators", OOPSLA 2014.
pub(crate) fn mixed(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// An order of `0..count` for each epoch, found for one position at a time: all threads can ask for theirs
/// without a list that they share.
///
/// A Feistel network permutes the next power of four; positions that come out too large go through it again
/// (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, section 4).
pub(crate) struct Order {
    count: u64,
    half_bits: u32,
    keys: [u64; 6],
}

impl Order {
    /// The order of one epoch. `count` is at least 1.
    pub(crate) fn new(seed: u64, epoch: u64, count: u64) -> Self {
        let bits = u64::BITS - (count - 1).leading_zeros();
        let mut key = mixed(mixed(seed) ^ epoch);
        let keys = std::array::from_fn(|_| {
            key = mixed(key);
            key
        });
        Self { count, half_bits: bits.div_ceil(2).max(1), keys }
    }

    /// What comes at `position`, which is below the count.
    pub(crate) fn at(&self, position: u64) -> u64 {
        debug_assert!(position < self.count);
        let mask = (1 << self.half_bits) - 1;
        let mut x = position;
        loop {
            let (mut left, mut right) = (x >> self.half_bits, x & mask);
            for key in self.keys {
                (left, right) = (right, left ^ (mixed(right ^ key) & mask));
            }
            x = left << self.half_bits | right;
            if x < self.count {
                return x;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn an_order_has_everything_once_and_differs_between_epochs_and_seeds() {
        for count in [1, 2, 3, 4, 5, 16, 17, 1000, 4097] {
            let order = |seed, epoch| -> Vec<u64> {
                let order = Order::new(seed, epoch, count);
                (0..count).map(|position| order.at(position)).collect()
            };
            for epoch in 0..4 {
                let all: BTreeSet<u64> = order(7, epoch).into_iter().collect();
                assert!(all.into_iter().eq(0..count), "{count}");
            }
            if count > 16 {
                assert_ne!(order(7, 0), order(7, 1));
                assert_ne!(order(7, 0), order(8, 0));
                assert_eq!(order(7, 3), order(7, 3));
            }
        }
    }

    /// Of a random order, the number of neighbours that stay neighbours is about 2 whatever the count.
    #[test]
    fn an_order_leaves_few_neighbours_together() {
        let order = Order::new(1, 0, 10_000);
        let together = (1..10_000)
            .filter(|position| order.at(*position).abs_diff(order.at(position - 1)) == 1);
        assert!(together.count() < 12);
    }

    #[test]
    fn draws_follow_from_their_numbers_and_have_the_promised_moments() {
        let first = |seed, stream, position| rng(seed, stream, position).next_u64();
        let all = [
            first(1, Stream::Augmentation, 1),
            first(2, Stream::Augmentation, 1),
            first(1, Stream::Validation, 1),
            first(1, Stream::Augmentation, 2),
        ];
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 4);
        assert_eq!(all[0], first(1, Stream::Augmentation, 1));
        let mut rng = rng(3, Stream::Augmentation, 0);
        const COUNT: usize = 20_000;
        let noise: Vec<f32> = (0..COUNT).map(|_| noise(&mut rng)).collect();
        let mean = noise.iter().sum::<f32>() / COUNT as f32;
        let variance = noise.iter().map(|x| x * x).sum::<f32>() / COUNT as f32;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean}, {variance}");
        assert!((0..1000).all(|_| below(&mut rng, 3) < 3 && unit(&mut rng) < 1.0));
    }
}
