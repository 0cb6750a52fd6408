//! Recording a device's work once, to have it done again by one command.
//!
//! CUDA records what is launched into a graph. A replay costs the host microseconds, whatever the number
//! of kernels. WebGPU's runtime keeps a list of its own. A recording holds addresses:
//! `blackburn_train::graph` takes care of what lies there.

#[cfg(feature = "gpu")]
mod progress;
#[cfg(not(feature = "gpu"))]
#[path = "no_progress.rs"]
mod progress;

pub use progress::{Milestones, Progress};

#[cfg(feature = "gpu")]
use crate::{
    ops::{attention::mask_maps, copies, fp8_linear::marked, written},
    random,
    tensors::kept_casts,
};
#[cfg(feature = "gpu")]
use burn::backend::{Backend, BackendTensor, Dispatch, DispatchDevice, DispatchTensorKind};
use burn::tensor::{DType, Device, Tensor, kind};
#[cfg(feature = "gpu")]
use burn_backend::{BackendGraph, ExecutionError};
#[cfg(feature = "cuda")]
use burn_cubecl::fusion::FusionCubeRuntime;
#[cfg(feature = "cuda")]
use burn_fusion::client::GlobalFusionClient;
#[cfg(feature = "gpu")]
use burn_std::id::StreamId;
use std::{
    cell::Cell,
    sync::atomic::{AtomicU64, Ordering},
};

static REPLAYS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static RECORDING: Cell<bool> = const { Cell::new(false) };
}

/// Whether what this thread launches is recorded.
pub(crate) fn is_recording() -> bool {
    RECORDING.get()
}

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

impl GraphError {
    /// Bytes for which a recording found no room, where it failed for that: no memory is added while a device records.
    /// [`hold_spare`] has it held.
    pub fn missing_bytes(&self) -> Option<usize> {
        // CubeCL's `IoError::PageUpdateForbidden`, of which Burn passes on the text.
        let Self::Refused { reason, .. } = self else { return None };
        let (_, size) = reason.split_once("No room for ")?;
        size.split_once(" bytes in the memory held")?.0.parse().ok()
    }
}

/// Memory that nothing else takes as long as this is held.
#[derive(Debug)]
pub struct Spare {
    _memory: Option<Tensor<1>>,
}

/// Has `device` hold so many bytes besides what work takes that is asked for from here on: when the result is dropped, the
/// device has them for a recording that finds its memory in another order than the work did.
///
/// # Errors
///
/// As [`hand_over`].
pub fn hold_spare(device: &Device, bytes: usize) -> Result<Spare, GraphError> {
    let device = device.clone().without_autodiff();
    let elements = bytes.div_ceil(size_of::<f32>());
    let memory = (bytes > 0).then(|| Tensor::empty([elements], (&device, DType::F32)));
    if memory.is_some() {
        hand_over(&device)?;
    }
    Ok(Spare { _memory: memory })
}

/// Whether `device` may record.
pub fn is_supported(device: &Device) -> bool {
    crate::tensors::is_gpu(&device.clone().without_autodiff())
}

/// Replays that the process asked for so far. A profile cannot see the kernels of a replay, so it has to
/// know that there was one.
pub fn replays() -> u64 {
    REPLAYS.load(Ordering::Relaxed)
}

/// A queue of commands to devices. Commands of one queue are done in order; those of two are not. Burn gives
/// each thread a queue of its own, unless it is told otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    #[cfg(feature = "gpu")]
    stream: StreamId,
}

impl Queue {
    /// The queue that this thread's commands go to.
    pub fn current() -> Self {
        Self {
            #[cfg(feature = "gpu")]
            stream: StreamId::current(),
        }
    }

    /// Waits until `device` has done all that was asked of it in this queue, by any thread.
    ///
    /// # Errors
    ///
    /// [`GraphError::Refused`] when some of that failed.
    pub fn wait(self, device: &Device) -> Result<(), GraphError> {
        #[cfg(feature = "gpu")]
        let done = self.stream.executes(|| device.sync());
        #[cfg(not(feature = "gpu"))]
        let done = device.sync();
        done.map_err(|error| GraphError::Refused { step: "wait", reason: error.to_string() })
    }
}

/// Which value a tensor of a GPU is. Clones of a tensor are the same value as long as they stay in one
/// queue. What is computed anew is another one, even in the same memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    #[cfg(feature = "gpu")]
    id: burn_ir::TensorId,
}

impl Identity {
    /// That of `tensor`. `None` on CPUs.
    pub fn of<const D: usize, K: kind::Autodiff>(tensor: Tensor<D, K>) -> Option<Self> {
        #[cfg(feature = "gpu")]
        return match tensor.without_autodiff().into_dispatch().kind {
            DispatchTensorKind::Cube(
                BackendTensor::Float(plain)
                | BackendTensor::Int(plain)
                | BackendTensor::Bool(plain)
                | BackendTensor::Quantized(plain),
            ) => Some(Self { id: plain.id }),
            _ => None,
        };
        #[cfg(not(feature = "gpu"))]
        {
            drop(tensor);
            None
        }
    }

