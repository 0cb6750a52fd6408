//! What the provider that takes steps together is told of this one.

use crate::{steps::provider::Optimizer, stream::Scalars};
use blackburn_kernels::adamw::AdamwStep;

/// Parameter, gradient, and two moments.
#[derive(Clone, Debug, Default)]
pub(crate) struct Adamw;

impl Optimizer<4> for Adamw {
    const NAME: &'static str = "BlackburnAdamw";
    const OP: &'static str = "adamw_update";
    const ID: &'static str = "blackburn::adamw_step";
    const SCALARS: usize = 7;
    type Numbers = AdamwStep;

    fn numbers(scalars: &Scalars<'_>) -> Option<AdamwStep> {
        Some(AdamwStep {
            beta_1: scalars.real(1)?,
            beta_2: scalars.real(2)?,
            epsilon: scalars.real(3)?,
            weight_decay: scalars.real(4)?,
            rate: scalars.real(5)?,
            time: scalars.whole(6)?,
        })
    }

    fn advance(numbers: &mut AdamwStep, rate: f64) {
        numbers.rate = rate;
        numbers.time = numbers.time.saturating_add(1);
    }
}
