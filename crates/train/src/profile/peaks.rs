//! What a device does at best, and what timing a kernel costs by itself.

use super::{ProfileError, median, wait_for};
use blackburn_backend::profile as backend;
use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Bytes of the tensor that is copied. Larger than the caches of the GPUs there are.
const COPY_BYTES: usize = 256 << 20;
/// Largest side of the matrices.
const LARGEST_SIDE: usize = 4096;
/// A product that takes this long shows what a device can do.
const LONG_ENOUGH: Duration = Duration::from_millis(20);
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
    /// Measured at the end, with Burn's operations: an element-wise operation that reads and writes 256 MiB, and
    /// products of square matrices, of side 4096 or as large as takes 20 ms.
    #[default]
    Measured,
    /// Given, from a data sheet for instance: see [`peak_flops`](crate::throughput::peak_flops).
    Given(Peaks),
    /// None: no shares of the roofline.
    Unknown,
}

impl PeakSource {
    pub(super) fn resolve(&self, device: &Device) -> Result<Option<Peaks>, ProfileError> {
        match self {
            Self::Measured => Peaks::measure(device).map(Some),
            Self::Given(peaks) => Ok(Some(peaks.clone())),
            Self::Unknown => Ok(None),
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

    /// Measures what `device` does.
    ///
    /// # Errors
    ///
    /// [`ProfileError::Device`].
    pub fn measure(device: &Device) -> Result<Self, ProfileError> {
        let device = device.clone().without_autodiff();
        let source = Tensor::<1>::ones([COPY_BYTES / 4], (&device, DType::F32));
        let copy = best(&device, || source.clone().mul_scalar(2.0))?;
        drop(source);
        let sixteen = [FloatDType::BF16, FloatDType::F16]
            .into_iter()
            .find(|dtype| device.supports_dtype(*dtype));
        Ok(Self {
            bytes_per_second: 2.0 * COPY_BYTES as f64 / copy.as_secs_f64(),
            flops_16_bit: sixteen.map(|dtype| product(&device, dtype)).transpose()?,
            flops_f32: product(&device, FloatDType::F32)?,
        })
    }
}

/// Operations per second of products.
fn product(device: &Device, dtype: FloatDType) -> Result<f64, ProfileError> {
    let mut side = 512;
    loop {
        let random = || {
            Tensor::<2>::random([side, side], Distribution::Uniform(-1.0, 1.0), device).cast(dtype)
        };
        let (lhs, rhs) = (random(), random());
        let time = best(device, || lhs.clone().matmul(rhs.clone()))?;
        if side == LARGEST_SIDE || time >= LONG_ENOUGH {
            return Ok(2.0 * (side as f64).powi(3) / time.as_secs_f64());
        }
        side *= 2;
    }
}

/// The shortest time of `work`, begun and ended with the device idle. Its result is kept until then: work
/// whose results are let go of before it ran need not run.
fn best<T>(device: &Device, work: impl Fn() -> T) -> Result<Duration, ProfileError> {
    let mut best = Duration::MAX;
    // The first compiles the kernel.
    for round in 0..=ROUNDS {
        wait_for(device)?;
        let started = Instant::now();
        let result = work();
        wait_for(device)?;
        let time = started.elapsed();
        drop(result);
        if round > 0 {
            best = best.min(time);
        }
    }
    Ok(best.max(Duration::from_nanos(1)))
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
