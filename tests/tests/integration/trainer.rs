//! Trainers on the device that kernels are tested on, where passes are recorded.

use blackburn::train::{
    checkpoint::Checkpoints,
    ema::EmaConfig,
    graph::GraphStatus,
    optim::SgdGroups,
    precision::{Precision, full_precision},
    schedule::WarmupCosine,
    trainer::{MicroBatch, Trainer, TrainerConfig},
};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    modules::seeded,
    on_burn_device, run_alone,
    tensors::{tensor, values},
};
use burn::{
    nn::{BatchNorm, BatchNormConfig, Gelu, Linear, LinearConfig},
    prelude::*,
};
use libtest_mimic::{Failed, Trial};
use std::env;

/// Set in a process that runs one test alone: a recording is of one thread.
const ALONE: &str = "BLACKBURN_TEST_TRAINER_HERE";

type Test = fn(&Device) -> Result<(), Failed>;

const TESTS: [(&str, Test); 7] = [
    ("recorded_steps_are_steps_that_ran", recorded),
    ("a_resumed_trainer_records_anew_and_goes_on", resumed),
    ("a_window_of_another_length_runs_in_between", windows),
    ("what_is_not_recorded_says_why", unrecorded),
    ("steps_that_repeat_the_last_one_have_the_same_bits", repeated),
    ("a_clone_of_a_parameter_is_not_overwritten", cloned),
    ("metrics_come_with_the_step_behind_theirs", measured),
];

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |(name, test): (&str, Test)| {
        let name = format!("trainer::{name}");
        Trial::ignorable_test(name.clone(), move || {
            on_burn_device(|device| match env::var_os(ALONE) {
                Some(_) => test(&device.autodiff()),
                None => run_alone(&name, &[(ALONE, "1")]).map(drop),
            })
        })
    };
    TESTS.into_iter().map(trial).collect()
}

const WIDTH: usize = 64;
const ROWS: usize = 24;

#[derive(Module, Debug)]
struct Network {
    first: Linear,
    gelu: Gelu,
    second: Linear,
    norm: Option<BatchNorm>,
}

type Batch = (Tensor<2>, Tensor<2>);

impl Network {
    fn new(device: &Device) -> Self {
        let network = Self {
            first: LinearConfig::new(WIDTH, 2 * WIDTH).init(device),
            gelu: Gelu::new(),
            second: LinearConfig::new(2 * WIDTH, WIDTH).init(device),
            norm: None,
        };
        seeded(network, Storage::F32, |_, _, _| {})
    }

    fn loss(&self, (x, y): Batch) -> Tensor<1> {
        let mut z = self.second.forward(self.gelu.forward(self.first.forward(x)));
        if let Some(norm) = &self.norm {
            z = norm.forward::<3>(z.unsqueeze_dim(2)).squeeze_dim(2);
        }
        (full_precision(z) - y).powi_scalar(2).mean()
    }
}

fn batch(step: u64, rows: usize, device: &Device) -> Batch {
    let device = device.clone().without_autodiff();
    let numbers = |seed| normal(seed, rows * WIDTH, 1.0, Storage::F32);
    let tensor = |seed| tensor(&numbers(seed), [rows, WIDTH], Storage::F32, &device);
    (tensor(2 * step), tensor(2 * step + 1))
}

fn config(device: &Device) -> TrainerConfig {
    let schedule = WarmupCosine { peak: 0.02, floor: 0.0, warmup_steps: 3, total_steps: 30 };
    TrainerConfig::new(schedule)
        .with_precision(Precision::fastest(device))
        .with_micro_batches(2)
        .with_max_norm(1.0)
        .with_ema(EmaConfig { decay: 0.9, warmup: true })
}

fn steps(
    trainer: &mut Trainer<Network, Batch>,
    steps: std::ops::Range<u64>,
    device: &Device,
) -> Result<Vec<f32>, Failed> {
    let step = |step| {
        let (x, y) = batch(step, ROWS, device);
        Ok(trainer.step((trainer.input(x), y), Network::loss)?.loss())
    };
    steps.map(step).collect()
}

