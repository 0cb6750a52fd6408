//! What goes wrong, and what is said and kept then.

use std::io;
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use burn::{
    optim::GradientsParams,
    train::{Interrupter, Interruption},
};

use super::*;
use crate::schedule::Schedule;

fn message(result: &LearningResult<Toy>) -> String {
    result.error.as_ref().expect("the training failed").to_string()
}

#[test]
fn a_loss_that_is_not_finite_ends_the_training_and_spares_the_checkpoints() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    // The target is spoiled from the second epoch on: a rate that explodes does that.
    let schedule = |step: usize| if step < 2 { 0.1 } else { 1e30 };
    let schedule = schedule.scheduler().expect("functions are not checked");
    let result = training(folder.path(), rows(6))
        .num_epochs(5)
        .with_default_checkpointers()
        .with_metric_logger(InMemoryMetricLogger::new())
        .with_training_strategy(strategy().into())
        .launch(Learner::new(Toy::new(), SgdConfig::new().init(), schedule));
    let message = message(&result);
    assert!(message.contains("training diverged") && message.contains("epoch"), "{message}");
    assert_eq!(result.interrupted, None);
    let mut saved: Vec<_> = std::fs::read_dir(folder.path().join("checkpoint"))
        .expect("checkpoints")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
        .filter(|name| name.starts_with("model"))
        .collect();
    saved.sort();
    assert_eq!(saved.len(), 1, "{saved:?}");
    assert!(saved[0].contains('1'), "{saved:?}");
}

#[test]
fn a_nan_is_found_in_the_middle_of_an_epoch() {
    let mut spoiled = rows(30);
    spoiled[4][2] = f32::NAN;
    let steps = Arc::new(AtomicUsize::new(0));
    let counter = steps.clone();
    let folder = tempfile::tempdir().expect("a temporary folder");
    // A hook answers for gradients; the loss is watched all the same.
    let hook = move |_: &mut GradientsParams, _: &Toy| {
        counter.fetch_add(1, Ordering::SeqCst);
        Verdict::Apply
    };
    let result = training(folder.path(), spoiled)
        .with_metric_logger(InMemoryMetricLogger::new())
        .with_training_strategy(strategy().with_check_every(3).with_hook(hook).into())
        .launch(learner());
    let message = message(&result);
    assert!(message.contains("between iterations 1 and 3 of epoch 1"), "{message}");
    assert_eq!(steps.load(Ordering::SeqCst), 3);
}

/// A hook that writes its checkpoint of the first epoch only, and cannot read it.
struct Foreign;

impl StepHook<Toy> for Foreign {
    fn before_step(&mut self, _: &mut GradientsParams, _: &Toy) -> Verdict {
        Verdict::Apply
    }

    fn save(&mut self, epoch: usize) -> io::Result<()> {
        if epoch == 1 { Ok(()) } else { Err(io::Error::other("the disk is full")) }
    }

    fn load(&mut self, _epoch: usize) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::InvalidData, "a checkpoint of something else"))
    }
}

#[test]
fn a_hooks_error_is_the_trainings_error() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let training = || {
        training(folder.path(), rows(6))
            .num_epochs(3)
            .with_default_checkpointers()
            .with_metric_logger(InMemoryMetricLogger::new())
            .with_training_strategy(strategy().with_hook(Foreign).into())
    };
    let written = training().launch(learner());
    assert!(message(&written).contains("the disk is full"));
    // The hook's checkpoint comes first: without it the learner's of that epoch would be of no use.
    let of_epoch = |epoch: usize| {
        let entries = std::fs::read_dir(folder.path().join("checkpoint")).expect("checkpoints");
        let ending = format!("-{epoch}.");
        let name = |entry: io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name();
        entries.map(name).filter(|name| name.to_string_lossy().contains(&ending)).count()
    };
    assert!(of_epoch(1) > 0);
    assert_eq!(of_epoch(2), 0);
    // The learner's own checkpoint of the first epoch is there, and nothing is learned from it.
    let read = training().checkpoint(1).launch(learner());
    assert!(message(&read).contains("a checkpoint of something else"));
    let elsewhere = tempfile::tempdir().expect("a temporary folder");
    let one_epoch = self::training(elsewhere.path(), rows(6))
        .with_metric_logger(InMemoryMetricLogger::new())
        .with_training_strategy(strategy().into())
        .launch(learner());
    assert_eq!(read.model.weights(), one_epoch.model.weights());
}

