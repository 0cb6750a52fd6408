//! Steps that cover the plans: see [`variants`](crate::variants).

use super::SgdStep;
use crate::{step, variants::Variant};

/// A step of training that looks ahead.
const NESTEROV: SgdStep = SgdStep {
    momentum: 0.9,
    dampening: 0.0,
    nesterov: true,
    weight_decay: 1e-4,
    rate: 0.1,
    time: 1,
};

pub(crate) fn variants() -> Vec<Variant> {
    let plain = SgdStep { nesterov: false, ..NESTEROV };
    step::variants("sgd", [(NESTEROV, "_nesterov"), (plain, "")])
}
