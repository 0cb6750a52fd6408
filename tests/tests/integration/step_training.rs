//! The optimizers of `blackburn::train` on their kernels.

use crate::step_model;
use blackburn::train::{optim::StepGate, scaler::GradScalerConfig};
use blackburn_backend::steps::{Draw, Taken};
use blackburn_reference::{random::normal, storage::Storage, tolerance::compare};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    on_burn_device, run_alone,
    tensors::{tensor, values},
};
use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, ModuleOptimizer},
    prelude::*,
    tensor::Distribution,
};
use libtest_mimic::{Failed, Trial};
use std::{
    env,
    fmt::Debug,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// An optimizer, by what makes it.
pub(crate) trait Groups: Copy + Debug + 'static {
    const NAME: &'static str;
    /// The end of its kernel's name.
    const RULE: &'static str;
    /// Roundings in f32 of what a step takes from a parameter, which is a tenth at most.
    const ROUNDINGS: f64;

    /// One that all of its numbers matter to.
    fn sample() -> Self;
    /// Others whose training is compared with that on the CPU.
    fn others() -> Vec<Self>;
    fn by_chance(self) -> Self;

    /// The optimizer, which may take steps back if it has a gate.
    fn optimizer<M: Module>(
        &self,
        model: &M,
        device: &Device,
        gate: Option<&StepGate>,
    ) -> ModuleOptimizer;

    /// A parameter after one step of the sample at each of `rates`, each waited for.
    fn alone<const D: usize>(
        parameter: Tensor<D>,
        gradient: impl Fn(usize) -> Tensor<D>,
        rates: &[f64],
    ) -> Result<Tensor<D>, Failed>;

    /// Whether the operation refuses what it does not take.
    fn refusals(device: &Device) -> Result<(), Failed>;
}

pub(crate) type Test = fn(&Device) -> Result<(), Failed>;

pub(crate) fn trials<G: Groups>() -> Vec<Trial> {
    let counts: [(&str, Test); 2] = [
        ("a_step_is_one_kernel", one_kernel::<G>),
        ("a_step_that_rounds_by_chance_is_one_kernel_and_a_seed", one_kernel_by_chance::<G>),
    ];
    let tests: [(&str, Test); 6] = [
        ("training_is_that_of_the_cpu", as_on_the_cpu::<G>),
        ("a_saved_and_loaded_optimizer_continues_bit_for_bit", restored::<G>),
        ("an_overflow_takes_the_step_back", overflow::<G>),
        ("strided_gradients_are_read_right", strided_gradient::<G>),
        ("expanded_parameters_and_gradients_are_read_right", expanded::<G>),
        ("what_the_operation_does_not_take_is_refused_where_it_is_asked_for", G::refusals),
    ];
    let mut trials = step_model::trials::<G>();
    trials.extend(counts.map(|(name, test)| counted::<G>(name, test)));
    trials.extend(tests.map(|(name, test)| {
        let name = format!("{}::{name}", G::NAME);
        Trial::ignorable_test(name, move || on_burn_device(|device| test(&device)))
    }));
    trials
}

/// Set in a process that runs one test alone: others would add to the blocks that are observed.
const ALONE: &str = "BLACKBURN_TEST_STEPS_HERE";

/// A test that counts blocks.
pub(crate) fn counted<G: Groups>(name: &str, test: Test) -> Trial {
    let name = format!("{}::{name}", G::NAME);
    Trial::ignorable_test(name.clone(), move || {
        on_burn_device(|device| match env::var_os(ALONE) {
            Some(_) => test(&device),
            None => run_alone(&name, &[(ALONE, "1")]).map(drop),
        })
    })
}

/// Launches of the optimizer's steps.
pub(crate) fn launches<G: Groups>(block: &Block) -> usize {
    let is_step =
        |kernel: &&&str| kernel.contains("OptimizerStepKernel") && kernel.ends_with(G::RULE);
    block.kernels.iter().filter(is_step).count()
}

#[derive(Module, Debug)]
struct Network {
    first: Linear,
    second: Linear,
}

/// Two matrices and two vectors. Rows are 512 bytes in any type: CUDA's runtime pads others, and what
/// is padded is copied before it is updated.
const PARAMETERS: usize = 4;
const SHAPES: ([usize; 2], [usize; 2]) = ([12, 256], [256, 256]);

