//! Which weights dropout leaves out, in plain Rust: the words of
//! `blackburn_kernels::attention`, so that devices agree.

use super::Dropout;

const ROUNDS: usize = 7;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
/// A call's four words are for two queries and two keys, so many apart.
const APART: usize = 8;

impl Dropout {
    /// What weights that stay are multiplied by.
    pub(super) fn kept(self) -> f64 {
        1.0 / (1.0 - self.rate)
    }

    /// A word of the generator below this is a weight left out.
    fn threshold(self) -> u32 {
        // A rate below 1 stays below 2^32; the cast stops at the largest.
        (self.rate * 4_294_967_296.0).round() as u32
    }

    /// What so many elements are multiplied by, one after the other: 0 where they are left out. Words are
    /// those of `blackburn_kernels::dropout`.
    pub(crate) fn factors(self, elements: usize) -> Vec<f32> {
        let (threshold, kept) = (self.threshold(), self.kept() as f32);
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        let mut factors = vec![kept; elements];
        for (call, factors) in factors.chunks_mut(4).enumerate() {
            let words = philox([call as u32, 0, 0, 0], key);
            for (factor, word) in factors.iter_mut().zip(words) {
                if word < threshold {
                    *factor = 0.0;
                }
            }
        }
        factors
    }

    /// Whether each of the pairs is left out, `[heads, rows, columns]`; the first head is number
    /// `first_head` among those of all sequences.
    pub(super) fn left_out(
        self,
        first_head: usize,
        [heads, rows, columns]: [usize; 3],
    ) -> Vec<bool> {
        let threshold = self.threshold();
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        let mut left_out = vec![false; heads * rows * columns];
        for (head, pairs) in left_out.chunks_mut((rows * columns).max(1)).enumerate() {
            let firsts = |size: usize| (0..size).filter(|place| place & APART == 0);
            for (row, column) in firsts(rows).flat_map(|row| firsts(columns).map(move |c| (row, c)))
            {
                // Kernels count in 32 bits, too.
                let head = (first_head + head) as u32;
                let words = philox([column as u32, row as u32, head, 0], key);
                let places = [(0, 0), (0, APART), (APART, 0), (APART, APART)];
                for (word, (below, beside)) in words.iter().zip(places) {
                    let (row, column) = (row + below, column + beside);
                    if row < rows && column < columns {
                        pairs[row * columns + column] = *word < threshold;
                    }
                }
            }
        }
        left_out
    }
}

/// Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
fn philox(counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let product = |a: u32, b: u32| {
        let wide = u64::from(a) * u64::from(b);
        ((wide >> 32) as u32, wide as u32)
    };
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
        let zeros = philox([0; 4], [0; 2]);
        assert_eq!(zeros, [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]);
        let ones = philox([u32::MAX; 4], [u32::MAX; 2]);
        assert_eq!(ones, [0x5207_ddc2, 0x4516_5e59, 0x4d8e_e751, 0x8c52_f662]);
    }

    #[test]
    fn places_are_counted_over_all_sequences() {
        let dropout = Dropout { rate: 0.5, seed: 1 << 40 };
        let all = dropout.left_out(0, [3, 5, 7]);
        assert_eq!(all.len(), 3 * 5 * 7);
        assert_eq!(dropout.left_out(2, [1, 5, 7]), all[70..]);
        // A row's first words do not depend on how long it is, or on how many there are.
        assert_eq!(dropout.left_out(0, [1, 1, 6]), all[..6]);
        let wide = dropout.left_out(0, [1, 20, 30]);
        let narrow = dropout.left_out(0, [1, 11, 30]);
        assert_eq!(wide[..11 * 30], narrow);
    }
}
