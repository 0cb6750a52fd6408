//! The training step, and what a checkpoint is made of: [`Trainer`] does both.

use crate::{
    data::loader::Batch, evaluation::tensors, model::ResNet, settings::RunSettings,
    weights::Weights,
};
use anyhow::{Context, Result};
use blackburn::{
    distributed::Group,
    train::{
        checkpoint::Checkpoint,
        precision::{PrecisionPolicy, full_precision},
        trainer::{MicroBatch, Step, Trainer, TrainerConfig, TrainerError},
    },
};
use burn::{
    module::Module,
    nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig},
    tensor::{Device, Int, Tensor},
};
use example_program::CadenceOptions;

/// A network that learns from images and their classes.
pub(crate) struct Training {
    pub(crate) trainer: Trainer<ResNet, (Tensor<4>, Tensor<1, Int>)>,
    criterion: CrossEntropyLoss,
    device: Device,
}

fn config(settings: &RunSettings, cadence: CadenceOptions, group: &Group) -> TrainerConfig {
    let config = TrainerConfig::new(settings.schedule())
        .with_group(group)
        .with_metrics_every(cadence.log_every())
        .with_policy(PrecisionPolicy::new(settings.precision).with_f32_statistics())
        .with_optimizer(settings.groups())
        .with_max_norm(settings.clip.unwrap_or(f64::INFINITY))
        .with_seed(settings.seed);
    match settings.ema() {
        Some(ema) => config.with_ema(ema),
        None => config,
    }
}

impl Training {
    /// A network with random parameters, or with those of a file, without its last layer if so asked.
    pub(crate) fn new(
        settings: &RunSettings,
        weights: Option<(&Weights, bool)>,
        cadence: CadenceOptions,
        device: &Device,
        group: &Group,
    ) -> Result<Self> {
        device.seed(settings.seed);
        let model = ResNet::new(&settings.model, &device.clone().autodiff());
        let model = match weights {
            Some((weights, new_head)) => weights.load(model, &settings.model, new_head)?,
            None => model,
        };
        Ok(Self::of(settings, config(settings, cadence, group).init(model)?, device))
    }

    /// What a checkpoint holds, to go on with or to read.
    pub(crate) fn load(
        settings: &RunSettings,
        checkpoint: &Checkpoint,
        cadence: CadenceOptions,
        device: &Device,
        group: &Group,
    ) -> Result<Self> {
        let model = ResNet::new(&settings.model, &device.clone().autodiff());
        let config = config(settings, cadence, group);
        Ok(Self::of(settings, config.resume(model, checkpoint)?, device))
    }

    fn of(
        settings: &RunSettings,
        trainer: Trainer<ResNet, (Tensor<4>, Tensor<1, Int>)>,
        device: &Device,
    ) -> Self {
        let smoothing = settings.label_smoothing;
        let smoothing = (smoothing > 0.0).then_some(smoothing);
        let criterion = CrossEntropyLossConfig::new().with_smoothing(smoothing);
        Self { trainer, criterion: criterion.init(device), device: device.clone() }
    }

    /// One optimizer step, by the mean gradient of all batches.
    pub(crate) fn step(&mut self, batches: Vec<Batch>) -> Result<Step, TrainerError> {
        let policy = self.trainer.policy();
        let batches = batches
            .into_iter()
            .map(|batch| MicroBatch::new(tensors(batch, policy, &self.device)))
            .collect::<Result<_, _>>()?;
        let criterion = &self.criterion;
        self.trainer.step_of(batches, |model, (images, classes)| {
            criterion.forward(full_precision(model.forward(images)), classes)
        })
    }

    /// The network to tell images apart with: of averaged weights where there are some, unless `raw`.
    pub(crate) fn to_read(&self, raw: bool) -> Result<ResNet> {
        let model = match raw {
            true => self.trainer.model()?.valid(),
            false => self.trainer.valid().context("cannot average the weights")?,
        };
        Ok(model.materialize())
    }
}
