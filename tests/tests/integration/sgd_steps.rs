//! Gradient descent on models of many parameters.

use super::{kind::Sgd, training::DAMPENED};
use crate::step_model::{Deep, Kind, RATES};
use blackburn::train::optim::{SgdGroups, StepGate};
use blackburn_backend::sgd::{self, Step, Tensors};
use burn::{optim::ModuleOptimizer, prelude::*};
use libtest_mimic::Failed;

impl Kind for Sgd {
    const NAME: &'static str = "sgd";
    const RULE: &'static str = "SgdRule>";

    fn optimizer(model: &Deep, device: &Device, gate: Option<&StepGate>) -> ModuleOptimizer {
        match gate {
            Some(gate) => DAMPENED.init_gated(model, device, gate),
            None => DAMPENED.init(model, device),
        }
    }

    fn alone<const D: usize>(
        mut parameter: Tensor<D>,
        gradient: impl Fn(usize) -> Tensor<D>,
        device: &Device,
    ) -> Result<Tensor<D>, Failed> {
        let mut velocity = Tensor::zeros(parameter.dims(), device);
        let SgdGroups { momentum, dampening, nesterov, weight_decay, .. } = DAMPENED;
        for (step, rate) in RATES.into_iter().enumerate() {
            let tensors = Tensors { parameter, gradient: gradient(step), velocity };
            let step = Step {
                momentum,
                dampening,
                nesterov,
                weight_decay: if D > 1 { weight_decay } else { 0.0 },
                rate,
                time: step + 1,
            };
            let stepped = sgd::step(tensors, step, None, None);
            device.sync().map_err(|error| error.to_string())?;
            (parameter, velocity) = (stepped.parameter, stepped.velocity);
        }
        Ok(parameter)
    }
}
