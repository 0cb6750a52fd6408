//! Calls that cover the plans: see [`variants`](crate::variants).

use super::{RotaryBlueprint, RotaryProblem, rotary, rotary_watched};
use crate::{
    Pass,
    attention::Order,
    buffer::{Buffer, F32, Rows},
    variants::{FLOATS, Variant},
};

/// Sizes of a head with their sequences: whole vectors with four rows a unit, and pairs with one.
pub const SIZES: [(usize, usize); 2] = [(64, 8), (6, 1)];

/// Both passes in every type, as plans differ, with magnitudes for whole vectors.
pub(crate) fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        for (head_dim, batch) in SIZES {
            for pass in [Pass::Forward, Pass::Backward] {
                let name = format!("{name}_{head_dim}_{pass}");
                let promises = [("rotary", RotaryBlueprint::PROMISE)];
                let watched = head_dim == 64;
                all.push(Variant::new(name, promises, move |client| {
                    let order = Order::PositionsFirst;
                    let problem = RotaryProblem {
                        batch,
                        heads: 4,
                        seq: 32,
                        head_dim,
                        dtype,
                        strides: order.strides(4, 32, head_dim),
                        order,
                        start: 0,
                        positions: 32,
                    };
                    let x = Buffer::empty(client, problem.elements(), dtype);
                    let table = Rows::from(Buffer::empty(client, 2 * 32 * head_dim, F32));
                    // Held, so that the result is written beside it.
                    rotary(client, &problem, pass, x.clone(), &table)?;
                    if watched {
                        rotary_watched(client, &problem, pass, x.clone(), &table)?;
                    }
                    rotary(client, &problem, pass, x, &table).map(drop)
                }));
            }
        }
    }
    all
}
