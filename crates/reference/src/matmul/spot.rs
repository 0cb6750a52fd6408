//! Single elements of products that are too large to compute whole.

use super::MatmulCase;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeSet;

/// Indices into the output, ascending and without repetition: the four corners of the first and of
/// the last matrix, where tiles end, and random ones up to `count`. There are fewer where the output
/// is smaller, and never fewer than the corners.
pub fn spot_check_indices(case: &MatmulCase, count: usize, seed: u64) -> Vec<usize> {
    let len = case.out_len();
    if count >= len {
        return (0..len).collect();
    }
    let (matrix, n) = (case.m * case.n, case.n);
    let corners = [0, n - 1, matrix - n, matrix - 1];
    let mut indices: BTreeSet<usize> =
        corners.iter().flat_map(|corner| [*corner, len - matrix + corner]).collect();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    while indices.len() < count {
        indices.insert((rng.next_u64() % len as u64) as usize);
    }
    indices.into_iter().collect()
}

/// A single element of a product.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Element {
    /// Its value.
    pub value: f64,
    /// The same element of the product of absolute values.
    pub magnitude: f64,
    /// The same element of the product of squares.
    pub squares: f64,
}

/// The element of the output at `index`.
///
/// # Panics
///
/// When an operand has another length than the case says, or `index` is out of range.
pub fn element(case: &MatmulCase, lhs: &[f64], rhs: &[f64], index: usize) -> Element {
    case.check(lhs, rhs);
    assert!(index < case.out_len(), "{case} has no element {index}");
    let (row, j) = (index / case.n, index % case.n);
    let (b, i) = (row / case.m, row % case.m);
    let [lhs_batch, lhs_row, lhs_step] = case.lhs_strides();
    let [rhs_batch, rhs_step, rhs_column] = case.rhs_strides();
    let (lhs_start, rhs_start) = (b * lhs_batch + i * lhs_row, b * rhs_batch + j * rhs_column);
    (0..case.k).fold(Element::default(), |Element { value, magnitude, squares }, p| {
        let term = lhs[lhs_start + p * lhs_step] * rhs[rhs_start + p * rhs_step];
        Element {
            value: value + term,
            magnitude: magnitude + term.abs(),
            squares: squares + term * term,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        matmul::{Layout, magnitudes, matmul, squares},
        random::normal,
        storage::Storage,
    };

    #[test]
    fn single_elements_are_those_of_the_whole_product() {
        use Layout::{ColumnMajor, RowMajor};
        for lhs in [RowMajor, ColumnMajor] {
            for rhs in [RowMajor, ColumnMajor] {
                let case = MatmulCase { name: "test", batch: 3, m: 4, n: 5, k: 7, lhs, rhs };
                let a = normal(1, case.lhs_len(), 1.0, Storage::F32);
                let b = normal(2, case.rhs_len(), 1.0, Storage::F32);
                let (values, magnitudes) = (matmul(&case, &a, &b), magnitudes(&case, &a, &b));
                let squares = squares(&case, &a, &b);
                for i in 0..case.out_len() {
                    let found = element(&case, &a, &b, i);
                    assert_eq!(
                        (found.value, found.magnitude),
                        (values[i], magnitudes[i]),
                        "{case} {i}"
                    );
                    assert!((found.squares - squares[i]).abs() <= 1e-12 * squares[i], "{case} {i}");
                }
            }
        }
    }

    #[test]
    fn corners_are_always_checked_and_the_rest_is_random() {
        let (lhs, rhs) = (Layout::RowMajor, Layout::RowMajor);
        let case = MatmulCase { name: "test", batch: 3, m: 100, n: 200, k: 1, lhs, rhs };
        let indices = spot_check_indices(&case, 50, 7);
        assert_eq!(indices.len(), 50);
        for corner in [0, 199, 19_800, 19_999, 40_000, 40_199, 59_800, 59_999] {
            assert!(indices.contains(&corner), "{corner}");
        }
        assert_eq!(indices, spot_check_indices(&case, 50, 7));
        assert_ne!(indices, spot_check_indices(&case, 50, 8));
        assert_eq!(spot_check_indices(&case, 0, 7).len(), 8);
        let small = MatmulCase { m: 1, n: 2, ..case };
        assert_eq!(spot_check_indices(&small, 50, 7), [0, 1, 2, 3, 4, 5]);
        assert!(spot_check_indices(&MatmulCase { m: 0, ..case }, 50, 7).is_empty());
    }
}
