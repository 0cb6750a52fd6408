//! Rotary position embedding: neighboring columns of a row are turned by an angle of the row's position.

use crate::{gelu::output_error, storage::Storage};

/// The table `[positions, head_dim, 2]` of cosines and sines that `burn::nn::RotaryEncoding` holds, rounded to f32.
/// The two columns of a pair have the same numbers.
pub fn table(positions: usize, head_dim: usize, base: f64) -> Vec<f64> {
    let factors = |(position, column): (usize, usize)| {
        let frequency = base.powf(-((column / 2 * 2) as f64) / head_dim as f64);
        let angle = position as f64 * frequency;
        [angle.cos(), angle.sin()].map(|factor| Storage::F32.round(factor))
    };
    let places = (0..positions).flat_map(|at| (0..head_dim).map(move |column| (at, column)));
    places.flat_map(factors).collect()
}

/// How rows are turned.
#[derive(Clone, Copy, Debug)]
pub struct Rotation<'a> {
    /// `[positions, head_dim, 2]`: what a column is multiplied by, and its partner.
    pub table: &'a [f64],
    /// Columns of a row.
    pub head_dim: usize,
    /// Position of each sequence's first row.
    pub start: usize,
    /// Whether the gradient of the rows is asked for, given that of the result: the transposed matrices.
    pub gradient: bool,
}

impl Rotation<'_> {
    /// What becomes of `x`, `[.., seq, head_dim]`, and how far off it may be when it is computed in f32 and stored
    /// in `storage`.
    pub fn of(&self, x: &[f64], seq: usize, storage: Storage) -> (Vec<f64>, Vec<f64>) {
        let element = |at: usize| {
            let (row, column) = (at / self.head_dim, at % self.head_dim);
            let [own, partner] = self.factors(self.start + row % seq, column);
            let [own, partner] = [x[at] * own, x[at ^ 1] * partner];
            (own + partner, bound(own, partner, storage))
        };
        (0..x.len()).map(element).unzip()
    }

    /// What `column` of the row at `position` is multiplied by for itself, and its partner for it.
    fn factors(&self, position: usize, column: usize) -> [f64; 2] {
        let of = |column: usize, which: usize| {
            self.table[(position * self.head_dim + column) * 2 + which]
        };
        // A matrix [[c0, -s0], [s1, c1]], or its transpose.
        let from = if self.gradient { column ^ 1 } else { column };
        let sign = if from.is_multiple_of(2) { -1.0 } else { 1.0 };
        [of(column, 0), sign * of(from, 1)]
    }
}

/// How far off the sum of two products may be: each of them is rounded, then the sum.
fn bound(own: f64, partner: f64, storage: Storage) -> f64 {
    let f32 = Storage::F32;
    let products = f32.unit_roundoff() * (own.abs() + partner.abs()) + 2.0 * f32.underflow();
    // Their error is rounded with the sum.
    let again = 1.0 + storage.unit_roundoff() + 2.0 * f32.unit_roundoff();
    products * again + output_error(own + partner, storage)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{gradcheck::check_derivative, random::normal};

    #[test]
    fn known_values_come_out() {
        // Those of the test of burn::nn::RotaryEncoding, which has base 10000.
        let table = table(10, 4, 10_000.0);
        let rotation = Rotation { table: &table, head_dim: 4, start: 0, gradient: false };
        let x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        let (y, _) = rotation.of(&x, 2, Storage::F32);
        let expected = [1.0, 2.0, 3.0, 4.0, -2.3473, 7.4492, 6.9197, 8.0696];
        assert!(y.iter().zip(expected).all(|(y, expected)| (y - expected).abs() < 1e-4), "{y:?}");
    }

    #[test]
    fn the_gradient_is_the_function_s_own() {
        // Numbers that no rotation has: what is transposed shows.
        let table = normal(1, 5 * 6 * 2, 1.0, Storage::F32);
        let forward = Rotation { table: &table, head_dim: 6, start: 2, gradient: false };
        let backward = Rotation { gradient: true, ..forward };
        let (x, dy) = (normal(2, 3 * 6, 1.0, Storage::F32), normal(3, 3 * 6, 1.0, Storage::F32));
        let (dx, _) = backward.of(&dy, 3, Storage::F32);
        for at in 0..x.len() {
            let loss = |number: f64| {
                let mut x = x.clone();
                x[at] = number;
                let (y, _) = forward.of(&x, 3, Storage::F32);
                y.iter().zip(&dy).map(|(y, dy)| y * dy).sum::<f64>()
            };
            check_derivative(loss, |_| dx[at], x[at]).unwrap();
        }
    }

    #[test]
    fn the_gradient_of_a_rotation_turns_it_back() {
        let table = table(9, 8, 100.0);
        let forward = Rotation { table: &table, head_dim: 8, start: 4, gradient: false };
        let x = normal(5, 5 * 8, 1.0, Storage::F32);
        let (y, _) = forward.of(&x, 5, Storage::F32);
        let (back, _) = Rotation { gradient: true, ..forward }.of(&y, 5, Storage::F32);
        assert!(back.iter().zip(&x).all(|(back, x)| (back - x).abs() < 1e-6));
    }

    #[test]
    fn bounds_are_tight_enough_to_tell_neighboring_positions_apart() {
        let table = table(100, 2, 10_000.0);
        let [here, next] = [50, 51].map(|start| {
            Rotation { table: &table, head_dim: 2, start, gradient: false }.of(
                &[1.0, 1.0],
                1,
                Storage::Bf16,
            )
        });
        assert!((0..2).all(|at| (here.0[at] - next.0[at]).abs() > 20.0 * here.1[at]));
    }
}
