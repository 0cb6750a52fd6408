//! The largest micro-batch that fits the device, found by trial.
//!
//! No formula knows what a model, an optimizer, fusion and the allocator need together. So [`auto_batch`] runs
//! training steps of growing micro-batches until the device runs out of memory, recovers, and closes in on the
//! limit. From the limit it derives a [`BatchPlan`] for the batch that is to be accumulated.
//!
//! ```
//! use blackburn_train::auto_batch::{AutoBatch, auto_batch};
//! use burn::{
//!     nn::LinearConfig,
//!     optim::{GradientsParams, SgdConfig},
//!     prelude::*,
//! };
//!
//! let device = Device::flex().autodiff();
//! let model = LinearConfig::new(4, 2).init(&device);
//! // On a CPU there is no memory limit to find: `limit` ends the search.
//! let options = AutoBatch { limit: Some(8), ..AutoBatch::new(20) };
//! let plan = auto_batch(&device, options, |micro_batch| {
//!     // A clone trains, so that a step that fails half-way leaves nothing behind.
//!     let mut optimizer = SgdConfig::new().init();
//!     let x = Tensor::<2>::ones([micro_batch, 4], &device);
//!     let loss = model.forward(x).powi_scalar(2).mean();
//!     let gradients = GradientsParams::from_grads(loss.backward(), &model);
//!     let _ = optimizer.step(0.0, model.clone(), gradients);
//!     device.sync()
//! })?;
//! assert_eq!((plan.micro_batch, plan.accumulation), (7, 3));
//! assert_eq!(plan.micro_batches().collect::<Vec<_>>(), [7, 7, 6]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use crate::memory::{self, MemoryMonitor};
use burn::tensor::Device;
use std::{
    any::Any,
    fmt,
    panic::{self, AssertUnwindSafe},
};

/// Divisors of the target this close to the largest micro-batch are preferred to it.
const NEAR: f64 = 0.9;

/// Options of [`auto_batch`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AutoBatch {
    /// Samples that one optimizer step is to see; at least 1.
    pub target: usize,
    /// No step with more samples than this is tried; at least one sample and its margin. `None` leaves the target, and the
    /// margin above it, as the only limit. Set it on a CPU, where running out of memory ends the
    /// program instead of the search.
    pub limit: Option<usize>,
    /// The share of the largest micro-batch that ran which is left unused, for what later steps
    /// need more: longer sequences, fragments of memory. At least 0, below 1.
    pub margin: f64,
}

impl AutoBatch {
    /// For batches of `target` samples, without a limit and with a margin of 0.1.
    pub fn new(target: usize) -> Self {
        Self { target, limit: None, margin: 0.1 }
    }

    /// What must have run for micro-batches of `size` samples, with the margin.
    fn trial(&self, size: usize) -> usize {
        (size as f64 / (1.0 - self.margin)).ceil() as usize
    }

    /// The plan when micro-batches of `ran` samples ran, `trial(1)` of them at least.
    fn plan(&self, ran: usize) -> BatchPlan {
        let target = self.target;
        // Rounding may put the quotient one off its trial, so the trial decides.
        let mut usable = target.min((ran as f64 * (1.0 - self.margin)) as usize + 1);
        while usable > 1 && self.trial(usable) > ran {
            usable -= 1;
        }
        let least = (usable as f64 * NEAR).ceil() as usize;
        let even = (least..=usable).rev().find(|size| target.is_multiple_of(*size));
        // As many passes as with the largest, and the last one nearly as large as the others.
        let micro_batch = even.unwrap_or_else(|| target.div_ceil(target.div_ceil(usable)));
        let accumulation = target.div_ceil(micro_batch);
        BatchPlan { target, micro_batch, accumulation, largest_run: ran }
    }

