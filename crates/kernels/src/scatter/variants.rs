//! Additions that cover the plans: see [`variants`](crate::variants).

use super::{ScatterProblem, SelectProblem, scatter_add, select_add};
use crate::{
    DeviceProfile, Promise,
    buffer::Buffer,
    variants::{FLOATS, Variant},
};
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind},
};

/// Rows, terms and places of `scatter`: short rows, and those that fill shared memory everywhere.
pub const ROWS: [[usize; 3]; 3] = [[4096, 24, 100], [4096, 1024, 1024], [64, 4096, 4000]];
/// Outer, terms, places and inner of `select`: slices of vectors, and single elements.
pub const SLICES: [[usize; 4]; 2] = [[4, 1000, 500, 64], [4096, 1024, 1024, 1]];

/// Both in every type.
pub(crate) fn variants(client: &Client) -> Vec<Variant> {
    const INDEX: ElemType = ElemType::Int(IntKind::I32);

    // A multiprocessor is full while it sorts; units that add wait for values that lie anywhere.
    let sort = Promise::registers(DeviceProfile::of(client).registers_when_full());
    let add = Promise::registers(40);
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        for [rows, terms, places] in ROWS {
            let problem = ScatterProblem { rows, terms, places, dtype };
            let name = format!("rows_{name}_{rows}x{terms}_to_{places}");
            all.push(Variant::new(name, [("scatter_rows", add)], move |client| {
                let x = Buffer::empty(client, rows * places, dtype);
                let index = Buffer::empty(client, rows * terms, INDEX);
                let values = Buffer::empty(client, rows * terms, dtype);
                scatter_add(client, &problem, &x, &index, &values).map(drop)
            }));
        }
        for [outer, terms, places, inner] in SLICES {
            let problem = SelectProblem { outer, terms, places, inner, dtype };
            let promises =
                [("embedding_count", sort), ("embedding_sort", sort), ("select_add", add)];
            let name = format!("slices_{name}_{outer}x{terms}x{inner}_to_{places}");
            all.push(Variant::new(name, promises, move |client| {
                let x = Buffer::empty(client, outer * places * inner, dtype);
                let index = Buffer::empty(client, terms, INDEX);
                let values = Buffer::empty(client, outer * terms * inner, dtype);
                select_add(client, &problem, &x, &index, &values).map(drop)
            }));
        }
    }
    all
}