    /// As the stream knows it.
    #[cfg(feature = "gpu")]
    pub(crate) fn id(self) -> burn_ir::TensorId {
        self.id
    }
}

/// Has all that this thread asked `device` for run as far as the host is concerned: launched on CUDA, submitted elsewhere.
///
/// `Device::flush` does so, too. On CUDA it also waits until the device has done all that it was asked for up to the
/// flush before, where anything was copied to the device since: two flushes in a step would make the host wait for
/// the whole step.
///
/// # Errors
///
/// [`GraphError::Refused`] when the device's thread has failed.
pub fn hand_over(device: &Device) -> Result<(), GraphError> {
    let failed = |reason: String| GraphError::Refused { step: "hand-over", reason };
    #[cfg(feature = "cuda")]
    if let DispatchDevice::Cube(cube @ cubecl::Device::Cuda(_)) =
        device.clone().without_autodiff().as_dispatch()
    {
        let client = GlobalFusionClient::<FusionCubeRuntime>::load(cube);
        return client.try_sync(|| ()).map_err(|error| failed(format!("{error:?}")));
    }
    device.flush().map_err(|error| failed(error.to_string()))
}

/// A pass of this thread that warms up for one that is to be recorded, until it is dropped.
#[derive(Debug)]
#[must_use = "the pass ends when this is dropped"]
pub struct WarmUp(());

/// Begins a pass of this thread that warms up for one that is to be recorded. It has to take the memory that the other one
/// will take: it lets go of what products of earlier passes keep for later ones, codes in 8 bits, and keeps what calls
/// of one pass share, maps of masks.
pub fn begin_pass() -> WarmUp {
    #[cfg(feature = "gpu")]
    {
        marked::forget_casts();
        mask_maps::begin();
        kept_casts::pause();
    }
    WarmUp(())
}

impl Drop for WarmUp {
    fn drop(&mut self) {
        #[cfg(feature = "gpu")]
        {
            mask_maps::end();
            kept_casts::resume();
        }
    }
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
    return ask(device, "start", Dispatch::graph_start_capture).inspect(|()| {
        RECORDING.set(true);
        copies::record(true);
        mask_maps::begin();
        kept_casts::pause();
        // What was cast before may have other numbers when this is replayed.
        marked::forget_casts();
    });
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
    {
        let recorded = ask(device, "end", Dispatch::graph_stop_capture);
        RECORDING.set(false);
        copies::record(false);
        mask_maps::end();
        kept_casts::resume();
        random::leave_pass();
        // What was recorded has not been cast.
        marked::forget_casts();
        recorded.map(|recorded| Graph { recorded, device: device.clone() })
    }
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
    /// Has the recorded work done again, behind all that this queue was asked for before.
    ///
    /// # Safety
    ///
    /// The calling thread's [`Queue`] must be the one that recorded. Every tensor that the recorded work
    /// reads from outside or writes must still have its memory, and no other queue may use it before this
    /// work is done.
    ///
    /// # Errors
    ///
    /// [`GraphError::Refused`] where the device did not take the command.
    pub unsafe fn replay(&self) -> Result<(), GraphError> {
        #[cfg(feature = "gpu")]
        {
            REPLAYS.fetch_add(1, Ordering::Relaxed);
            // SAFETY: the caller's.
            let replayed =
                unsafe { Dispatch::graph_replay(self.device.as_dispatch(), &self.recorded) };
            // A replay writes without a word to those who hold the memory.
            written::forget_all();
            replayed.map_err(|error| refused("replay", &error))
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
    if !crate::tensors::is_gpu(&device) {
        return Err(unsupported(&device));
    }
    question(device.as_dispatch()).map_err(|error| refused(step, &error))
}

/// The client of a GPU.
#[cfg(feature = "gpu")]
fn client(device: &Device) -> Option<cubecl::client::Client> {
    match device.as_dispatch() {
        DispatchDevice::Cube(cube) => Some(cube.client()),
        _ => None,
    }
}

fn unsupported(device: &Device) -> GraphError {
    GraphError::Unsupported { device: format!("{device:?}") }
}

#[cfg(feature = "gpu")]
fn refused(step: &'static str, error: &ExecutionError) -> GraphError {
    GraphError::Refused { step, reason: error.to_string() }
}

#[cfg(all(test, feature = "gpu"))]
mod tests {
    use super::*;
    use cubecl::server::IoError;

    #[test]
    fn what_a_recording_lacked_is_read_from_what_cubecl_says() {
        let size = 268_435_456;
        let lacking = IoError::PageUpdateForbidden { size, backtrace: Default::default() };
        let refused = |reason| GraphError::Refused { step: "end", reason };
        let wrapped = format!("An error happened during execution\nCaused by:\n  {lacking}");
        assert_eq!(refused(wrapped).missing_bytes(), Some(268_435_456));
        let other = IoError::BufferTooBig { size, backtrace: Default::default() };
        assert_eq!(refused(other.to_string()).missing_bytes(), None);
    }
}
