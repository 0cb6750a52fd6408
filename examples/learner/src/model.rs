//! A classifier of standard modules, and its steps.

use blackburn::train::learner::Reported;
use burn::{
    module::Module,
    nn::{Gelu, Linear, LinearConfig, loss::CrossEntropyLossConfig},
    tensor::{Device, Tensor},
    train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep},
};

use crate::data::{ARMS, Points};

const WIDTH: usize = 64;

#[derive(Module, Debug)]
pub(crate) struct Classifier {
    first: Linear,
    second: Linear,
    head: Linear,
    activation: Gelu,
}

impl Classifier {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(2, WIDTH).init(device),
            second: LinearConfig::new(WIDTH, WIDTH).init(device),
            head: LinearConfig::new(WIDTH, ARMS).init(device),
            activation: Gelu::new(),
        }
    }

    /// Operations of one sample's forward and backward pass: two per weight and product, in one
    /// product forward and two backward.
    pub(crate) const FLOPS_PER_SAMPLE: f64 =
        6.0 * (2 * WIDTH + WIDTH * WIDTH + WIDTH * ARMS) as f64;

    pub(crate) fn classify(&self, points: Points) -> Reported<ClassificationOutput> {
        let samples = points.arms.dims()[0];
        let hidden = self.activation.forward(self.first.forward(points.places));
        let hidden = self.activation.forward(self.second.forward(hidden));
        let logits = self.head.forward(hidden);
        let loss = CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits.clone(), points.arms.clone());
        Reported::new(ClassificationOutput::new(loss.clone(), logits, points.arms), &loss, samples)
    }
}

impl TrainStep for Classifier {
    type Input = Points;
    type Output = Reported<ClassificationOutput>;

    fn step(&self, points: Points) -> TrainOutput<Self::Output> {
        let output = self.classify(points);
        let gradients = output.output.loss.backward();
        TrainOutput::new(self, gradients, output)
    }
}

impl InferenceStep for Classifier {
    type Input = Points;
    type Output = Reported<ClassificationOutput>;

    fn step(&self, points: Points) -> Self::Output {
        self.classify(points)
    }
}

/// The mean loss of `model`, taken out of training, over all of `points`.
pub(crate) fn loss(
    model: &Classifier,
    points: &dyn burn::data::dataloader::DataLoader<Points>,
) -> anyhow::Result<f64> {
    let (mut sum, mut samples) = (0.0, 0);
    for batch in points.iter() {
        let report = model.classify(batch?).report;
        let loss: Tensor<1> = report.loss;
        sum += loss.into_scalar::<f64>() * report.items as f64;
        samples += report.items;
    }
    Ok(sum / samples as f64)
}
