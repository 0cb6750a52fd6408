//! Programs of a module each, which run in any precision and on any device: forward, backward, and by parameters that
//! another program wrote.

use crate::{
    modules::{parameter_gradients, read, seeded},
    plain::Tensors,
    tensors::{tensor, values},
};
use blackburn::train::precision::{PrecisionPolicy, full_precision};
use blackburn_reference::{random::normal, storage::Storage};
use burn::{
    module::{ModuleMapper, Param},
    optim::GradientsParams,
    prelude::*,
    store::ModuleRecord,
    tensor::{Bool, Bytes, Gradients},
};
use libtest_mimic::Failed;
use std::{
    cell::RefCell,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// What programs are run by.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Where.
    pub device: Device,
    /// In what.
    pub policy: PrecisionPolicy,
    /// Whether a result is cast to f32 for the loss, as `burn::nn`'s losses need it.
    pub casts_for_loss: bool,
    /// By what share of themselves inputs and parameters are changed, and the draw of the signs.
    pub noise: Option<(f64, u64)>,
}

/// What a program made, or why it was not run.
#[derive(Debug)]
pub enum Outcome {
    /// The output, and the gradients of inputs and parameters, by name. The output is the first.
    Ran(Tensors),
    /// The policy's error.
    Refused(String),
}

/// Data that a program runs on: the same numbers each time, and the gradients of those that have some.
pub struct Data<'a> {
    setting: &'a Setting,
    leaves: RefCell<Vec<Leaf>>,
}

type Leaf = Box<dyn FnOnce(&Gradients) -> Result<Vec<f64>, Failed>>;

impl Data<'_> {
    /// The device of all data.
    pub fn device(&self) -> &Device {
        &self.setting.device
    }

    /// Normal numbers as a model's input, with a gradient.
    pub fn normal<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        self.input(shape, |number| number)
    }

    /// Numbers between a tenth and nine tenths as a model's input, with a gradient.
    pub fn share<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        self.input(shape, |number| 0.5 + 0.4 * number.sin())
    }

    /// Normal numbers as the loss gets a model's result, with a gradient.
    pub fn result<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        self.for_loss(self.normal(shape))
    }

    /// Numbers between a tenth and nine tenths as the loss gets a model's result, with a gradient.
    pub fn shares<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        self.for_loss(self.share(shape))
    }

    /// A result as the loss gets it.
    pub fn for_loss<const D: usize>(&self, result: Tensor<D>) -> Tensor<D> {
        if self.setting.casts_for_loss { full_precision(result) } else { result }
    }

    /// Numbers between a tenth and nine tenths that a result is compared with, in its type.
    pub fn target<const D: usize>(&self, like: &Tensor<D>) -> Tensor<D> {
        let numbers = self.numbers(like.dims().iter().product());
        let numbers: Vec<f64> = numbers.iter().map(|number| 0.5 + 0.4 * number.cos()).collect();
        tensor(&numbers, like.dims(), Storage::F32, self.device()).cast(like.dtype())
    }

    /// Ones and minus ones that a result is compared with, in its type.
    pub fn signs<const D: usize>(&self, like: &Tensor<D>) -> Tensor<D> {
        let numbers = self.numbers(like.dims().iter().product());
        let numbers: Vec<f64> = numbers.iter().map(|number| number.signum()).collect();
        tensor(&numbers, like.dims(), Storage::F32, self.device()).cast(like.dtype())
    }

    /// Integers from `least` to below `least + choices`.
    pub fn ids<const D: usize>(
        &self,
        shape: [usize; D],
        least: i64,
        choices: i64,
    ) -> Tensor<D, Int> {
        let ids =
            (0..shape.iter().product::<usize>() as i64).map(|i| least + (i * i + i / 3) % choices);
        Tensor::from_data(TensorData::new(ids.collect::<Vec<i64>>(), shape), self.device())
    }

    /// A mask that is true for every third of the last dimension but the first.
    pub fn mask<const D: usize>(&self, shape: [usize; D]) -> Tensor<D, Bool> {
        let last = shape[D - 1];
        let mask = (0..shape.iter().product::<usize>()).map(|i| i % last % 3 == 2);
        Tensor::from_data(TensorData::new(mask.collect::<Vec<bool>>(), shape), self.device())
    }

    /// Numbers that bf16 and f16 hold, each time others.
    fn numbers(&self, count: usize) -> Vec<f64> {
        normal(1 + self.leaves.borrow().len() as u64, count, 1.0, Storage::Bf16)
    }

    fn input<const D: usize>(&self, shape: [usize; D], map: impl Fn(f64) -> f64) -> Tensor<D> {
        let place = self.leaves.borrow().len() as u64;
        let numbers = self.numbers(shape.iter().product());
        let mut numbers: Vec<f64> =
            numbers.into_iter().map(|number| Storage::Bf16.round(map(number))).collect();
        disturb(&mut numbers, self.setting.noise, place);
        let leaf = tensor(&numbers, shape, Storage::F32, self.device()).require_grad();
        let kept = leaf.clone();
        let gradient = move |gradients: &Gradients| match kept.grad(gradients) {
            Some(gradient) => values(gradient),
            None => Err("an input has no gradient".into()),
        };
        self.leaves.borrow_mut().push(Box::new(gradient));
        self.setting.policy.input(leaf)
    }
}

/// Changes each number by that share of itself, up or down.
fn disturb(numbers: &mut [f64], noise: Option<(f64, u64)>, place: u64) {
    let Some((share, draw)) = noise else { return };
    let signs = normal((1 << 20) + (draw << 32) + place, numbers.len(), 1.0, Storage::F32);
    numbers.iter_mut().zip(signs).for_each(|(number, sign)| *number *= 1.0 + share * sign.signum());
}

