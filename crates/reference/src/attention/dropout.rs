//! Which pairs dropout keeps.
//!
//! The choice is a function of the seed and of the pair's place alone, so backward computes it
//! again instead of reading it, and every device and tiling makes the same one.
//!
//! Pairs are drawn by 16 bits, of which 8 are their own, as are single elements of other tensors, or by 32.

/// Dropout of the weights of attention, and of elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// The share that is left out, from 0 to below 1. A device is given what the thresholds
    /// and [`Dropout::rescale`] make of it: the threshold of a rate in f32 is another one.
    pub rate: f64,
    /// What the choice depends on.
    pub seed: u64,
}

impl Dropout {
    /// What the weights that are kept are multiplied by, so that their mean stays.
    pub fn rescale(&self) -> f64 {
        1.0 / (1.0 - self.rate)
    }

    /// Whether element `i` of a tensor is kept, where the generator's key is `key`. Its draw is a byte of its call for
    /// eight, and below it its neighbor's byte from the lowest digit on; or, where the rate is within 1/64 of 0 or 1, a
    /// word of its call for two.
    pub fn keeps_element(&self, i: usize, key: [u32; 2]) -> bool {
        let call = |elements: usize| philox2x32([(i / elements) as u32, key[1]], key[0]);
        if (1.0 / 64.0..=63.0 / 64.0).contains(&self.rate) {
            let words = call(8);
            let byte = |i: usize| (words[i % 8 / 4] >> (i % 4 * 8)) as u8;
            let draw = u16::from_be_bytes([byte(i), byte(i ^ 1).reverse_bits()]);
            f64::from(draw) >= (self.rate * 2f64.powi(16)).round()
        } else {
            f64::from(call(2)[i % 2])
                >= (self.rate * 2f64.powi(32)).round().min(f64::from(u32::MAX))
        }
    }

    /// A draw for a pair from here on is kept.
    pub fn pair_threshold(&self) -> u32 {
        ((self.rate * 2f64.powi(16)).round() as u32).min((1 << 16) - 1)
    }

    /// As [`Dropout::rescale`], by the rate in steps of 2^-16 that pairs have.
    pub fn pair_rescale(&self) -> f64 {
        2f64.powi(16) / (2f64.powi(16) - f64::from(self.pair_threshold()))
    }

    /// Whether the pair of query `i` and key `j` is kept, `head` being
    /// `batch index * heads_q + query head`.
    ///
    /// Two calls of the generator serve two queries, 8 apart, and 16 keys. A pair has a bit of each of the eight words:
    /// its draw's upper byte, of which the last word's bit is the highest. The lower byte is its neighbor's, in which the
    /// first word's bit is the highest.
    pub fn keeps(&self, head: usize, i: usize, j: usize) -> bool {
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        let call = |n| philox4x32([j as u32 / 16, (i & !8) as u32, head as u32, n], key);
        let words = [call(0), call(1)].concat();
        let place = |j: usize| j % 2 * 16 + j / 2 % 4 * 4 + j / 8 % 2 * 2 + i / 8 % 2;
        let mut draw = 0;
        for (number, word) in words.iter().enumerate() {
            draw |= (word >> place(j) & 1) << (8 + number);
            draw |= (word >> place(j ^ 1) & 1) << (7 - number);
        }
        draw >= self.pair_threshold()
    }
}

/// Of Philox.
const ROUNDS: usize = 7;
/// What a round adds to the words of a key: of the golden ratio, and of the square root of 3.
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// The upper and the lower word of a product.
fn product(a: u32, b: u32) -> (u32, u32) {
    let wide = u64::from(a) * u64::from(b);
    ((wide >> 32) as u32, wide as u32)
}

/// Two random words: Philox2x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
pub fn philox2x32(counter: [u32; 2], mut key: u32) -> [u32; 2] {
    let mut words = counter;
    for _ in 0..ROUNDS {
        let (high, low) = product(0xd256_d193, words[0]);
        words = [high ^ key ^ words[1], low];
        key = key.wrapping_add(WEYL[0]);
    }
    words
}

