//! Calls that cover the plans: see [`variants`](crate::variants).

use super::{DropoutProblem, KeptElements, add_masked, dropout};
use crate::{
    Promise,
    buffer::Buffer,
    variants::{FLOATS, Variant},
};

use cubecl::ir::{ElemType, UIntKind};

/// Five cubes of 256 units a multiprocessor hide the latency of memory.
const PROMISE: Promise = Promise::registers(48);

/// Every type, alone, with a residual, with a key, and by a mask in memory.
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
        let name = format!("{name}_masked");
        all.push(Variant::new(name, [("masked", PROMISE)], move |client| {
            let x = Buffer::empty(client, 1 << 16, dtype);
            let kept = KeptElements { mask: x.clone(), scale: 1.25 };
            add_masked(client, &x, &kept, &x).map(drop)
        }));
    }
    all
}
