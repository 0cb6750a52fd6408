use crate::{
    checkpoint::Checkpoints,
    schedule::WarmupCosine,
    trainer::{Metrics, Trainer, TrainerConfig},
};
use burn::{
    nn::{Linear, LinearConfig},
    tensor::{Device, Tensor},
};
use std::{
    thread,
    time::{Duration, Instant},
};

const SCHEDULE: WarmupCosine =
    WarmupCosine { peak: 0.05, floor: 0.01, warmup_steps: 2, total_steps: 12 };

fn trainer(every: usize) -> Trainer<Linear, Tensor<2>> {
    let device = Device::flex().autodiff();
    let config = TrainerConfig::new(SCHEDULE).with_metrics_every(every);
    config.init(LinearConfig::new(4, 3).init(&device)).expect("sound options")
}

fn batch(step: usize) -> Tensor<2> {
    let numbers: Vec<f32> = (0..8).map(|i| ((31 * i + 7919 * step) as f32).sin()).collect();
    Tensor::<1>::from_floats(numbers.as_slice(), &Device::flex()).reshape([2, 4])
}

fn loss(model: &Linear, x: Tensor<2>) -> Tensor<1> {
    model.forward(x).powi_scalar(2).mean()
}

#[test]
fn metrics_are_of_all_steps_since_the_last() {
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoints = Checkpoints::new(folder.path(), "test");
    let mut trainer = trainer(4);
    let mut of_steps = Vec::new();
    let mut found: Vec<Metrics> = Vec::new();
    for number in 1..=10 {
        let step = trainer.step(batch(number), loss).expect("a step");
        of_steps.push((step.loss(), step.gradient_norm.into_scalar::<f32>(), step.learning_rate));
        found.extend(step.metrics);
        if number == 6 {
            // Looks at losses, which are told of all the same.
            trainer.save(&checkpoints, &()).expect("a folder to write to");
        }
    }
    found.extend(trainer.metrics().expect("sound losses"));
    assert_eq!(trainer.metrics().expect("no step was taken"), None);

    let ends: Vec<_> = found.iter().map(|metrics| (metrics.step, metrics.steps)).collect();
    assert_eq!(ends, [(4, 4), (8, 4), (10, 2)]);
    for metrics in &found {
        let steps = &of_steps[metrics.step - metrics.steps..metrics.step];
        let mean = steps.iter().map(|(loss, ..)| loss).sum::<f32>() / steps.len() as f32;
        let close = (metrics.loss - mean).abs() <= 4.0 * f32::EPSILON * mean;
        assert!(close, "{metrics:?}, expected a loss of {mean}");
        let (_, norm, rate) = steps[steps.len() - 1];
        assert_eq!((metrics.gradient_norm, metrics.learning_rate), (norm, rate));
    }
}

#[test]
fn the_time_between_steps_counts_but_not_behind_a_look() {
    const LONG: Duration = Duration::from_millis(200);
    let mut trainer = trainer(2);
    let begun = Instant::now();
    trainer.step(batch(0), loss).expect("a step");
    thread::sleep(LONG);
    let with = trainer.step(batch(1), loss).expect("a step").metrics.expect("due");
    assert!(with.elapsed >= LONG && with.elapsed <= begun.elapsed(), "{with:?}");
    assert_eq!(with.step_time(), with.elapsed / 2);
    trainer.step(batch(2), loss).expect("a step");
    trainer.metrics().expect("sound losses");
    thread::sleep(LONG);
    let begun = Instant::now();
    let without = trainer.step(batch(3), loss).expect("a step").metrics.expect("due");
    assert!(without.elapsed <= begun.elapsed(), "{without:?}");
    assert_eq!(without.moving, Duration::ZERO);
}

#[test]
fn a_gradient_norm_that_is_no_number_is_named() {
    let mut trainer = trainer(1);
    trainer.step(batch(0), loss).expect("a step");
    // The loss is 0, and the root's slope there is not finite.
    let root = |model: &Linear, _| (model.weight.val() * 0.0).sqrt().mean();
    let error = trainer.step(batch(1), root).expect_err("no gradient").to_string();
    assert!(error.contains("the gradient norm of step 2 is NaN"), "{error}");
}

#[test]
fn a_line_says_it_all() {
    let metrics = Metrics {
        step: 20,
        steps: 5,
        loss: 0.12345,
        gradient_norm: 1.5,
        learning_rate: 3e-4,
        elapsed: Duration::from_millis(86),
        moving: Duration::ZERO,
    };
    assert_eq!(
        metrics.to_string(),
        "step 20: loss 0.1235, gradient norm 1.500, learning rate 3.00e-4, 17.20 ms a step"
    );
}
