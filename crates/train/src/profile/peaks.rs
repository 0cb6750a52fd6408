//! What a device does at best, and what timing a kernel costs by itself.

use super::{ProfileError, median, wait_for};
use blackburn_backend::profile as backend;
use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor};
use serde::{Deserialize, Serialize};

/// Bytes of the tensor that is read, and of the one that is written. Together more than the caches of the
/// GPUs there are hold; each what WebGPU promises for a buffer.
const COPY_BYTES: usize = 128 << 20;
/// Largest side of the matrices.
const LARGEST_SIDE: usize = 4096;
/// A product that takes this long shows what a device can do.
const LONG_ENOUGH_US: f64 = 20e3;
/// Measurements, of which the best counts.
const ROUNDS: usize = 5;
/// Launches of the smallest kernel.
const SMALLEST_KERNELS: usize = 20;

/// What a device does at best.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peaks {
    /// Bytes read and written per second.
    pub bytes_per_second: f64,
    /// Floating-point operations per second in products of bf16 matrices, or of f16 where there is no
    /// bf16. `None` where the device has neither.
    pub flops_16_bit: Option<f64>,
    /// The same of f32 matrices, with the precision that the program computes them in.
    pub flops_f32: f64,
}

/// Where peaks are from.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum PeakSource {
    /// Measured at the end: see [`Peaks::measure`]. Where that fails, with a warning, there are no shares of
    /// the roofline.
    #[default]
    Measured,
    /// Given, from a data sheet for instance: see [`peak_flops`](crate::throughput::peak_flops).
    Given(Peaks),
    /// None: no shares of the roofline.
    Unknown,
}

impl PeakSource {
    pub(super) fn resolve(&self, device: &Device) -> Option<Peaks> {
        match self {
            Self::Measured => Peaks::measure(device)
                .inspect_err(|error| tracing::warn!("a profile without a roofline: {error}"))
                .ok(),
            Self::Given(peaks) => Some(peaks.clone()),
            Self::Unknown => None,
        }
    }
}

impl Peaks {
    pub(super) fn validate(&self) -> Result<(), ProfileError> {
        let all = [
            ("bytes_per_second", Some(self.bytes_per_second)),
            ("flops_16_bit", self.flops_16_bit),
            ("flops_f32", Some(self.flops_f32)),
        ];
        for (peak, actual) in all {
            if let Some(actual) = actual.filter(|actual| !(actual.is_finite() && *actual > 0.0)) {
                return Err(ProfileError::Peak { peak, actual });
            }
        }
        Ok(())
    }

    /// Operations per second with operands of elements of so many bytes.
    pub(super) fn flops(&self, element_bytes: u8) -> Option<f64> {
        match element_bytes {
            2 => self.flops_16_bit,
            4 => Some(self.flops_f32),
            _ => None,
        }
    }

    /// Measures what `device` does, with Burn's operations and in the way in which a profile times kernels: an
    /// element-wise operation that reads 128 MiB and writes as many, and products of square matrices, of side
    /// 4096 or as large as takes 20 ms.
    ///
    /// # Errors
    ///
    /// [`ProfileError::Observe`] on a CPU, [`ProfileError::Peaks`] where kernels are not timed or compute
    /// wrongly, for want of memory for instance.
    pub fn measure(device: &Device) -> Result<Self, ProfileError> {
        let device = device.clone().without_autodiff();
        let untimed = || ProfileError::Peaks { reason: "the runtime times no kernels".into() };
        let measured = Meter { floor_us: launch_floor_us(&device)?.ok_or_else(untimed)?, device };
        let sixteen = [FloatDType::BF16, FloatDType::F16]
            .into_iter()
            .find(|dtype| measured.device.supports_dtype(*dtype));
        Ok(Self {
            bytes_per_second: measured.copy()?,
            flops_16_bit: sixteen.map(|dtype| measured.product(dtype)).transpose()?,
            flops_f32: measured.product(FloatDType::F32)?,
        })
    }
}

struct Meter {
    device: Device,
    floor_us: f64,
}

