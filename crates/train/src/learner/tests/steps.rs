//! What a step computes.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use burn::{
    data::{
        dataloader::{DataLoaderIterator, Progress},
        dataset::DatasetError,
    },
    optim::GradientsParams,
};

use super::*;
use crate::schedule::Schedule;

#[test]
fn unequal_micro_batches_and_the_incomplete_last_window_are_means_over_their_rows() {
    let all = rows(10);
    // Windows of three batches: nine rows, and the one that is left.
    let result = train(strategy(), 3);
    assert!(result.error.is_none(), "{:?}", result.error);
    let expected = descend(&[&all[..9], &all[9..]], f64::INFINITY);
    assert_close(&result.model.weights(), expected, rounding(2));
    // Windows of two: the second one holds batches of three rows and of one.
    let result = train(strategy(), 2);
    let expected = descend(&[&all[..6], &all[6..]], f64::INFINITY);
    assert_close(&result.model.weights(), expected, rounding(2));
}

/// Data whose end nobody knows beforehand: its progress is never complete.
struct Endless(Arc<dyn DataLoader<Rows>>);

struct EndlessIterator<'a>(Box<dyn DataLoaderIterator<Rows> + 'a>);

impl Iterator for EndlessIterator<'_> {
    type Item = Result<Rows, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next()
    }
}

impl DataLoaderIterator<Rows> for EndlessIterator<'_> {
    fn progress(&self) -> Progress {
        Progress::new(0, usize::MAX, None)
    }
}

impl DataLoader<Rows> for Endless {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Rows> + 'a> {
        Box::new(EndlessIterator(self.0.iter()))
    }

    fn num_items(&self) -> usize {
        usize::MAX
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Rows>> {
        Arc::new(Self(self.0.to_device(device)))
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<Rows>> {
        Arc::new(Self(self.0.slice(start, end)))
    }
}

#[test]
fn the_last_window_counts_even_if_the_loader_does_not_announce_it() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let all = rows(10);
    let endless = Arc::new(Endless(loader(all.clone(), 3)));
    let result = SupervisedTraining::new(folder.path(), endless, loader(all.clone(), 4))
        .with_application_logger(None)
        .renderer(Box::new(LineRenderer::to(std::io::sink())))
        .grads_accumulation(3)
        .with_metric_logger(InMemoryMetricLogger::new())
        .with_training_strategy(strategy().into())
        .launch(learner());
    let expected = descend(&[&all[..9], &all[9..]], f64::INFINITY);
    assert_close(&result.model.weights(), expected, rounding(2));
}

/// Sums instead of means, equal weights for unequal batches, or a dropped window would be seen.
#[test]
fn other_ways_to_accumulate_are_far_off() {
    let all = rows(10);
    let right = descend(&[&all[..6], &all[6..]], f64::INFINITY);
    let dropped = descend(&[&all[..6]], f64::INFINITY);
    let first = descend(&[&all[..6]], f64::INFINITY);
    let [three, one] = [gradient(first, &all[6..9]), gradient(first, &all[9..])];
    let equal = [0, 1].map(|i| first[i] - RATE * 0.5 * (three[i] + one[i]));
    for wrong in [dropped, equal] {
        let off = (0..2).map(|i| (wrong[i] - right[i]).abs()).fold(0.0, f64::max);
        assert!(off > 1e-2, "{wrong:?} is too close to {right:?} to tell");
    }
}

#[test]
fn accumulated_gradients_are_clipped_by_their_global_norm() {
    let all = rows(10);
    let result = train(strategy().with_max_norm(0.3), 2);
    let clipped = descend(&[&all[..6], &all[6..]], 0.3);
    let free = descend(&[&all[..6], &all[6..]], f64::INFINITY);
    assert!((clipped[0] - free[0]).abs() > 1e-2, "the norm must matter here");
    // Clipping adds 1e-6 to a norm above 0.3: a factor off by at most 4e-6, on two steps that are
    // at most 0.3 RATE long.
    let bound = rounding(2) + 2.0 * 4e-6 * 0.3 * RATE;
    assert_close(&result.model.weights(), clipped, bound);
}

#[test]
fn several_devices_share_an_epoch() {
    // Two workers with five rows each, in batches of 3 and 2; a round of both makes a window.
    let result = train(strategy().with_device(&Device::flex()), 1);
    assert!(result.error.is_none(), "{:?}", result.error);
    let all = rows(10);
    let first = [&all[..3], &all[5..8]].concat();
    let second = [&all[3..5], &all[8..]].concat();
    let expected = descend(&[&first, &second], f64::INFINITY);
    assert_close(&result.model.weights(), expected, rounding(2));
}

