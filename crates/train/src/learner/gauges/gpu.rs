//! What the driver says of a GPU, as gauges.

use burn::tensor::TensorReadError;

use super::Gauge;
use crate::gpu::{GpuError, GpuMonitor};

/// Which of the driver's readings is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GpuQuantity {
    /// Share of the time in which a kernel ran.
    Utilization,
    /// Temperature of the chip.
    Temperature,
    /// Power drawn by the board.
    Power,
}

/// Utilization, temperature or power of an NVIDIA GPU, as the driver gives it at each item. The
/// epoch's value is the mean. None without a driver.
#[derive(Clone, Debug)]
pub struct GpuGauge {
    monitor: Option<GpuMonitor>,
    quantity: GpuQuantity,
}

impl GpuGauge {
    /// Utilization, temperature and power, in this order. Where the GPU cannot be watched the
    /// reason is written to the error output, once, and the gauges have no values.
    pub fn all(monitor: Result<GpuMonitor, GpuError>) -> [Self; 3] {
        let monitor =
            monitor.inspect_err(|error| eprintln!("GPU metrics are unavailable: {error}")).ok();
        [GpuQuantity::Utilization, GpuQuantity::Temperature, GpuQuantity::Power]
            .map(|quantity| Self { monitor: monitor.clone(), quantity })
    }

    /// One reading of a GPU that can be watched.
    pub fn new(monitor: GpuMonitor, quantity: GpuQuantity) -> Self {
        Self { monitor: Some(monitor), quantity }
    }
}

impl Gauge for GpuGauge {
    type Input = ();

    fn name(&self) -> String {
        match self.quantity {
            GpuQuantity::Utilization => "GPU Utilization",
            GpuQuantity::Temperature => "GPU Temperature",
            GpuQuantity::Power => "GPU Power",
        }
        .to_owned()
    }

    fn unit(&self) -> Option<String> {
        let unit = match self.quantity {
            GpuQuantity::Utilization => "%",
            GpuQuantity::Temperature => "°C",
            GpuQuantity::Power => "W",
        };
        Some(unit.to_owned())
    }

    fn higher_is_better(&self) -> bool {
        self.quantity == GpuQuantity::Utilization
    }

    fn measure(&mut self, (): &()) -> Result<Option<f64>, TensorReadError> {
        let Some(monitor) = &self.monitor else { return Ok(None) };
        Ok(match self.quantity {
            GpuQuantity::Utilization => monitor.utilization_percent(),
            GpuQuantity::Temperature => monitor.temperature_celsius(),
            GpuQuantity::Power => monitor.power_watts(),
        })
    }
}
