//! The step on GPUs.

use super::{AdamwPrimitives, Chance, Gate, Step, Updated};
use crate::handles::contiguous_buffer;
use blackburn_kernels::{
    adamw::{self, AdamwStep, AdamwTensors},
    buffer::Buffer,
};
use burn::backend::{
    TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_cubecl::{CubeBackend, CubeDevice, tensor::CubeTensor};
use burn_std::{DType, Shape};
use cubecl::client::Client;

impl AdamwPrimitives for CubeBackend {
    fn adamw_step(
        parameter: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        gate: Gate<Self>,
        chance: Chance<Self>,
        step: Step,
    ) -> Updated<Self> {
        let like = Like {
            client: parameter.client.clone(),
            device: parameter.device.clone(),
            shape: parameter.shape(),
        };
        let stored = parameter.dtype;
        let tensors = AdamwTensors {
            parameter: contiguous_buffer(parameter),
            gradient: contiguous_buffer(gradient),
            first: contiguous_buffer(first),
            second: contiguous_buffer(second),
        };
        let gate = match gate {
            Gate::Open => None,
            Gate::Read(reading) => Some(adamw::Gate {
                taken: contiguous_buffer(reading.taken),
                skipped: contiguous_buffer(reading.skipped),
                factor: contiguous_buffer(reading.factor),
            }),
        };
        let chance = match chance {
            Chance::Nearest => None,
            Chance::Drawn { seed, number } => Some(drawn(seed, number)),
        };
        let updated = adamw::adamw_update(&like.client, &numbers(step), tensors, gate, chance)
            .unwrap_or_else(|error| panic!("{error}"));
        Updated {
            parameter: like.tensor(updated.parameter, stored),
            first: like.tensor(updated.first, DType::F32),
            second: like.tensor(updated.second, DType::F32),
        }
    }
}

fn numbers(step: Step) -> AdamwStep {
    let Step { beta_1, beta_2, epsilon, weight_decay, rate, time } = step;
    AdamwStep { beta_1, beta_2, epsilon, weight_decay, rate, time }
}

/// Panics where the kernel would refuse these numbers.
pub(super) fn check(step: Step) {
    numbers(step).check().unwrap_or_else(|error| panic!("{error}"));
}

fn drawn(seed: IntTensor<CubeBackend>, draw: u32) -> adamw::Chance {
    adamw::Chance { seed: contiguous_buffer(seed), draw }
}

/// Where and how results lie.
struct Like {
    client: Client,
    device: CubeDevice,
    shape: Shape,
}

impl Like {
    fn tensor(&self, buffer: Buffer, dtype: DType) -> CubeTensor {
        CubeTensor::new_contiguous(
            self.client.clone(),
            self.device.clone(),
            self.shape.clone(),
            buffer.handle,
            dtype,
        )
    }
}
