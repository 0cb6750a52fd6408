//! Sums that cover the plans: see [`variants`](crate::variants).

use super::{RowSumBlueprint, row_squares, row_sum};
use crate::{
    buffer::{Buffer, Rows},
    variants::{FLOATS, Variant},
};

/// Rows and columns: statistics of a batch of images, channels of one, and rows shorter than a cube.
pub const SHAPES: [[usize; 2]; 3] = [[64, 200_704], [8192, 768], [65_536, 64]];

/// Every type in each shape.
pub(crate) fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        for [rows, columns] in SHAPES {
            let promises = [("row_sum", RowSumBlueprint::PROMISE)];
            all.push(Variant::new(format!("{name}_{rows}x{columns}"), promises, move |client| {
                let buffer = Buffer::empty(client, rows * columns, dtype);
                let x = Rows { buffer, rows, columns, pitch: columns };
                let means = row_sum(client, &x, 1.0)?;
                row_squares(client, &x, &means, 1.0).map(drop)
            }));
        }
    }
    all
}
