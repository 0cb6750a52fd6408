//! The step on GPUs.

use super::{Sgd, SgdPrimitives, Step, Updated};
use crate::steps::{
    gate::{Chance, Gate, kernel_chance, kernel_gate},
    operation::alone,
};
use blackburn_kernels::sgd::SgdStep;
use burn::backend::tensor::FloatTensor;
use burn_cubecl::CubeBackend;

impl SgdPrimitives for CubeBackend {
    fn sgd_step(
        parameter: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        velocity: FloatTensor<Self>,
        _together: FloatTensor<Self>,
        gate: Gate<Self>,
        chance: Chance<Self>,
        draw: u32,
        momentum: f64,
        dampening: f64,
        nesterov: bool,
        weight_decay: f64,
        rate: f64,
        time: usize,
    ) -> Updated<Self> {
        let step = SgdStep { momentum, dampening, nesterov, weight_decay, rate, time };
        let (gate, chance) = (kernel_gate(gate), kernel_chance(chance, draw));
        let tensors = [parameter, gradient, velocity];
        let [parameter, _, velocity] = alone::<Sgd, 3>(step, tensors, gate, chance);
        Updated { parameter, velocity }
    }
}

/// Panics where the kernel would refuse these numbers.
pub(super) fn check(step: Step) {
    let Step { momentum, dampening, nesterov, weight_decay, rate, time } = step;
    SgdStep { momentum, dampening, nesterov, weight_decay, rate, time }
        .check()
        .unwrap_or_else(|error| panic!("{error}"));
}
