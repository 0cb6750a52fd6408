//! Steps that cover the plans: see [`variants`](crate::variants).

use super::AdamwStep;
use crate::{step, variants::Variant};

/// A step of training; all steps take the same way.
const STEP: AdamwStep =
    AdamwStep { beta_1: 0.9, beta_2: 0.95, epsilon: 1e-8, weight_decay: 0.1, rate: 1e-3, time: 1 };

pub(crate) fn variants() -> Vec<Variant> {
    step::variants("adamw", [(STEP, ""); 2])
}
