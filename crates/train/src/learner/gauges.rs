//! The toolkit's measures as gauges.

use burn::tensor::{Device, Tensor, TensorReadError};

use super::{gauge::Gauge, report::StepReport};
use crate::{
    memory::{MemoryMonitor, PoolMemory},
    throughput::{ModelFlops, Throughput},
};

#[cfg(feature = "nvml")]
mod gpu;

#[cfg(feature = "nvml")]
pub use gpu::{GpuGauge, GpuQuantity};

/// Items per second, when the metrics' thread sees them. Register it after burn-train's
/// `LossMetric`, which waits for the device: without that wait it counts what was queued, not what
/// was done. The epoch's value is over all of it but its first item; validation is left out.
impl Gauge for Throughput {
    type Input = StepReport;

    fn name(&self) -> String {
        format!("Throughput of {}", self.unit())
    }

    fn unit(&self) -> Option<String> {
        Some(format!("{}/s", self.unit()))
    }

    fn higher_is_better(&self) -> bool {
        true
    }

    fn measure(&mut self, report: &StepReport) -> Result<Option<f64>, TensorReadError> {
        Ok(self.record(report.items))
    }

    fn of_epoch(&self, _mean: Option<f64>) -> Option<f64> {
        self.average()
    }

    fn reset(&mut self) {
        Throughput::reset(self);
    }
}

/// Utilization in percent, measured as [`Throughput`] is.
impl Gauge for ModelFlops {
    type Input = StepReport;

    fn name(&self) -> String {
        "Model FLOPs Utilization".to_owned()
    }

    fn unit(&self) -> Option<String> {
        Some("%".to_owned())
    }

    fn higher_is_better(&self) -> bool {
        true
    }

    fn measure(&mut self, report: &StepReport) -> Result<Option<f64>, TensorReadError> {
        Ok(self.record(report.items))
    }

    fn of_epoch(&self, _mean: Option<f64>) -> Option<f64> {
        self.average()
    }

    fn reset(&mut self) {
        ModelFlops::reset(self);
    }
}

/// The gradients' global norm before clipping, at each optimizer step. None at the micro-batches
/// in between, and at a step that was skipped.
#[derive(Clone, Copy, Debug, Default)]
pub struct GradientNorm;

impl Gauge for GradientNorm {
    type Input = StepReport;

    fn name(&self) -> String {
        "Gradient Norm".to_owned()
    }

    fn unit(&self) -> Option<String> {
        None
    }

    fn higher_is_better(&self) -> bool {
        false
    }

    fn measure(&mut self, report: &StepReport) -> Result<Option<f64>, TensorReadError> {
        read(report.gradient_norm.as_ref())
    }
}

/// The loss scale at each optimizer step, skipped ones included. The epoch's value is the last.
#[derive(Clone, Copy, Debug, Default)]
pub struct LossScale {
    last: Option<f64>,
}

impl Gauge for LossScale {
    type Input = StepReport;

    fn name(&self) -> String {
        "Loss Scale".to_owned()
    }

    fn unit(&self) -> Option<String> {
        None
    }

    fn higher_is_better(&self) -> bool {
        true
    }

    fn measure(&mut self, report: &StepReport) -> Result<Option<f64>, TensorReadError> {
        let scale = read(report.loss_scale.as_ref())?;
        self.last = scale.or(self.last);
        Ok(scale)
    }

    fn of_epoch(&self, _mean: Option<f64>) -> Option<f64> {
        self.last
    }
}

fn read(value: Option<&Tensor<1>>) -> Result<Option<f64>, TensorReadError> {
    value.map(|value| value.clone().try_into_scalar::<f64>()).transpose()
}

/// Which number of a device's memory pools is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PoolQuantity {
    /// Used by live tensors.
    InUse,
    /// Taken from the device.
    Reserved,
}

/// A device's memory pools in MiB. The epoch's value is the peak since the training began. None
/// where the backend has no pools, as Burn's CPU backend.
#[derive(Clone, Debug)]
pub struct PoolUse {
    memory: MemoryMonitor,
    quantity: PoolQuantity,
}

impl PoolUse {
    /// Shows `quantity` of the pools of `device`.
    pub fn new(device: &Device, quantity: PoolQuantity) -> Self {
        Self { memory: MemoryMonitor::new(device), quantity }
    }

    fn pick(&self, memory: PoolMemory) -> f64 {
        let bytes = match self.quantity {
            PoolQuantity::InUse => memory.in_use_bytes,
            PoolQuantity::Reserved => memory.reserved_bytes,
        };
        bytes as f64 / f64::from(1 << 20)
    }
}

impl Gauge for PoolUse {
    type Input = ();

    fn name(&self) -> String {
        match self.quantity {
            PoolQuantity::InUse => "Memory in Use",
            PoolQuantity::Reserved => "Memory Reserved",
        }
        .to_owned()
    }

    fn unit(&self) -> Option<String> {
        Some("MiB".to_owned())
    }

    fn higher_is_better(&self) -> bool {
        false
    }

    fn measure(&mut self, (): &()) -> Result<Option<f64>, TensorReadError> {
        Ok(self.memory.read().map(|memory| self.pick(memory)))
    }

    fn of_epoch(&self, _mean: Option<f64>) -> Option<f64> {
        self.memory.peak().map(|memory| self.pick(memory))
    }
}
