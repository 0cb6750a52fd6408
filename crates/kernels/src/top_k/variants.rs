//! Rows that cover the plans: see [`variants`](crate::variants).

use super::{TopKProblem, top_k};
use crate::{
    Promise,
    buffer::Buffer,
    variants::{FLOATS, Variant},
};

/// Rows, columns and k: few units a row, and rows that fill shared memory everywhere.
pub const SIZES: [[usize; 3]; 2] = [[4096, 40, 4], [256, 2048, 50]];

/// As many as cubes of one plane that a multiprocessor holds may have; larger ones are held by fewer of shared memory.
const PROMISE: Promise = Promise::registers(64);

/// Each in every type.
pub(crate) fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        for [rows, columns, k] in SIZES {
            let problem = TopKProblem { rows, columns, k, dtype };
            let name = format!("{name}_{k}_of_{rows}x{columns}");
            all.push(Variant::new(name, [("top_k", PROMISE)], move |client| {
                let x = Buffer::empty(client, rows * columns, dtype);
                top_k(client, &problem, &x).map(drop)
            }));
        }
    }
    all
}
