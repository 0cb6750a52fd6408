//! What metrics, loggers and the renderer say.

use std::sync::Mutex;

use burn::{
    data::dataloader::Progress,
    train::metric::{Metric, MetricMetadata, Numeric, NumericEntry},
};

use super::*;
use crate::{
    tensorboard::scalars,
    throughput::{ModelFlops, Throughput},
};

fn metadata() -> MetricMetadata {
    MetricMetadata { progress: Progress::new(1, 1, None), iteration: Some(1), lr: None }
}

fn one(value: f32) -> Tensor<1> {
    Tensor::full([1], value, &Device::flex())
}

fn final_value<G: Gauge>(metric: &GaugeMetric<G>) -> f64 {
    match metric.final_value() {
        NumericEntry::Final(value) => value,
        other => panic!("expected a final value, got {other:?}"),
    }
}

#[test]
fn a_norm_is_averaged_over_the_steps_that_have_one() {
    let mut metric = GaugeMetric::new(GradientNorm);
    for norm in [Some(2.0), None, Some(4.0)] {
        let mut report = StepReport::new(&one(1.0), 8);
        report.gradient_norm = norm.map(one);
        let entry = metric.update(&report, &metadata()).expect("readable");
        assert_eq!(entry.is_not_available(), norm.is_none());
        assert_eq!(metric.value().map(|value| value.current()), norm.map(f64::from));
    }
    assert_eq!(final_value(&metric), 3.0);
    metric.clear();
    assert!(final_value(&metric).is_nan());
    assert!(metric.compute().expect("no tensor is read").is_not_available());
}

#[test]
fn the_loss_scale_of_an_epoch_is_its_last() {
    let mut metric = GaugeMetric::new(LossScale::default());
    for scale in [Some(65536.0), Some(32768.0), None] {
        let mut report = StepReport::new(&one(1.0), 8);
        report.loss_scale = scale.map(one);
        metric.update(&report, &metadata()).expect("readable");
    }
    assert_eq!(final_value(&metric), 32768.0);
}

#[test]
fn a_device_without_pools_has_no_memory_to_show() {
    let device = Device::flex();
    for quantity in [PoolQuantity::InUse, PoolQuantity::Reserved] {
        let mut metric = GaugeMetric::new(PoolUse::new(&device, quantity));
        assert!(metric.update(&(), &metadata()).expect("no tensor is read").is_not_available());
        assert!(metric.value().is_none());
    }
}

#[test]
fn two_devices_have_metrics_of_two_names() {
    let metric = || GaugeMetric::new(PoolUse::new(&Device::flex(), PoolQuantity::InUse));
    assert_eq!(metric().name().as_str(), "Memory in Use");
    assert_eq!(metric().named("Memory in Use of GPU 1").name().as_str(), "Memory in Use of GPU 1");
}

#[cfg(feature = "nvml")]
#[test]
fn without_a_driver_gpu_metrics_have_no_values() {
    use crate::gpu::{Gpu, GpuMonitor};
    let missing = GpuMonitor::open_with_library("/nowhere/libnvidia-ml.so", Gpu::Index(0));
    let gauges = GpuGauge::all(missing);
    assert_eq!(
        gauges.each_ref().map(Gauge::name),
        ["GPU Utilization", "GPU Temperature", "GPU Power"]
    );
    for gauge in gauges {
        let mut metric = GaugeMetric::new(gauge);
        assert!(metric.update(&(), &metadata()).expect("no tensor is read").is_not_available());
    }
}

/// What a renderer wrote, readable after the training took it.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Two epochs of four iterations each, in windows of `accumulate`.
fn logged(logger: TensorBoardLogger, accumulate: usize, lines: Lines) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let flops = ModelFlops::new("rows", 12.0, 1e9).expect("valid arguments");
    let result = training(folder.path(), rows(10))
        .num_epochs(2)
        .grads_accumulation(accumulate)
        .metric_train_numeric(GaugeMetric::new(GradientNorm))
        .metric_train_numeric(GaugeMetric::new(LossScale::default()))
        .metric_train_numeric(GaugeMetric::new(Throughput::new("rows")))
        .metric_train_numeric(GaugeMetric::new(flops))
        .metric_train_numeric(GaugeMetric::new(PoolUse::new(
            &Device::flex(),
            PoolQuantity::Reserved,
        )))
        .renderer(Box::new(LineRenderer::to(lines)))
        .with_metric_logger(logger)
        .with_training_strategy(strategy().into())
        .launch(learner());
    assert!(result.error.is_none(), "{:?}", result.error);
}

