//! Calls that cover the plans: see [`variants`](crate::variants).

use super::{DropoutProblem, dropout};
use crate::{
    Promise,
    buffer::Buffer,
    variants::{FLOATS, Variant},
};

/// Five cubes of 256 units a multiprocessor hide the latency of memory.
const PROMISE: Promise = Promise::registers(48);

/// Every type, alone and with a residual.
pub(crate) fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        for (adds, kind) in [(false, ""), (true, "_residual")] {
            let name = format!("{name}{kind}");
            all.push(Variant::new(name, [("dropout", PROMISE)], move |client| {
                let problem = DropoutProblem { elements: 1 << 16, dtype, rate: 0.1, seed: 1 };
                let x = Buffer::empty(client, problem.elements, dtype);
                dropout(client, &problem, &x, adds.then_some(&x)).map(drop)
            }));
        }
    }
    all
}
