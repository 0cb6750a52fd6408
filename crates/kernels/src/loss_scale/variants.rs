//! Calls that cover the plans: see [`variants`](crate::variants).

use super::{Scaler, ScalerRules, loss_scale_measure, loss_scale_update};
use crate::{
    Promise,
    buffer::Buffer,
    square_sum::PLACES,
    variants::{FLOATS, Variant},
};

/// Registers of the two kernels, each of which has a single cube: more would cost nothing.
const PROMISES: [(&str, Promise); 2] =
    [("loss_scale_measure", Promise::registers(64)), ("loss_scale_update", Promise::registers(64))];

/// Gradients with and without a scale and a largest norm, and the scaler's numbers.
pub(crate) fn variants() -> Vec<Variant> {
    let (f32, _) = FLOATS[0];
    let mut all = Vec::new();
    for (scaled, clipped, name) in [
        (true, true, "scaled_clipped"),
        (true, false, "scaled"),
        (false, true, "clipped"),
        (false, false, "plain"),
    ] {
        all.push(Variant::new(name.into(), PROMISES, move |client| {
            let sums = Buffer::empty(client, PLACES, f32);
            let scale = scaled.then(|| Buffer::empty(client, 1, f32));
            let largest = if clipped { 1.0 } else { f32::INFINITY };
            loss_scale_measure(client, &sums, scale.as_ref(), largest).map(drop)
        }));
    }
    all.push(Variant::new("rules".into(), PROMISES, move |client| {
        let one = || Buffer::empty(client, 1, f32);
        let rules = ScalerRules {
            growth: 2.0,
            backoff: 0.5,
            interval: 2000,
            least: 1.0,
            largest: 65_536.0,
        };
        let old = Scaler { scale: one(), clean: one(), skipped: one(), in_a_row: one() };
        loss_scale_update(client, &rules, &one(), &old).map(drop)
    }));
    all
}