/// Four random words: Philox4x32-7, of the same paper.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
    let (mut words, mut key) = (counter, key);
    for _ in 0..ROUNDS {
        let (high_0, low_0) = product(MULTIPLIERS[0], words[0]);
        let (high_1, low_1) = product(MULTIPLIERS[1], words[2]);
        words = [high_1 ^ words[1] ^ key[0], low_1, high_0 ^ words[3] ^ key[1], low_0];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
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
        assert_eq!(philox2x32([0x243f_6a88, 0x85a3_08d3], 0x1319_8a2e), [0xbedb_be6b, 0xe4c7_70b3]);
        assert_eq!(
            philox4x32([0; 4], [0; 2]),
            [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]
        );
        assert_eq!(
            philox4x32([u32::MAX; 4], [u32::MAX; 2]),
            [0x5207_ddc2, 0x4516_5e59, 0x4d8e_e751, 0x8c52_f662]
        );
        assert_eq!(
            philox4x32(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0x4dfc_caba, 0x190a_87f0, 0xc473_62ba, 0xb6b5_242a]
        );
    }

    #[test]
    fn the_share_left_out_is_the_rate() {
        let dropout = Dropout { rate: 0.3, seed: 1 << 40 };
        let pairs = (0..100).flat_map(|i| (0..100).map(move |j| (i, j)));
        let left_out = pairs.filter(|(i, j)| !dropout.keeps(5, *i, *j)).count();
        // Five standard deviations of 10 000 draws.
        assert!((left_out as f64 - 3000.0).abs() < 230.0, "{left_out}");
    }

    /// Neighbors share digits of their draws, and weights of a word the calls of the generator.
    #[test]
    fn whether_two_weights_are_left_out_does_not_depend_on_each_other() {
        for rate in [0.1, 0.3] {
            let dropout = Dropout { rate, seed: 3 };
            // What separates the two: the next key, one 8 further, and the query 8 below.
            for (below, beside) in [(0, 1), (0, 8), (8, 0)] {
                let pairs = (0..256).flat_map(|i| (0..256).map(move |j| (i, j)));
                let both = pairs.filter(|(i, j)| {
                    !dropout.keeps(2, *i, *j) && !dropout.keeps(2, i ^ below, j ^ beside)
                });
                // Each pair is met twice.
                let (found, n, both_of) = (both.count() as f64 / 2.0, 32768.0, rate * rate);
                let deviation = f64::sqrt(n * both_of * (1.0 - both_of));
                assert!((found - n * both_of).abs() < 5.0 * deviation, "{rate}: {found}");
            }
        }
    }

    #[test]
    fn rates_are_told_apart_in_steps_of_65536() {
        for rate in [0.002, 0.1 + 1.0 / 512.0] {
            let dropout = Dropout { rate, seed: 9 };
            let pairs = (0..512).flat_map(|i| (0..512).map(move |j| (i, j)));
            let left_out = pairs.filter(|(i, j)| !dropout.keeps(0, *i, *j)).count() as f64;
            let n = 512.0 * 512.0;
            let deviation = f64::sqrt(n * rate * (1.0 - rate));
            assert!((left_out - n * rate).abs() < 5.0 * deviation, "{rate}: {left_out}");
        }
    }

    #[test]
    fn nothing_is_left_out_at_rate_zero_and_each_place_draws_for_itself() {
        assert!((0..100).all(|j| Dropout { rate: 0.0, seed: 3 }.keeps(0, 0, j)));
        let row = |seed, head, i| {
            let dropout = Dropout { rate: 0.5, seed };
            (0..64).map(|j| dropout.keeps(head, i, j)).collect::<Vec<_>>()
        };
        assert_ne!(row(1, 0, 0), row(2, 0, 0));
        assert_ne!(row(1, 0, 0), row(1 << 32, 0, 0));
        assert_ne!(row(1, 0, 0), row(1, 1, 0));
        assert_ne!(row(1, 0, 0), row(1, 0, 1));
    }

    /// Neighbors share digits of their draws, and eight elements a call of the generator.
    #[test]
    fn whether_two_elements_are_left_out_does_not_depend_on_each_other() {
        for rate in [0.1, 0.3] {
            let dropout = Dropout { rate, seed: 3 };
            for apart in [1, 2, 4, 8] {
                let n = 1 << 18;
                let out = |i: usize| !dropout.keeps_element(i, [3, 5]);
                // Each pair is met twice.
                let found = (0..n).filter(|i| out(*i) && out(i ^ apart)).count() as f64 / 2.0;
                let (n, both_of) = (f64::from(1 << 17), rate * rate);
                let deviation = f64::sqrt(n * both_of * (1.0 - both_of));
                assert!((found - n * both_of).abs() < 5.0 * deviation, "{rate}, {apart}: {found}");
            }
        }
    }

    #[test]
    fn the_share_of_elements_left_out_is_the_rate_in_bytes_and_in_words() {
        for (rate, elements) in [(0.1, 10_000), (0.5, 10_000), (1e-3, 100_000), (0.999, 100_000)] {
            let dropout = Dropout { rate, seed: 7 };
            let left_out = (0..elements).filter(|i| !dropout.keeps_element(*i, [7, 0])).count();
            let (mean, n) = (rate * elements as f64, elements as f64);
            let deviation = (n * rate * (1.0 - rate)).sqrt();
            assert!((left_out as f64 - mean).abs() < 5.0 * deviation, "{rate}: {left_out}");
        }
        assert!((0..1000).all(|i| Dropout { rate: 0.0, seed: 3 }.keeps_element(i, [3, 0])));
    }

    #[test]
    fn thresholds_split_the_range_of_draws() {
        let pairs = |rate| Dropout { rate, seed: 0 };
        assert_eq!((pairs(0.5).pair_threshold(), pairs(0.5).pair_rescale()), (1 << 15, 2.0));
        assert_eq!((pairs(1e-6).pair_threshold(), pairs(1e-6).pair_rescale()), (0, 1.0));
        assert_eq!(pairs(1.0 - 1e-12).pair_threshold(), (1 << 16) - 1);
    }
}
