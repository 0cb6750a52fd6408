//! Calls that cover the plans: see [`variants`](crate::variants).

use super::{Columns, copy_columns};
use crate::{
    DeviceProfile, Promise,
    buffer::{Buffer, Rows},
    variants::{FLOATS, Variant},
};
use cubecl::client::Client;

/// One of two images of 32 channels that are joined, in every type.
pub(crate) fn variants(client: &Client) -> Vec<Variant> {
    let by_memory = Promise::registers(DeviceProfile::of(client).registers_when_full());
    FLOATS
        .map(|(dtype, name)| {
            Variant::new(name.into(), [("copy_columns", by_memory)], move |client| {
                let of = |columns, first| {
                    let rows = 64 * 64;
                    let buffer = Buffer::empty(client, rows * columns, dtype);
                    Columns { of: Rows { buffer, rows, columns, pitch: columns }, first }
                };
                copy_columns(client, 32, &of(32, 0), &of(64, 32))
            })
        })
        .into()
}
