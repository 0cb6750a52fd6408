//! Tensors that cover the plans: see [`variants`](crate::variants).

use super::{Overwrite, overwrite, overwrite_many, overwrite_parts};
use crate::{
    Promise,
    buffer::{Buffer, Rows},
    variants::{FLOATS, Variant},
};
use cubecl::ir::{ElemType, IntKind};

/// Eight cubes of 256 units a multiprocessor.
const PROMISES: [(&str, Promise); 1] = [("overwrite", Promise::registers(32))];

/// What training overwrites: by vectors, and what they leave at the ends of rows; rows of a convolution's weight;
/// many at once; and images that are joined.
pub(crate) fn variants() -> Vec<Variant> {
    let [f32, f16, bf16] = FLOATS;
    let i32 = (ElemType::Int(IntKind::I32), "i32");
    let one = [(f32, f32), (f32, f16), (f32, bf16), (bf16, bf16), (f16, f16), (i32, i32)].map(
        |((source, source_name), (target, target_name))| {
            let name = format!("{target_name}_with_{source_name}");
            Variant::new(name, PROMISES, move |client| {
                let rows = |dtype| Rows::one(Buffer::empty(client, 4099, dtype));
                overwrite(client, &rows(target), &rows(source))
            })
        },
    );
    let many = Variant::new("bf16_with_f32_many_short_rows".into(), PROMISES, move |client| {
        let rows = |dtype, pitch| Rows {
            buffer: Buffer::empty(client, 192 * pitch, dtype),
            rows: 192,
            columns: 3,
            pitch,
        };
        let all = [0; 16].map(|_| Overwrite::new(rows(bf16.0, 8), rows(f32.0, 4)));
        overwrite_many(client, &all)
    });
    let joined = FLOATS.map(|(dtype, name)| {
        Variant::new(format!("{name}_images_joined"), PROMISES, move |client| {
            const PIXELS: usize = 64 * 64;
            const CHANNELS: usize = 32;
            let buffer = |channels| Buffer::empty(client, PIXELS * channels, dtype);
            let rows = |buffer, pitch| Rows { buffer, rows: PIXELS, columns: CHANNELS, pitch };
            let out = buffer(2 * CHANNELS);
            let parts = [0, CHANNELS].map(|first| Overwrite {
                target: rows(out.clone(), 2 * CHANNELS),
                source: rows(buffer(CHANNELS), CHANNELS),
                skipped: [first, 0],
            });
            overwrite_parts(client, &parts)
        })
    });
    one.into_iter().chain([many]).chain(joined).collect()
}
