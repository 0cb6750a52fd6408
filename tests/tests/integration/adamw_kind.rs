//! AdamW for the tests that serve any optimizer's kernel.

use super::{STEP, check, elements_of, reference, several_steps, start};
use crate::step_kind::{Kind, Many, Numbers, One};
use blackburn_kernels::{
    KernelError,
    adamw::{
        AdamwProblem, AdamwStep, AdamwTensors, adamw_update, adamw_update_many, adamw_update_with,
    },
    buffer::Buffer,
    step::{Blueprint, Chance, Problem},
};
use blackburn_reference::{
    adamw::{Corrections, Rounding},
    storage::Storage,
};
use cubecl::client::Client;
use libtest_mimic::Failed;

pub(super) struct Adamw;

impl Kind<4> for Adamw {
    const NAME: &'static str = "adamw";
    const NAMES: [&'static str; 4] = ["parameter", "gradient", "first", "second"];
    type Step = AdamwStep;
    type Tensors = AdamwTensors;
    const STEP: AdamwStep = STEP;
    const START: fn(&Client, usize, Storage, Buffer) -> AdamwTensors = start;
    const PROBLEM: fn(&AdamwTensors) -> Result<AdamwProblem, KernelError> = AdamwProblem::new;
    const ONE: One<AdamwStep, AdamwTensors> = adamw_update;
    const MANY: Many<AdamwStep, AdamwTensors> = adamw_update_many;
    const SEVERAL_STEPS: fn(&Client, Storage, Storage, usize) -> Result<(), Failed> = several_steps;

    fn numbers(place: usize) -> AdamwStep {
        AdamwStep {
            weight_decay: if place.is_multiple_of(2) { 0.1 } else { 0.0 },
            rate: 1e-2 / (1 + place) as f64,
            time: 1 + place % 5,
            ..STEP
        }
    }

    fn decay(step: &mut AdamwStep) -> &mut f64 {
        &mut step.weight_decay
    }

    fn rate(step: &mut AdamwStep) -> &mut f64 {
        &mut step.rate
    }

    fn time(step: &mut AdamwStep) -> &mut usize {
        &mut step.time
    }

    fn by(
        client: &Client,
        step: &AdamwStep,
        tensors: AdamwTensors,
        chance: Option<Chance>,
        plan: &dyn Fn(&Problem<4>, &Client) -> Blueprint,
    ) -> Result<AdamwTensors, KernelError> {
        adamw_update_with(client, step, tensors, None, chance, plan)
    }

    fn check(
        step: AdamwStep,
        skipped: Option<usize>,
        numbers: [&Numbers; 2],
        gradient: &[f64],
        stored: Storage,
        rounding: Rounding,
    ) -> Result<(), Failed> {
        let [old, new] = numbers.map(elements_of);
        let taken = step.time.saturating_sub(skipped.unwrap_or(0)).max(1);
        let by = if skipped.is_some() { Corrections::Device } else { Corrections::Host };
        check(&reference(&step, taken), [&old, &new], gradient, stored, rounding, by)
    }
}