fn network(storage: Storage, device: &Device) -> Network {
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
fn gradients(
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

fn numbers(network: &Network) -> Result<Vec<f64>, Failed> {
    let mut all = Vec::new();
    for layer in [&network.first, &network.second] {
        all.extend(values(layer.weight.val())?);
        let bias = layer.bias.as_ref().ok_or("LinearConfig gives a bias")?;
        all.extend(values(bias.val())?);
    }
    Ok(all)
}

fn train(
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
fn blocks_of_a_step<G: Groups>(
    groups: G,
    storage: Storage,
    device: &Device,
) -> Result<Vec<Block>, Failed> {
    let device = &device.clone().autodiff();
    let network = network(storage, device);
    let optimizer = groups.optimizer(&network, device, None);
    let (mut optimizer, network) = train(optimizer, network, 0..2, storage, device)?;
    let gradients = gradients(&network, 2, storage, device)?;
    let (_network, blocks) = blocks_of(device, || Ok(optimizer.step(0.01, network, gradients)))?;
    Ok(blocks)
}

/// Whether one launch took the steps of all parameters, beside `others`.
fn is_one_step<G: Groups>(blocks: &[Block], others: usize) -> Result<(), Failed> {
    let is_step = |block: &&Block| {
        (block.operations, block.kernels.len(), launches::<G>(block)) == (PARAMETERS, 1, 1)
    };
    let kernels: usize = blocks.iter().map(|block| block.kernels.len()).sum();
    if blocks.iter().filter(is_step).count() == 1 && kernels == 1 + others {
        return Ok(());
    }
    Err(format!("{PARAMETERS} parameters took {blocks:?}").into())
}

fn one_kernel<G: Groups>(device: &Device) -> Result<(), Failed> {
    is_one_step::<G>(&blocks_of_a_step(G::sample(), Storage::F32, device)?, 0)
}

/// Besides, each step draws a seed.
fn one_kernel_by_chance<G: Groups>(device: &Device) -> Result<(), Failed> {
    is_one_step::<G>(&blocks_of_a_step(G::sample().by_chance(), Storage::F16, device)?, 1)
}

/// The same gradients on the kernel and through Burn's operations on the CPU.
fn as_on_the_cpu<G: Groups>(device: &Device) -> Result<(), Failed> {
    const STEPS: u64 = 5;
    let mut all = vec![(G::sample(), Storage::F32), (G::sample(), Storage::F16)];
    all.extend(G::others().into_iter().map(|groups| (groups, Storage::F32)));
    for (groups, storage) in all {
        let run = |device: Device| -> Result<Vec<f64>, Failed> {
            let device = device.autodiff();
            let network = network(storage, &device);
            let optimizer = groups.optimizer(&network, &device, None);
            let (_, network) = train(optimizer, network, 0..STEPS, storage, &device)?;
            numbers(&network)
        };
        let (actual, expected) = (run(device.clone())?, run(Device::flex())?);
        // Stored in f16, each step may be rounded to the other side.
        let bounds: Vec<f64> = expected
            .iter()
            .map(|p| {
                let in_f32 = Storage::F32.unit_roundoff() * (G::ROUNDINGS * 0.1 + 2.0 * p.abs());
                let stored = match storage {
                    Storage::F32 => 0.0,
                    other => 2.0 * other.unit_roundoff() * p.abs() + other.underflow(),
                };
                STEPS as f64 * (in_f32 + stored)
            })
            .collect();
        compare(&actual, &expected, &bounds)
            .map_err(|error| format!("{groups:?} in {storage:?}: {error}"))?;
    }
    Ok(())
}

fn restored<G: Groups>(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let storage = Storage::F32;
    let start = network(storage, device);
    let optimizer = G::sample().optimizer(&start, device, None);
    let (optimizer, middle) = train(optimizer, start, 0..3, storage, device)?;
    let bytes = optimizer.into_bytes().map_err(|error| error.to_string())?;
    let fresh = || G::sample().optimizer(&middle, device, None);
    let loaded = fresh().from_bytes(bytes).map_err(|error| error.to_string())?;
    let rest = |optimizer: ModuleOptimizer| -> Result<Vec<f64>, Failed> {
        numbers(&train(optimizer, middle.clone(), 3..5, storage, device)?.1)
    };
    let (straight, resumed) = (rest(optimizer)?, rest(loaded)?);
    if straight != resumed {
        return Err("a restored optimizer went another way".into());
    }
    if straight == rest(fresh())? {
        return Err("the state made no difference, so this test shows nothing".into());
    }
    Ok(())
}

/// A gradient that is not finite leaves the model as it is and does not count as a step, before the first
/// step that is taken and after it.
fn overflow<G: Groups>(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let storage = Storage::F32;
    let run = |overflows: &[u64]| -> Result<Vec<f64>, Failed> {
        // At the least scale, where it stays.
        let config = GradScalerConfig { initial_scale: 1.0, ..GradScalerConfig::default() };
        let mut scaler = config.init(device)?;
        let mut model = network(storage, device);
        let mut optimizer = G::sample().optimizer(&model, device, Some(scaler.gate()));
        for step in 0..3 {
            if overflows.contains(&step) {
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
    let without = run(&[])?;
    for overflows in [&[0][..], &[1], &[0, 1, 2]] {
        if run(overflows)? != without {
            return Err(format!("overflows before {overflows:?} left their trace").into());
        }
    }
    Ok(())
}

/// The gradient of a weight may come as a view.
fn strided_gradient<G: Groups>(device: &Device) -> Result<(), Failed> {
    let [rows, columns] = [7, 12];
    let of = |seed| -> Tensor<2> {
        let numbers = normal(seed, rows * columns, 1.0, Storage::F32);
        tensor(&numbers, [rows, columns], Storage::F32, device)
    };
    let run = |gradient: Tensor<2>| values(G::alone(of(1), |_| gradient.clone(), &[0.01])?);
    let straight = of(2);
    // The same numbers, one column after the other in memory.
    let columns_first = straight.clone().swap_dims(0, 1).into_data();
    let turned = Tensor::<2>::from_data(columns_first, device).swap_dims(0, 1);
    if run(straight)? == run(turned)? { Ok(()) } else { Err("a view was read as it lies".into()) }
}

/// Broadcast values hold one row, or one column, for all: their strides are 0.
fn expanded<G: Groups>(device: &Device) -> Result<(), Failed> {
    let [rows, columns] = [5, 12];
    let of = |seed, shape: [usize; 2]| -> Tensor<2> {
        let numbers = normal(seed, shape[0] * shape[1], 1.0, Storage::F32);
        tensor(&numbers, shape, Storage::F32, device)
    };
    let run = |parameter: Tensor<2>, gradient: Tensor<2>| {
        values(G::alone(parameter, |_| gradient.clone(), &[0.01, 0.02])?)
    };
    for shape in [[1, columns], [rows, 1], [1, 1]] {
        let repeats = [rows / shape[0], columns / shape[1]];
        let repeated = [1, 2].map(|seed| of(seed, shape).repeat(&repeats));
        let expanded = [1, 2].map(|seed| of(seed, shape).expand([rows, columns]));
        let [parameter, gradient] = repeated;
        let [view, gradient_view] = expanded;
        let expected = run(parameter.clone(), gradient)?;
        if run(view, gradient_view.clone())? != expected {
            return Err(format!("an expanded {shape:?} was read as it lies").into());
        }
        if run(parameter, gradient_view)? != expected {
            return Err(format!("an expanded gradient of {shape:?} was read as it lies").into());
        }
    }
    Ok(())
}

/// A gate's readings and a draw that no operation takes.
pub(crate) fn bad_readings(device: &Device) -> (Taken, Draw) {
    let two = || Tensor::<1>::ones([2], device);
    let taken = Taken { taken: two(), skipped: two(), factor: two() };
    let seed = Tensor::<1, Int>::random([3], Distribution::Uniform(0.0, 9.0), device);
    (taken, Draw { seed, number: 0 })
}

/// Whether a call panics in the name of the operation and of the argument.
pub(crate) fn is_named<G: Groups, T>(
    argument: &str,
    call: impl FnOnce() -> T,
) -> Result<(), Failed> {
    let Err(panic) = catch_unwind(AssertUnwindSafe(call)) else {
        return Err(format!("a bad {argument} was taken").into());
    };
    let literal = panic.downcast_ref::<&str>().copied();
    let message = panic.downcast_ref::<String>().map(String::as_str).or(literal);
    let message = message.ok_or("a panic without a message")?;
    if message.contains(argument) && message.contains(G::NAME) {
        return Ok(());
    }
    Err(format!("{argument} is not named: {message}").into())
}
