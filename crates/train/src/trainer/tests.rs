use super::*;
use crate::{
    checkpoint::Checkpoints,
    clip::clip_global_norm,
    ema::EmaConfig,
    optim::{AdamWGroups, SgdGroups},
    precision::{Masters, full_precision},
    scaler::GradScalerConfig,
    schedule::WarmupCosine,
};
use burn::{
    nn::{
        BatchNorm, BatchNormConfig, Dropout, DropoutConfig, LayerNorm, LayerNormConfig, Linear,
        LinearConfig,
    },
    optim::AdamWConfig,
    tensor::FloatDType,
};
use std::{env, process::Command};

const ROWS: usize = 7;
const SCHEDULE: WarmupCosine =
    WarmupCosine { peak: 0.05, floor: 0.01, warmup_steps: 2, total_steps: 8 };

type Batch = (Tensor<2>, Tensor<2>);

#[derive(Module, Debug)]
struct Network {
    first: Linear,
    norm: LayerNorm,
    dropout: Dropout,
    second: Linear,
}

impl Network {
    fn new(dropout: f64, device: &Device) -> Self {
        Self {
            first: LinearConfig::new(4, 8).init(device),
            norm: LayerNormConfig::new(8).init(device),
            dropout: DropoutConfig::new(dropout).init(),
            second: LinearConfig::new(8, 2).init(device),
        }
    }

    fn loss(&self, (x, y): Batch) -> Tensor<1> {
        let hidden = self.dropout.forward(self.norm.forward(self.first.forward(x)));
        (full_precision(self.second.forward(hidden)) - y).powi_scalar(2).mean()
    }

    fn numbers(&self) -> Vec<f32> {
        let of = |layer: &Linear| {
            let weight = layer.weight.base().to_data();
            weight.iter::<f32>().collect::<Vec<_>>()
        };
        [of(&self.first), of(&self.second)].concat()
    }
}

fn device() -> Device {
    Device::flex().autodiff()
}

fn batch(step: u64) -> Batch {
    let device = Device::flex();
    let number = |i: usize| ((37 * i as u64 + 11 + 5 * step) % 29) as f32 / 14.5 - 1.0;
    let [x, y] = [4, 2].map(|columns| {
        let numbers: Vec<f32> = (0..ROWS * columns).map(number).collect();
        Tensor::<1>::from_floats(numbers.as_slice(), &device).reshape([ROWS, columns])
    });
    (x, y)
}

fn message<T>(result: Result<T, TrainerError>) -> String {
    match result {
        Ok(_) => panic!("expected an error"),
        Err(error) => error.to_string(),
    }
}

fn trained(mut trainer: Trainer<Network, Batch>, steps: std::ops::Range<u64>) -> Vec<f32> {
    for step in steps {
        trainer.step(batch(step), Network::loss).expect("a step");
    }
    trainer.model().expect("the model is there").numbers()
}

/// The loop that a trainer stands for.
fn by_hand(mut model: Network, max_norm: f64) -> Vec<f32> {
    let mut optimizer = AdamWGroups::default().init(&model, &device());
    for step in 0..5 {
        let loss = model.loss(batch(step));
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        clip_global_norm(&mut gradients, &model, max_norm);
        model = optimizer.step(SCHEDULE.at(step as usize), model, gradients);
    }
    model.numbers()
}

fn assert_close(actual: &[f32], expected: &[f32], bound: f32) {
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!((a - e).abs() <= bound, "number {i}: {a} against {e}, bound {bound}");
    }
}

/// Rounding of one step may turn by a unit in the last place, of weights below 2; AdamW moves a weight by the
/// rate at most, whatever the size of its gradient, so gradients that are all rounding are no measure.
const SAME: f32 = 5.0 * 2.0 * f32::EPSILON * 8.0;

#[test]
fn a_trainer_is_the_loop_written_by_hand() {
    let model = Network::new(0.0, &device());
    let config = TrainerConfig::new(SCHEDULE).with_max_norm(0.5);
    let ours = trained(config.init(model.clone()).expect("sound options"), 0..5);
    assert_close(&ours, &by_hand(model.clone(), 0.5), SAME);
    let unclipped = by_hand(model, f64::INFINITY);
    assert!(ours.iter().zip(unclipped).any(|(a, b)| (a - b).abs() > 1e-4), "nothing was clipped");
}

