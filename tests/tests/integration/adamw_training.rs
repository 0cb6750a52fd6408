//! The optimizer of `blackburn::train` on the kernel.

use super::kind::Adamw;
use crate::step_model::{Kind, Test, counted, launches};
use blackburn::train::{optim::AdamWGroups, scaler::GradScalerConfig};
use blackburn_backend::adamw::{self, Draw, Step, Taken, Tensors};
use blackburn_reference::{random::normal, storage::Storage, tolerance::compare};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    on_burn_device,
    tensors::{float, tensor, values},
};
use burn::{
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, ModuleOptimizer},
    prelude::*,
    tensor::Distribution,
};
use libtest_mimic::{Failed, Trial};
use std::ops::Range;

const COUNTS: [(&str, Test); 2] = [
    ("a_step_is_one_kernel", one_kernel),
    ("a_step_that_rounds_by_chance_is_one_kernel_and_a_seed", one_kernel_by_chance),
];

const TESTS: [(&str, Test); 4] = [
    ("training_is_that_of_the_cpu", as_on_the_cpu),
    ("an_overflow_takes_the_step_back", overflow),
    ("strided_gradients_are_read_right", strided_gradient),
    ("what_the_operation_does_not_take_is_refused_where_it_is_asked_for", refusals),
];

pub(crate) fn trials() -> Vec<Trial> {
    let test = |(name, test): (&str, Test)| {
        let name = format!("adamw::{name}");
        Trial::ignorable_test(name, move || on_burn_device(|device| test(&device)))
    };
    let count = |(name, test)| counted("adamw", name, test);
    COUNTS.into_iter().map(count).chain(TESTS.into_iter().map(test)).collect()
}

#[derive(Module, Debug)]
pub(crate) struct Network {
    pub(crate) first: Linear,
    second: Linear,
}

/// Two matrices and two vectors. Rows are 512 bytes in any type: CUDA's runtime pads others, and what
/// is padded is copied before it is updated.
pub(crate) const PARAMETERS: usize = 4;
pub(crate) const SHAPES: ([usize; 2], [usize; 2]) = ([12, 256], [256, 256]);

pub(crate) fn network(storage: Storage, device: &Device) -> Network {
    let layer = |seed: u64, [inputs, outputs]: [usize; 2]| {
        let mut layer = LinearConfig::new(inputs, outputs).init(device);
        let weight = normal(seed, inputs * outputs, 1.0, storage);
        layer.weight = layer.weight.map(|old| {
            tensor(&weight, [inputs, outputs], storage, &old.device()).detach().require_grad()
        });
        let bias = normal(seed + 1, outputs, 1.0, storage);
        layer.bias = layer.bias.map(|param| {
            param
                .map(|old| tensor(&bias, [outputs], storage, &old.device()).detach().require_grad())
        });
        layer
    };
    Network { first: layer(1, SHAPES.0), second: layer(3, SHAPES.1) }
}

/// Gradients that are drawn, and on the device before anything is watched.
pub(crate) fn gradients(
    network: &Network,
    seed: u64,
    storage: Storage,
    device: &Device,
) -> Result<GradientsParams, Failed> {
    let device = &device.clone().without_autodiff();
    let mut gradients = GradientsParams::new();
    for (i, layer) in [&network.first, &network.second].into_iter().enumerate() {
        let seed = 10 * seed + 2 * i as u64;
        let shape = layer.weight.dims();
        let weight = normal(seed, shape[0] * shape[1], 0.1, storage);
        gradients.register::<2>(layer.weight.id, tensor(&weight, shape, storage, device));
        let bias = layer.bias.as_ref().ok_or("LinearConfig gives a bias")?;
        let values = normal(seed + 1, shape[1], 0.1, storage);
        gradients.register::<1>(bias.id, tensor(&values, [shape[1]], storage, device));
    }
    device.sync().map_err(|error| error.to_string())?;
    Ok(gradients)
}

