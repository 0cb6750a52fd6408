//! Products of matrices, and how far off a device may be.
//!
//! `out[b, i, j] = sum_p lhs[b, i, p] rhs[b, p, j]`, with `lhs` `m` by `k`, `rhs` `k` by `n` and a
//! contiguous row-major `out`. The bounds are in [`MatmulPrecision`].

mod precision;
mod spot;

pub use precision::{MatmulPrecision, Sums};
pub use spot::{Element, element, spot_check_indices};

use std::{fmt, num::NonZero, thread};

/// Products that take a thread longer than starting it does.
const WORTH_A_THREAD: usize = 1 << 20;

/// How a matrix lies in memory, without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Rows follow each other.
    RowMajor,
    /// Columns follow each other: the transpose is what is stored row by row.
    ColumnMajor,
}

impl Layout {
    /// Elements between neighbors in a column and between neighbors in a row.
    pub fn strides(self, rows: usize, columns: usize) -> [usize; 2] {
        match self {
            Self::RowMajor => [columns, 1],
            Self::ColumnMajor => [1, rows],
        }
    }

    /// The letter that BLAS has for it: N is stored as it is multiplied, T is transposed.
    pub fn letter(self) -> char {
        match self {
            Self::RowMajor => 'N',
            Self::ColumnMajor => 'T',
        }
    }
}

/// A product to test or to time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatmulCase {
    /// What it stands for, such as "gpt2 mlp up, forward".
    pub name: &'static str,
    /// Pairs of matrices, which follow each other in memory.
    pub batch: usize,
    /// Rows of the left operand and of the output.
    pub m: usize,
    /// Columns of the right operand and of the output.
    pub n: usize,
    /// Terms of each sum.
    pub k: usize,
    /// How the left operand, `m` by `k`, is stored.
    pub lhs: Layout,
    /// How the right operand, `k` by `n`, is stored.
    pub rhs: Layout,
}

impl MatmulCase {
    /// Elements of the left operand.
    pub fn lhs_len(&self) -> usize {
        self.batch * self.m * self.k
    }

    /// Elements of the right operand.
    pub fn rhs_len(&self) -> usize {
        self.batch * self.k * self.n
    }

    /// Elements of the output.
    pub fn out_len(&self) -> usize {
        self.batch * self.m * self.n
    }

    /// Multiplications and additions.
    pub fn flops(&self) -> f64 {
        2.0 * self.out_len() as f64 * self.k as f64
    }

    /// Strides of the left operand, in elements: of the batch, of `m` and of `k`.
    pub fn lhs_strides(&self) -> [usize; 3] {
        let [row, column] = self.lhs.strides(self.m, self.k);
        [self.m * self.k, row, column]
    }

    /// Strides of the right operand, in elements: of the batch, of `k` and of `n`.
    pub fn rhs_strides(&self) -> [usize; 3] {
        let [row, column] = self.rhs.strides(self.k, self.n);
        [self.k * self.n, row, column]
    }

    fn check(&self, lhs: &[f64], rhs: &[f64]) {
        assert_eq!(lhs.len(), self.lhs_len(), "lhs of {self} differs in length");
        assert_eq!(rhs.len(), self.rhs_len(), "rhs of {self} differs in length");
    }
}

impl fmt::Display for MatmulCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, batch, m, n, k, lhs, rhs } = self;
        let (lhs, rhs) = (lhs.letter(), rhs.letter());
        write!(f, "{name} ({batch} x {m}x{k}x{n} {lhs}{rhs})")
    }
}

/// The product in f64.
///
/// # Panics
///
/// When an operand has another length than the case says.
pub fn matmul(case: &MatmulCase, lhs: &[f64], rhs: &[f64]) -> Vec<f64> {
    product(case, lhs, rhs, |x| x)
}

/// The product of the absolute values: what bounds are multiples of.
///
/// It also says how errors of an operand travel. With an operand's bounds in that operand's place,
/// it is how far the product moves at most when the operand moves within them.
///
/// # Panics
///
/// When an operand has another length than the case says.
pub fn magnitudes(case: &MatmulCase, lhs: &[f64], rhs: &[f64]) -> Vec<f64> {
    product(case, lhs, rhs, f64::abs)
}

/// The product of the squares: of each element, the sum of the squares of its terms.
///
/// # Panics
///
/// When an operand has another length than the case says.
pub fn squares(case: &MatmulCase, lhs: &[f64], rhs: &[f64]) -> Vec<f64> {
    product(case, lhs, rhs, |x| x * x)
}