fn numbers(trainer: &Trainer<Network, Batch>) -> Result<Vec<f64>, Failed> {
    let (model, valid) = (trainer.model()?, trainer.valid()?);
    let mut all = values(model.first.weight.base())?;
    all.extend(values(model.second.weight.base())?);
    all.extend(values(valid.first.weight.base())?);
    Ok(all)
}

/// Weights are below 1, and AdamW moves each by the rate at most in each of a few steps; where a gradient is
/// about zero, the direction is a rounding's.
fn assert_close(what: &str, ours: &[f64], expected: &[f64]) -> Result<(), Failed> {
    let apart: f64 = ours.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum();
    let norm: f64 = expected.iter().map(|x| x * x).sum();
    let share = (apart / norm).sqrt();
    if share < 2e-3 { Ok(()) } else { Err(format!("{what}: apart by {share} of the norm").into()) }
}

fn recorded(device: &Device) -> Result<(), Failed> {
    let network = Network::new(device);
    let mut eager: Trainer<_, Batch> = config(device).without_recording().init(network.clone())?;
    let mut replayed: Trainer<_, Batch> = config(device).init(network)?;
    let expected = steps(&mut eager, 0..14, device)?;
    let losses = steps(&mut replayed, 0..14, device)?;
    if replayed.graph_status() != GraphStatus::Recorded {
        return Err(format!("not recorded: {:?}", replayed.graph_status()).into());
    }
    let wide = |losses: &[f32]| losses.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    assert_close("losses", &wide(&losses), &wide(&expected))?;
    assert_close("weights", &numbers(&replayed)?, &numbers(&eager)?)?;

    let report = replayed.report()?;
    let gelu = report.served.get("BlackburnGelu").or(report.served.get("BlackburnMatmul"));
    if gelu.is_none() || !report.to_string().contains("recorded, and replayed by one command") {
        return Err(format!("the report does not say what ran: {report}").into());
    }
    Ok(())
}

fn resumed(device: &Device) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let checkpoints = Checkpoints::new(folder.path(), "test");
    let mut straight: Trainer<_, Batch> = config(device).init(Network::new(device))?;
    steps(&mut straight, 0..7, device)?;
    straight.save(&checkpoints, &())?;
    let expected = steps(&mut straight, 7..14, device)?;
    let mut resumed: Trainer<_, Batch> =
        config(device).resume(Network::new(device), &checkpoints.newest()?)?;
    let losses = steps(&mut resumed, 7..14, device)?;
    if resumed.graph_status() != GraphStatus::Recorded || losses[0] != expected[0] {
        return Err(format!("{:?}, {losses:?} {expected:?}", resumed.graph_status()).into());
    }
    assert_close("weights", &numbers(&resumed)?, &numbers(&straight)?)
}

fn windows(device: &Device) -> Result<(), Failed> {
    let network = Network::new(device);
    let run = |config: TrainerConfig| -> Result<_, Failed> {
        let mut trainer: Trainer<_, Batch> = config
            .with_optimizer(SgdGroups { weight_decay: 0.0, ..SgdGroups::default() })
            .init(network.clone())?;
        for step in 0..12 {
            // The last window of an epoch is shorter, and its last batch, too.
            let lengths: &[usize] = if step % 6 == 5 { &[ROWS, 7] } else { &[ROWS; 3] };
            let parts = lengths.iter().enumerate().map(|(part, rows)| {
                let (x, y) = batch(10 * step + part as u64, *rows, device);
                MicroBatch::new((trainer.input(x), y))
            });
            let parts = parts.collect::<Result<Vec<_>, _>>()?;
            trainer.step_of(parts, Network::loss)?;
        }
        Ok((trainer.graph_status(), numbers(&trainer)?))
    };
    let (status, ours) = run(config(device))?;
    if status != GraphStatus::Recorded {
        return Err(format!("not recorded: {status:?}").into());
    }
    assert_close("weights", &ours, &run(config(device).without_recording())?.1)
}

