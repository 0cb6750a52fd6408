//! Copies of parameters that steps write, against the parameters as they become.

use blackburn_backend::{
    copies::Copies,
    graph,
    overwrite::overwrite_float,
    steps::{
        Taken,
        sgd::{Step, Stepped, Tensors, step},
    },
};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    on_burn_device, run_alone,
    tensors::{tensor, values},
};
use burn::{prelude::*, tensor::FloatDType};
use libtest_mimic::{Failed, Trial};
use std::env;

/// Set in a process that runs one test alone: kernels are counted.
const ALONE: &str = "BLACKBURN_TEST_COPIES_HERE";

type Test = fn(&Device) -> Result<(), Failed>;

const TESTS: [(&str, Test); 8] = [
    ("a_step_leaves_nothing_to_refresh", nothing_left),
    ("several_steps_are_all_in_the_copy", several_steps),
    ("a_step_that_is_not_taken_makes_a_stale_copy_right", not_taken),
    ("what_overwrites_either_is_seen", overwritten),
    ("another_parameter_is_seen", another),
    ("two_copies_of_a_parameter_are_both_right", two),
    ("copies_of_another_queue_are_made_again", other_queue),
    ("copies_that_are_dropped_are_left_alone", dropped),
];

pub(crate) fn trials() -> Vec<Trial> {
    let alone = |(name, test): (&str, Test)| {
        let name = format!("parameter_copies::{name}");
        Trial::ignorable_test(name.clone(), move || {
            on_burn_device(|device| match env::var_os(ALONE) {
                Some(_) => test(&device),
                None => run_alone(&name, &[(ALONE, "1")]).map(drop),
            })
        })
    };
    let recorded = Trial::ignorable_test("parameter_copies::what_a_replay_writes_is_seen", || {
        on_burn_device(|device| replayed(&device))
    });
    TESTS.into_iter().map(alone).chain([recorded]).collect()
}

/// Rows are 512 bytes in any type: CUDA's runtime pads others.
const SHAPE: [usize; 2] = [12, 256];
const LENGTH: usize = SHAPE[0] * SHAPE[1];
const COPIED: Storage = Storage::F16;
/// Two are stepped by one launch.
const PARAMETERS: usize = 2;

/// Parameters with what their steps take, and copies.
struct Model {
    stepped: Vec<Stepped<2>>,
    held: Vec<Tensor<2>>,
    copies: Copies,
    device: Device,
    steps: u64,
}

fn drawn(seed: u64, device: &Device) -> Tensor<2> {
    tensor(&normal(seed, LENGTH, 1.0, Storage::F32), SHAPE, Storage::F32, device)
}

/// Memory for copies, with other numbers.
fn memory(device: &Device) -> Vec<Tensor<2>> {
    let one = |_| Tensor::<2>::ones(SHAPE, device).cast(FloatDType::F16);
    (0..PARAMETERS).map(one).collect()
}

impl Model {
    fn new(device: &Device) -> Self {
        let device = device.clone().without_autodiff();
        let stepped = |seed: usize| Stepped {
            parameter: drawn(seed as u64, &device),
            velocity: Tensor::zeros(SHAPE, &device),
        };
        let stepped = (0..PARAMETERS).map(stepped).collect();
        Self { stepped, held: memory(&device), copies: Copies::new(), device, steps: 0 }
    }

    fn step(&mut self, gate: Option<&Taken>) {
        self.steps += 1;
        let (seed, device) = (100 * self.steps, &self.device);
        let together = self.copies.together();
        let one = |(place, Stepped { parameter, velocity }): (usize, Stepped<2>)| {
            let gradient = drawn(seed + place as u64, device);
            step(Tensors { parameter, gradient, velocity }, STEP, gate.cloned(), None, together)
        };
        self.stepped = std::mem::take(&mut self.stepped).into_iter().enumerate().map(one).collect();
    }

    /// How many kernels that takes.
    fn refresh(&mut self) -> Result<usize, Failed> {
        let Self { held, stepped, copies, device, .. } = self;
        let refreshed = || -> Result<Vec<_>, Failed> {
            let pairs = std::mem::take(held).into_iter().zip(stepped.iter());
            Ok(pairs.map(|(copy, it)| copies.refresh(copy, it.parameter.clone())).collect())
        };
        let (new, blocks) = blocks_of(device, refreshed)?;
        *held = new;
        Ok(kernels(&blocks))
    }

    /// Whether the copies are what the parameters are.
    fn check(&self) -> Result<(), Failed> {
        agree(&self.held, &self.stepped)
    }
}

fn agree(held: &[Tensor<2>], stepped: &[Stepped<2>]) -> Result<(), Failed> {
    for (copy, Stepped { parameter, .. }) in held.iter().zip(stepped) {
        if values(copy.clone())? != rounded(values(parameter.clone())?) {
            return Err("a copy is not as its parameter is".into());
        }
    }
    Ok(())
}

fn kernels(blocks: &[Block]) -> usize {
    blocks.iter().map(|block| block.kernels.len()).sum()
}

const STEP: Step =
    Step { momentum: 0.9, dampening: 0.0, nesterov: false, weight_decay: 0.1, rate: 0.1, time: 1 };

/// One launch for both, or none.
fn refreshes(model: &mut Model, expected: usize) -> Result<(), Failed> {
    let found = model.refresh()?;
    if found != expected {
        return Err(format!("{found} kernels refresh the copies, not {expected}").into());
    }
    model.check()
}

