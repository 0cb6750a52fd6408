//! What a pass keeps from one call to the next, and threads that take turns.

use super::{Network, Passes, ROWS, STEPS, Test, agree, at, batch};
use blackburn::train::{
    graph::GradientGraph,
    memory::MemoryMonitor,
    precision::{Precision, PrecisionPolicy, full_precision},
};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::tensors::{tensor, values};
use burn::{
    nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    prelude::*,
};
use libtest_mimic::Failed;
use std::{cell::Cell, sync::mpsc, thread};

pub(super) const TESTS: [(&str, Test); 5] = [
    ("running_statistics_run", statistics),
    ("running_statistics_run_in_mixed_precision", statistics_in_f16),
    ("statistics_that_are_frozen_are_recorded", frozen_statistics),
    ("threads_that_take_turns_train_as_one_does", turns),
    ("checks_of_replays_take_the_memory_of_the_recording", memory),
];

const FEATURES: usize = 8;
const RUNS: u64 = 100;
/// Steps by which a recording is replayed.
const WARM: u64 = 5;
const TURNS: u64 = 5;

#[derive(Module, Debug)]
struct Normalized {
    linear: Linear,
    norm: BatchNorm,
}

impl Normalized {
    fn new(device: &Device) -> Self {
        let mut linear = LinearConfig::new(FEATURES, FEATURES).with_bias(false).init(device);
        linear.weight = linear.weight.map(|old| {
            let weight = normal(11, FEATURES * FEATURES, 0.4, Storage::F32);
            tensor(&weight, old.dims(), Storage::F32, device).detach().require_grad()
        });
        Self { linear, norm: BatchNormConfig::new(FEATURES).init(device) }
    }

    fn pass(&self, x: Tensor<2>) -> (Tensor<1>, GradientsParams) {
        let loss = full_precision(self.norm.forward(self.linear.forward(x))).powi_scalar(4).mean();
        let value = loss.clone().inner();
        (value, GradientsParams::from_grads(loss.backward(), self))
    }

    fn statistics(&self) -> Result<Vec<f64>, Failed> {
        let mut all = values(self.norm.running_mean.value_sync())?;
        all.extend(values(self.norm.running_var.value_sync())?);
        Ok(all)
    }
}

/// Normally distributed around 5, with a deviation of 2.
fn input(run: u64, device: &Device) -> Tensor<2> {
    let x: Vec<f64> =
        normal(100 + run, 16 * FEATURES, 2.0, Storage::F32).iter().map(|x| x + 5.0).collect();
    tensor(&x, [16, FEATURES], Storage::F32, &device.clone().without_autodiff())
}

type NormalizedPasses = GradientGraph<Normalized, Tensor<2>, Tensor<1>>;

/// The statistics after some runs, how many passes ran for them, and whether one was recorded.
fn run(
    model: &Normalized,
    mut graph: NormalizedPasses,
    policy: &PrecisionPolicy,
    device: &Device,
) -> Result<(Vec<f64>, u64, bool), Failed> {
    let passes = Cell::new(0);
    for run in 0..RUNS {
        graph.run(model, policy.input(input(run, device)), |model, x| {
            passes.set(passes.get() + 1);
            model.pass(x)
        })?;
    }
    Ok((model.statistics()?, passes.get(), graph.is_recorded()))
}

fn compared(policy: &PrecisionPolicy, least: f64, device: &Device) -> Result<(), Failed> {
    let model = || policy.apply(Normalized::new(device));
    let (ran, ..) = run(&model()?, NormalizedPasses::disabled(policy.clone()), policy, device)?;
    let model = model()?;
    let (found, passes, recorded) =
        run(&model, NormalizedPasses::new(policy.clone()), policy, device)?;
    if recorded || passes != RUNS {
        return Err(format!("recorded: {recorded}, {passes} passes for {RUNS} runs").into());
    }
    agree(&found, &ran, least)
}

fn statistics(device: &Device) -> Result<(), Failed> {
    compared(&PrecisionPolicy::default(), 1e-5, device)
}

fn statistics_in_f16(device: &Device) -> Result<(), Failed> {
    compared(&PrecisionPolicy::new(Precision::F16), 1e-2, device)
}

fn frozen_statistics(device: &Device) -> Result<(), Failed> {
    let policy = PrecisionPolicy::default();
    let mut model = Normalized::new(device);
    for step in 0..3 {
        model.pass(input(step, device));
    }
    model.norm = model.norm.freeze();
    let before = model.statistics()?;
    let mut graph = NormalizedPasses::new(policy);
    let mut optimizer = SgdConfig::new().init();
    for step in 0..STEPS {
        let (expected, _) = model.pass(input(step, device));
        let (loss, gradients) = graph.run(&model, input(step, device), Normalized::pass)?;
        agree(&values(loss)?, &values(expected)?, 1e-5)?;
        model = optimizer.step(1e-3, model, gradients);
    }
    if !graph.is_recorded() {
        return Err("nothing was recorded".into());
    }
    agree(&model.statistics()?, &before, 0.0)
}

