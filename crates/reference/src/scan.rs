//! Cumulative sums, products, maxima and minima of a row.

use crate::storage::Storage;

/// How numbers are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cumulative {
    /// Their sum.
    Sum,
    /// Their product.
    Product,
    /// The largest; NaN if one is.
    Max,
    /// The smallest; NaN if one is.
    Min,
}

impl Cumulative {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Sum, Self::Product, Self::Max, Self::Min];

    /// Two numbers, combined.
    pub fn combine(self, early: f64, late: f64) -> f64 {
        match self {
            Self::Sum => early + late,
            Self::Product => early * late,
            Self::Max | Self::Min if early.is_nan() || late.is_nan() => f64::NAN,
            Self::Max => early.max(late),
            Self::Min => early.min(late),
        }
    }

    /// What each element and all before it come to.
    pub fn of_row(self, row: &[f64]) -> Vec<f64> {
        let mut all: Option<f64> = None;
        let mut next = |x: &f64| {
            let combined = all.map_or(*x, |all| self.combine(all, *x));
            all = Some(combined);
            combined
        };
        row.iter().map(&mut next).collect()
    }

    /// How far off each of these may be. An element of a sum goes through at most `additions` of f32 on its way into
    /// any result, in whatever order, each of which rounds something that is at most the sum of magnitudes. A product
    /// is rounded once for each factor. Either is rounded to storage in the end. Extremes are exact.
    pub fn bounds(self, row: &[f64], additions: usize, storage: Storage) -> Vec<f64> {
        let f32_roundoff = Storage::F32.unit_roundoff();
        let mut magnitudes = 0.0;
        let bound = |(at, (x, y)): (usize, (&f64, f64))| {
            magnitudes += x.abs();
            let rounded = storage.unit_roundoff() * y.abs() + storage.underflow();
            match self {
                Self::Sum => additions.min(at) as f64 * f32_roundoff * magnitudes + rounded,
                Self::Product => at as f64 * f32_roundoff * y.abs() + rounded,
                Self::Max | Self::Min => 0.0,
            }
        };
        row.iter().zip(self.of_row(row)).enumerate().map(bound).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_prefix_is_combined() {
        let row = [2.0, -1.0, 3.0];
        let of = |cumulative: Cumulative| cumulative.of_row(&row);
        assert_eq!(of(Cumulative::Sum), [2.0, 1.0, 4.0]);
        assert_eq!(of(Cumulative::Product), [2.0, -2.0, -6.0]);
        assert_eq!(of(Cumulative::Max), [2.0, 2.0, 3.0]);
        assert_eq!(of(Cumulative::Min), [2.0, -1.0, -1.0]);
        assert_eq!(Cumulative::Sum.of_row(&[]), [0.0; 0]);
    }

    #[test]
    fn nan_stays() {
        for cumulative in Cumulative::ALL {
            let made = cumulative.of_row(&[1.0, f64::NAN, 2.0]);
            assert_eq!(made.iter().map(|x| x.is_nan()).collect::<Vec<_>>(), [false, true, true]);
        }
    }

    #[test]
    fn bounds_grow_with_what_was_added() {
        let row = [1.0, -1.0, 1.0, -1.0];
        let bounds = Cumulative::Sum.bounds(&row, 8, Storage::F32);
        assert!(bounds.is_sorted() && bounds[3] > 0.0, "{bounds:?}");
        assert_eq!(Cumulative::Max.bounds(&row, 8, Storage::Bf16), [0.0; 4]);
    }
}
