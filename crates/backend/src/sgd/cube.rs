//! The step on GPUs.

use super::{SgdPrimitives, Step, Updated};
use crate::{
    adamw::{Chance, Gate, kernel_chance, kernel_gate},
    handles::{Place, rows, tensor_of_rows},
};
use blackburn_kernels::sgd::{SgdStep, SgdTensors, sgd_update};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn_cubecl::CubeBackend;
use burn_std::DType;

impl SgdPrimitives for CubeBackend {
    fn sgd_step(
        parameter: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        velocity: FloatTensor<Self>,
        gate: Gate<Self>,
        chance: Chance<Self>,
        draw: u32,
        step: Step,
    ) -> Updated<Self> {
        let (place, shape) = (Place::of(&parameter), parameter.shape());
        let stored = parameter.dtype;
        let tensors = SgdTensors {
            parameter: rows(parameter),
            gradient: rows(gradient),
            velocity: rows(velocity),
        };
        let (gate, chance) = (kernel_gate(gate), kernel_chance(chance, draw));
        let updated = sgd_update(&place.client, &numbers(step), tensors, gate, chance)
            .unwrap_or_else(|error| panic!("{error}"));
        let tensor = |rows, dtype| tensor_of_rows(&place, shape.clone(), rows, dtype);
        Updated {
            parameter: tensor(updated.parameter, stored),
            velocity: tensor(updated.velocity, DType::F32),
        }
    }
}

fn numbers(step: Step) -> SgdStep {
    let Step { momentum, dampening, nesterov, weight_decay, rate, time } = step;
    SgdStep { momentum, dampening, nesterov, weight_decay, rate, time }
}

/// Panics where the kernel would refuse these numbers.
pub(super) fn check(step: Step) {
    numbers(step).check().unwrap_or_else(|error| panic!("{error}"));
}
