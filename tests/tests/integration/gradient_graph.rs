//! Passes that are recorded and replayed, against those that run.

#[path = "gradient_graph_accumulation.rs"]
mod accumulation;
#[path = "gradient_graph_changes.rs"]
mod changes;
#[path = "gradient_graph_milestones.rs"]
mod milestones;
#[path = "gradient_graph_state.rs"]
mod state;

use blackburn::{
    nn::{dropout, flash, seed, transformer::TransformerEncoderInput},
    train::{
        clip::clip_global_norm,
        graph::{GradientGraph, PassTensors},
        optim::AdamWGroups,
        precision::{Precision, PrecisionPolicy, full_precision},
    },
};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    modules::seeded,
    on_burn_device, run_alone,
    tensors::{tensor, values},
};
use burn::{
    module::{ModuleDisplay, Param},
    nn::{
        Dropout, DropoutConfig, Embedding, EmbeddingConfig, Gelu, Linear, LinearConfig,
        transformer::{TransformerEncoder, TransformerEncoderConfig},
    },
    optim::GradientsParams,
    prelude::*,
    tensor::{Distribution, FloatDType},
};
use libtest_mimic::{Failed, Trial};
use std::{
    env,
    fmt::Display,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

/// Set in a process that runs one test alone: a recording is of one thread, and others would allocate in
/// between.
const ALONE: &str = "BLACKBURN_TEST_GRAPH_HERE";

type Test = fn(&Device) -> Result<(), Failed>;

const TESTS: [(&str, Test); 10] = [
    ("training_by_replays_is_training", training),
    ("training_by_replays_is_training_in_mixed_precision", mixed_precision),
    ("a_batch_of_another_shape_runs_without_the_recording", other_shapes),
    ("dropout_is_recorded_and_leaves_out_others_each_time", dropout),
    ("drop_in_dropout_is_recorded_and_leaves_out_others_each_time", drop_in_dropout),
    ("flash_attention_with_dropout_is_recorded", flash_attention),
    ("a_recording_that_repeats_random_integers_is_refused", random_integers),
    ("a_pass_that_reads_a_value_is_not_recorded", reads_a_value),
    ("outputs_are_the_callers_own", outputs_are_kept),
    ("another_thread_runs_passes_without_the_recording", other_thread),
];

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |(name, test): (&str, Test)| {
        let name = format!("gradient_graph::{name}");
        Trial::ignorable_test(name.clone(), move || {
            on_burn_device(|device| match env::var_os(ALONE) {
                Some(_) => test(&device.autodiff()),
                None => run_alone(&name, &[(ALONE, "1")]).map(drop),
            })
        })
    };
    let all = TESTS.into_iter().chain(accumulation::TESTS).chain(changes::TESTS);
    all.chain(milestones::TESTS).chain(state::TESTS).map(trial).collect()
}

const WORDS: usize = 64;
const WIDTH: usize = 128;
const ROWS: usize = 32;
const STEPS: u64 = 12;

/// Its embedding is used twice.
#[derive(Module, Debug)]
struct Network {
    words: Embedding,
    first: Linear,
    gelu: Gelu,
    dropout: Dropout,
    second: Linear,
}

impl Network {
    fn new(dropout: f64, device: &Device) -> Self {
        let fill = |seed: u64, param: Param<Tensor<2>>| {
            param.map(|old| {
                let weight = normal(seed, old.shape().num_elements(), 0.1, Storage::F32);
                tensor(&weight, old.dims(), Storage::F32, &old.device()).detach().require_grad()
            })
        };
        let mut network = Self {
            words: EmbeddingConfig::new(WORDS, WIDTH).init(device),
            first: LinearConfig::new(WIDTH, 2 * WIDTH).init(device),
            gelu: Gelu::new(),
            dropout: DropoutConfig::new(dropout).init(),
            second: LinearConfig::new(2 * WIDTH, WIDTH).with_bias(false).init(device),
        };
        network.words.weight = fill(1, network.words.weight);
        network.first.weight = fill(2, network.first.weight);
        network.first.bias = network.first.bias.map(|bias| {
            bias.map(|old| Tensor::<1>::zeros(old.dims(), &old.device()).detach().require_grad())
        });
        network.second.weight = fill(3, network.second.weight);
        network
    }