pub(crate) fn numbers(network: &Network) -> Result<Vec<f64>, Failed> {
    let mut all = Vec::new();
    for layer in [&network.first, &network.second] {
        all.extend(values(layer.weight.val())?);
        let bias = layer.bias.as_ref().ok_or("LinearConfig gives a bias")?;
        all.extend(values(bias.val())?);
    }
    Ok(all)
}

pub(crate) fn train(
    mut optimizer: ModuleOptimizer,
    mut network: Network,
    steps: Range<u64>,
    storage: Storage,
    device: &Device,
) -> Result<(ModuleOptimizer, Network), Failed> {
    for step in steps {
        let gradients = gradients(&network, step, storage, device)?;
        network = optimizer.step(0.01, network, gradients);
    }
    device.sync().map_err(|error| error.to_string())?;
    Ok((optimizer, network))
}

/// What one step runs once the states are there.
pub(crate) fn blocks_of_a_step(
    optimizer: impl Fn(&Network, &Device) -> ModuleOptimizer,
    storage: Storage,
    device: &Device,
) -> Result<Vec<Block>, Failed> {
    let device = &device.clone().autodiff();
    let network = network(storage, device);
    let optimizer = optimizer(&network, device);
    let (mut optimizer, network) = train(optimizer, network, 0..2, storage, device)?;
    let gradients = gradients(&network, 2, storage, device)?;
    let (_network, blocks) = blocks_of(device, || Ok(optimizer.step(0.01, network, gradients)))?;
    Ok(blocks)
}

/// Whether one launch took the steps of all parameters, beside `others`.
pub(crate) fn is_one_step(blocks: &[Block], rule: &str, others: usize) -> Result<(), Failed> {
    let is_step = |block: &&Block| {
        (block.operations, block.kernels.len(), launches(block, rule)) == (PARAMETERS, 1, 1)
    };
    let kernels: usize = blocks.iter().map(|block| block.kernels.len()).sum();
    if blocks.iter().filter(is_step).count() == 1 && kernels == 1 + others {
        return Ok(());
    }
    Err(format!("{PARAMETERS} parameters took {blocks:?}").into())
}

fn one_kernel(device: &Device) -> Result<(), Failed> {
    let groups = AdamWGroups::default();
    let blocks =
        blocks_of_a_step(|model, device| groups.init(model, device), Storage::F32, device)?;
    is_one_step(&blocks, Adamw::RULE, 0)
}

/// Besides, each step draws a seed.
fn one_kernel_by_chance(device: &Device) -> Result<(), Failed> {
    let groups = AdamWGroups { stochastic_rounding: true, ..AdamWGroups::default() };
    let blocks =
        blocks_of_a_step(|model, device| groups.init(model, device), Storage::F16, device)?;
    is_one_step(&blocks, Adamw::RULE, 1)
}

/// The same gradients on the kernel and through Burn's operations on the CPU.
fn as_on_the_cpu(device: &Device) -> Result<(), Failed> {
    const STEPS: u64 = 5;
    for storage in [Storage::F32, Storage::F16] {
        let run = |device: Device| -> Result<Vec<f64>, Failed> {
            let device = device.autodiff();
            let network = network(storage, &device);
            let optimizer = AdamWGroups::default().init(&network, &device);
            let (_, network) = train(optimizer, network, 0..STEPS, storage, &device)?;
            numbers(&network)
        };
        let (actual, expected) = (run(device.clone())?, run(Device::flex())?);
        // A step is at most some 0.01 / (1 - 0.9) of some fifty roundings in f32. Stored in f16, each
        // step may be rounded to the other side.
        let bounds: Vec<f64> = expected
            .iter()
            .map(|p| {
                let in_f32 = Storage::F32.unit_roundoff() * (50.0 * 0.1 + 2.0 * p.abs());
                let stored = match storage {
                    Storage::F32 => 0.0,
                    other => 2.0 * other.unit_roundoff() * p.abs() + other.underflow(),
                };
                STEPS as f64 * (in_f32 + stored)
            })
            .collect();
        compare(&actual, &expected, &bounds).map_err(|error| format!("{storage:?}: {error}"))?;
    }
    Ok(())
}

