//! Calls that cover the plans: see [`variants`](crate::variants).

use super::{DropoutProblem, dropout};
use crate::{
    Promise,
    buffer::Buffer,
    variants::{FLOATS, Variant},
};

use cubecl::ir::{ElemType, UIntKind};

/// Five cubes of 256 units a multiprocessor hide the latency of memory.
const PROMISE: Promise = Promise::registers(48);

/// Every type, alone, with a residual, and with a key.
pub(crate) fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        for (adds, has_key, kind) in
            [(false, false, ""), (true, false, "_residual"), (true, true, "_residual_key")]
        {
            let name = format!("{name}{kind}");
            all.push(Variant::new(name, [("dropout", PROMISE)], move |client| {
                let problem = DropoutProblem { elements: 1 << 16, dtype, rate: 0.1, seed: 1 };
                let x = Buffer::empty(client, problem.elements, dtype);
                let key = Buffer::empty(client, 2, ElemType::UInt(UIntKind::U32));
                dropout(client, &problem, &x, adds.then_some(&x), has_key.then_some(&key)).map(drop)
            }));
        }
    }
    all
}