/// Another thread overwrites parameters that a replay of this one may still read.
fn turns(device: &Device) -> Result<(), Failed> {
    /// A pass that takes the device a while.
    fn long(
        network: &Network,
        (words, scale): (Tensor<2, Int>, Tensor<1>),
    ) -> (Tensor<1>, GradientsParams) {
        let mut x = network.words.forward(words);
        for _ in 0..24 {
            x = x.clone() + network.second.forward(network.first.forward(x)) * 0.1;
        }
        let loss = x.powi_scalar(2).mean() * scale;
        let value = loss.clone().inner();
        (value, GradientsParams::from_grads(loss.backward(), network))
    }
    /// Asks for work that a GPU has not done when the other thread comes, so that what this thread asks for
    /// next has not begun by then.
    fn occupy(device: &Device) {
        const PRODUCTS: usize = 16;
        const SIZE: usize = if cfg!(feature = "cuda") { 4096 } else { 32 };
        let x = Tensor::<2>::full([SIZE, SIZE], 1.0 / SIZE as f64, &device.clone().inner());
        (0..PRODUCTS).fold(x.clone(), |product, _| product.matmul(x.clone()));
    }
    let here = Network::new(0.0, device);
    let there = here.clone().doubled();
    let of = |network: &Network, step| values(long(network, batch(step, ROWS, device)).0);
    let mut graph = Passes::new(PrecisionPolicy::default());
    for step in 0..WARM {
        graph.run(&here, batch(step, ROWS, device), long)?;
    }
    if !graph.is_recorded() {
        return Err("nothing was recorded".into());
    }
    // One other thread takes all its turns: CubeCL waits for another queue when it first sees its memory.
    thread::scope(|scope| {
        let (to_there, turns) = mpsc::channel::<(Passes, u64)>();
        let (to_here, done) = mpsc::channel();
        let there_too = there.clone();
        scope.spawn(move || {
            for (mut graph, step) in turns {
                let loss = graph.run(&there_too, batch(step, ROWS, device), long);
                if to_here.send((graph, loss.map(|(loss, _)| loss))).is_err() {
                    break;
                }
            }
        });
        for step in 0..TURNS {
            occupy(device);
            let (first, gradients) = graph.run(&here, batch(step, ROWS, device), long)?;
            drop(gradients);
            to_there.send((graph, step))?;
            let second = done.recv().map_err(|_| "the other thread panicked")?;
            graph = second.0;
            for (loss, network) in [(first, &here), (second.1?, &there)] {
                agree(&values(loss)?, &of(network, step)?, 1e-5)
                    .map_err(at(format!("step {step}")))?;
            }
        }
        if graph.is_recorded() { Ok(()) } else { Err("the recording was dropped".into()) }
    })
}

/// Replays 2 and 10 are compared with the pass, which needs as much memory as the recording has.
fn memory(device: &Device) -> Result<(), Failed> {
    const REPLAYS: u64 = 12;
    /// Of a tensor between two layers.
    const TENSOR_BYTES: usize = (32 << 20) / LAYERS;
    const LAYERS: usize = 16;
    const WIDTH: usize = 64;
    let model = LinearConfig::new(WIDTH, WIDTH).init(device);
    let pass = |model: &Linear, x: Tensor<2>| {
        let y = (0..LAYERS).fold(x, |x, _| model.forward(x).tanh());
        let loss = y.powi_scalar(2).mean();
        let value = loss.clone().inner();
        (value, GradientsParams::from_grads(loss.backward(), model))
    };
    let x = Tensor::<2>::full([TENSOR_BYTES / 4 / WIDTH, WIDTH], 0.1, &device.clone().inner());
    let mut graph = GradientGraph::new(PrecisionPolicy::default());
    let mut monitor = MemoryMonitor::new(device);
    let mut reserved = || {
        device.sync().map_err(|error| error.to_string())?;
        Ok::<_, Failed>(monitor.read().ok_or("the pools report")?.reserved_bytes)
    };
    while !graph.is_recorded() {
        graph.run(&model, x.clone(), pass)?;
    }
    let recorded = reserved()?;
    for _ in 1..REPLAYS {
        graph.run(&model, x.clone(), pass)?;
    }
    let checked = reserved()?;
    if !graph.is_recorded() {
        return Err("the recording was dropped".into());
    }
    println!("{recorded} bytes reserved with the recording, {checked} after its checks");
    match checked.saturating_sub(recorded) < (LAYERS * TENSOR_BYTES / 2) as u64 {
        true => Ok(()),
        false => Err(format!("{recorded} bytes were reserved, and {checked} after checks").into()),
    }
}
