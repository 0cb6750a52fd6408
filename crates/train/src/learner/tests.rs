//! A linear model of two weights in burn-train's learner, compared with its training by hand in
//! f64.

mod failures;
mod metrics;
mod scaling;
mod steps;
mod together;

use std::path::Path;
use std::sync::Arc;

use burn::{
    data::{
        dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher},
        dataset::InMemDataset,
    },
    lr_scheduler::constant::ConstantLr,
    module::Module,
    nn::{Initializer, Linear, LinearConfig},
    optim::SgdConfig,
    tensor::{Device, Tensor, TensorData},
    train::{
        InferenceStep, Learner, LearningResult, SupervisedTraining, TrainOutput, TrainStep,
        logger::InMemoryMetricLogger, metric::LossMetric,
    },
};

use super::*;

/// Two inputs and what they should give.
type Row = [f32; 3];

#[derive(Clone, Debug)]
struct Rows {
    inputs: Tensor<2>,
    targets: Tensor<2>,
}

struct RowBatcher;

impl Batcher<Row, Rows> for RowBatcher {
    fn batch(&self, rows: Vec<Row>, device: &Device) -> Rows {
        let inputs: Vec<f32> = rows.iter().flat_map(|row| [row[0], row[1]]).collect();
        let targets: Vec<f32> = rows.iter().map(|row| row[2]).collect();
        Rows {
            inputs: Tensor::from_data(TensorData::new(inputs, [rows.len(), 2]), device),
            targets: Tensor::from_data(TensorData::new(targets, [rows.len(), 1]), device),
        }
    }
}

#[derive(Module, Debug)]
struct Toy {
    linear: Linear,
    #[module(skip)]
    scaling: Option<LossScaling>,
}

impl Toy {
    fn new() -> Self {
        let device = Device::flex().autodiff();
        let linear = LinearConfig::new(2, 1).with_bias(false).with_initializer(Initializer::Ones);
        Self { linear: linear.init(&device), scaling: None }
    }

    fn loss(&self, rows: Rows) -> Tensor<1> {
        self.linear.forward(rows.inputs).sub(rows.targets).powi_scalar(2).mean()
    }

    fn weights(&self) -> Vec<f32> {
        self.linear.weight.val().into_data().try_to_vec().expect("weights are f32")
    }
}

impl TrainStep for Toy {
    type Input = Rows;
    type Output = StepReport;

    fn step(&self, rows: Rows) -> TrainOutput<StepReport> {
        let [items, _] = rows.inputs.dims();
        let loss = self.loss(rows);
        let report = StepReport::new(&loss, items);
        let loss = self.scaling.as_ref().map_or(loss.clone(), |scaling| scaling.scale(loss));
        TrainOutput::new(self, loss.backward(), report)
    }
}

impl InferenceStep for Toy {
    type Input = Rows;
    type Output = StepReport;

    fn step(&self, rows: Rows) -> StepReport {
        let [items, _] = rows.inputs.dims();
        StepReport::new(&self.loss(rows), items)
    }
}

/// Rows of mild size that no two weights fit exactly.
fn rows(count: usize) -> Vec<Row> {
    let row = |i: usize| {
        let i = i as f32;
        [(0.7 * i).sin(), (1.3 * i).cos(), (0.9 * i + 0.5).sin()]
    };
    (0..count).map(row).collect()
}

fn loader(rows: Vec<Row>, batch: usize) -> Arc<dyn DataLoader<Rows>> {
    DataLoaderBuilder::new(RowBatcher).batch_size(batch).build(InMemDataset::new(rows))
}

/// A training on `rows` in batches of three that prints nothing. It logs to memory, unless
/// `configure` sets another logger.
fn training(folder: &Path, rows: Vec<Row>) -> SupervisedTraining<Toy> {
    let valid = loader(rows.clone(), 4);
    SupervisedTraining::new(folder, loader(rows, 3), valid)
        .with_application_logger(None)
        .renderer(Box::new(LineRenderer::to(std::io::sink())))
        .metrics((LossMetric::new(),))
}

fn strategy() -> ToolkitStrategy<Toy> {
    ToolkitStrategy::new(&Device::flex())
}

const RATE: f64 = 0.25;

fn learner() -> Learner<Toy> {
    Learner::new(Toy::new(), SgdConfig::new().init(), ConstantLr::new(RATE))
}

/// Trains with `strategy` for one epoch on ten rows: batches of 3, 3, 3 and 1.
fn train(strategy: ToolkitStrategy<Toy>, accumulate: usize) -> LearningResult<Toy> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    training(folder.path(), rows(10))
        .grads_accumulation(accumulate)
        .with_metric_logger(InMemoryMetricLogger::new())
        .with_training_strategy(strategy.into())
        .launch(learner())
}

/// The gradient of the mean loss over `rows`, in f64.
fn gradient(weights: [f64; 2], rows: &[Row]) -> [f64; 2] {
    let mut sum = [0.0; 2];
    for row in rows {
        let [a, b, target] = row.map(f64::from);
        let error = weights[0] * a + weights[1] * b - target;
        sum[0] += 2.0 * error * a;
        sum[1] += 2.0 * error * b;
    }
    sum.map(|x| x / rows.len() as f64)
}

/// The mean loss over `rows`, in f64.
fn mean_loss(weights: [f64; 2], rows: &[Row]) -> f64 {
    let errors = rows.iter().map(|row| {
        let [a, b, target] = row.map(f64::from);
        weights[0] * a + weights[1] * b - target
    });
    errors.map(|error| error * error).sum::<f64>() / rows.len() as f64
}

/// Gradient descent over `windows`, in f64.
fn descend(windows: &[&[Row]], max_norm: f64) -> [f64; 2] {
    let mut weights = [1.0, 1.0];
    for rows in windows {
        let gradient = gradient(weights, rows);
        let norm = gradient.iter().map(|x| x * x).sum::<f64>().sqrt();
        let factor = (max_norm / norm).min(1.0);
        weights = [0, 1].map(|i| weights[i] - RATE * factor * gradient[i]);
    }
    weights
}

/// A step rounds some 30 times per weight: two products and two sums a row, the mean over the
/// window, the norm, the update. No value on the way exceeds 8 (errors are below 3, inputs below
/// 1), and a step cannot enlarge an earlier error: the loss is convex and the rate below 2 over
/// its largest curvature.
fn rounding(steps: usize) -> f64 {
    steps as f64 * 30.0 * 8.0 * RATE * f64::from(f32::EPSILON) / 2.0
}

fn assert_close(actual: &[f32], expected: [f64; 2], bound: f64) {
    for (actual, expected) in actual.iter().zip(expected) {
        let error = (f64::from(*actual) - expected).abs();
        assert!(error <= bound, "{actual} against {expected}: off by {error:e}, bound {bound:e}");
    }
}