fn product(case: &MatmulCase, lhs: &[f64], rhs: &[f64], map: fn(f64) -> f64) -> Vec<f64> {
    case.check(lhs, rhs);
    let &MatmulCase { batch, m, n, k, .. } = case;
    let mut out = vec![0.0; case.out_len()];
    if out.is_empty() {
        return out;
    }
    let lhs = &row_major(lhs, [batch, m, k], case.lhs_strides(), map);
    let rhs = &row_major(rhs, [batch, k, n], case.rhs_strides(), map);
    let multiply = |first: usize, out: &mut [f64]| {
        for (i, out) in out.chunks_exact_mut(n).enumerate() {
            let i = first + i;
            let matrix = i / m * k * n;
            // A row of `rhs` at a time, which is contiguous; columns would not be.
            for (p, x) in lhs[i * k..][..k].iter().enumerate() {
                let row = &rhs[matrix + p * n..][..n];
                out.iter_mut().zip(row).for_each(|(y, w)| *y += x * w);
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = threads.min(batch * m * n * k / WORTH_A_THREAD);
    if threads < 2 {
        multiply(0, &mut out);
        return out;
    }
    let rows = (batch * m).div_ceil(threads);
    thread::scope(|scope| {
        for (part, out) in out.chunks_mut(rows * n).enumerate() {
            let multiply = &multiply;
            scope.spawn(move || multiply(part * rows, out));
        }
    });
    out
}

/// A contiguous copy of a `[batch, rows, columns]` with those strides.
fn row_major(
    data: &[f64],
    [batch, rows, columns]: [usize; 3],
    [batch_stride, row_stride, column_stride]: [usize; 3],
    map: fn(f64) -> f64,
) -> Vec<f64> {
    let mut copy = Vec::with_capacity(data.len());
    for b in 0..batch {
        for i in 0..rows {
            let start = b * batch_stride + i * row_stride;
            copy.extend((0..columns).map(|j| map(data[start + j * column_stride])));
        }
    }
    copy
}

#[cfg(test)]
mod tests {
    use super::*;
    use Layout::{ColumnMajor, RowMajor};

    fn case(m: usize, n: usize, k: usize, lhs: Layout, rhs: Layout) -> MatmulCase {
        MatmulCase { name: "test", batch: 1, m, n, k, lhs, rhs }
    }

    #[test]
    fn a_product_worked_by_hand_comes_out_in_all_layouts() {
        // [1 2 3; 4 5 6] [7 8; 9 10; 11 12]
        let lhs = [(RowMajor, [1., 2., 3., 4., 5., 6.]), (ColumnMajor, [1., 4., 2., 5., 3., 6.])];
        let rhs =
            [(RowMajor, [7., 8., 9., 10., 11., 12.]), (ColumnMajor, [7., 9., 11., 8., 10., 12.])];
        for (lhs_layout, lhs) in lhs {
            for (rhs_layout, rhs) in rhs {
                let case = case(2, 2, 3, lhs_layout, rhs_layout);
                assert_eq!(matmul(&case, &lhs, &rhs), [58.0, 64.0, 139.0, 154.0], "{case}");
            }
        }
    }

    #[test]
    fn matrices_of_a_batch_are_multiplied_apart() {
        let case = MatmulCase { batch: 2, ..case(1, 2, 1, RowMajor, RowMajor) };
        assert_eq!(matmul(&case, &[2.0, 3.0], &[1.0, -1.0, 10.0, 20.0]), [2.0, -2.0, 30.0, 60.0]);
        let magnitudes = magnitudes(&case, &[2.0, -3.0], &[1.0, -1.0, 10.0, 20.0]);
        assert_eq!(magnitudes, [2.0, 2.0, 30.0, 60.0]);
    }

    #[test]
    fn empty_sums_are_zero_and_empty_products_empty() {
        assert_eq!(matmul(&case(2, 1, 0, RowMajor, RowMajor), &[], &[]), [0.0, 0.0]);
        assert!(matmul(&case(0, 2, 1, RowMajor, RowMajor), &[], &[1.0, 2.0]).is_empty());
    }

    #[test]
    fn nan_and_infinity_reach_their_row_and_no_other() {
        let case = case(2, 1, 2, RowMajor, RowMajor);
        let y = matmul(&case, &[f64::INFINITY, 0.0, 1.0, 1.0], &[0.0, 1.0]);
        assert!(y[0].is_nan());
        assert_eq!(y[1], 1.0);
    }

    #[test]
    fn cases_count_and_name_themselves() {
        let case = MatmulCase { batch: 6, ..case(2, 5, 3, RowMajor, ColumnMajor) };
        assert_eq!((case.lhs_len(), case.rhs_len(), case.out_len()), (36, 90, 60));
        assert_eq!(case.flops(), 360.0);
        assert_eq!((case.lhs_strides(), case.rhs_strides()), ([6, 3, 1], [15, 1, 3]));
        assert_eq!(case.to_string(), "test (6 x 2x3x5 NT)");
    }

    #[test]
    #[should_panic(expected = "lhs of test (1 x 2x3x5 NN) differs in length")]
    fn an_operand_of_another_length_is_refused() {
        matmul(&case(2, 5, 3, RowMajor, RowMajor), &[0.0; 5], &[0.0; 15]);
    }
}
