//! Sums that cover the plans: see [`variants`](crate::variants).

use super::{ColumnSumBlueprint, ColumnSumProblem, column_squares, column_sum};
use crate::{
    buffer::Buffer,
    variants::{FLOATS, Variant},
};

/// Rows that one pass sums, and rows that take two.
pub const ROWS: [usize; 2] = [8, 16_384];
/// Columns of rows that whole vectors serve.
pub const COLUMNS: usize = 4096;

/// Every type in one pass and in two.
pub(crate) fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        for rows in ROWS {
            let promises = [("column_sum", ColumnSumBlueprint::PROMISE)];
            all.push(Variant::new(format!("{name}_of_{rows}"), promises, move |client| {
                let shape = [rows, COLUMNS];
                let problem = ColumnSumProblem::new(&shape, &[COLUMNS, 1], 0..1, dtype)?;
                let x = Buffer::empty(client, rows * COLUMNS, dtype);
                let means = column_sum(client, &problem, &x)?;
                column_squares(client, &problem, &x, &means, 1.0).map(drop)
            }));
        }
    }
    all
}