/// A module, and what is done with it.
pub trait Program {
    /// What it is called.
    fn name(&self) -> &'static str;

    /// How many operations in a row round on the way to the output.
    fn roundings(&self) -> f64;

    /// Runs it forward and backward.
    ///
    /// # Errors
    ///
    /// A panic, what the device reports, numbers that are not finite, or a parameter without a gradient.
    fn run(&self, setting: &Setting) -> Result<Outcome, Failed>;

    /// The module's parameters.
    ///
    /// # Errors
    ///
    /// What the record reports.
    fn record(&self) -> Result<Bytes, Failed>;

    /// The program with these parameters.
    ///
    /// # Errors
    ///
    /// A record that does not fit.
    fn with_record(&self, record: Bytes) -> Result<Box<dyn Program>, Failed>;
}

/// A program that makes a module, and runs it on data of its own. Its parameters are the same each time.
pub fn program<M: Module + 'static, const D: usize>(
    name: &'static str,
    roundings: u32,
    init: fn(&Device) -> M,
    forward: fn(&M, &Data<'_>) -> Tensor<D>,
) -> Box<dyn Program> {
    let module = seeded(init(&Device::flex().autodiff()), Storage::F32, |path, _, numbers| {
        // A variance is not below zero.
        if path.ends_with("running_var") {
            numbers.iter_mut().for_each(|number| *number = 0.5 + number.abs());
        }
    });
    Box::new(Typed { name, roundings: f64::from(roundings), init, forward, module })
}

struct Typed<M, const D: usize> {
    name: &'static str,
    roundings: f64,
    init: fn(&Device) -> M,
    forward: fn(&M, &Data<'_>) -> Tensor<D>,
    /// On the CPU.
    module: M,
}

impl<M: Module + 'static, const D: usize> Typed<M, D> {
    fn results(&self, setting: &Setting) -> Result<Outcome, Failed> {
        let disturbed = self.module.clone().map(&mut Disturbing { noise: setting.noise, place: 0 });
        // Tables and the like that a module makes are made where it runs.
        let module = carry(disturbed, (self.init)(&setting.device))?;
        let module = match setting.policy.apply(module) {
            Ok(module) => module,
            Err(error) => return Ok(Outcome::Refused(error.to_string())),
        };
        let data = Data { setting, leaves: RefCell::default() };
        let y = full_precision((self.forward)(&module, &data));
        let factors = normal(0, y.dims().iter().product(), 1.0, Storage::Bf16);
        let factors = tensor(&factors, y.dims(), Storage::F32, &setting.device);
        let gradients = (y.clone() * factors).sum().backward();
        let mut results = vec![("output".to_string(), values(y)?)];
        for (place, leaf) in data.leaves.into_inner().into_iter().enumerate() {
            results.push((format!("gradient of input {place}"), leaf(&gradients)?));
        }
        let gradients = GradientsParams::from_grads(gradients, &module);
        for (path, numbers) in read(parameter_gradients(&module, &gradients)?)? {
            results.push((format!("gradient of {path}"), numbers));
        }
        match results.iter().find(|(_, numbers)| !numbers.iter().all(|number| number.is_finite())) {
            Some((name, _)) => Err(format!("{name} is not finite").into()),
            None => Ok(Outcome::Ran(results)),
        }
    }
}

impl<M: Module + 'static, const D: usize> Program for Typed<M, D> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn roundings(&self) -> f64 {
        self.roundings
    }

    fn run(&self, setting: &Setting) -> Result<Outcome, Failed> {
        catch_unwind(AssertUnwindSafe(|| self.results(setting))).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
            Err(format!("panicked: {}", text.unwrap_or_default()).into())
        })
    }

    fn record(&self) -> Result<Bytes, Failed> {
        bytes(self.module.clone())
    }

    fn with_record(&self, record: Bytes) -> Result<Box<dyn Program>, Failed> {
        // Fresh parameters, which the record has to replace.
        let fresh = (self.init)(&Device::flex().autodiff());
        let Self { name, roundings, init, forward, .. } = *self;
        Ok(Box::new(Self { name, roundings, init, forward, module: loaded(fresh, record)? }))
    }
}

fn bytes<M: Module>(module: M) -> Result<Bytes, Failed> {
    Ok(module.into_record().into_bytes().map_err(|error| format!("{error:?}"))?)
}

fn loaded<M: Module>(module: M, record: Bytes) -> Result<M, Failed> {
    let record = ModuleRecord::from_bytes(record).map_err(|error| format!("{error:?}"))?;
    module.try_load_record(record).map_err(|error| format!("{error:?}").into())
}

/// `to` with the parameters of `from`, which is on another device.
fn carry<M: Module>(from: M, to: M) -> Result<M, Failed> {
    loaded(to, bytes(from)?)
}

/// Changes parameters as [`disturb`] does.
struct Disturbing {
    noise: Option<(f64, u64)>,
    place: u64,
}

impl ModuleMapper for Disturbing {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.noise.is_none() {
            return param;
        }
        self.place += 1;
        let place = (1 << 16) + self.place;
        param.map(|old| {
            let (dims, device): ([usize; D], _) = (old.dims(), old.device());
            let numbers = old.into_data().convert::<f64>().try_to_vec::<f64>();
            let mut numbers = numbers.expect("numbers were cast to f64");
            disturb(&mut numbers, self.noise, place);
            tensor(&numbers, dims, Storage::F32, &device).require_grad()
        })
    }
}
