//! Scans that cover the plans: see [`variants`](crate::variants).

use super::{ScanBlueprint, ScanOperation, ScanProblem, scan};
use crate::{
    buffer::Buffer,
    variants::{FLOATS, Variant},
};
use cubecl::ir::{ElemType, IntKind};

/// Outer, length and inner: rows of a tile, short ones, ragged ones, and long ones in chunks; columns whole and in
/// chunks.
pub const SIZES: [[usize; 3]; 6] = [
    [4096, 1024, 1],
    [65_536, 32, 1],
    [512, 1023, 1],
    [4, 1 << 20, 1],
    [64, 64, 8192],
    [1, 4096, 256],
];

/// Operations, and how names of variants say them. The smallest is found as the largest is.
const OPERATIONS: [(ScanOperation, &str); 3] =
    [(ScanOperation::Sum, "sum"), (ScanOperation::Product, "product"), (ScanOperation::Max, "max")];

/// Each size, in every type for sums, and in f32 and i32 for the others.
pub(crate) fn variants() -> Vec<Variant> {
    let integers = (ElemType::Int(IntKind::I32), "i32");
    let mut all = Vec::new();
    for (dtype, name) in FLOATS.into_iter().chain([integers]) {
        for (operation, operation_name) in OPERATIONS {
            if operation != ScanOperation::Sum && dtype.size() != 4 {
                continue;
            }
            for [outer, length, inner] in SIZES {
                let problem = ScanProblem { operation, outer, length, inner, dtype };
                let name = format!("{operation_name}_{name}_{outer}x{length}x{inner}");
                let promises = [
                    ("scan_rows", ScanBlueprint::ROW_PROMISE),
                    ("scan_row_totals", ScanBlueprint::ROW_PROMISE),
                    ("scan_columns", ScanBlueprint::COLUMN_PROMISE),
                    ("scan_column_totals", ScanBlueprint::COLUMN_PROMISE),
                ];
                all.push(Variant::new(name, promises, move |client| {
                    let x = Buffer::empty(client, problem.elements(), dtype);
                    scan(client, &problem, &x).map(drop)
                }));
            }
        }
    }
    all
}