fn nothing_left(device: &Device) -> Result<(), Failed> {
    let mut model = Model::new(device);
    refreshes(&mut model, 1)?;
    for _ in 0..3 {
        model.step(None);
        refreshes(&mut model, 0)?;
        // As where gradients are accumulated.
        refreshes(&mut model, 0)?;
    }
    Ok(())
}

fn several_steps(device: &Device) -> Result<(), Failed> {
    let mut model = Model::new(device);
    refreshes(&mut model, 1)?;
    model.step(None);
    model.step(None);
    refreshes(&mut model, 0)
}

/// The parameter is another one than the copy was made of, in the same memory, when the gate is closed.
fn not_taken(device: &Device) -> Result<(), Failed> {
    let mut model = Model::new(device);
    refreshes(&mut model, 1)?;
    let other = drawn(7, &model.device);
    let first = model.stepped.remove(0);
    let parameter = overwrite_float(first.parameter, other);
    model.stepped.insert(0, Stepped { parameter, ..first });
    let number = |value: f32| Tensor::<1>::from_floats([value], &model.device);
    let gate = Taken { taken: number(0.0), skipped: number(0.0), factor: number(1.0) };
    model.step(Some(&gate));
    refreshes(&mut model, 0)
}

fn overwritten(device: &Device) -> Result<(), Failed> {
    let mut model = Model::new(device);
    refreshes(&mut model, 1)?;
    model.step(None);
    let zeros = Tensor::zeros(SHAPE, &model.device);
    model.held[1] = overwrite_float(model.held[1].clone(), zeros);
    refreshes(&mut model, 1)?;
    model.step(None);
    let parameter = model.stepped[0].parameter.clone();
    model.stepped[0].parameter = overwrite_float(parameter, drawn(8, &model.device));
    refreshes(&mut model, 1)?;
    // Where somebody may write in place, nobody does.
    model.step(None);
    model.device.sync().map_err(|error| error.to_string())?;
    let Stepped { parameter, velocity } = model.stepped.remove(0);
    model.stepped.insert(0, Stepped { parameter: parameter * 2.0, velocity });
    refreshes(&mut model, 1)?;
    model.step(None);
    refreshes(&mut model, 0)
}

/// As where a checkpoint is loaded.
fn another(device: &Device) -> Result<(), Failed> {
    let mut model = Model::new(device);
    refreshes(&mut model, 1)?;
    model.step(None);
    model.stepped[0].parameter = drawn(9, &model.device);
    refreshes(&mut model, 1)?;
    model.step(None);
    refreshes(&mut model, 0)
}

fn two(device: &Device) -> Result<(), Failed> {
    let mut model = Model::new(device);
    let (copies, mut held) = (Copies::new(), memory(&model.device));
    for _ in 0..3 {
        model.refresh()?;
        let both = held.into_iter().zip(&model.stepped);
        held = both.map(|(copy, it)| copies.refresh(copy, it.parameter.clone())).collect();
        model.check()?;
        agree(&held, &model.stepped)?;
        model.step(None);
    }
    Ok(())
}

/// A queue does not wait for what a step writes in another one, as it does for tensors that it is given.
fn other_queue(device: &Device) -> Result<(), Failed> {
    let mut model = Model::new(device);
    refreshes(&mut model, 1)?;
    model.step(None);
    let model = std::thread::scope(|scope| {
        let elsewhere = || refreshes(&mut model, 1).map(|()| model);
        scope.spawn(elsewhere).join().map_err(|_| "a thread panicked")?
    })?;
    model.check()
}

fn dropped(device: &Device) -> Result<(), Failed> {
    let mut model = Model::new(device);
    refreshes(&mut model, 1)?;
    let before: Result<Vec<_>, _> = model.held.iter().cloned().map(values).collect();
    model.copies = Copies::new();
    model.step(None);
    let after: Result<Vec<_>, _> = model.held.iter().cloned().map(values).collect();
    if before? != after? {
        return Err("a step has written copies that were given up".into());
    }
    refreshes(&mut model, 1)
}

/// A recording overwrites the parameter, and is replayed behind steps.
fn replayed(device: &Device) -> Result<(), Failed> {
    let mut model = Model::new(device);
    model.refresh()?;
    model.step(None);
    let other = drawn(11, &model.device);
    let told = |error: graph::GraphError| Failed::from(error.to_string());
    model.device.sync().map_err(|error| error.to_string())?;
    graph::prepare(&model.device).map_err(told)?;
    graph::start(&model.device).map_err(told)?;
    let parameter = overwrite_float(model.stepped[0].parameter.clone(), other.clone());
    let recording = graph::stop(&model.device).map_err(told)?;
    model.stepped[0].parameter = parameter;
    for _ in 0..2 {
        model.refresh()?;
        model.check()?;
        model.step(None);
        model.refresh()?;
        model.check()?;
        model.step(None);
        // SAFETY: this thread has recorded it, and both tensors have their memory still.
        unsafe { recording.replay() }.map_err(told)?;
        model.refresh()?;
        if values(model.held[0].clone())? != rounded(values(other.clone())?) {
            return Err("the copy is not what a replay has written".into());
        }
    }
    Ok(())
}

fn rounded(numbers: Vec<f64>) -> Vec<f64> {
    numbers.into_iter().map(|number| COPIED.round(number)).collect()
}