    fn loss(&self, words: Tensor<2, Int>, scale: Tensor<1>) -> Tensor<1> {
        let x = self.words.forward(words);
        let y = self
            .second
            .forward(self.dropout.forward(self.gelu.forward(self.first.forward(x.clone()))));
        full_precision(y - x).powi_scalar(2).mean() * scale
    }

    /// With weights of twice the size.
    fn doubled(mut self) -> Self {
        let twice =
            |param: Param<Tensor<2>>| param.map(|old| old.mul_scalar(2.0).detach().require_grad());
        self.words.weight = twice(self.words.weight);
        self.first.weight = twice(self.first.weight);
        self.second.weight = twice(self.second.weight);
        self
    }

    fn numbers(&self) -> Result<Vec<f64>, Failed> {
        let mut all = values(self.words.weight.base())?;
        all.extend(values(self.first.weight.base())?);
        let bias = self.first.bias.as_ref().ok_or("LinearConfig gives a bias")?;
        all.extend(values(bias.base())?);
        all.extend(values(self.second.weight.base())?);
        Ok(all)
    }
}

type Passes = GradientGraph<Network, (Tensor<2, Int>, Tensor<1>), Tensor<1>>;

/// Words of a step, and a scale that only the device knows.
fn batch(step: u64, rows: usize, device: &Device) -> (Tensor<2, Int>, Tensor<1>) {
    let device = device.clone().without_autodiff();
    let words: Vec<i32> =
        (0..rows as u64).map(|row| ((row * 7 + step * 13) % WORDS as u64) as i32).collect();
    let words = Tensor::<1, Int>::from_data(&words[..], &device).reshape([rows / 4, 4]);
    (words, Tensor::<1>::from_data([1.0 + step as f32], &device))
}

fn pass(
    network: &Network,
    (words, scale): (Tensor<2, Int>, Tensor<1>),
) -> (Tensor<1>, GradientsParams) {
    let loss = network.loss(words, scale);
    let value = loss.clone().inner();
    (value, GradientsParams::from_grads(loss.backward(), network))
}

/// Says where in a test something failed.
fn at(place: impl Display) -> impl FnOnce(Failed) -> Failed {
    move |error| format!("{place}: {}", error.message().unwrap_or_default()).into()
}

/// Of all weights.
fn gradient_numbers(network: &Network, gradients: &GradientsParams) -> Result<Vec<f64>, Failed> {
    let mut all = Vec::new();
    for param in [&network.words.weight, &network.first.weight, &network.second.weight] {
        let gradient = gradients.get::<2>(param.id).ok_or("a parameter has no gradient")?;
        all.extend(values(gradient)?);
    }
    Ok(all)
}

struct Trained {
    losses: Vec<f64>,
    numbers: Vec<f64>,
    recorded: bool,
}

fn train(
    mut graph: Passes,
    policy: &PrecisionPolicy,
    rows: impl Fn(u64) -> usize,
    device: &Device,
) -> Result<Trained, Failed> {
    let mut network = policy.apply(Network::new(0.0, device))?;
    let mut optimizer = AdamWGroups::default().init(&network, device);
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (loss, gradients) = graph.run(&network, batch(step, rows(step), device), pass)?;
        network = optimizer.step(1e-2, network, gradients);
        losses.push(loss);
    }
    let losses = values(Tensor::cat(losses, 0))?;
    Ok(Trained { losses, numbers: network.numbers()?, recorded: graph.is_recorded() })
}

/// The embedding's gradient may be added up in any order, which Adam's first steps can turn into steps.
fn agree(replayed: &[f64], ran: &[f64], least: f64) -> Result<(), Failed> {
    let norm: f64 = ran.iter().map(|x| x * x).sum::<f64>().sqrt();
    let distance: f64 = replayed.iter().zip(ran).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
    let is_near = distance <= least * norm;
    if replayed.len() != ran.len() || !is_near {
        return Err(format!("{distance} apart, of a norm of {norm}").into());
    }
    Ok(())
}

