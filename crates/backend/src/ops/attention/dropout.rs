//! Which weights dropout leaves out, in plain Rust: the draws of
//! `blackburn_kernels::attention`, so that devices agree.

use super::Dropout;
use crate::ops::dropout::philox;

/// Two calls' eight words are for the weights of two queries, so many apart,
const APART: usize = 8;
/// and of so many keys.
const KEYS: usize = 16;
/// How many draws there are: of 16 bits.
const DRAWS: u32 = 1 << 16;

impl Dropout {
    /// A draw below this is a weight left out: the rate in steps of 2^-16.
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
            let columns_of_calls = || (0..columns).step_by(KEYS);
            for (row, column) in
                rows_of_calls.flat_map(|row| columns_of_calls().map(move |column| (row, column)))
            {
                // Kernels count in 32 bits, too.
                let head = (first_head + head) as u32;
                let block = (column / KEYS) as u32;
                let words =
                    [0, 1].map(|call| philox([block, row as u32, head, call], key)).concat();
                for below in [0, 1] {
                    let row = row + below * APART;
                    if row < rows {
                        for beside in 0..KEYS.min(columns - column) {
                            let draw = draw(&words, place_of(below, beside));
                            pairs[row * columns + column + beside] = draw < threshold;
                        }
                    }
                }
            }
        }
        left_out
    }
}

/// The bit of a weight in each word.
fn place_of(query: usize, key: usize) -> u32 {
    (16 * (key % 2) + 4 * (key % 8 / 2) + 2 * (key / 8) + query) as u32
}

/// Digits of the weight's own, those of the last word first, and below them its neighbor's, those of the first word
/// first.
fn draw(words: &[u32], place: u32) -> u32 {
    let digit = |word: &u32, place: u32| word >> place & 1;
    let own = words.iter().rev().map(|word| digit(word, place));
    let neighbor = words.iter().map(|word| digit(word, place ^ 16));
    own.chain(neighbor).fold(0, |draw, digit| 2 * draw + digit)
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
