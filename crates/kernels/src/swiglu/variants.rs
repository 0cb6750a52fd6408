//! Calls that cover the plans: see [`variants`](crate::variants).

use super::{swiglu_backward, swiglu_backward_watched, swiglu_forward, swiglu_forward_watched};
use crate::{
    buffer::Buffer,
    elementwise::ElementwiseBlueprint,
    variants::{FLOATS, Variant},
};

/// Elements that whole vectors serve.
pub const ELEMENTS: usize = 4096;

/// Both passes in every type, with magnitudes and without.
pub(crate) fn variants() -> Vec<Variant> {
    let promises = [
        ("swiglu_forward", ElementwiseBlueprint::PROMISE),
        ("swiglu_backward", ElementwiseBlueprint::PROMISE),
        ("swiglu_forward_watched", ElementwiseBlueprint::PROMISE),
        ("swiglu_backward_watched", ElementwiseBlueprint::PROMISE),
    ];
    let variant = |(dtype, name): (_, &str)| {
        Variant::new(name.into(), promises, move |client| {
            let x = Buffer::empty(client, ELEMENTS, dtype);
            swiglu_forward(client, &x, &x)?;
            swiglu_backward(client, &x, &x, &x)?;
            swiglu_forward_watched(client, &x, &x)?;
            swiglu_backward_watched(client, &x, &x, &x).map(drop)
        })
    };
    FLOATS.map(variant).into()
}