    fn validate<E>(&self) -> Result<(), AutoBatchError<E>> {
        let refuse = |option, expected: &str, actual: String| {
            Err(AutoBatchError::Option { option, expected: expected.into(), actual })
        };
        if self.target == 0 {
            return refuse("target", "at least 1", "0".into());
        }
        if !(0.0..1.0).contains(&self.margin) {
            return refuse("margin", "a number of at least 0 and below 1", self.margin.to_string());
        }
        match self.limit {
            Some(limit) if limit < self.trial(1) => {
                let least = self.trial(1);
                let expected = format!("at least {least}, a sample with its margin, or none");
                refuse("limit", &expected, limit.to_string())
            }
            _ => Ok(()),
        }
    }
}

/// How to reach a batch with micro-batches that fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    /// Samples of an optimizer step.
    pub target: usize,
    /// Samples of a forward and backward pass.
    pub micro_batch: usize,
    /// Passes in an optimizer step: the target over the micro-batch, rounded up.
    pub accumulation: usize,
    /// The largest micro-batch that was run, of which the margin was taken.
    pub largest_run: usize,
}

impl BatchPlan {
    /// The sizes of the passes of one optimizer step: all alike, except for a smaller last one where
    /// the target does not divide evenly. They are the weights for
    /// [`GradientSum`](crate::accumulate::GradientSum).
    pub fn micro_batches(&self) -> impl Iterator<Item = usize> + use<> {
        let Self { target, micro_batch, accumulation, .. } = *self;
        (0..accumulation).map(move |pass| micro_batch.min(target - pass * micro_batch))
    }
}

/// The reason why no plan was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AutoBatchError<E> {
    /// An option contradicts itself.
    #[error("auto_batch: option `{option}`: expected {expected}, got {actual}")]
    Option {
        /// The option.
        option: &'static str,
        /// What it must be.
        expected: String,
        /// What it is.
        actual: String,
    },
    /// Even the smallest step does not fit.
    #[error(
        "auto_batch: expected a step of {size} samples, the smallest with this margin, to fit the \
         device; it ran out of memory: {message}"
    )]
    NothingFits {
        /// The samples of the step.
        size: usize,
        /// What the device said.
        message: String,
    },
    /// The step failed, and not for lack of memory.
    #[error("auto_batch: the step failed: {0}")]
    Step(E),
    /// The device did not recover from running out of memory.
    #[error("auto_batch: the device did not recover from running out of memory: {0}")]
    Device(String),
}

/// Finds the largest micro-batch that fits `device`, and the plan for `options.target` samples.
///
/// `step` must run what training will run for a micro-batch of the given size: forward and backward passes and an
/// optimizer step, at the longest sequence that occurs. Then it must wait (`Device::sync`). If training accumulates
/// passes, add two of them up, since the sum of gradients needs memory too. Train a clone of the model and of the
/// optimizer's state: a step that runs out of memory half-way leaves results that later reads refuse.
///
/// Sizes double from the smallest that the margin allows to what the target needs. After the first that does not
/// fit, they are bisected for as long as that can change the plan. Each trial is logged through `tracing`. Trials
/// may compile kernels for their sizes, so the search takes longest in a fresh installation.
///
/// A step after which the device's pools hold more than the [limit](memory::limit) does not fit, either.
///
/// A lack of memory is recognized by what the error, or the panic in its stead, says
/// ([`names_lack_of_memory`]). The panic's own report still goes to the standard error output.
///
/// # Errors
///
/// If an option contradicts itself, `step` fails for another reason than a lack of memory (with that error),
/// nothing fits, or the device does not recover.
///
/// # Panics
///
/// If `step` panics for another reason than a lack of memory. A program compiled with `panic = "abort"` cannot
/// recover from any panic.
pub fn auto_batch<E: fmt::Debug + fmt::Display>(
    device: &Device,
    options: AutoBatch,
    mut step: impl FnMut(usize) -> Result<(), E>,
) -> Result<BatchPlan, AutoBatchError<E>> {
    options.validate()?;
    let most = options.trial(options.target).min(options.limit.unwrap_or(usize::MAX));
    let smallest = options.trial(1);
    if let Some(message) = attempt(device, smallest, &mut step)? {
        return Err(AutoBatchError::NothingFits { size: smallest, message });
    }
    let (mut fits, mut too_large) = (smallest, most.saturating_add(1));
    let micro_batch = |ran| options.plan(ran).micro_batch;
    while fits + 1 < too_large && micro_batch(fits) != micro_batch(too_large - 1) {
        // Doubling until something does not fit, bisecting from then on.
        let size = match too_large > most {
            true => fits.saturating_mul(2).min(most),
            false => fits + (too_large - fits) / 2,
        };
        match attempt(device, size, &mut step)? {
            None => fits = size,
            Some(_) => too_large = size,
        }
    }
    let plan = options.plan(fits);
    tracing::info!(?plan, "micro-batch found");
    Ok(plan)
}

