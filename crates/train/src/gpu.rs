//! Utilization, temperature and power of NVIDIA GPUs.
//!
//! The driver's management library (NVML) is loaded at run time. A program built with the feature `nvml` therefore
//! starts everywhere, and [`GpuMonitor::open`] says so if there is no NVIDIA driver.

use std::ffi::OsStr;
use std::sync::Arc;

use nvml_wrapper::{Device, Nvml, enum_wrappers::device::TemperatureSensor, error::NvmlError};

/// Why a GPU cannot be watched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// There is no NVIDIA driver, or it does not work.
    #[error("GpuMonitor::open: the NVIDIA driver's management library is not available: {0}")]
    Driver(#[source] NvmlError),
    /// The driver has no such GPU.
    #[error("GpuMonitor::open: argument `gpu`: expected {expected}, got {actual}: {source}")]
    NoSuchGpu {
        /// What would do.
        expected: String,
        /// What was asked for.
        actual: String,
        /// The driver's reason.
        source: NvmlError,
    },
}

/// Which GPU is meant.
///
/// The driver counts all GPUs of the machine by their place on the bus. CUDA counts those that
/// `CUDA_VISIBLE_DEVICES` leaves, the fastest first unless `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gpu {
    /// By the driver's count, as `nvidia-smi` shows it.
    Index(u32),
    /// By its identifier, as `nvidia-smi -L` shows it: `GPU-…`.
    Uuid(String),
}

/// A reading of a GPU. A value is `None` if the board does not measure it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GpuReading {
    /// Share of the driver's last sampling period (between 1/6 s and 1 s) in which a kernel ran,
    /// in percent (NVML's reference, `nvmlUtilization_t`). It says that the GPU was not idle, not
    /// that it was used well.
    pub utilization_percent: Option<f64>,
    /// Temperature of the chip in degrees Celsius.
    pub temperature_celsius: Option<f64>,
    /// Power drawn by the board in watts.
    pub power_watts: Option<f64>,
}

/// Watches one GPU through the driver. Copies share the connection.
#[derive(Clone, Debug)]
pub struct GpuMonitor {
    nvml: Arc<Nvml>,
    gpu: Gpu,
}

impl GpuMonitor {
    /// Connects to the driver and looks `gpu` up.
    ///
    /// # Errors
    ///
    /// [`GpuError::Driver`] where there is no working NVIDIA driver, [`GpuError::NoSuchGpu`] where
    /// it does not know the GPU.
    pub fn open(gpu: Gpu) -> Result<Self, GpuError> {
        Self::connect(Nvml::init(), gpu)
    }

    /// [`open`](Self::open), with the library at `path` instead of the driver's usual one.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open).
    pub fn open_with_library(path: impl AsRef<OsStr>, gpu: Gpu) -> Result<Self, GpuError> {
        Self::connect(Nvml::builder().lib_path(path.as_ref()).init(), gpu)
    }

    fn connect(nvml: Result<Nvml, NvmlError>, gpu: Gpu) -> Result<Self, GpuError> {
        let monitor = Self { nvml: Arc::new(nvml.map_err(GpuError::Driver)?), gpu };
        if let Err(source) = monitor.device() {
            let count = monitor.nvml.device_count().unwrap_or_default();
            return Err(GpuError::NoSuchGpu {
                expected: format!("one of the driver's {count} GPUs"),
                actual: format!("{:?}", monitor.gpu),
                source,
            });
        }
        Ok(monitor)
    }

    /// The driver's name of the GPU, as [`peak_flops`](crate::throughput::peak_flops) expects it.
    /// `None` if the driver fails.
    pub fn name(&self) -> Option<String> {
        self.device().ok()?.name().ok()
    }

    /// Reads the GPU's values. Nothing waits for the GPU's work.
    pub fn read(&self) -> GpuReading {
        GpuReading {
            utilization_percent: self.utilization_percent(),
            temperature_celsius: self.temperature_celsius(),
            power_watts: self.power_watts(),
        }
    }

    /// Reads the utilization alone.
    pub fn utilization_percent(&self) -> Option<f64> {
        Some(f64::from(self.device().ok()?.utilization_rates().ok()?.gpu))
    }

    /// Reads the temperature alone.
    pub fn temperature_celsius(&self) -> Option<f64> {
        Some(f64::from(self.device().ok()?.temperature(TemperatureSensor::Gpu).ok()?))
    }

    /// Reads the power alone.
    pub fn power_watts(&self) -> Option<f64> {
        // The driver counts milliwatts.
        Some(f64::from(self.device().ok()?.power_usage().ok()?) / 1e3)
    }

    fn device(&self) -> Result<Device<'_>, NvmlError> {
        match &self.gpu {
            Gpu::Index(index) => self.nvml.device_by_index(*index),
            Gpu::Uuid(uuid) => self.nvml.device_by_uuid(uuid.as_str()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_driver_is_an_error_that_says_so() {
        let error = GpuMonitor::open_with_library("/nowhere/libnvidia-ml.so", Gpu::Index(0))
            .expect_err("there is no such library");
        assert!(matches!(error, GpuError::Driver(_)), "{error:?}");
        let error = error.to_string();
        assert!(error.contains("driver") && error.contains("/nowhere/"), "{error}");
    }

    /// With a driver: every value that the board measures is in a range that a GPU survives.
    #[test]
    fn readings_are_plausible_where_there_is_a_driver() {
        let monitor = match GpuMonitor::open(Gpu::Index(0)) {
            Ok(monitor) => monitor,
            Err(error) => return println!("not checked: {error}"),
        };
        let reading = monitor.read();
        let within =
            |value: Option<f64>, most: f64| value.is_none_or(|v| (0.0..=most).contains(&v));
        assert!(within(reading.utilization_percent, 100.0), "{reading:?}");
        assert!(within(reading.temperature_celsius, 120.0), "{reading:?}");
        assert!(within(reading.power_watts, 2000.0), "{reading:?}");
        assert!(monitor.name().is_some_and(|name| !name.is_empty()));
        let error = GpuMonitor::open(Gpu::Index(9999)).expect_err("nobody has that many");
        assert!(matches!(error, GpuError::NoSuchGpu { .. }), "{error}");
    }
}
