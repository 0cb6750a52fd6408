//! The AdamW of `blackburn::train`.

use crate::step_training::{Groups, bad_readings, is_named};
use blackburn::train::optim::{AdamWGroups, StepGate};
use blackburn_backend::steps::{
    Together,
    adamw::{self, Step, Tensors},
};
use blackburn_reference::storage::Storage;
use blackburn_tests::tensors::float;
use burn::{module::Module, optim::ModuleOptimizer, prelude::*};
use libtest_mimic::Failed;

const STEP: Step =
    Step { beta_1: 0.9, beta_2: 0.95, epsilon: 1e-8, weight_decay: 0.0, rate: 0.1, time: 1 };

impl Groups for AdamWGroups {
    const NAME: &'static str = "adamw";
    const RULE: &'static str = "AdamwRule>";
    const ROUNDINGS: f64 = 50.0;

    fn sample() -> Self {
        Self::default()
    }

    fn others() -> Vec<Self> {
        Vec::new()
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
        let zeros = || Tensor::zeros(parameter.dims(), device);
        let (mut first, mut second) = (zeros(), zeros());
        let groups = Self::sample();
        for (step, rate) in rates.iter().enumerate() {
            let tensors = Tensors { parameter, gradient: gradient(step), first, second };
            let step = Step {
                beta_1: groups.beta_1.into(),
                beta_2: groups.beta_2.into(),
                epsilon: groups.epsilon.into(),
                weight_decay: if D > 1 { groups.weight_decay.into() } else { 0.0 },
                rate: *rate,
                time: step + 1,
            };
            let stepped = adamw::step(tensors, step, None, None, &Together::default());
            device.sync().map_err(|error| error.to_string())?;
            (parameter, first, second) = (stepped.parameter, stepped.first, stepped.second);
        }
        Ok(parameter)
    }

    fn refusals(device: &Device) -> Result<(), Failed> {
        let ones = |shape: [usize; 2], storage: Storage, device: &Device| -> Tensor<2> {
            Tensor::<2>::ones(shape, device).cast(float(storage))
        };
        let tensors = |gradient: [usize; 2], moment: Storage, device: &Device| Tensors {
            parameter: ones([2, 3], Storage::F32, device),
            gradient: ones(gradient, Storage::F32, device),
            first: ones([2, 3], moment, device),
            second: ones([2, 3], Storage::F32, device),
        };
        let served = tensors([2, 3], Storage::F32, device);
        if !adamw::serves(&served) {
            return Err("tensors that fit each other are refused".into());
        }
        for (what, refused) in [
            ("another shape", tensors([3, 2], Storage::F32, device)),
            ("moments in f16", tensors([2, 3], Storage::F16, device)),
            ("the CPU", tensors([2, 3], Storage::F32, &Device::flex())),
        ] {
            if adamw::serves(&refused) {
                return Err(format!("{what} was taken").into());
            }
        }
        let (taken, draw) = bad_readings(device);
        let together = Together::default();
        let call = |step, taken, draw| adamw::step(served.clone(), step, taken, draw, &together);
        is_named::<Self, _>("`beta_2`", || call(Step { beta_2: 1.0, ..STEP }, None, None))?;
        is_named::<Self, _>("`time`", || call(Step { time: 0, ..STEP }, None, None))?;
        is_named::<Self, _>("`taken`", || call(STEP, Some(taken), None))?;
        is_named::<Self, _>("`seed`", || call(STEP, None, Some(draw)))
    }
}
