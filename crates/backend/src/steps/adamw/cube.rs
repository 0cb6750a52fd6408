//! The step on GPUs.

use super::{Adamw, AdamwPrimitives, Step, Updated};
use crate::steps::{
    gate::{Chance, Gate, kernel_chance, kernel_gate},
    operation::alone,
};
use blackburn_kernels::adamw::AdamwStep;
use burn::backend::tensor::FloatTensor;
use burn_cubecl::CubeBackend;

impl AdamwPrimitives for CubeBackend {
    fn adamw_step(
        parameter: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        _together: FloatTensor<Self>,
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
        let (gate, chance) = (kernel_gate(gate), kernel_chance(chance, draw));
        let tensors = [parameter, gradient, first, second];
        let [parameter, _, first, second] = alone::<Adamw, 4>(step, tensors, gate, chance);
        Updated { parameter, first, second }
    }
}

/// Panics where the kernel would refuse these numbers.
pub(super) fn check(step: Step) {
    let Step { beta_1, beta_2, epsilon, weight_decay, rate, time } = step;
    AdamwStep { beta_1, beta_2, epsilon, weight_decay, rate, time }
        .check()
        .unwrap_or_else(|error| panic!("{error}"));
}