#[test]
fn micro_batches_are_a_step_of_the_whole_batch() {
    let model = Network::new(0.0, &device());
    let config = TrainerConfig::new(0.1)
        .with_optimizer(SgdGroups { weight_decay: 0.0, ..SgdGroups::default() });
    let whole = trained(config.init(model.clone()).expect("sound options"), 0..3);
    let config = config.with_micro_batches(3);
    let mut parts: Trainer<_, Batch> = config.init(model.clone()).expect("sound options");
    let step = parts.step(batch(0), Network::loss).expect("a step");
    let loss: f32 = model.loss(batch(0)).into_scalar();
    assert!((step.loss() - loss).abs() < 8.0 * f32::EPSILON * loss, "{} {loss}", step.loss());
    assert_close(&trained(parts, 1..3), &whole, 1e-5);
}

#[test]
fn micro_batches_count_by_their_weight() {
    let model = Network::new(0.0, &device());
    let config = TrainerConfig::new(0.1).with_optimizer(SgdGroups::default());
    let after = |weights: [f64; 2]| {
        let mut trainer: Trainer<_, Batch> = config.init(model.clone()).expect("sound options");
        let micro_batches = weights
            .iter()
            .enumerate()
            .map(|(i, weight)| MicroBatch { tensors: batch(i as u64), weight: *weight })
            .collect();
        trainer.step_of(micro_batches, Network::loss).expect("a step");
        trainer.model().expect("the model is there").numbers()
    };
    let first_alone = trained(config.init(model.clone()).expect("sound options"), 0..1);
    assert_eq!(after([2.0, 0.0]), first_alone);
    let uneven = after([3.0, 1.0]);
    assert_close(&after([30.0, 10.0]), &uneven, 1e-7);
    assert!(after([1.0, 1.0]).iter().zip(uneven).any(|(a, b)| (a - b).abs() > 1e-4));
}

#[test]
fn steps_that_overflow_are_left_out_with_any_optimizer() {
    let burns = AdamWConfig::new().init();
    let all: [TrainerOptimizer; 3] =
        [AdamWGroups::default().into(), SgdGroups::default().into(), burns.into()];
    for optimizer in all {
        let name = format!("{optimizer:?}");
        let mut trainer: Trainer<_, Batch> = TrainerConfig::new(0.1)
            .with_precision(Precision::F16)
            .with_loss_scaling(GradScalerConfig { initial_scale: 1e9, ..Default::default() })
            .with_optimizer(optimizer)
            .with_max_norm(1.0)
            .init(Network::new(0.0, &device()))
            .expect("sound options");
        let before = trainer.model().expect("the model is there").numbers();
        let step = |trainer: &mut Trainer<_, Batch>| {
            let (x, y) = batch(0);
            trainer.step((trainer.input(x), y), Network::loss).expect("a step")
        };
        step(&mut trainer);
        assert_eq!(trainer.model().expect("the model is there").numbers(), before, "{name}");
        assert_eq!(trainer.scaler().state().scale, 5e8, "{name}");
        (0..25).for_each(|_| drop(step(&mut trainer)));
        let after = trainer.model().expect("the model is there").numbers();
        assert!(after != before && after.iter().all(|x| x.is_finite()), "{name}");
    }
}

#[test]
fn a_model_whose_gradients_are_never_finite_ends_the_training() {
    let mut trainer: Trainer<_, Batch> = TrainerConfig::new(0.1)
        .with_precision(Precision::F16)
        .init(Network::new(0.0, &device()))
        .expect("sound options");
    let explode = |model: &Network, (x, y): Batch| {
        let loss = model.loss((x, y));
        // The derivative of the root of zero is infinite.
        loss.clone() + (loss.clone() - loss).sqrt()
    };
    let refused = (0..60).find_map(|_| {
        let (x, y) = batch(0);
        trainer.step((trainer.input(x), y), explode).err()
    });
    let reason = refused.expect("no step was taken").to_string();
    assert!(
        reason.contains("steps one after another had gradients that are not finite"),
        "{reason}"
    );
}