/// Runs a step; what the device said if it ran out of memory.
fn attempt<E: fmt::Debug + fmt::Display>(
    device: &Device,
    size: usize,
    step: &mut impl FnMut(usize) -> Result<(), E>,
) -> Result<Option<String>, AutoBatchError<E>> {
    let message = match panic::catch_unwind(AssertUnwindSafe(|| step(size))) {
        Ok(Ok(())) => match beyond_limit(device) {
            Some(message) => message,
            None => {
                tracing::info!(micro_batch = size, "fits");
                return Ok(None);
            }
        },
        // An error may name its causes only when it is formatted for debugging.
        Ok(Err(error)) => match lack_of_memory(&format!("{error}\n{error:?}")) {
            Some(message) => message,
            None => return Err(AutoBatchError::Step(error)),
        },
        Err(payload) => match panic_message(&*payload).and_then(lack_of_memory) {
            Some(message) => message,
            None => panic::resume_unwind(payload),
        },
    };
    tracing::info!(micro_batch = size, message, "does not fit");
    recover(device).map_err(AutoBatchError::Device)?;
    Ok(Some(message))
}

/// What the device's pools have kept of a step, if it is more than the limit of memory.
fn beyond_limit(device: &Device) -> Option<String> {
    let limit = memory::limit()?;
    let reserved = MemoryMonitor::new(device).read()?.reserved_bytes;
    (reserved > limit).then(|| {
        format!(
            "it reserved {}, and the limit is {}",
            memory::shown(reserved),
            memory::shown(limit)
        )
    })
}

/// Waits until what the step had queued has failed too, and gives its memory back.
fn recover(device: &Device) -> Result<(), String> {
    let drain = || match device.sync() {
        Err(error) if !names_lack_of_memory(&format!("{error}\n{error:?}")) => {
            Err(error.to_string())
        }
        _ => Ok(()),
    };
    drain()?;
    device.memory_cleanup();
    drain()
}

fn panic_message(payload: &(dyn Any + Send)) -> Option<&str> {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied())
}

/// The line of `text` that tells of a lack of memory.
fn lack_of_memory(text: &str) -> Option<String> {
    text.lines().find(|line| names_lack_of_memory(line)).map(|line| line.trim().to_string())
}

/// Whether an error's or a panic's message tells that the device's memory, or the host's, did not
/// suffice.
///
/// In the words of the drivers of CUDA and Vulkan, of `wgpu`, and of CubeCL 0.11, whose errors reach
/// Burn's callers as text: `IoError::{OutOfMemory, BufferTooBig, PageSizesExhausted}` and
/// `LaunchError::OutOfMemory`.
pub fn names_lack_of_memory(message: &str) -> bool {
    let message = message.to_lowercase();
    [
        "out of memory",
        "out-of-memory",
        "out_of_memory",
        "outofmemory",
        "out of device memory",
        "out of host memory",
        "can't allocate buffer of size",
        "every page size the memory tracks still holds live allocations",
    ]
    .iter()
    .any(|words| message.contains(words))
}

#[cfg(test)]
mod tests;