/// A gradient that is not finite leaves the model as it is and does not count as a step.
fn overflow(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let storage = Storage::F32;
    let run = |overflows: bool| -> Result<Vec<f64>, Failed> {
        // At the least scale, where it stays.
        let config = GradScalerConfig { initial_scale: 1.0, ..GradScalerConfig::default() };
        let mut scaler = config.init(device)?;
        let mut model = network(storage, device);
        let mut optimizer = AdamWGroups::default().init_gated(&model, device, scaler.gate());
        for step in 0..3 {
            if overflows && step == 1 {
                let mut bad = gradients(&model, 99, storage, device)?;
                let plain = device.clone().without_autodiff();
                let inf = Tensor::<2>::full(SHAPES.0, f32::INFINITY, &plain);
                bad.register::<2>(model.first.weight.id, inf);
                let before = numbers(&model)?;
                scaler.unscale(&mut bad, &model)?;
                model = optimizer.step(0.01, model, bad);
                scaler.update()?;
                if numbers(&model)? != before {
                    return Err("the step was not taken back".into());
                }
            }
            let mut gradients = gradients(&model, step, storage, device)?;
            scaler.unscale(&mut gradients, &model)?;
            model = optimizer.step(0.01, model, gradients);
            scaler.update()?;
        }
        numbers(&model)
    };
    let (with, without) = (run(true)?, run(false)?);
    // Corrections are computed from the steps that were taken, which are as many.
    if with == without { Ok(()) } else { Err("a step that was taken back left its trace".into()) }
}

/// The gradient of a weight may come as a view.
fn strided_gradient(device: &Device) -> Result<(), Failed> {
    let [rows, columns] = [7, 12];
    let count = rows * columns;
    let storage = Storage::F32;
    let of = |seed, deviation| -> Tensor<2> {
        tensor(&normal(seed, count, deviation, storage), [rows, columns], storage, device)
    };
    let step =
        Step { beta_1: 0.9, beta_2: 0.95, epsilon: 1e-8, weight_decay: 0.1, rate: 0.01, time: 3 };
    let run = |gradient: Tensor<2>| -> Result<Vec<f64>, Failed> {
        let zeros = || Tensor::zeros([rows, columns], device);
        let tensors = Tensors { parameter: of(1, 1.0), gradient, first: zeros(), second: zeros() };
        values(adamw::step(tensors, step, None, None).parameter)
    };
    let straight = of(2, 1.0);
    // The same numbers, one column after the other in memory.
    let columns_first = straight.clone().swap_dims(0, 1).into_data();
    let turned = Tensor::<2>::from_data(columns_first, device).swap_dims(0, 1);
    if run(straight)? == run(turned)? { Ok(()) } else { Err("a view was read as it lies".into()) }
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
    let step =
        Step { beta_1: 0.9, beta_2: 0.95, epsilon: 1e-8, weight_decay: 0.0, rate: 0.1, time: 1 };
    let two = || Tensor::<1>::ones([2], device);
    let taken = || Taken { taken: two(), skipped: two(), factor: two() };
    let draw = || Draw {
        seed: Tensor::<1, Int>::random([3], Distribution::Uniform(0.0, 9.0), device),
        number: 0,
    };
    let calls: [(&str, Step, Option<Taken>, Option<Draw>); 4] = [
        ("`beta_2`", Step { beta_2: 1.0, ..step }, None, None),
        ("`time`", Step { time: 0, ..step }, None, None),
        ("`taken`", step, Some(taken()), None),
        ("`seed`", step, None, Some(draw())),
    ];
    for (argument, step, gate, draw) in calls {
        let tensors = served.clone();
        let call = std::panic::AssertUnwindSafe(|| adamw::step(tensors, step, gate, draw));
        let Err(panic) = std::panic::catch_unwind(call) else {
            return Err(format!("a bad {argument} was taken").into());
        };
        let literal = panic.downcast_ref::<&str>().copied();
        let message = panic.downcast_ref::<String>().map(String::as_str).or(literal);
        let message = message.ok_or("a panic without a message")?;
        if !message.contains(argument) {
            return Err(format!("{argument} is not named: {message}").into());
        }
    }
    Ok(())
}
