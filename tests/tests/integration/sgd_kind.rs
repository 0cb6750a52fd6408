//! Gradient descent for the tests that serve any optimizer's kernel.

use super::{STEP, check, elements_of, reference, several_steps, start};
use crate::step_kind::{Kind, Numbers, UpdateOf};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    sgd::{SgdProblem, SgdStep, SgdTensors, sgd_update, sgd_update_many, sgd_update_with},
    step::{Blueprint, Chance, Gate, Problem},
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

    fn start(client: &Client, length: usize, stored: Storage, gradient: Buffer) -> SgdTensors {
        start(client, length, stored, gradient)
    }

    fn problem(tensors: &SgdTensors) -> Result<SgdProblem, KernelError> {
        SgdProblem::new(tensors)
    }

    fn one(
        client: &Client,
        step: &SgdStep,
        tensors: SgdTensors,
        gate: Option<Gate>,
        chance: Option<Chance>,
    ) -> Result<SgdTensors, KernelError> {
        sgd_update(client, step, tensors, gate, chance)
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

    fn many(
        client: &Client,
        updates: Vec<UpdateOf<Self, 3>>,
        gate: Option<Gate>,
        seed: Option<Buffer>,
    ) -> Result<Vec<SgdTensors>, KernelError> {
        sgd_update_many(client, updates, gate, seed)
    }

    fn several_steps(
        client: &Client,
        stored: Storage,
        gradients: Storage,
        length: usize,
    ) -> Result<(), Failed> {
        several_steps(client, stored, gradients, length)
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