#[test]
fn the_average_is_what_validation_sees() {
    let ema = EmaConfig { decay: 0.5, warmup: false };
    let model = Network::new(0.0, &device());
    let mut trainer: Trainer<_, Batch> =
        TrainerConfig::new(0.1).with_ema(ema).init(model.clone()).expect("sound options");
    trainer.step(batch(0), Network::loss).expect("a step");
    let now = trainer.model().expect("the model is there").numbers();
    let expected: Vec<f32> =
        model.numbers().iter().zip(&now).map(|(old, new)| 0.5 * old + 0.5 * new).collect();
    let valid = trainer.valid().expect("the model is there");
    assert!(!valid.first.weight.base().is_autodiff());
    assert_close(&valid.numbers(), &expected, f32::EPSILON);
}

/// Dropout and parameters that are rounded by chance, so that nothing repeats without the seed.
fn by_chance() -> TrainerConfig {
    TrainerConfig::new(SCHEDULE)
        .with_policy(PrecisionPolicy::new(Precision::Bf16).with_masters(Masters::None))
        .with_optimizer(AdamWGroups { stochastic_rounding: true, ..AdamWGroups::default() })
        .with_ema(EmaConfig { decay: 0.9, warmup: true })
        .with_micro_batches(2)
        .with_max_norm(1.0)
        .with_seed(7)
}

fn advance(trainer: &mut Trainer<Network, Batch>, steps: std::ops::Range<u64>) -> Vec<f32> {
    let step = |step| {
        let (x, y) = batch(step);
        trainer.step((trainer.input(x), y), Network::loss).expect("a step").loss()
    };
    steps.map(step).collect()
}

fn all_numbers(trainer: &Trainer<Network, Batch>) -> [Vec<f32>; 2] {
    [
        trainer.model().expect("the model is there").numbers(),
        trainer.valid().expect("it is").numbers(),
    ]
}

/// In a process of its own: random numbers of the CPU are the process's, and other tests draw some.
#[test]
fn a_resumed_trainer_goes_on_bit_for_bit() {
    const NAME: &str = "trainer::tests::a_resumed_trainer_goes_on_bit_for_bit";
    const ALONE: &str = "BLACKBURN_TEST_RESUMED_HERE";
    if env::var_os(ALONE).is_some() {
        return resumed_bit_for_bit();
    }
    let mut process = Command::new(env::current_exe().expect("the test has a path"));
    let output = process.args(["--exact", NAME]).env(ALONE, "1").output().expect("it starts");
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && told.contains("1 passed"), "{told}");
}

fn resumed_bit_for_bit() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let checkpoints = Checkpoints::new(folder.path(), "test");
    let config = by_chance();
    let mut straight: Trainer<_, Batch> =
        config.init(Network::new(0.3, &device())).expect("sound options");
    advance(&mut straight, 0..3);
    straight.save(&checkpoints, &(5, "place")).expect("it is written");
    let expected = advance(&mut straight, 3..6);

    let found = checkpoints.newest().expect("it is sound");
    assert_eq!(saved_extra::<(u32, String)>(&found).expect("it was saved"), (5, "place".into()));
    let fresh = || Network::new(0.3, &device());
    let mut resumed: Trainer<_, Batch> = config.resume(fresh(), &found).expect("it fits");
    assert_eq!(resumed.steps_taken(), 3);
    assert_eq!(advance(&mut resumed, 3..6), expected);
    assert_eq!(all_numbers(&resumed), all_numbers(&straight));

    let mut other: Trainer<_, Batch> =
        config.with_seed(8).resume(fresh(), &found).expect("it fits");
    assert_ne!(advance(&mut other, 3..6), expected, "chance plays no part, so this shows nothing");
}

#[test]
fn checkpoints_of_other_options_or_models_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let checkpoints = Checkpoints::new(folder.path(), "test");
    let mut trainer: Trainer<_, Batch> =
        by_chance().init(Network::new(0.0, &device())).expect("sound options");
    advance(&mut trainer, 0..1);
    trainer.save(&checkpoints, &()).expect("it is written");
    let found = checkpoints.newest().expect("it is sound");
    let refused = |config: TrainerConfig| {
        message(config.resume::<_, Batch, ()>(Network::new(0.0, &device()), &found))
    };
    let plain = TrainerConfig::new(0.1);
    let reason = refused(plain.clone().with_precision(Precision::F16));
    assert!(
        reason.contains("saved without loss scaling, and training goes on with it"),
        "{reason}"
    );
    let reason = refused(plain.clone());
    assert!(reason.contains("saved with an average of the weights"), "{reason}");
    let reason = refused(plain.clone().with_ema(EmaConfig { decay: 0.9, warmup: true }));
    assert!(reason.contains("saved with the masters None, and the policy has F32"), "{reason}");
    let other = LinearConfig::new(4, 2).init(&device());
    let reason = message(by_chance().resume::<_, Batch, ()>(other, &found));
    assert!(reason.contains("model.bpk does not fit this model"), "{reason}");
}

