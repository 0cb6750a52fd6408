//! Gradient descent for the tests that serve any optimizer's kernel.

use super::{STEP, check, elements_of, reference, several_steps, start};
use crate::step_kind::{Kind, Many, Numbers, One};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    sgd::{SgdProblem, SgdStep, SgdTensors, sgd_update, sgd_update_many, sgd_update_with},
    step::{Blueprint, Chance, Problem},
};
use blackburn_reference::{adamw::Rounding, storage::Storage};
use cubecl::client::Client;
use libtest_mimic::Failed;

pub(super) struct Sgd;

impl Kind<3> for Sgd {
    const NAME: &'static str = "sgd";
    const NAMES: [&'static str; 3] = ["parameter", "gradient", "velocity"];
    type Step = SgdStep;
    type Tensors = SgdTensors;
    const STEP: SgdStep = STEP;
    const START: fn(&Client, usize, Storage, Buffer) -> SgdTensors = start;
    const PROBLEM: fn(&SgdTensors) -> Result<SgdProblem, KernelError> = SgdProblem::new;
    const ONE: One<SgdStep, SgdTensors> = sgd_update;
    const MANY: Many<SgdStep, SgdTensors> = sgd_update_many;
    const SEVERAL_STEPS: fn(&Client, Storage, Storage, usize) -> Result<(), Failed> = several_steps;

    /// Two forms, which take launches of their own, and first steps among others.
    fn numbers(place: usize) -> SgdStep {
        SgdStep {
            dampening: 0.1 * (place % 3) as f64,
            nesterov: place % 4 == 3,
            weight_decay: if place.is_multiple_of(2) { 0.1 } else { 0.0 },
            rate: 1e-2 / (1 + place) as f64,
            time: 1 + place % 5,
            ..STEP
        }
    }

    fn decay(step: &mut SgdStep) -> &mut f64 {
        &mut step.weight_decay
    }

    fn rate(step: &mut SgdStep) -> &mut f64 {
        &mut step.rate
    }

    fn time(step: &mut SgdStep) -> &mut usize {
        &mut step.time
    }

    fn by(
        client: &Client,
        step: &SgdStep,
        tensors: SgdTensors,
        chance: Option<Chance>,
        plan: &dyn Fn(&Problem<3>, &Client) -> Blueprint,
    ) -> Result<SgdTensors, KernelError> {
        sgd_update_with(client, step, tensors, None, chance, plan)
    }

    fn check(
        step: SgdStep,
        skipped: Option<usize>,
        numbers: [&Numbers; 2],
        gradient: &[f64],
        stored: Storage,
        rounding: Rounding,
    ) -> Result<(), Failed> {
        let [old, new] = numbers.map(elements_of);
        let is_first = step.time <= 1 + skipped.unwrap_or(0);
        check(&reference(&step, is_first), [&old, &new], gradient, stored, rounding)
    }
}
