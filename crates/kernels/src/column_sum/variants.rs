//! Sums that cover the plans: see [`variants`](crate::variants).

use super::{ColumnSumBlueprint, ColumnSumProblem, column_squares, column_sum};
use crate::{
    buffer::Buffer,
    variants::{FLOATS, Variant},
};

/// Rows and columns that whole vectors serve: what one cube sums alone, what clusters do where there are some, of 16 and of
/// 32 bits, and what takes two launches.
const SHAPES: [[usize; 2]; 4] = [[8, 4096], [2048, 768], [2048, 384], [16_384, 4096]];

/// Every type in each form.
pub(crate) fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        for shape @ [rows, columns] in SHAPES {
            let promises = [
                ("column_sum", ColumnSumBlueprint::PROMISE),
                ("column_sum_cluster", ColumnSumBlueprint::CLUSTER_PROMISE),
            ];
            all.push(Variant::new(
                format!("{name}_of_{rows}x{columns}"),
                promises,
                move |client| {
                    let problem = ColumnSumProblem::new(&shape, &[columns, 1], 0..1, dtype)?;
                    let x = Buffer::empty(client, rows * columns, dtype);
                    let means = column_sum(client, &problem, &x)?;
                    column_squares(client, &problem, &x, &means, 1.0).map(drop)
                },
            ));
        }
    }
    all
}