#[test]
fn absurd_options_are_refused_by_name() {
    let sound = TrainerConfig::new(0.1);
    for (config, expected) in [
        (TrainerConfig::new(-1.0), "`learning rate`: expected a positive number, got -1"),
        (TrainerConfig::new(f64::NAN), "`learning rate`"),
        (sound.clone().with_max_norm(0.0), "`max_norm`: expected a positive number, got 0"),
        (sound.clone().with_max_norm(f64::NAN), "`max_norm`"),
        (sound.clone().with_micro_batches(0), "`micro_batches`: expected at least 1, got 0"),
        (sound.clone().with_metrics_every(0), "`metrics_every`: expected at least 1, got 0"),
        (sound.clone().with_ema(EmaConfig { decay: 1.0, warmup: false }), "`decay`"),
    ] {
        let reason = message(config.init::<_, Batch, ()>(Network::new(0.0, &device())));
        assert!(reason.contains(expected), "{reason}");
    }
    let reason = message(sound.init::<_, Batch, ()>(Network::new(0.0, &Device::flex())));
    assert!(reason.contains("make it on `device.autodiff()`"), "{reason}");
    let reason = message(sound.init::<_, Batch, ()>(DropoutConfig::new(0.1).init()));
    assert!(reason.contains("expected at least one parameter"), "{reason}");
}

#[test]
fn a_loss_that_cannot_be_learned_from_is_refused_and_the_model_kept() {
    let mut trainer: Trainer<_, Batch> = TrainerConfig::new(0.1)
        .with_precision(Precision::Bf16)
        .init(Network::new(0.0, &device()))
        .expect("sound options");
    let input = |trainer: &Trainer<Network, Batch>| (trainer.input(batch(0).0), batch(0).1);
    let before = trainer.model().expect("the model is there").numbers();

    let narrow = |model: &Network, batch: Batch| model.loss(batch).cast(FloatDType::BF16);
    let reason = message(trainer.step(input(&trainer), narrow));
    assert!(reason.contains("expected one number in f32, got 1 in BF16"), "{reason}");
    let many = |model: &Network, batch: Batch| model.loss(batch).repeat_dim(0, 3);
    let reason = message(trainer.step(input(&trainer), many));
    assert!(reason.contains("got 3 in F32"), "{reason}");
    let constant = |_: &Network, (_, y): Batch| y.mean();
    let reason = message(trainer.step(input(&trainer), constant));
    assert!(reason.contains("expected one that depends on a parameter"), "{reason}");
    let elsewhere = |_: &Network, (_, y): Batch| y.mean().autodiff().require_grad();
    let reason = message(trainer.step(input(&trainer), elsewhere));
    assert!(reason.contains("expected one that depends on a parameter"), "{reason}");

    assert_eq!(trainer.model().expect("the model is there").numbers(), before);
    assert_eq!(trainer.steps_taken(), 0);
    trainer.step(input(&trainer), Network::loss).expect("a sound step");
}

#[test]
fn a_loss_that_is_not_finite_ends_the_training_and_is_not_saved() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let checkpoints = Checkpoints::new(folder.path(), "test");
    let mut trainer: Trainer<_, Batch> =
        TrainerConfig::new(0.1).init(Network::new(0.0, &device())).expect("sound options");
    for step in 0..3 {
        let (x, y) = batch(step);
        let y = if step == 1 { y * f32::NAN } else { y };
        trainer.step((x, y), Network::loss).expect("nobody has looked yet");
    }
    let reason = message(trainer.save(&checkpoints, &()));
    assert!(reason.contains("the loss of step 2 is NaN"), "{reason}");
    assert!(checkpoints.steps().is_empty());

    let mut trainer: Trainer<_, Batch> = TrainerConfig::new(0.1)
        .with_metrics_every(2)
        .init(Network::new(0.0, &device()))
        .expect("sound options");
    trainer.step(batch(0), Network::loss).expect("a sound step");
    let (x, y) = batch(1);
    assert!(message(trainer.step((x * f32::INFINITY, y), Network::loss)).contains("step 2"));
}

