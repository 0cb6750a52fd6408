//! AdamW's steps of several parameters in few launches.

use super::{STEP, check, elements, reference, start};
use crate::step_many::{Kind, UpdateOf};
use blackburn_kernels::{
    KernelError,
    adamw::{AdamwStep, AdamwTensors, adamw_update, adamw_update_many},
    buffer::{Buffer, Rows},
    step::{Chance, Gate},
};
use blackburn_reference::{
    adamw::{Corrections, Element, Rounding},
    storage::Storage,
};
use cubecl::client::Client;
use libtest_mimic::Failed;

pub(super) struct Adamw;

impl Kind for Adamw {
    const NAME: &'static str = "adamw";
    type Step = AdamwStep;
    type Tensors = AdamwTensors;
    type Element = Element;

    fn numbers(place: usize) -> AdamwStep {
        AdamwStep {
            weight_decay: if place.is_multiple_of(2) { 0.1 } else { 0.0 },
            rate: 1e-2 / (1 + place) as f64,
            time: 1 + place % 5,
            ..STEP
        }
    }

    fn later(step: AdamwStep) -> AdamwStep {
        AdamwStep { time: step.time + 1, ..step }
    }

    fn others(step: AdamwStep) -> AdamwStep {
        AdamwStep { weight_decay: step.weight_decay + 0.1, ..step }
    }

    fn too_early(step: AdamwStep) -> AdamwStep {
        AdamwStep { time: 0, ..step }
    }

    fn start(client: &Client, length: usize, stored: Storage, gradient: Buffer) -> AdamwTensors {
        start(client, length, stored, gradient)
    }

    fn elements(
        client: &Client,
        tensors: &AdamwTensors,
        stored: Storage,
    ) -> Result<Vec<Element>, Failed> {
        elements(client, tensors, stored)
    }

    fn parameter(tensors: &AdamwTensors) -> &Rows {
        &tensors.parameter
    }

    fn gradient(tensors: &mut AdamwTensors) -> &mut Rows {
        &mut tensors.gradient
    }

    fn one(
        client: &Client,
        step: &AdamwStep,
        tensors: AdamwTensors,
        gate: Option<Gate>,
        chance: Option<Chance>,
    ) -> Result<AdamwTensors, KernelError> {
        adamw_update(client, step, tensors, gate, chance)
    }

    fn many(
        client: &Client,
        updates: Vec<UpdateOf<Self>>,
        gate: Option<Gate>,
        seed: Option<Buffer>,
    ) -> Result<Vec<AdamwTensors>, KernelError> {
        adamw_update_many(client, updates, gate, seed)
    }

    fn check(
        step: AdamwStep,
        skipped: Option<usize>,
        elements: [&[Element]; 2],
        gradient: &[f64],
        stored: Storage,
        rounding: Rounding,
    ) -> Result<(), Failed> {
        let taken = step.time.saturating_sub(skipped.unwrap_or(0)).max(1);
        let by = if skipped.is_some() { Corrections::Device } else { Corrections::Host };
        check(&reference(&step, taken), elements, gradient, stored, rounding, by)
    }
}
