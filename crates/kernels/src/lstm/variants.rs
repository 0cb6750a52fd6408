//! Sequences that cover the plans: see [`variants`](crate::variants).

use super::{LstmProblem, lstm_backward, lstm_forward};
use crate::{
    buffer::{Buffer, F32},
    elementwise::ElementwiseBlueprint,
    matmul::F32Precision,
    variants::{FLOATS, Variant},
};

/// Two steps of both passes in every type, by vectors and by elements. Products have variants of their own.
pub(crate) fn variants() -> Vec<Variant> {
    let promises = [
        ("lstm_cell", ElementwiseBlueprint::PROMISE),
        ("lstm_cell_backward", ElementwiseBlueprint::PROMISE),
    ];
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        for hidden in [64, 33] {
            all.push(Variant::new(format!("{name}_{hidden}"), promises, move |client| {
                let (steps, batch) = (2, 16);
                let problem = LstmProblem {
                    steps,
                    batch,
                    hidden,
                    reverse: false,
                    dtype,
                    f32_precision: F32Precision::Tf32,
                };
                let empty = |elements| Buffer::empty(client, elements, dtype);
                let state = batch * hidden;
                let (projected, weight) = (empty(steps * 4 * state), empty(4 * hidden * hidden));
                let first = [&empty(state), &Buffer::empty(client, state, F32)];
                let made = lstm_forward(client, &problem, &projected, &weight, first)?;
                lstm_backward(client, &problem, &made.saved, &weight, &made.out).map(drop)
            }));
        }
    }
    all
}