#[test]
fn an_interruption_ends_the_epoch_and_gives_its_reason() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let interrupter = Interrupter::new();
    let (stop, steps) = (interrupter.clone(), Arc::new(AtomicUsize::new(0)));
    let counter = steps.clone();
    let hook = move |_: &mut GradientsParams, _: &Toy| {
        if counter.fetch_add(1, Ordering::SeqCst) == 1 {
            stop.stop(Some("enough"));
        }
        Verdict::Apply
    };
    let result = training(folder.path(), rows(30))
        .num_epochs(3)
        .with_interrupter(interrupter)
        .with_metric_logger(InMemoryMetricLogger::new())
        .with_training_strategy(strategy().with_hook(hook).into())
        .launch(learner());
    assert_eq!(result.interrupted, Some(Interruption { reason: Some("enough".to_owned()) }));
    assert!(result.error.is_none());
    assert_eq!(steps.load(Ordering::SeqCst), 2);
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    CountsNothing,
    DependsOnNothing,
}

/// A model with a training step at fault.
#[derive(Module, Debug)]
struct Faulty {
    toy: Toy,
    #[module(skip)]
    fault: Fault,
}

impl TrainStep for Faulty {
    type Input = Rows;
    type Output = StepReport;

    fn step(&self, rows: Rows) -> TrainOutput<StepReport> {
        match self.fault {
            Fault::CountsNothing => {
                let mut output = TrainStep::step(&self.toy, rows);
                output.item.items = 0;
                output
            }
            Fault::DependsOnNothing => {
                let loss = rows.targets.require_grad().mean();
                let report = StepReport::new(&loss, 3);
                TrainOutput::new(self, loss.backward(), report)
            }
        }
    }
}

impl InferenceStep for Faulty {
    type Input = Rows;
    type Output = StepReport;

    fn step(&self, rows: Rows) -> StepReport {
        InferenceStep::step(&self.toy, rows)
    }
}

fn message_of(fault: Fault) -> String {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (train, valid) = (loader(rows(6), 3), loader(rows(6), 3));
    let model = Faulty { toy: Toy::new(), fault };
    let result = SupervisedTraining::new(folder.path(), train, valid)
        .with_application_logger(None)
        .renderer(Box::new(LineRenderer::to(std::io::sink())))
        .with_metric_logger(InMemoryMetricLogger::new())
        .with_training_strategy(ToolkitStrategy::new(&Device::flex()).into())
        .launch(Learner::new(model, SgdConfig::new().init(), ConstantLr::new(RATE)));
    result.error.expect("refused").to_string()
}

#[test]
fn a_micro_batch_of_nothing_is_refused_by_name() {
    let message = message_of(Fault::CountsNothing);
    assert!(message.contains("`items`") && message.contains("got 0"), "{message}");
}

#[test]
fn a_loss_that_depends_on_no_parameter_is_refused() {
    let message = message_of(Fault::DependsOnNothing);
    assert!(message.contains("no parameter of the model has a gradient"), "{message}");
}

#[test]
#[should_panic(expected = "greater than zero")]
fn an_accumulation_of_zero_is_refused() {
    train(strategy(), 0);
}

#[test]
#[should_panic(expected = "argument `max_norm`")]
fn a_maximum_norm_of_zero_is_refused() {
    let _ = strategy().with_max_norm(0.0);
}

#[test]
#[should_panic(expected = "argument `steps`")]
fn a_check_every_zero_steps_is_refused() {
    let _ = strategy().with_check_every(0);
}

#[test]
#[should_panic(expected = "argument `loss`")]
fn a_loss_of_several_elements_is_refused() {
    let _ = StepReport::new(&Tensor::zeros([2], &Device::flex()), 1);
}
