//! Tensors that cover the plans: see [`variants`](crate::variants).

use super::{PLACES, sketch};
use crate::{
    Promise,
    buffer::{Buffer, F32, Rows},
    variants::{FLOATS, Variant},
};

/// Eight cubes of 256 units a multiprocessor.
const PROMISES: [(&str, Promise); 1] = [("sketch", Promise::registers(32))];

/// In every type, with and without something between rows, and with sums that somebody else holds.
pub(crate) fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        for (by_rows, held, suffix) in
            [(false, false, ""), (true, false, "_by_rows"), (false, true, "_copied")]
        {
            all.push(Variant::new(format!("of_{name}{suffix}"), PROMISES, move |client| {
                let pitch = if by_rows { 1024 } else { 1000 };
                let buffer = Buffer::empty(client, 64 * pitch, dtype);
                let sums = Buffer::empty(client, PLACES, F32);
                let holder = held.then(|| sums.clone());
                let x = Rows { buffer, rows: 64, columns: 1000, pitch };
                let result = sketch(client, sums, &x, 7).map(drop);
                drop(holder);
                result
            }));
        }
    }
    all
}
