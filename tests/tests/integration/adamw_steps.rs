//! AdamW on models of many parameters.

use super::kind::Adamw;
use crate::step_model::{Deep, Kind, RATES};
use blackburn::train::optim::{AdamWGroups, StepGate};
use blackburn_backend::adamw::{self, Step, Tensors};
use burn::{optim::ModuleOptimizer, prelude::*};
use libtest_mimic::Failed;

impl Kind for Adamw {
    const NAME: &'static str = "adamw";
    const RULE: &'static str = "AdamwRule>";

    fn optimizer(model: &Deep, device: &Device, gate: Option<&StepGate>) -> ModuleOptimizer {
        let groups = AdamWGroups::default();
        match gate {
            Some(gate) => groups.init_gated(model, device, gate),
            None => groups.init(model, device),
        }
    }

    fn alone<const D: usize>(
        mut parameter: Tensor<D>,
        gradient: impl Fn(usize) -> Tensor<D>,
        device: &Device,
    ) -> Result<Tensor<D>, Failed> {
        let zeros = || Tensor::zeros(parameter.dims(), device);
        let (mut first, mut second) = (zeros(), zeros());
        let groups = AdamWGroups::default();
        for (step, rate) in RATES.into_iter().enumerate() {
            let tensors = Tensors { parameter, gradient: gradient(step), first, second };
            let step = Step {
                beta_1: groups.beta_1.into(),
                beta_2: groups.beta_2.into(),
                epsilon: groups.epsilon.into(),
                weight_decay: if D > 1 { groups.weight_decay.into() } else { 0.0 },
                rate,
                time: step + 1,
            };
            let stepped = adamw::step(tensors, step, None, None);
            device.sync().map_err(|error| error.to_string())?;
            (parameter, first, second) = (stepped.parameter, stepped.first, stepped.second);
        }
        Ok(parameter)
    }
}
