//! What a pass keeps from one call to the next, and threads that take turns.

use super::{Network, Passes, ROWS, STEPS, Test, agree, at, batch};
use blackburn::train::{
    graph::{GradientGraph, GraphStatus},
    memory::MemoryMonitor,
    optim::SgdGroups,
    precision::{Precision, PrecisionPolicy, full_precision},
};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    is_on_cuda,
    tensors::{tensor, values},
};
use burn::{
    module::{
        Content, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param, ParamId,
    },
    nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    prelude::*,
};
use libtest_mimic::Failed;
use std::{
    cell::Cell,
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
};

pub(super) const TESTS: [(&str, Test); 8] = [
    ("running_statistics_are_recorded", statistics),
    ("running_statistics_are_recorded_in_mixed_precision", statistics_in_f16),
    ("running_statistics_of_other_shapes_and_passes_are_added", statistics_between),
    ("running_statistics_that_were_read_stay_what_they_were", statistics_kept),
    ("state_that_cannot_be_replaced_is_not_recorded", locked_state),
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

struct Run {
    statistics: Vec<f64>,
    weight: Vec<f64>,
    /// How often the pass ran.
    passes: u64,
    recorded: bool,
}

/// Trains for some steps.
fn run(
    mut graph: NormalizedPasses,
    policy: &PrecisionPolicy,
    device: &Device,
) -> Result<Run, Failed> {
    let mut model = policy.apply(Normalized::new(device))?;
    let mut optimizer = SgdGroups::default().init(&model, device);
    let passes = Cell::new(0);
    for run in 0..RUNS {
        let x = policy.input(input(run, device));
        let (_, gradients) = graph.run(&model, x, |model, x| {
            passes.set(passes.get() + 1);
            model.pass(x)
        })?;
        model = optimizer.step(1e-4, model, gradients);
    }
    Ok(Run {
        statistics: model.statistics()?,
        weight: values(model.linear.weight.base())?,
        passes: passes.get(),
        recorded: graph.is_recorded(),
    })
}

fn compared(policy: &PrecisionPolicy, least: f64, device: &Device) -> Result<(), Failed> {
    let ran = run(NormalizedPasses::disabled(policy.clone()), policy, device)?;
    let found = run(NormalizedPasses::new(policy.clone()), policy, device)?;
    if !found.recorded || found.passes >= RUNS {
        let Run { recorded, passes, .. } = found;
        return Err(format!("recorded: {recorded}, {passes} passes for {RUNS} runs").into());
    }
    agree(&found.weight, &ran.weight, least).map_err(at("weights"))?;
    agree(&found.statistics, &ran.statistics, least).map_err(at("statistics"))
}

fn statistics(device: &Device) -> Result<(), Failed> {
    compared(&PrecisionPolicy::default(), 1e-5, device)
}

fn statistics_in_f16(device: &Device) -> Result<(), Failed> {
    compared(&PrecisionPolicy::new(Precision::F16), 1e-2, device)
}

/// Between replays, passes run for a batch of another size, and without the graph.
fn statistics_between(device: &Device) -> Result<(), Failed> {
    let policy = PrecisionPolicy::default();
    let train = |mut graph: NormalizedPasses| {
        let model = Normalized::new(device);
        for step in 0..4 * WARM {
            let x = input(step, device);
            let x = if step % 4 == 3 { x.narrow(0, 0, 10) } else { x };
            graph.run(&model, x, Normalized::pass)?;
            if step % 5 == 4 {
                model.pass(input(100 + step, device));
            }
        }
        Ok::<_, Failed>((model.statistics()?, graph.is_recorded()))
    };
    let (ran, _) = train(NormalizedPasses::disabled(policy.clone()))?;
    let (found, recorded) = train(NormalizedPasses::new(policy))?;
    if !recorded {
        return Err("nothing was recorded".into());
    }
    agree(&found, &ran, 1e-5)
}

/// A model for validation has statistics of its own.
fn statistics_kept(device: &Device) -> Result<(), Failed> {
    let mut graph = NormalizedPasses::new(PrecisionPolicy::default());
    let model = Normalized::new(device);
    let mut step = 0;
    let mut train = |until: u64| {
        while step < until {
            graph.run(&model, input(step, device), Normalized::pass)?;
            step += 1;
        }
        Ok::<_, Failed>(graph.is_recorded())
    };
    if !train(WARM)? {
        return Err("nothing was recorded".into());
    }
    let valid = model.valid();
    let before = valid.statistics()?;
    // Through the checks at replays 2 and 10.
    train(4 * WARM)?;
    agree(&valid.statistics()?, &before, 0.0).map_err(at("the model for validation"))?;
    match agree(&model.statistics()?, &before, 1e-3) {
        Ok(()) => Err("replays left the statistics as they were".into()),
        Err(_) => Ok(()),
    }
}

/// How often it was asked, which a mapper cannot set.
#[derive(Clone, Debug)]
struct Count {
    id: ParamId,
    value: Arc<Mutex<Tensor<1>>>,
}

impl Module for Count {
    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        devices
    }

    fn fork(self, _: &Device) -> Self {
        self
    }

    fn to_device(self, _: &Device) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let value = self.value.lock().unwrap_or_else(PoisonError::into_inner).clone();
        visitor.visit_float(&Param::initialized(self.id, value));
    }

    fn map<M: ModuleMapper>(self, _: &mut M) -> Self {
        self
    }

    fn materialize(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn train(self) -> Self {
        self
    }
}

impl ModuleDisplayDefault for Count {
    fn content(&self, content: Content) -> Option<Content> {
        content.add_formatted(&"Count".to_string()).optional()
    }
}

impl ModuleDisplay for Count {}

fn locked_state(device: &Device) -> Result<(), Failed> {
    type Counted = (Linear, Count);
    let linear = LinearConfig::new(FEATURES, FEATURES).init(device);
    let zero = Tensor::<1>::zeros([1], &device.clone().without_autodiff());
    let count = Count { id: ParamId::new(), value: Arc::new(Mutex::new(zero)) };
    let model: Counted = (linear, count.clone());
    let mut graph = GradientGraph::new(PrecisionPolicy::default());
    let pass = |(linear, count): &Counted, x: Tensor<2>| {
        let mut value = count.value.lock().unwrap_or_else(PoisonError::into_inner);
        *value = value.clone() + 1.0;
        let loss = linear.forward(x).powi_scalar(2).mean();
        let value = loss.clone().inner();
        (value, GradientsParams::from_grads(loss.backward(), linear))
    };
    for step in 0..STEPS {
        graph.run(&model, input(step, device), pass)?;
    }
    let counted = values(count.value.lock().unwrap_or_else(PoisonError::into_inner).clone())?;
    let status = graph.status(device);
    match &status {
        GraphStatus::Unrecorded { reason } if reason.contains("the pass changes `1`") => {
            agree(&counted, &[STEPS as f64], 0.0)
        }
        _ => Err(format!("{status:?}").into()),
    }
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
        let size = if is_on_cuda() { 4096 } else { 32 };
        let x = Tensor::<2>::full([size, size], 1.0 / size as f64, &device.clone().inner());
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
