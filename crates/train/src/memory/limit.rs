//! A limit to what the process takes of a device's memory.

use super::{MemoryEstimate, MemoryMonitor, PoolMemory, release, shown};
use burn::tensor::{Device, ExecutionError};
use std::sync::atomic::{AtomicU64, Ordering};

/// What `blackburn::init` was told, in bytes; 0 is no limit.
static LIMIT_BYTES: AtomicU64 = AtomicU64::new(0);

/// What takes less memory.
const LESS: &str = "Take smaller micro-batches and more of them (TrainerConfig::with_micro_batches), recompute \
    activations (Device::gradient_checkpointing), compute the loss in chunks \
    (blackburn::nn::loss::linear_cross_entropy) or split the optimizer's state over GPUs \
    (TrainerConfig::with_sharded_optimizer)";

/// Why memory does not suffice.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The device's pools took more than the limit.
    #[error(
        "out of memory: the device's pools reserved {}, of which {} are in use now, and the limit is {}. {LESS}, or \
         raise the limit (BLACKBURN_MEMORY_LIMIT or Config::memory_limit)",
        shown(*reserved_bytes), shown(*in_use_bytes), shown(*limit_bytes)
    )]
    Limit {
        /// What the pools took from the device.
        reserved_bytes: u64,
        /// What tensors lie in.
        in_use_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// A training cannot fit.
    #[error(
        "out of memory before the start: a step needs at least {}, and there is {}. It is {}. {LESS}",
        shown(estimate.expected_bytes()), shown(*available_bytes), estimate.line()
    )]
    TooLarge {
        /// What it needs.
        estimate: Box<MemoryEstimate>,
        /// What there is: the limit, or all of the device.
        available_bytes: u64,
    },
    /// The device failed.
    #[error("MemoryWatch::check: the device failed: {0}")]
    Device(#[from] ExecutionError),
}

/// Limits the memory that the process takes of each device, from now on. `blackburn::init` calls it with
/// `Config::memory_limit`. See [`MemoryWatch`] on what a limit does.
pub fn set_limit(bytes: Option<u64>) {
    LIMIT_BYTES.store(bytes.unwrap_or_default(), Ordering::Relaxed);
}

/// The limit in bytes, where there is one.
pub fn limit() -> Option<u64> {
    Some(LIMIT_BYTES.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0)
}

/// Checks what a device's pools have taken against the [`limit`].
///
/// CubeCL, which takes the memory, knows no limit and has no place to ask before it takes more. So a limit is checked
/// and not enforced: a step may go beyond it, and the check after it says so. Pools keep what a step needed, so that
/// no step goes beyond it unnoticed. What they do not hold is not counted: the CUDA context and compiled kernels (some
/// hundred MiB on NVIDIA GPUs), and buffers of NCCL. A CPU has no pools, and no limit holds there.
///
/// A [`Trainer`](crate::trainer::Trainer) has a watch of its own. In a plain loop, check after each step, or now and
/// then:
///
/// ```
/// use blackburn_train::memory::MemoryWatch;
/// use burn::tensor::Device;
///
/// let device = Device::flex();
/// let mut watch = MemoryWatch::new(&device);
/// for _step in 0..3 {
///     // ... a step of training
///     watch.check()?;
/// }
/// # Ok::<(), blackburn_train::memory::MemoryError>(())
/// ```
#[derive(Clone, Debug)]
pub struct MemoryWatch {
    device: Device,
    monitor: MemoryMonitor,
    /// The last check found more than the limit, and gave back what was not in use.
    was_beyond: bool,
}

impl MemoryWatch {
    /// Watches `device`.
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), monitor: MemoryMonitor::new(device), was_beyond: false }
    }

    /// Compares what the pools have taken with the limit. Does nothing without a limit; with one, it waits until the
    /// host has handed its work to the device.
    ///
    /// Pools may hold what an earlier phase needed. So where they hold more than the limit, what is not in use is given
    /// back at first, with a warning. The error comes where the rest is still too much, and where the next check finds
    /// the same again.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Limit`], and [`MemoryError::Device`] when something went wrong on the device earlier.
    pub fn check(&mut self) -> Result<(), MemoryError> {
        let Some(limit) = limit() else { return Ok(()) };
        let Some(taken) = self.monitor.read() else { return Ok(()) };
        if taken.reserved_bytes <= limit {
            self.was_beyond = false;
            return Ok(());
        }
        if self.was_beyond {
            return Err(beyond(taken, limit));
        }
        let released = release(&self.device)?;
        match self.monitor.read() {
            Some(left) if left.reserved_bytes > limit => {
                Err(beyond(PoolMemory { in_use_bytes: left.in_use_bytes, ..taken }, limit))
            }
            _ => {
                tracing::warn!(
                    "the device's pools reserved {}, and the limit is {}: gave back {} that nothing used",
                    shown(taken.reserved_bytes),
                    shown(limit),
                    shown(released)
                );
                self.was_beyond = true;
                Ok(())
            }
        }
    }
}

fn beyond(memory: PoolMemory, limit_bytes: u64) -> MemoryError {
    let PoolMemory { in_use_bytes, reserved_bytes } = memory;
    MemoryError::Limit { reserved_bytes, in_use_bytes, limit_bytes }
}
