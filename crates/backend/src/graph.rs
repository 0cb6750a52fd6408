//! Recording a device's work once, to have it done again by one command.
//!
//! CUDA records what is launched into a graph whose replay costs the host microseconds, whatever the
//! number of kernels; WebGPU's runtime keeps a list of its own. What is recorded are addresses:
//! `blackburn_train::graph` keeps what lies there in order.

#[cfg(feature = "gpu")]
use burn::backend::{Backend, Dispatch, DispatchDevice};
use burn::tensor::Device;
#[cfg(feature = "gpu")]
use burn_backend::{BackendGraph, ExecutionError};
use std::sync::atomic::{AtomicU64, Ordering};

static REPLAYS: AtomicU64 = AtomicU64::new(0);

/// Why a device's work is not recorded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// The device has no graphs: a CPU.
    #[error("{device} records no graphs; only GPUs do")]
    Unsupported {
        /// The device.
        device: String,
    },
    /// The runtime refused, for instance because of an allocation or a transfer in between.
    #[error("{step} of a graph failed: {reason}")]
    Refused {
        /// What was asked.
        step: &'static str,
        /// What the runtime said.
        reason: String,
    },
}

/// Whether `device` may record.
pub fn is_supported(device: &Device) -> bool {
    crate::device::is_gpu(&device.clone().without_autodiff())
}

/// Replays that the process asked for so far. Nobody sees the kernels of a replay, so a profile has to know
/// that there was one.
pub fn replays() -> u64 {
    REPLAYS.load(Ordering::Relaxed)
}

/// Gets `device` ready to record on this thread. What runs from here until [`start`] is warm-up: it
/// allocates what the recording will use again.
///
/// # Errors
///
/// [`GraphError`], after which nothing has changed.
pub fn prepare(device: &Device) -> Result<(), GraphError> {
    #[cfg(feature = "gpu")]
    return ask(device, "preparation", Dispatch::graph_prepare);
    #[cfg(not(feature = "gpu"))]
    Err(unsupported(device))
}

/// Records what this thread launches on `device`, instead of running it, until [`stop`]. Nothing may be
/// read, transferred or allocated in between.
///
/// # Errors
///
/// [`GraphError`], after which the device works as before.
pub fn start(device: &Device) -> Result<(), GraphError> {
    #[cfg(feature = "gpu")]
    return ask(device, "start", Dispatch::graph_start_capture);
    #[cfg(not(feature = "gpu"))]
    Err(unsupported(device))
}

/// Ends the recording.
///
/// # Errors
///
/// [`GraphError`], where what was recorded cannot be replayed. The device works as before, but what was
/// launched in between never ran.
pub fn stop(device: &Device) -> Result<Graph, GraphError> {
    #[cfg(feature = "gpu")]
    return ask(device, "end", Dispatch::graph_stop_capture)
        .map(|recorded| Graph { recorded, device: device.clone() });
    #[cfg(not(feature = "gpu"))]
    Err(unsupported(device))
}

/// Recorded work.
pub struct Graph {
    #[cfg(feature = "gpu")]
    recorded: BackendGraph<Dispatch>,
    /// Without a GPU backend there is none.
    #[cfg(not(feature = "gpu"))]
    recorded: std::convert::Infallible,
    device: Device,
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Graph {
    /// Has the recorded work done again, behind all that this thread asked of the device before.
    ///
    /// # Safety
    ///
    /// Every tensor that the recorded work read from outside or wrote must still have its memory, and no
    /// other thread may use it before this work is done.
    ///
    /// # Errors
    ///
    /// [`GraphError::Refused`] where the device did not take the command.
    pub unsafe fn replay(&self) -> Result<(), GraphError> {
        #[cfg(feature = "gpu")]
        {
            REPLAYS.fetch_add(1, Ordering::Relaxed);
            // SAFETY: the caller's.
            unsafe { Dispatch::graph_replay(self.device.as_dispatch(), &self.recorded) }
                .map_err(|error| refused("replay", &error))
        }
        #[cfg(not(feature = "gpu"))]
        match self.recorded {}
    }
}

#[cfg(feature = "gpu")]
fn ask<T>(
    device: &Device,
    step: &'static str,
    question: impl FnOnce(&DispatchDevice) -> Result<T, ExecutionError>,
) -> Result<T, GraphError> {
    let device = device.clone().without_autodiff();
    if !crate::device::is_gpu(&device) {
        return Err(unsupported(&device));
    }
    question(device.as_dispatch()).map_err(|error| refused(step, &error))
}

fn unsupported(device: &Device) -> GraphError {
    GraphError::Unsupported { device: format!("{device:?}") }
}

#[cfg(feature = "gpu")]
fn refused(step: &'static str, error: &ExecutionError) -> GraphError {
    GraphError::Refused { step, reason: error.to_string() }
}