fn measured(device: &Device) -> Result<(), Failed> {
    let mut trainer: Trainer<_, Batch> =
        config(device).with_metrics_every(4).init(Network::new(device))?;
    let (mut losses, mut found) = (Vec::new(), Vec::new());
    for number in 0..14 {
        let (x, y) = batch(number, ROWS, device);
        let step = trainer.step((trainer.input(x), y), Network::loss)?;
        found.extend(step.metrics.map(|metrics| (step.number, metrics)));
        // Read below: nothing waits for the device in between.
        losses.push((step.mean_loss, step.gradient_norm));
    }
    found.extend(trainer.metrics()?.map(|metrics| (losses.len(), metrics)));
    let ends: Vec<_> = found.iter().map(|(at, seen)| (*at, seen.step, seen.steps)).collect();
    if ends != [(5, 4, 4), (9, 8, 4), (13, 12, 4), (14, 14, 2)] {
        return Err(format!("metrics came at, of and over steps {ends:?}").into());
    }
    for (_, metrics) in found {
        let steps = &losses[metrics.step - metrics.steps..metrics.step];
        let of_steps = steps.iter().map(|(loss, _)| loss.clone().into_scalar::<f32>());
        let mean = of_steps.sum::<f32>() / steps.len() as f32;
        let norm = steps[steps.len() - 1].1.clone().into_scalar::<f32>();
        let is_close = (metrics.loss - mean).abs() <= 4.0 * f32::EPSILON * mean;
        if !is_close || metrics.gradient_norm != norm {
            return Err(
                format!("{metrics:?}, expected a loss of {mean} and a norm of {norm}").into()
            );
        }
    }
    Ok(())
}

fn unrecorded(device: &Device) -> Result<(), Failed> {
    let report = |config: TrainerConfig| -> Result<String, Failed> {
        let mut network = Network::new(device);
        network.norm = Some(BatchNormConfig::new(WIDTH).init(device));
        let mut trainer: Trainer<_, Batch> = config.init(network)?;
        steps(&mut trainer, 0..5, device)?;
        Ok(trainer.report()?.to_string())
    };
    for (config, expected) in [
        (TrainerConfig::new(0.01), "passes: recorded"),
        (
            TrainerConfig::new(0.01).without_recording(),
            "passes: one by one, since recording is switched off",
        ),
    ] {
        let report = report(config)?;
        if !report.contains(expected) {
            return Err(format!("`{expected}` is not in\n{report}").into());
        }
    }
    Ok(())
}

/// What a run of steps came to.
#[derive(Debug, PartialEq)]
struct Run {
    losses: Vec<f32>,
    norms: Vec<f32>,
    parameters: Vec<f64>,
    /// Those of the model for validation.
    averages: Vec<f64>,
    /// Behind one more step of a trainer that was resumed from there.
    resumed: Vec<f64>,
}

/// Steps beyond the checks behind replays 2 and 10, one of them with fewer rows. If the model `is_shown` before each,
/// each is taken in the usual way. Gives the steps that were repeated, too.
fn run(
    config: &TrainerConfig,
    has_norm: bool,
    is_shown: bool,
    device: &Device,
) -> Result<(Run, usize), Failed> {
    let config = config.clone().with_seed(5);
    let network = || Network {
        // Its statistics are those of all clones.
        norm: has_norm.then(|| BatchNormConfig::new(WIDTH).init(device)),
        ..Network::new(device)
    };
    let mut trainer: Trainer<_, Batch> = config.clone().init(network())?;
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    let mut step = |trainer: &mut Trainer<_, Batch>, number| -> Result<(), Failed> {
        let (x, y) = batch(number, if number == 18 { ROWS / 2 } else { ROWS }, device);
        let step = trainer.step((trainer.input(x), y), Network::loss)?;
        losses.push(step.loss());
        norms.push(step.gradient_norm.into_scalar());
        Ok(())
    };
    for number in 0..24 {
        if is_shown {
            trainer.model()?;
        }
        step(&mut trainer, number)?;
    }
    let folder = tempfile::tempdir()?;
    let checkpoints = Checkpoints::new(folder.path(), "test");
    trainer.save(&checkpoints, &())?;
    let mut resumed: Trainer<_, Batch> = config.resume(network(), &checkpoints.newest()?)?;
    step(&mut resumed, 24)?;
    let [parameters, averages, resumed] =
        [trainer.model()?, &trainer.valid()?, resumed.model()?].map(all);
    let run =
        Run { losses, norms, parameters: parameters?, averages: averages?, resumed: resumed? };
    Ok((run, trainer.steps_repeated()))
}

