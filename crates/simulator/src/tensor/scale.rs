//! Products whose blocks of k are scaled (PTX ISA, "Block Scaling for mma.sync"): where the scales lie, what they
//! are, and the scaled sums.

/// Which of four scales a register of some lanes gives for one operand: that byte, of the lanes of every four that
/// `thread` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScaleSelector {
    pub(crate) byte: usize,
    /// 0 or 1, a pair of lanes of four, for the left operand; 0 to 3, one of them, for the right one.
    pub(crate) thread: usize,
}

impl ScaleSelector {
    /// The lane that has the scale of a row of the left operand. The second lane of its pair has that of the row
    /// 8 below.
    pub(crate) fn lane_of_row(self, row: usize) -> usize {
        4 * (row % 8) + 2 * self.thread + row / 8
    }

    /// The lane that has the scale of a column of the right operand.
    pub(crate) fn lane_of_column(self, column: usize) -> usize {
        4 * column + self.thread
    }
}

/// A scale of type `ue8m0`: a power of two, or NaN.
pub(crate) fn ue8m0(bits: u8) -> f64 {
    match bits {
        u8::MAX => f64::NAN,
        exponent => 2.0_f64.powi(i32::from(exponent) - 127),
    }
}

/// `sums += a b`, with each row of a and each column of b scaled: products are added in f64, scaled, and rounded to
/// f32 with the sum. Operands as [`accumulate`](super::accumulate) takes them.
pub(crate) fn accumulate_scaled(
    sums: &mut [f32],
    [a, b]: [&[f32]; 2],
    [rows, columns]: [&[f64]; 2],
    k: usize,
) {
    let n = columns.len();
    for ((sums, a), row_scale) in sums.chunks_exact_mut(n).zip(a.chunks_exact(k)).zip(rows) {
        for (column, (sum, scale)) in sums.iter_mut().zip(columns).enumerate() {
            let terms = a.iter().zip(b[column..].iter().step_by(n));
            let dot: f64 = terms.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            *sum = (f64::from(*sum) + row_scale * scale * dot) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_lie_in_the_lanes_that_the_manual_names() {
        let first = ScaleSelector { byte: 0, thread: 0 };
        // Of four lanes the first pair has rows g and g + 8, the second pair those of another product.
        assert_eq!([0, 1, 7, 8, 15].map(|row| first.lane_of_row(row)), [0, 4, 28, 1, 29]);
        let second = ScaleSelector { byte: 3, thread: 1 };
        assert_eq!([0, 8, 15].map(|row| second.lane_of_row(row)), [2, 3, 31]);
        assert_eq!([0, 5, 7].map(|column| first.lane_of_column(column)), [0, 20, 28]);
        assert_eq!(ScaleSelector { byte: 0, thread: 3 }.lane_of_column(7), 31);
    }

    #[test]
    fn scales_are_powers_of_two() {
        assert_eq!([0x7f, 0x80, 0x7e, 0].map(ue8m0), [1.0, 2.0, 0.5, 2.0_f64.powi(-127)]);
        assert_eq!(ue8m0(254), 2.0_f64.powi(127));
        assert!(ue8m0(255).is_nan());
    }

    #[test]
    fn sums_are_scaled_by_row_and_column() {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]);
        let mut sums = [1.0; 4];
        accumulate_scaled(&mut sums, [&a, &b], [&[1.0, 0.5], &[2.0, 4.0]], 2);
        assert_eq!(sums, [39.0, 89.0, 44.0, 101.0]);
    }
}
