//! What the provider that takes steps together is told of this one.

use crate::{steps::provider::Optimizer, stream::Scalars};
use blackburn_kernels::sgd::SgdStep;

/// Parameter, gradient, and a velocity.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sgd;

impl Optimizer<3> for Sgd {
    const NAME: &'static str = "BlackburnSgd";
    const OP: &'static str = "sgd_update";
    const ID: &'static str = "blackburn::sgd_step";
    const SCALARS: usize = 7;
    type Numbers = SgdStep;

    fn numbers(scalars: &Scalars<'_>) -> Option<SgdStep> {
        Some(SgdStep {
            momentum: scalars.real(1)?,
            dampening: scalars.real(2)?,
            nesterov: scalars.flag(3)?,
            weight_decay: scalars.real(4)?,
            rate: scalars.real(5)?,
            time: scalars.whole(6)?,
        })
    }

    fn advance(numbers: &mut SgdStep, rate: f64) {
        numbers.rate = rate;
        numbers.time = numbers.time.saturating_add(1);
    }
}
