//! Which weights dropout leaves out, in plain Rust: the draws of
//! `blackburn_kernels::attention`, so that devices agree.

use super::Dropout;
use crate::ops::dropout::philox;

/// A call's four words are for two queries and two pairs of keys, so many apart.
const APART: usize = 8;
/// How many draws there are: of 15 bits, two in a word.
const DRAWS: u32 = 1 << 15;

impl Dropout {
    /// A draw below this is a weight left out: the rate in steps of 2^-15.
    fn pair_threshold(self) -> u32 {
        ((self.rate * f64::from(DRAWS)).round() as u32).min(DRAWS - 1)
    }

    /// What weights that stay are multiplied by.
    pub(super) fn pair_kept(self) -> f64 {
        f64::from(DRAWS) / f64::from(DRAWS - self.pair_threshold())
    }

    /// Whether each of the pairs is left out, `[heads, rows, columns]`; the first head is number
    /// `first_head` among those of all sequences.
    pub(super) fn left_out(
        self,
        first_head: usize,
        [heads, rows, columns]: [usize; 3],
    ) -> Vec<bool> {
        let threshold = self.pair_threshold();
        let key = self.key();
        let mut left_out = vec![false; heads * rows * columns];
        for (head, pairs) in left_out.chunks_mut((rows * columns).max(1)).enumerate() {
            let rows_of_calls = (0..rows).filter(|row| row & APART == 0);
            let columns_of_calls = || (0..columns).filter(|column| column & (APART | 1) == 0);
            for (row, column) in
                rows_of_calls.flat_map(|row| columns_of_calls().map(move |column| (row, column)))
            {
                // Kernels count in 32 bits, too.
                let head = (first_head + head) as u32;
                let words = philox([column as u32, row as u32, head, 0], key);
                let places = [(0, 0), (0, APART), (APART, 0), (APART, APART)];
                for (word, (below, beside)) in words.iter().zip(places) {
                    for (half, neighbor) in [(word & 0xffff, 0), (word >> 16, 1)] {
                        let (row, column) = (row + below, column + beside + neighbor);
                        if row < rows && column < columns {
                            pairs[row * columns + column] = half % DRAWS < threshold;
                        }
                    }
                }
            }
        }
        left_out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_counted_over_all_sequences() {
        let dropout = Dropout::new(0.5, 1 << 40);
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
