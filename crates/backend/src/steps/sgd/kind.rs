//! What the provider that takes steps together is told of this one.

use crate::steps::{
    operation::Scalars,
    provider::{Kind, Many, StepProvider},
};
use blackburn_kernels::sgd::{SgdStep, SgdTensors, sgd_update_many};

/// Registers the provider with Burn.
pub(crate) type SgdProvider = StepProvider<Sgd, 3>;

/// Parameter, gradient, and a velocity.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sgd;

impl Kind<3> for Sgd {
    const NAME: &'static str = "BlackburnSgd";
    const OP: &'static str = "sgd_update";
    const ID: &'static str = "blackburn::sgd_step";
    const SCALARS: usize = 7;
    type Step = SgdStep;
    type Tensors = SgdTensors;
    const MANY: Many<Self::Step, Self::Tensors> = sgd_update_many;

    fn step(scalars: &Scalars<'_>) -> Option<SgdStep> {
        Some(SgdStep {
            momentum: scalars.real(1)?,
            dampening: scalars.real(2)?,
            nesterov: scalars.flag(3)?,
            weight_decay: scalars.real(4)?,
            rate: scalars.real(5)?,
            time: scalars.whole(6)?,
        })
    }
}
