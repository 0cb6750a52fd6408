//! Which weights dropout leaves out, in plain Rust: the words of
//! `blackburn_kernels::attention`, so that devices agree.

use super::Dropout;
use crate::ops::dropout::philox;

/// A call's four words are for two queries and two keys, so many apart.
const APART: usize = 8;

impl Dropout {
    /// Whether each of the pairs is left out, `[heads, rows, columns]`; the first head is number
    /// `first_head` among those of all sequences.
    pub(super) fn left_out(
        self,
        first_head: usize,
        [heads, rows, columns]: [usize; 3],
    ) -> Vec<bool> {
        let threshold = self.threshold();
        let key = self.key();
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
