//! Burn's own AdamW, whose operations a provider takes together, against f64.

use blackburn_backend::overwrite::overwrite_float;
use blackburn_reference::{
    adamw::{Corrections, Element, Rounding, Step, bound, update},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    on_burn_device,
    tensors::{float, tensor, values},
    trials_in,
};
use burn::{
    module::{Module, Param},
    optim::{AdamWConfig, GradientsParams, ModuleOptimizer},
    prelude::*,
};
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;
const NARROW: [Storage; 2] = [Storage::F16, Storage::Bf16];
const BETA_1: f32 = 0.9;
const BETA_2: f32 = 0.98;
const EPSILON: f32 = 1e-6;
/// Operations of a parameter's step, and parameters that a launch takes at least.
const OPERATIONS: u64 = 15;
const TOGETHER: u64 = 8;
/// More parameters than a launch takes, of several shapes.
const MATRICES: [[usize; 2]; 12] = [
    [3, 5],
    [16, 33],
    [1, 1],
    [4, 4],
    [4, 4],
    [4, 4],
    [2, 64],
    [7, 9],
    [33, 16],
    [5, 3],
    [8, 8],
    [8, 8],
];
const VECTORS: [usize; 8] = [7, 1, 64, 64, 64, 129, 5, 7];

pub(crate) fn trials() -> Vec<Trial> {
    type Test = fn(&Device) -> Result<(), Failed>;
    let tests: [(&str, Test); 4] = [
        ("burns_own_is_taken_together_and_right", |device| train(device, 0.1, true)),
        ("without_decay_burns_own_runs_as_burn_has_it", |device| train(device, 0.0, false)),
        ("a_copy_of_the_model_keeps_its_numbers", copies),
        ("other_numbers_than_adamws_are_burns", look_alike),
    ];
    let trial = |(name, test): (&str, Test)| {
        let name = format!("adamw_plain::{name}");
        Trial::ignorable_test(name, move || on_burn_device(|device| test(&device)))
    };
    let casts = trials_in("adamw_plain::a_step_makes_casts_of_the_next_pass", &NARROW, casts);
    tests.map(trial).into_iter().chain(casts).collect()
}

#[derive(Module, Debug)]
struct Weights {
    matrices: Vec<Param<Tensor<2>>>,
    vectors: Vec<Param<Tensor<1>>>,
}

/// Numbers of each parameter, matrices first; another seed gives others.
fn drawn(seed: u64) -> Vec<Vec<f64>> {
    let sizes = MATRICES.iter().map(|shape| shape[0] * shape[1]).chain(VECTORS);
    sizes.enumerate().map(|(at, size)| normal(seed + at as u64, size, 1.0, F32)).collect()
}

impl Weights {
    fn new(numbers: &[Vec<f64>], device: &Device) -> Self {
        let (matrices, vectors) = numbers.split_at(MATRICES.len());
        let matrix = |(numbers, shape): (&Vec<f64>, [usize; 2])| {
            Param::from_tensor(tensor(numbers, shape, F32, device))
        };
        let vector = |(numbers, size): (&Vec<f64>, usize)| {
            Param::from_tensor(tensor(numbers, [size], F32, device))
        };
        Self {
            matrices: matrices.iter().zip(MATRICES).map(matrix).collect(),
            vectors: vectors.iter().zip(VECTORS).map(vector).collect(),
        }
    }

    /// Its gradients are those numbers.
    fn loss(&self, gradients: &[Vec<f64>], device: &Device) -> Tensor<1> {
        let (matrices, vectors) = gradients.split_at(MATRICES.len());
        let mut loss = Tensor::<1>::zeros([1], device);
        for ((weight, numbers), shape) in self.matrices.iter().zip(matrices).zip(MATRICES) {
            loss = loss + (weight.val() * tensor(numbers, shape, F32, device)).sum();
        }
        for ((weight, numbers), size) in self.vectors.iter().zip(vectors).zip(VECTORS) {
            loss = loss + (weight.val() * tensor(numbers, [size], F32, device)).sum();
        }
        loss
    }

    fn numbers(&self) -> Result<Vec<Vec<f64>>, Failed> {
        let matrices = self.matrices.iter().map(|weight| values(weight.val().inner()));
        let vectors = self.vectors.iter().map(|weight| values(weight.val().inner()));
        matrices.chain(vectors).collect()
    }
}

