//! Gradient descent's steps of several parameters in few launches.

use super::{STEP, check, elements, reference, start};
use crate::step_many::{Kind, UpdateOf};
use blackburn_kernels::{
    KernelError,
    buffer::{Buffer, Rows},
    sgd::{SgdStep, SgdTensors, sgd_update, sgd_update_many},
    step::{Chance, Gate},
};
use blackburn_reference::{adamw::Rounding, sgd::Element, storage::Storage};
use cubecl::client::Client;
use libtest_mimic::Failed;

pub(super) struct Sgd;

impl Kind for Sgd {
    const NAME: &'static str = "sgd";
    type Step = SgdStep;
    type Tensors = SgdTensors;
    type Element = Element;

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

    fn later(step: SgdStep) -> SgdStep {
        SgdStep { time: step.time + 1, ..step }
    }

    fn others(step: SgdStep) -> SgdStep {
        SgdStep { weight_decay: step.weight_decay + 0.1, ..step }
    }

    fn too_early(step: SgdStep) -> SgdStep {
        SgdStep { time: 0, ..step }
    }

    fn start(client: &Client, length: usize, stored: Storage, gradient: Buffer) -> SgdTensors {
        start(client, length, stored, gradient)
    }

    fn elements(
        client: &Client,
        tensors: &SgdTensors,
        stored: Storage,
    ) -> Result<Vec<Element>, Failed> {
        elements(client, tensors, stored)
    }

    fn parameter(tensors: &SgdTensors) -> &Rows {
        &tensors.parameter
    }

    fn gradient(tensors: &mut SgdTensors) -> &mut Rows {
        &mut tensors.gradient
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

    fn many(
        client: &Client,
        updates: Vec<UpdateOf<Self>>,
        gate: Option<Gate>,
        seed: Option<Buffer>,
    ) -> Result<Vec<SgdTensors>, KernelError> {
        sgd_update_many(client, updates, gate, seed)
    }

    fn check(
        step: SgdStep,
        skipped: Option<usize>,
        elements: [&[Element]; 2],
        gradient: &[f64],
        stored: Storage,
        rounding: Rounding,
    ) -> Result<(), Failed> {
        let is_first = step.time <= 1 + skipped.unwrap_or(0);
        check(&reference(&step, is_first), elements, gradient, stored, rounding)
    }
}