impl Meter {
    /// Bytes read and written per second.
    fn copy(&self) -> Result<f64, ProfileError> {
        let source = Tensor::<1>::ones([COPY_BYTES / 4], (&self.device, DType::F32));
        let (time_us, doubled) = self.best(|| source.clone().mul_scalar(2.0))?;
        let last = doubled.narrow(0, COPY_BYTES / 4 - 1, 1);
        is_right("a copy", last, 2.0)?;
        Ok(2.0 * COPY_BYTES as f64 / (time_us * 1e-6))
    }

    /// Operations per second of products.
    fn product(&self, dtype: FloatDType) -> Result<f64, ProfileError> {
        let mut side = 512;
        loop {
            // Powers of two: the sum is exact in any order and type.
            let ones = Tensor::<2>::ones([side, side], (&self.device, DType::F32)).cast(dtype);
            let random =
                Tensor::<2>::random([side, side], Distribution::Uniform(-1.0, 1.0), &self.device);
            let random = random.cast(dtype);
            let (_, sums) = self.best(|| ones.clone().matmul(ones.clone()))?;
            let corner = sums.slice([side - 1..side, side - 1..side]);
            is_right("a product", corner.cast(FloatDType::F32).flatten(0, 1), side as f32)?;
            let (time_us, _) = self.best(|| random.clone().matmul(random.clone()))?;
            if side == LARGEST_SIDE || time_us >= LONG_ENOUGH_US {
                return Ok(2.0 * (side as f64).powi(3) / (time_us * 1e-6));
            }
            side *= 2;
        }
    }

    /// The shortest time of the kernels of `work`, and a result.
    fn best<T>(&self, work: impl Fn() -> T) -> Result<(f64, T), ProfileError> {
        let untimed = || ProfileError::Peaks { reason: "a kernel was not timed".into() };
        // Kernels are compiled here.
        let mut best = (f64::INFINITY, backend::observe(&self.device, &work)?.0);
        for _ in 0..ROUNDS {
            let (result, blocks) = backend::observe(&self.device, &work)?;
            let times: Option<Vec<_>> =
                blocks.iter().flat_map(|block| &block.launches).map(|launch| launch.time).collect();
            let times = times.filter(|times| !times.is_empty()).ok_or_else(untimed)?;
            let each = times.iter().map(|time| (time.as_secs_f64() * 1e6 - self.floor_us).max(0.0));
            let time_us: f64 = each.sum();
            if time_us > 0.0 && time_us < best.0 {
                best = (time_us, result);
            }
        }
        if best.0.is_finite() { Ok(best) } else { Err(untimed()) }
    }
}

/// A kernel that did not run is fast.
fn is_right(what: &str, value: Tensor<1>, expected: f32) -> Result<(), ProfileError> {
    let wrong = |reason: String| ProfileError::Peaks { reason: format!("{what} {reason}") };
    let data = value.try_into_data().map_err(|error| wrong(format!("failed: {error}")))?;
    match data.as_slice::<f32>() {
        Ok([actual]) if *actual == expected => Ok(()),
        other => Err(wrong(format!("came out as {other:?} instead of {expected}"))),
    }
}

/// What the smallest kernel measures, in microseconds: an addition to one number. `None` where the
/// runtime times no kernels.
pub(super) fn launch_floor_us(device: &Device) -> Result<Option<f64>, ProfileError> {
    let one = Tensor::<1>::ones([1], device);
    let work = || {
        (0..SMALLEST_KERNELS).try_for_each(|_| {
            let sum = one.clone().add_scalar(1.0);
            let done = wait_for(device);
            drop(sum);
            done
        })
    };
    work()?;
    let (done, blocks) = backend::observe(device, work)?;
    done?;
    let launches = blocks.iter().flat_map(|block| &block.launches);
    let times: Vec<_> =
        launches.filter_map(|launch| launch.time).map(|time| time.as_secs_f64() * 1e6).collect();
    Ok((!times.is_empty()).then(|| median(times)))
}
