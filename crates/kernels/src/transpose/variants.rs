//! Calls that cover the plans: see [`variants`](crate::variants).

use super::transpose;
use crate::{
    DeviceProfile, Promise,
    buffer::Buffer,
    variants::{FLOATS, Variant},
};
use cubecl::client::Client;

/// The gradient of GPT-2's head, whose rows are padded, in every type.
pub(crate) fn variants(client: &Client) -> Vec<Variant> {
    let by_memory = Promise::registers(DeviceProfile::of(client).registers_when_full());
    FLOATS
        .map(|(dtype, name)| {
            let kernel = if dtype.size() == 2 { "transpose_halves" } else { "transpose_words" };
            Variant::new(name.into(), [(kernel, by_memory)], move |client| {
                let (rows, columns, pitch) = (50_257, 768, 50_304);
                let source = Buffer::empty(client, columns * pitch, dtype);
                let target = Buffer::empty(client, rows * columns, dtype);
                transpose(client, &source, &target, columns, pitch)
            })
        })
        .into()
}