fn compare(policy: &PrecisionPolicy, least: f64, device: &Device) -> Result<(), Failed> {
    let all = |_| ROWS;
    let ran = train(GradientGraph::disabled(policy.clone()), policy, all, device)?;
    let replayed = train(GradientGraph::new(policy.clone()), policy, all, device)?;
    if !replayed.recorded || ran.recorded {
        return Err("nothing was recorded".into());
    }
    agree(&replayed.losses, &ran.losses, least)?;
    agree(&replayed.numbers, &ran.numbers, least)
}

fn training(device: &Device) -> Result<(), Failed> {
    compare(&PrecisionPolicy::default(), 1e-5, device)
}

fn mixed_precision(device: &Device) -> Result<(), Failed> {
    compare(&PrecisionPolicy::new(Precision::F16), 1e-3, device)
}

fn other_shapes(device: &Device) -> Result<(), Failed> {
    let policy = PrecisionPolicy::default();
    // Once recorded, every third batch is smaller.
    let rows = |step: u64| if step > 6 && step.is_multiple_of(3) { ROWS / 2 } else { ROWS };
    let ran = train(GradientGraph::disabled(policy.clone()), &policy, rows, device)?;
    let replayed = train(GradientGraph::new(policy.clone()), &policy, rows, device)?;
    if !replayed.recorded {
        return Err("nothing was recorded".into());
    }
    agree(&replayed.losses, &ran.losses, 1e-5)?;
    agree(&replayed.numbers, &ran.numbers, 1e-5)
}

fn dropout(device: &Device) -> Result<(), Failed> {
    draws_anew(&Network::new(0.5, device), &batch(0, ROWS, device), pass, device)
}

fn drop_in_dropout(device: &Device) -> Result<(), Failed> {
    let pass = |network: &Network, (words, scale): (Tensor<2, Int>, Tensor<1>)| {
        let x = network.words.forward(words);
        let hidden = network.gelu.forward(network.first.forward(x.clone()));
        let y = network.second.forward(dropout::dropout(&network.dropout, hidden));
        let loss = dropout::add_dropout(&network.dropout, x, y).powi_scalar(2).mean() * scale;
        let value = loss.clone().inner();
        (value, GradientsParams::from_grads(loss.backward(), network))
    };
    draws_anew(&Network::new(0.5, device), &batch(0, ROWS, device), pass, device)
}

/// Weights of attention are left out too, and what is added to the tokens.
fn flash_attention(device: &Device) -> Result<(), Failed> {
    let config = TransformerEncoderConfig::new(32, 64, 2, 1).with_dropout(0.3);
    let encoder = seeded(config.init(device), Storage::F32, |_, _, _| {});
    let numbers = normal(9, 2 * 16 * 32, 1.0, Storage::F32);
    let plain = device.clone().without_autodiff();
    let x: Tensor<3> = tensor(&numbers, [2, 16, 32], Storage::F32, &plain);
    let pass = |encoder: &TransformerEncoder, x: Tensor<3>| {
        let y = flash::transformer_encoder(encoder, TransformerEncoderInput::new(x));
        let loss = y.powi_scalar(2).mean();
        let value = loss.clone().inner();
        (value, GradientsParams::from_grads(loss.backward(), encoder))
    };
    draws_anew(&encoder, &x, pass, device)
}

/// Losses and gradients of a recorded pass on the same inputs, which differ by what is left out, are those of
/// a pass that runs.
fn draws_anew<M: Module + ModuleDisplay, I: PassTensors>(
    model: &M,
    inputs: &I,
    pass: impl Fn(&M, I) -> (Tensor<1>, GradientsParams),
    device: &Device,
) -> Result<(), Failed> {
    type Graph<M, I> = GradientGraph<M, I, Tensor<1>>;
    let run = |mut graph: Graph<M, I>| -> Result<_, Failed> {
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..STEPS {
            seed(step);
            let (loss, mut gradients) = graph.run(model, inputs.clone(), &pass)?;
            losses.extend(values(loss)?);
            norms.extend(values(clip_global_norm(&mut gradients, model, f64::INFINITY))?);
        }
        Ok((graph.is_recorded(), losses, norms))
    };
    let (is_recorded, losses, norms) = run(Graph::new(PrecisionPolicy::default()))?;
    let (_, expected, expected_norms) = run(Graph::disabled(PrecisionPolicy::default()))?;
    if !is_recorded {
        return Err(format!("nothing was recorded on {device:?}").into());
    }
    agree(&losses, &expected, 1e-5)?;
    agree(&norms, &expected_norms, 1e-4)?;
    let is_same = |pair: &&[f64]| (pair[0] - pair[1]).abs() < 1e-6 * pair[0];
    match losses.windows(2).filter(is_same).count() {
        0 => Ok(()),
        _ => Err(format!("losses repeat: {losses:?}").into()),
    }
}