fn steps_of(scalars: &[(String, i64, f32)], tag: &str) -> Vec<i64> {
    scalars.iter().filter(|(name, ..)| name == tag).map(|(_, step, _)| *step).collect()
}

fn only_file(folder: &Path) -> Vec<(String, i64, f32)> {
    let file = std::fs::read_dir(folder).expect("the folder").next().expect("a file");
    scalars(&std::fs::read(file.expect("an entry").path()).expect("the file"))
}

#[test]
fn tensorboard_gets_iterations_and_epochs() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let logger = TensorBoardLogger::create(folder.path()).expect("an event file");
    logged(logger, 2, Lines::default());
    let scalars = only_file(folder.path());
    assert_eq!(steps_of(&scalars, "train/Loss"), [1, 2, 3, 4, 5, 6, 7, 8]);
    // A window is two iterations.
    assert_eq!(steps_of(&scalars, "train/Gradient Norm"), [2, 4, 6, 8]);
    // The first item of an epoch starts the clock.
    assert_eq!(steps_of(&scalars, "train/Throughput of rows"), [2, 3, 4, 6, 7, 8]);
    for tag in ["epoch/train/Loss", "epoch/valid/Loss", "epoch/train/Model FLOPs Utilization"] {
        assert_eq!(steps_of(&scalars, tag), [1, 2], "{tag}");
    }
    for (tag, _, value) in &scalars {
        assert!(value.is_finite() && *value > 0.0, "{tag}: {value}");
        let nothing = ["Loss Scale", "Memory", "train/valid", "valid/Grad"];
        assert!(!nothing.iter().any(|part| tag.contains(part)), "{tag}");
    }
    // The validation's batches hold 4, 4 and 2 rows, and count for as many.
    let weights = descend(&[&rows(10)[..6], &rows(10)[6..]], f64::INFINITY);
    let expected = mean_loss(weights, &rows(10));
    let written = scalars.iter().find(|(tag, ..)| tag == "epoch/valid/Loss").expect("a loss");
    let error = (f64::from(written.2) - expected).abs();
    // The weights' rounding, seen through a loss whose slope is at most 8, and the loss's own.
    assert!(error < 8.0 * 2.0 * rounding(2) + rounding(4), "{written:?}, {expected}");
    // The first norm, from the gradient in f64: a norm rounds as often as a step.
    let norm = gradient([1.0, 1.0], &rows(10)[..6]).iter().map(|x| x * x).sum::<f64>().sqrt();
    let written = scalars.iter().find(|(tag, ..)| tag == "train/Gradient Norm").expect("a norm");
    assert!((f64::from(written.2) - norm).abs() < rounding(1) / RATE, "{written:?}, {norm}");
}

#[test]
fn the_incomplete_last_window_has_a_norm_of_its_own() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let logger = TensorBoardLogger::create(folder.path()).expect("an event file");
    logged(logger, 3, Lines::default());
    assert_eq!(steps_of(&only_file(folder.path()), "train/Gradient Norm"), [3, 4, 7, 8]);
}

#[test]
fn a_resumed_logger_counts_on() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let logger = TensorBoardLogger::resume(folder.path(), 100).expect("an event file");
    logged(logger, 2, Lines::default());
    assert_eq!(steps_of(&only_file(folder.path()), "train/Loss")[0], 101);
}

#[test]
fn a_logger_needs_a_folder_that_can_be_made() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("a-file");
    std::fs::write(&file, "").expect("a file");
    let error = TensorBoardLogger::create(&file).expect_err("a file is no folder").to_string();
    assert!(error.contains("a-file"), "{error}");
}

#[test]
fn lines_tell_of_epochs() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let lines = Lines::default();
    logged(TensorBoardLogger::create(folder.path()).expect("an event file"), 2, lines.clone());
    let text = String::from_utf8(lines.0.lock().expect("no panic").clone()).expect("UTF-8");
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert!(lines[0].starts_with("epoch 1/2 train: Loss "), "{text}");
    assert!(lines[0].contains("Gradient Norm ") && !lines[0].contains("Memory"), "{text}");
    assert!(lines[3].starts_with("epoch 2/2 valid: Loss "), "{text}");
}