impl Weights {
    /// Its numbers as a pass in 16 bits reads them.
    fn casts(&self, to: Storage) -> Result<Vec<Vec<f64>>, Failed> {
        let to = float(to);
        let matrices = self.matrices.iter().map(|weight| values(weight.val().inner().cast(to)));
        let vectors = self.vectors.iter().map(|weight| values(weight.val().inner().cast(to)));
        matrices.chain(vectors).collect()
    }

    /// Whether casts are the numbers rounded. Casts are read first, so that they are the first to read the numbers.
    fn check_casts(&self, to: Storage, when: &str) -> Result<(), Failed> {
        let (casts, numbers) = (self.casts(to)?, self.numbers()?);
        for (place, (casts, numbers)) in casts.into_iter().zip(numbers).enumerate() {
            let expected: Vec<f64> = numbers.into_iter().map(|x| to.round(x)).collect();
            if casts != expected {
                let reason =
                    format!("{when}, parameter {place}: expected {expected:?}, got {casts:?}");
                return Err(reason.into());
            }
        }
        Ok(())
    }

    fn map(self, change: impl Fn(Tensor<1>) -> Tensor<1>) -> Self {
        let vectors = self.vectors.into_iter().map(|weight| weight.map(&change));
        Self { vectors: vectors.collect(), ..self }
    }
}

fn step(
    model: Weights,
    optimizer: &mut ModuleOptimizer,
    gradients: &[Vec<f64>],
    rate: f64,
    device: &Device,
) -> Weights {
    let gradients = model.loss(gradients, device).backward();
    let gradients = GradientsParams::from_grads(gradients, &model);
    optimizer.step(rate, model, gradients)
}

fn served() -> u64 {
    blackburn_backend::profile::served().get("BlackburnPlainAdamw").copied().unwrap_or(0)
}

fn optimizer(weight_decay: f32) -> ModuleOptimizer {
    let config = AdamWConfig::new().with_beta_1(BETA_1).with_beta_2(BETA_2);
    config.with_epsilon(EPSILON).with_weight_decay(weight_decay).init()
}

fn train(device: &Device, weight_decay: f32, is_taken: bool) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let rates = [0.1, 0.05, 0.02, 0.01, 0.02];
    let start = drawn(1);
    let (mut model, mut optimizer) = (Weights::new(&start, device), optimizer(weight_decay));
    let element = |parameter: &f64| Element { parameter: *parameter, ..Element::default() };
    let mut expected: Vec<Vec<Element>> =
        start.iter().map(|numbers| numbers.iter().map(element).collect()).collect();
    let mut errors: Vec<Vec<f64>> = start.iter().map(|numbers| vec![0.0; numbers.len()]).collect();
    for (at, rate) in rates.into_iter().enumerate() {
        let gradients = drawn(100 * (2 + at as u64));
        let before = served();
        model = step(model, &mut optimizer, &gradients, rate, device);
        let numbers = model.numbers()?;
        let taken = served() - before;
        // The first step makes moments of nothing.
        if is_taken && at > 0 && taken < OPERATIONS * TOGETHER {
            return Err(format!("step {at}: {taken} operations were taken").into());
        }
        let step = Step {
            beta_1: f64::from(BETA_1),
            beta_2: f64::from(BETA_2),
            epsilon: f64::from(EPSILON),
            weight_decay: f64::from(weight_decay),
            rate,
            taken: at as u32 + 1,
        };
        let all = expected.iter_mut().zip(&mut errors).zip(gradients.iter().zip(numbers));
        for ((old, errors), (gradients, numbers)) in all {
            for ((old, error), g) in old.iter_mut().zip(errors.iter_mut()).zip(gradients) {
                let rounded = bound(&step, *old, *g, F32, Rounding::Nearest, Corrections::Host);
                // As much again for what moments carry on, and for what Burn rounds in between.
                *error += 4.0 * rounded.parameter;
                *old = update(&step, *old, *g);
            }
            let expected: Vec<f64> = old.iter().map(|element| element.parameter).collect();
            compare(&numbers, &expected, errors).map_err(|error| format!("step {at}: {error}"))?;
        }
    }
    Ok(())
}