/// All numbers of `model`.
fn all(model: &Network) -> Result<Vec<f64>, Failed> {
    let mut all = Vec::new();
    for layer in [&model.first, &model.second] {
        all.extend(values(layer.weight.base())?);
        all.extend(values(layer.bias.as_ref().expect("a bias").base())?);
    }
    if let Some(norm) = &model.norm {
        all.extend(values(norm.gamma.base())?);
        all.extend(values(norm.running_mean.value_sync())?);
    }
    Ok(all)
}

fn repeated(device: &Device) -> Result<(), Failed> {
    let schedule = WarmupCosine { peak: 0.02, floor: 0.0, warmup_steps: 3, total_steps: 30 };
    let config = TrainerConfig::new(schedule).with_micro_batches(2);
    let descent = SgdGroups { dampening: 0.1, nesterov: true, ..SgdGroups::default() };
    let fastest = Precision::fastest(device);
    for (what, config, has_norm) in [
        ("AdamW", config.clone(), false),
        ("a faster type", config.clone().with_precision(fastest), false),
        ("a norm that clips", config.clone().with_max_norm(0.1), false),
        ("gradient descent", config.clone().with_optimizer(descent), false),
        ("an average", config.clone().with_ema(EmaConfig { decay: 0.9, warmup: true }), false),
        ("running statistics", config.clone().with_max_norm(1.0), true),
    ] {
        let (expected, none) = run(&config, has_norm, true, device)?;
        let (found, some) = run(&config, has_norm, false, device)?;
        // Recorded at step 3, looked at and recorded anew at replays 2 and 10, and another shape at step 19. The step
        // behind each is watched.
        if (none, some) != (0, 15) {
            return Err(format!("{what}: {none} and {some} steps were repeated").into());
        }
        if found != expected {
            let Run { losses, norms, .. } = &found;
            let other = (&expected.losses, &expected.norms);
            let same = (found.parameters == expected.parameters, found.resumed == expected.resumed);
            return Err(format!(
                "{what}: losses {losses:?} and norms {norms:?}, expected {other:?}; whether parameters are the same, \
                 and those behind a resumed step: {same:?}"
            )
            .into());
        }
    }
    Ok(())
}

fn cloned(device: &Device) -> Result<(), Failed> {
    let config = TrainerConfig::new(0.02);
    let network = Network::new(device);
    let mut trainer: Trainer<_, Batch> = config.clone().init(network.clone())?;
    let mut straight: Trainer<_, Batch> = config.init(network)?;
    steps(&mut trainer, 0..9, device)?;
    let clone = trainer.model()?.first.weight.base().clone();
    let valid = trainer.valid()?;
    let before = values(clone.clone())?;
    let repeated = trainer.steps_repeated();
    let losses = steps(&mut trainer, 9..14, device)?;
    if repeated == 0 || trainer.steps_repeated() <= repeated {
        return Err(format!("{repeated}, then {} repeated", trainer.steps_repeated()).into());
    }
    let expected = steps(&mut straight, 0..14, device)?;
    if losses != expected[9..] {
        return Err(format!("losses {losses:?}, expected {:?}", &expected[9..]).into());
    }
    let after = [values(clone)?, values(valid.first.weight.base())?];
    if after.iter().any(|after| *after != before) {
        return Err("a clone has changed with the model".into());
    }
    Ok(())
}
