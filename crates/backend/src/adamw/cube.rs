//! The step on GPUs.

use super::{AdamwPrimitives, Chance, Gate, Step, Updated};
use crate::handles::{Place, contiguous_buffer, rows, tensor_of_rows};
use blackburn_kernels::adamw::{self, AdamwStep, AdamwTensors};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn_cubecl::CubeBackend;
use burn_std::DType;

impl AdamwPrimitives for CubeBackend {
    fn adamw_step(
        parameter: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        gate: Gate<Self>,
        chance: Chance<Self>,
        draw: u32,
        beta_1: f64,
        beta_2: f64,
        epsilon: f64,
        weight_decay: f64,
        rate: f64,
        time: usize,
    ) -> Updated<Self> {
        let step = AdamwStep { beta_1, beta_2, epsilon, weight_decay, rate, time };
        let (place, shape) = (Place::of(&parameter), parameter.shape());
        let stored = parameter.dtype;
        let tensors = AdamwTensors {
            parameter: rows(parameter),
            gradient: rows(gradient),
            first: rows(first),
            second: rows(second),
        };
        let (gate, chance) = (kernel_gate(gate), kernel_chance(chance, draw));
        let updated = adamw::adamw_update(&place.client, &step, tensors, gate, chance)
            .unwrap_or_else(|error| panic!("{error}"));
        let tensor = |rows, dtype| tensor_of_rows(&place, shape.clone(), rows, dtype);
        Updated {
            parameter: tensor(updated.parameter, stored),
            first: tensor(updated.first, DType::F32),
            second: tensor(updated.second, DType::F32),
        }
    }
}

pub(super) fn numbers(step: Step) -> AdamwStep {
    let Step { beta_1, beta_2, epsilon, weight_decay, rate, time } = step;
    AdamwStep { beta_1, beta_2, epsilon, weight_decay, rate, time }
}

/// Panics where the kernel would refuse these numbers.
pub(super) fn check(step: Step) {
    numbers(step).check().unwrap_or_else(|error| panic!("{error}"));
}

/// A gate as kernels read it.
pub(crate) fn kernel_gate(gate: Gate<CubeBackend>) -> Option<adamw::Gate> {
    match gate {
        Gate::Open => None,
        Gate::Read(reading) => Some(adamw::Gate {
            taken: contiguous_buffer(reading.taken),
            skipped: contiguous_buffer(reading.skipped),
            factor: contiguous_buffer(reading.factor),
        }),
    }
}

/// A chance as kernels take it, told apart from others with its seed by `draw`.
pub(crate) fn kernel_chance(chance: Chance<CubeBackend>, draw: u32) -> Option<adamw::Chance> {
    match chance {
        Chance::Nearest => None,
        Chance::Drawn { seed } => Some(adamw::Chance { seed: contiguous_buffer(seed), draw }),
    }
}
