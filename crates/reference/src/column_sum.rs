//! Sums of columns.

use crate::storage::Storage;

/// `y[o, c] = sum_r x[o, r, c]` of a contiguous `[outer, rows, columns]`.
///
/// # Panics
///
/// When `x` has another length.
pub fn column_sum(x: &[f64], outer: usize, rows: usize, columns: usize) -> Vec<f64> {
    assert_eq!(x.len(), outer * rows * columns, "x differs in length from its dimensions");
    let mut y = vec![0.0; outer * columns];
    for (i, value) in x.iter().enumerate() {
        y[i / (rows * columns) * columns + i % columns] += value;
    }
    y
}

/// How far off each sum may be: `rows` additions in f32 of terms whose magnitudes add up to
/// `magnitudes` (Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2, which holds
/// for every order of addition), and one rounding of `y` to storage.
pub fn bound(y: f64, magnitudes: f64, rows: usize, storage: Storage) -> f64 {
    let additions = rows as f64 * Storage::F32.unit_roundoff() * magnitudes;
    additions + y.abs() * storage.unit_roundoff() + storage.underflow()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_summed_within_their_batch() {
        let x: Vec<f64> = (0..12).map(f64::from).collect();
        assert_eq!(column_sum(&x, 2, 3, 2), [6.0, 9.0, 24.0, 27.0]);
    }

    #[test]
    fn the_bound_tells_a_missing_row_apart() {
        let x = crate::random::normal(1, 1000, 1.0, Storage::F32);
        let y = column_sum(&x, 1, 1000, 1)[0];
        let magnitudes: f64 = x.iter().map(|x| x.abs()).sum();
        assert!(x[999].abs() > bound(y, magnitudes, 1000, Storage::F32));
    }
}
