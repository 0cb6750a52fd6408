//! Calls that cover the plans: see [`variants`](crate::variants).

use super::{
    GeluCall, GeluSumBlueprint, gelu_backward, gelu_backward_sum, gelu_call_backward,
    gelu_call_backward_sum, gelu_call_forward, gelu_forward,
};
use crate::{
    buffer::Buffer,
    column_sum::ColumnSumBlueprint,
    dropout::{DropoutMask, KeptElements},
    elementwise::ElementwiseBlueprint,
    variants::{FLOATS, Variant},
};
use cubecl::ir::{ElemType, UIntKind};

/// Rows whose gradients one pass sums, and rows that take two.
pub const ROWS: [usize; 2] = [8, 16_384];
/// Columns of rows that whole vectors serve.
pub const COLUMNS: usize = 4096;

/// Every type, with both ways to sum gradients, and with what stands around GELU in a layer.
pub(crate) fn variants() -> Vec<Variant> {
    let promises = [
        ("gelu_forward", ElementwiseBlueprint::PROMISE),
        ("gelu_backward", ElementwiseBlueprint::PROMISE),
        ("gelu_backward_sum", GeluSumBlueprint::PROMISE),
        ("column_sum", ColumnSumBlueprint::PROMISE),
    ];
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        all.push(Variant::new(name.into(), promises, move |client| {
            let x = Buffer::empty(client, COLUMNS, dtype);
            gelu_forward(client, &x)?;
            gelu_backward(client, &x, &x).map(drop)
        }));
        for rows in ROWS {
            all.push(Variant::new(format!("{name}_of_{rows}"), promises, move |client| {
                let x = Buffer::empty(client, rows * COLUMNS, dtype);
                gelu_backward_sum(client, COLUMNS, &x, &x).map(drop)
            }));
        }
        let mut of_layer = promises;
        of_layer[2].1 = GeluSumBlueprint::LAYER_PROMISE;
        all.push(Variant::new(format!("{name}_layer"), of_layer, move |client| {
            let [bias, x] = [1, ROWS[1]].map(|rows| Buffer::empty(client, rows * COLUMNS, dtype));
            let key = Buffer::empty(client, 2, ElemType::UInt(UIntKind::U32));
            let dropout = Some(DropoutMask { rate: 0.1, seed: 1, key: Some(key) });
            let call = GeluCall { bias: Some(bias), dropout, ..GeluCall::alone(&x) };
            gelu_call_forward(client, &call)?;
            let kept = Some(KeptElements { mask: x.clone(), scale: 1.25 });
            gelu_call_forward(client, &GeluCall { kept, ..GeluCall::alone(&x) })?;
            gelu_call_backward(client, &call, &call.x)?;
            gelu_call_backward_sum(client, COLUMNS, &call, &call.x).map(drop)
        }));
    }
    all
}
