//! The training through Burn's learner.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use blackburn::train::{
    gpu::{Gpu, GpuMonitor},
    learner::{
        GaugeMetric, GpuGauge, GradientNorm, LineRenderer, PoolQuantity, PoolUse,
        TensorBoardLogger, ToolkitStrategy,
    },
    optim::AdamWGroups,
    schedule::Schedule,
    throughput::{Arithmetic, ModelFlops, Throughput, peak_flops},
};
use burn::{
    data::dataloader::DataLoader,
    tensor::Device,
    train::{
        Learner, MetricEarlyStoppingStrategy, StoppingCondition, SupervisedTraining,
        logger::FileMetricLogger,
        metric::{
            AccuracyMetric, LearningRateMetric, LossMetric,
            store::{Aggregate, Direction, Split},
        },
    },
};

use crate::{Settings, data::Points, model::Classifier};

/// Trains `model` and returns it, taken out of training. Checkpoints, logs and event files go to
/// `folder`.
pub(crate) fn train(
    model: Classifier,
    train: Arc<dyn DataLoader<Points>>,
    valid: Arc<dyn DataLoader<Points>>,
    settings: &Settings,
    device: &Device,
    folder: &Path,
) -> Result<Classifier> {
    let optimizer = AdamWGroups::default().init(&model, device);
    let learner = Learner::new(model, optimizer, settings.schedule().scheduler()?);

    let monitor = GpuMonitor::open(Gpu::Index(0));
    let peak = monitor
        .as_ref()
        .ok()
        .and_then(GpuMonitor::name)
        .and_then(|name| peak_flops(&name, Arithmetic::Tf32));
    let mut training = SupervisedTraining::new(folder, train, valid)
        .num_epochs(settings.epochs)
        .grads_accumulation(settings.accumulate)
        .with_training_strategy(
            ToolkitStrategy::new(device).with_max_norm(settings.max_norm).into(),
        )
        // The loss first: reading it waits for the step, which throughput then measures.
        .metrics((LossMetric::new(), AccuracyMetric::new()))
        .metric_train_numeric(LearningRateMetric::new())
        .metric_train_numeric(GaugeMetric::new(Throughput::new("samples")))
        .metric_train_numeric(GaugeMetric::new(GradientNorm))
        .metric_train_numeric(GaugeMetric::new(PoolUse::new(device, PoolQuantity::Reserved)))
        .with_metric_logger(FileMetricLogger::new(folder))
        .with_metric_logger(TensorBoardLogger::create(folder.join("events"))?)
        .with_default_checkpointers()
        .early_stopping(MetricEarlyStoppingStrategy::new(
            &LossMetric::new(),
            Aggregate::Mean,
            Direction::Lowest,
            Split::Valid,
            StoppingCondition::NoImprovementSince { n_epochs: settings.epochs },
        ))
        .with_application_logger(None);
    for gauge in GpuGauge::all(monitor) {
        training = training.metric_train_numeric(GaugeMetric::new(gauge));
    }
    if let Some(peak) = peak {
        let flops = ModelFlops::new("samples", Classifier::FLOPS_PER_SAMPLE, peak)?;
        training = training.metric_train_numeric(GaugeMetric::new(flops));
    }
    // Without a renderer set, burn-train shows its dashboard where it is built and there is a
    // terminal.
    if !(settings.dashboard && std::io::stdout().is_terminal()) {
        training = training.renderer(Box::new(LineRenderer::new()));
    }

    let result = training.launch(learner);
    if let Some(error) = result.error {
        bail!("{error}");
    }
    Ok(result.model)
}
