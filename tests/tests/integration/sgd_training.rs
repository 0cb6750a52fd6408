//! The gradient descent of `blackburn::train`.

use crate::step_training::{Groups, bad_readings, is_named};
use blackburn::train::optim::{SgdGroups, StepGate};
use blackburn_backend::steps::{
    Together,
    sgd::{self, Step, Tensors},
};
use blackburn_reference::storage::Storage;
use blackburn_tests::tensors::float;
use burn::{module::Module, optim::ModuleOptimizer, prelude::*};
use libtest_mimic::Failed;

const STEP: Step =
    Step { momentum: 0.9, dampening: 0.0, nesterov: false, weight_decay: 0.1, rate: 0.01, time: 3 };

impl Groups for SgdGroups {
    const NAME: &'static str = "sgd";
    const RULE: &'static str = "SgdRule>";
    const ROUNDINGS: f64 = 10.0;

    fn sample() -> Self {
        Self {
            momentum: 0.9,
            dampening: 0.25,
            nesterov: true,
            weight_decay: 0.1,
            decays_vectors: false,
            stochastic_rounding: false,
        }
    }

    fn others() -> Vec<Self> {
        vec![Self::default(), Self { momentum: 0.0, ..Self::sample() }]
    }

    fn by_chance(self) -> Self {
        Self { stochastic_rounding: true, ..self }
    }

    fn optimizer<M: Module>(
        &self,
        model: &M,
        device: &Device,
        gate: Option<&StepGate>,
    ) -> ModuleOptimizer {
        match gate {
            Some(gate) => self.init_gated(model, device, gate),
            None => self.init(model, device),
        }
    }

    fn alone<const D: usize>(
        mut parameter: Tensor<D>,
        gradient: impl Fn(usize) -> Tensor<D>,
        rates: &[f64],
    ) -> Result<Tensor<D>, Failed> {
        let device = &parameter.device();
        let mut velocity = Tensor::zeros(parameter.dims(), device);
        let Self { momentum, dampening, nesterov, weight_decay, .. } = Self::sample();
        for (step, rate) in rates.iter().enumerate() {
            let tensors = Tensors { parameter, gradient: gradient(step), velocity };
            let step = Step {
                momentum,
                dampening,
                nesterov,
                weight_decay: if D > 1 { weight_decay } else { 0.0 },
                rate: *rate,
                time: step + 1,
            };
            let stepped = sgd::step(tensors, step, None, None, &Together::default());
            device.sync().map_err(|error| error.to_string())?;
            (parameter, velocity) = (stepped.parameter, stepped.velocity);
        }
        Ok(parameter)
    }

    fn refusals(device: &Device) -> Result<(), Failed> {
        let ones = |shape: [usize; 2], storage: Storage, device: &Device| -> Tensor<2> {
            Tensor::<2>::ones(shape, device).cast(float(storage))
        };
        let tensors = |gradient: [usize; 2], velocity: Storage, device: &Device| Tensors {
            parameter: ones([2, 3], Storage::F32, device),
            gradient: ones(gradient, Storage::F32, device),
            velocity: ones([2, 3], velocity, device),
        };
        let served = tensors([2, 3], Storage::F32, device);
        if !sgd::serves(&served) {
            return Err("tensors that fit each other are refused".into());
        }
        for (what, refused) in [
            ("another shape", tensors([3, 2], Storage::F32, device)),
            ("a velocity in f16", tensors([2, 3], Storage::F16, device)),
            ("the CPU", tensors([2, 3], Storage::F32, &Device::flex())),
        ] {
            if sgd::serves(&refused) {
                return Err(format!("{what} was taken").into());
            }
        }
        let (taken, draw) = bad_readings(device);
        let together = Together::default();
        let call = |step, taken, draw| sgd::step(served.clone(), step, taken, draw, &together);
        is_named::<Self, _>("`momentum`", || call(Step { momentum: -1.0, ..STEP }, None, None))?;
        is_named::<Self, _>("`time`", || call(Step { time: 0, ..STEP }, None, None))?;
        is_named::<Self, _>("`taken`", || call(STEP, Some(taken), None))?;
        is_named::<Self, _>("`seed`", || call(STEP, None, Some(draw)))
    }
}