/// What somebody else holds is not written to.
fn copies(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let (mut model, mut optimizer) = (Weights::new(&drawn(1), device), optimizer(0.1));
    for at in 0..3 {
        let copy = model.clone();
        let before = copy.numbers()?;
        let taken = served();
        model = step(model, &mut optimizer, &drawn(50 * (1 + at)), 0.1, device);
        let (after, stepped) = (copy.numbers()?, model.numbers()?);
        if at > 0 && served() - taken < OPERATIONS * TOGETHER {
            return Err(format!("step {at}: too few operations were taken").into());
        }
        if after != before {
            return Err(format!("step {at} changed a copy of the model").into());
        }
        if stepped.iter().zip(&before).any(|(stepped, before)| stepped == before) {
            return Err(format!("step {at} left a parameter as it was").into());
        }
    }
    Ok(())
}

/// Casts are what they would be without: of parameters as they are, whoever has written them.
fn casts(device: &Device, to: Storage) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let (mut model, mut optimizer) = (Weights::new(&drawn(1), device), optimizer(0.1));
    // The first step makes moments of nothing, the second one is the first to look for casts.
    for at in 0..6 {
        // The step is taken, and counted.
        device.sync().map_err(|error| error.to_string())?;
        let before = served();
        model.check_casts(to, &format!("pass {at}"))?;
        let saved = served() - before;
        // Of fewer parameters than are taken together the step is Burn's.
        if at > 2 && saved < TOGETHER {
            return Err(format!("pass {at}: {saved} casts were saved").into());
        }
        model = step(model, &mut optimizer, &drawn(50 * (1 + at)), 0.1, device);
    }
    let halved =
        model.clone().map(|weight| weight.inner().mul_scalar(0.5).autodiff().require_grad());
    halved.check_casts(to, "halved")?;
    model.check_casts(to, "again")?;
    model = step(model, &mut optimizer, &drawn(7), 0.1, device);
    let other = |weight: Tensor<1>| {
        let other = weight.clone().inner().mul_scalar(3.0);
        overwrite_float(weight.inner(), other).autodiff().require_grad()
    };
    let kept = model.clone();
    let written = model.map(other);
    written.check_casts(to, "overwritten")?;
    kept.check_casts(to, "overwritten, in other hands")
}

/// The same operations with shares that do not add up to 1, of as many tensors as are taken together.
fn look_alike(device: &Device) -> Result<(), Failed> {
    let [kept, share, rate] = [0.9, 0.3, 0.1];
    const SIZE: usize = 40;
    let drawn = |seed: u64| normal(seed, SIZE, 1.0, F32);
    let magnitudes = |seed: u64| drawn(seed).iter().map(|x| x.abs()).collect::<Vec<_>>();
    let all: Vec<_> = (0..2 * TOGETHER)
        .map(|at| [drawn(4 * at), drawn(4 * at + 1), drawn(4 * at + 2), magnitudes(4 * at + 3)])
        .collect();
    let on_device = |numbers: &Vec<f64>| tensor(numbers, [SIZE], F32, device);
    let tensors: Vec<_> = all.iter().map(|numbers| numbers.each_ref().map(on_device)).collect();
    device.sync().map_err(|error| error.to_string())?;
    let mut moments = Vec::new();
    let mut stepped = Vec::new();
    for [parameter, g, first, second] in tensors {
        let m = first.mul_scalar(kept).add(g.clone().mul_scalar(share));
        let v = second.mul_scalar(kept).add(g.square().mul_scalar(share));
        let deviation = v.clone().div_scalar(0.5).sqrt().add_scalar(EPSILON);
        let change = m.clone().div_scalar(0.5).div(deviation);
        stepped.push(parameter.mul_scalar(0.99) - change.mul_scalar(rate));
        moments.push((m, v));
    }
    for ([parameter, gradient, first, second], stepped) in all.iter().zip(stepped) {
        let expected = (0..SIZE).map(|at| {
            let g = gradient[at];
            let m = kept * first[at] + share * g;
            let v = kept * second[at] + share * g * g;
            0.99 * parameter[at] - rate * (m / 0.5) / ((v / 0.5).sqrt() + f64::from(EPSILON))
        });
        let expected: Vec<f64> = expected.collect();
        // Some fifteen roundings, of numbers that are divided by deviations of 0.05 and more.
        let bounds: Vec<f64> = expected.iter().map(|x| 1e-5 * (1.0 + x.abs())).collect();
        compare(&values(stepped)?, &expected, &bounds)?;
    }
    Ok(())
}
