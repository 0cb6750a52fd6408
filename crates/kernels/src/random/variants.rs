//! Calls that cover the plans: see [`variants`](crate::variants).

use super::{RandomDistribution, RandomProblem, random};
use crate::{
    Promise,
    buffer::Buffer,
    variants::{FLOATS, Variant},
};
use cubecl::ir::{ElemType, UIntKind};

/// Eight cubes of 256 units a multiprocessor.
const PROMISE: Promise = Promise::registers(32);

/// Every type by every distribution.
pub(crate) fn variants() -> Vec<Variant> {
    let distributions = [
        ("bernoulli", RandomDistribution::Bernoulli(0.9)),
        ("uniform", RandomDistribution::Uniform { low: -1.0, high: 1.0 }),
        ("normal", RandomDistribution::Normal { mean: 0.0, deviation: 1.0 }),
    ];
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        for (kind, distribution) in distributions {
            let name = format!("{name}_{kind}");
            all.push(Variant::new(name, [("random", PROMISE)], move |client| {
                let problem = RandomProblem { elements: 1 << 16, dtype, distribution, number: 1 };
                let key = Buffer::empty(client, 2, ElemType::UInt(UIntKind::U32));
                random(client, &problem, &key).map(drop)
            }));
        }
    }
    all
}