#[test]
fn outputs_come_with_each_micro_batch() {
    let mut trainer: Trainer<_, Batch, Tensor<1>> = TrainerConfig::new(0.1)
        .with_micro_batches(3)
        .init(Network::new(0.0, &device()))
        .expect("sound options");
    let step = trainer
        .step(batch(0), |model, (x, y)| {
            let rows = y.dims()[0] as f32;
            let counted = Tensor::<1>::from_floats([rows], &model.first.weight.device());
            (model.loss((x, y)), counted)
        })
        .expect("a step");
    let rows: Vec<f32> = step.outputs.into_iter().map(Tensor::into_scalar).collect();
    assert_eq!((rows, step.number), (vec![3.0, 3.0, 1.0], 1));
}

#[test]
fn a_device_that_recomputes_activations_takes_plain_batches() {
    let device = device().gradient_checkpointing();
    let mut trainer: Trainer<_, Batch> = TrainerConfig::new(0.1)
        .with_micro_batches(2)
        .init(Network::new(0.0, &device))
        .expect("sound options");
    let (x, y) = batch(0);
    let lifted = (Tensor::from_inner(x), Tensor::from_inner(y));
    trainer.step(batch(0), Network::loss).expect("a step");
    trainer.step(lifted, Network::loss).expect("a step of another strategy");
}

#[test]
fn the_report_says_how_the_model_trains() {
    let mut trainer: Trainer<_, Batch> =
        TrainerConfig::new(0.1).init(Network::new(0.0, &device())).expect("sound options");
    let report = trainer.report().expect("the model is there").to_string();
    for expected in [
        "how the model trains on Flex(Cpu), in f32",
        "layers: 2 x Linear (58 parameters), stored in f32, computed in f32",
        "optimizer: AdamW, betas 0.9 and 0.95, weight decay 0.1",
        "passes: one by one, since Device<Flex(Cpu)> records no graphs",
    ] {
        assert!(report.contains(expected), "{report}");
    }
    trainer.stop_recording();
    let report = trainer.report().expect("the model is there").to_string();
    assert!(report.contains("since recording is switched off"), "{report}");
}

#[test]
fn modules_with_a_faster_function_are_counted() {
    let found = report::drop_ins(&vec![Network::new(0.0, &device()), Network::new(0.0, &device())]);
    let [DropIn { module: "LayerNorm", count: 2, function: "norm::layer_norm", .. }] = found[..]
    else {
        panic!("{found:?}")
    };
}

/// Burn's norms hold the last update of their running statistics back, and records lack it.
#[test]
fn running_statistics_are_saved_up_to_the_last_step() {
    #[derive(Module, Debug)]
    struct Normed {
        layer: Linear,
        norm: BatchNorm,
    }
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoints = Checkpoints::new(folder.path(), "test");
    let device = device();
    let model = || Normed {
        layer: LinearConfig::new(4, 3).init(&device),
        norm: BatchNormConfig::new(3).init(&device),
    };
    let config = TrainerConfig::new(0.1).without_recording();
    let mut trainer: Trainer<Normed, Batch> = config.init(model()).expect("options");
    for step in 0..3 {
        let loss = |model: &Normed, (x, _): Batch| {
            model.norm.forward(model.layer.forward(x)).powi_scalar(2).mean().add_scalar(1.0)
        };
        trainer.step(batch(step), loss).expect("a step");
    }
    trainer.save(&checkpoints, &()).expect("saved");
    let saved = checkpoints.newest().expect("sound");
    let loaded = saved_model(&saved, model()).expect("the same model");
    let statistics = |model: &Normed| {
        let norm = model.valid().norm;
        [norm.running_mean.value(), norm.running_var.value()]
            .map(|value| value.into_data().iter::<f32>().collect::<Vec<_>>())
    };
    assert_eq!(statistics(&loaded), statistics(trainer.model().expect("a model")));
}