#[test]
fn a_skipped_step_leaves_model_and_schedule_alone() {
    let steps = Arc::new(AtomicUsize::new(0));
    let rates = Arc::new(AtomicUsize::new(0));
    let (seen, asked) = (steps.clone(), rates.clone());
    // The first of the two windows is refused.
    let hook = move |_: &mut GradientsParams, _: &Toy| match seen.fetch_add(1, Ordering::SeqCst) {
        0 => Verdict::Skip,
        _ => Verdict::Apply,
    };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let schedule = move |_: usize| {
        asked.fetch_add(1, Ordering::SeqCst);
        RATE
    };
    let schedule = schedule.scheduler().expect("functions are not checked");
    let result = training(folder.path(), rows(10))
        .grads_accumulation(2)
        .with_metric_logger(InMemoryMetricLogger::new())
        .with_training_strategy(strategy().with_hook(hook).into())
        .launch(Learner::new(Toy::new(), SgdConfig::new().init(), schedule));
    assert_eq!(steps.load(Ordering::SeqCst), 2);
    assert_eq!(rates.load(Ordering::SeqCst), 1);
    let expected = descend(&[&rows(10)[6..]], f64::INFINITY);
    assert_close(&result.model.weights(), expected, rounding(1));
}

/// A scaler in miniature: the loss is not scaled here, so it scales the gradients itself.
struct Halving {
    saved: Arc<AtomicUsize>,
    loaded: Arc<AtomicUsize>,
}

impl StepHook<Toy> for Halving {
    fn before_step(&mut self, gradients: &mut GradientsParams, model: &Toy) -> Verdict {
        let id = model.linear.weight.id;
        let gradient = gradients.remove::<2>(id).expect("the weight has a gradient");
        gradients.register(id, gradient.mul_scalar(0.5));
        Verdict::Apply
    }

    fn loss_scale(&self) -> Option<Tensor<1>> {
        Some(Tensor::full([1], 1024.0, &Device::flex()))
    }

    fn save(&mut self, epoch: usize) -> std::io::Result<()> {
        self.saved.store(epoch, Ordering::SeqCst);
        Ok(())
    }

    fn load(&mut self, epoch: usize) -> std::io::Result<()> {
        self.loaded.store(epoch, Ordering::SeqCst);
        Ok(())
    }
}

#[test]
fn a_hook_changes_gradients_and_follows_checkpoints() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let [saved, loaded] = [0; 2].map(|zero| Arc::new(AtomicUsize::new(zero)));
    let run = |epochs: usize, checkpoint: Option<usize>| {
        let hook = Halving { saved: saved.clone(), loaded: loaded.clone() };
        let mut training = training(folder.path(), rows(6))
            .grads_accumulation(2)
            .num_epochs(epochs)
            .with_default_checkpointers()
            .with_metric_logger(InMemoryMetricLogger::new())
            .with_training_strategy(strategy().with_hook(hook).into());
        if let Some(checkpoint) = checkpoint {
            training = training.checkpoint(checkpoint);
        }
        training.launch(learner())
    };
    let once = run(1, None);
    let half: [f64; 2] = gradient([1.0, 1.0], &rows(6)).map(|x| 0.5 * x);
    assert_close(&once.model.weights(), [0, 1].map(|i| 1.0 - RATE * half[i]), rounding(1));
    assert_eq!((saved.load(Ordering::SeqCst), loaded.load(Ordering::SeqCst)), (1, 0));
    let resumed = run(2, Some(1));
    assert_eq!((saved.load(Ordering::SeqCst), loaded.load(Ordering::SeqCst)), (2, 1));
    // Bit for bit what two epochs in one go give.
    assert_eq!(resumed.model.weights(), run(2, None).model.weights());
}

#[test]
fn early_stopping_reads_what_the_tensorboard_logger_keeps() {
    use burn::train::{MetricEarlyStoppingStrategy, StoppingCondition, metric::store::*};
    let folder = tempfile::tempdir().expect("a temporary folder");
    let logger = TensorBoardLogger::create(folder.path().join("events")).expect("an event file");
    let rule = MetricEarlyStoppingStrategy::new(
        &LossMetric::new(),
        Aggregate::Mean,
        // The loss falls: by this rule no epoch after the first is an improvement.
        Direction::Highest,
        Split::Valid,
        StoppingCondition::NoImprovementSince { n_epochs: 2 },
    );
    let epochs = Arc::new(AtomicUsize::new(0));
    let counter = epochs.clone();
    let hook = move |_: &mut GradientsParams, _: &Toy| {
        counter.fetch_add(1, Ordering::SeqCst);
        Verdict::Apply
    };
    training(folder.path(), rows(3))
        .num_epochs(10)
        .with_metric_logger(logger)
        .early_stopping(rule)
        .with_training_strategy(strategy().with_hook(hook).into())
        .launch(learner());
    assert_eq!(epochs.load(Ordering::SeqCst), 3);
}
