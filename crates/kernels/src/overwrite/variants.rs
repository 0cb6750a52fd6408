//! Tensors that cover the plans: see [`variants`](crate::variants).

use super::overwrite;
use crate::{
    Promise,
    buffer::{Buffer, Rows},
    variants::{FLOATS, Variant},
};
use cubecl::ir::{ElemType, IntKind};

/// Eight cubes of 256 units a multiprocessor.
const PROMISES: [(&str, Promise); 1] = [("overwrite", Promise::registers(32))];

/// What training overwrites: by vectors, and what they leave at the ends of rows.
pub(crate) fn variants() -> Vec<Variant> {
    let [f32, f16, bf16] = FLOATS;
    let i32 = (ElemType::Int(IntKind::I32), "i32");
    [(f32, f32), (f32, f16), (f32, bf16), (bf16, bf16), (f16, f16), (i32, i32)]
        .map(|((source, source_name), (target, target_name))| {
            let name = format!("{target_name}_with_{source_name}");
            Variant::new(name, PROMISES, move |client| {
                let rows = |dtype| Rows::one(Buffer::empty(client, 4099, dtype));
                overwrite(client, &rows(target), &rows(source))
            })
        })
        .into()
}