/// Burn draws them by seeds of its own, which a replay repeats.
fn random_integers(device: &Device) -> Result<(), Failed> {
    let network = Network::new(0.0, device);
    let mut graph = Passes::new(PrecisionPolicy::default());
    for step in 0..STEPS {
        graph.run(&network, batch(step, ROWS, device), |network, (words, scale)| {
            let any = Distribution::Uniform(1.0, 100.0);
            let factor = Tensor::<1, Int>::random([1], any, &scale.device()).float();
            pass(network, (words, scale * factor))
        })?;
    }
    if graph.is_recorded() { Err("it was accepted".into()) } else { Ok(()) }
}

fn reads_a_value(device: &Device) -> Result<(), Failed> {
    let network = Network::new(0.0, device);
    let mut graph = Passes::new(PrecisionPolicy::default());
    let mut last = None;
    for step in 0..STEPS {
        let (loss, _) = graph.run(&network, batch(step, ROWS, device), |network, inputs| {
            let (loss, gradients) = pass(network, inputs);
            let value: f32 = loss.clone().into_scalar();
            assert!(value.is_finite());
            (loss, gradients)
        })?;
        last = Some(loss);
    }
    let loss = values(last.ok_or("no step ran")?)?;
    if graph.is_recorded() || !loss[0].is_finite() {
        return Err(format!("recorded: {}, loss {loss:?}", graph.is_recorded()).into());
    }
    Ok(())
}

fn outputs_are_kept(device: &Device) -> Result<(), Failed> {
    let network = Network::new(0.0, device);
    let mut graph = Passes::new(PrecisionPolicy::default());
    let mut outputs = Vec::new();
    for step in 0..STEPS {
        outputs.push(graph.run(&network, batch(step, ROWS, device), pass)?.0);
    }
    let (words, _) = batch(0, ROWS, device);
    let expected = |step: u64| {
        let (words_of_step, scale) = batch(step, ROWS, device);
        assert_eq!(words_of_step.dims(), words.dims());
        values(network.loss(words_of_step, scale).inner().cast(FloatDType::F32))
    };
    if !graph.is_recorded() {
        return Err("nothing was recorded".into());
    }
    for (step, output) in outputs.into_iter().enumerate() {
        agree(&values(output)?, &expected(step as u64)?, 1e-5)?;
    }
    Ok(())
}

/// A thread has a stream of its own, with which a replay would not be in order.
fn other_thread(device: &Device) -> Result<(), Failed> {
    let network = Network::new(0.0, device);
    let mut graph = Passes::new(PrecisionPolicy::default());
    // One more, with which the tenth replay has been checked.
    for step in 0..=STEPS {
        graph.run(&network, batch(step, ROWS, device), pass)?;
    }
    if !graph.is_recorded() {
        return Err("nothing was recorded".into());
    }
    // Other replays do not call the closure.
    let calls = AtomicUsize::new(0);
    let counted = |network: &Network, inputs| {
        calls.fetch_add(1, Ordering::Relaxed);
        pass(network, inputs)
    };
    graph.run(&network, batch(1, ROWS, device), counted)?;
    let here = calls.load(Ordering::Relaxed);
    let there = thread::scope(|scope| {
        let run = || graph.run(&network, batch(1, ROWS, device), counted).map(|_| ());
        scope.spawn(run).join()
    });
    there.map_err(|_| "the other thread panicked")??;
    match (here, calls.load(Ordering::Relaxed)) {
        (0, 1) => Ok(()),
        calls => Err(format!("passes that ran, here and with the other thread: {calls:?}").into()),
    }
}
