//! The functions of CUDA's driver that are called.

use super::library::{CallFailed, Status, Stream, functions, load, text};
use libloading::Library;
use std::ffi::{c_char, c_int, c_uint, c_void};

const CUDA: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// `CUevent`.
pub(super) type Event = *mut c_void;
/// `CUcontext`.
pub(super) type Context = *mut c_void;

/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: Status = 600;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;

functions! {
    /// CUDA's driver.
    Cuda {
        init = "cuInit": fn(c_uint) -> Status;
        device_get = "cuDeviceGet": fn(*mut c_int, c_int) -> Status;
        primary_context = "cuDevicePrimaryCtxRetain": fn(*mut Context, c_int) -> Status;
        set_context = "cuCtxSetCurrent": fn(Context) -> Status;
        context_record = "cuCtxRecordEvent": fn(Context, Event) -> Status;
        context_wait = "cuCtxWaitEvent": fn(Context, Event) -> Status;
        stream_create = "cuStreamCreateWithPriority": fn(*mut Stream, c_uint, c_int) -> Status;
        stream_query = "cuStreamQuery": fn(Stream) -> Status;
        stream_wait = "cuStreamWaitEvent": fn(Stream, Event, c_uint) -> Status;
        stream_destroy = "cuStreamDestroy_v2": fn(Stream) -> Status;
        event_create = "cuEventCreate": fn(*mut Event, c_uint) -> Status;
        event_record = "cuEventRecord": fn(Event, Stream) -> Status;
        event_elapsed = "cuEventElapsedTime": fn(*mut f32, Event, Event) -> Status;
        event_destroy = "cuEventDestroy_v2": fn(Event) -> Status;
        error_string = "cuGetErrorString": fn(Status, *mut *const c_char) -> Status;
    }
}

/// Functions of CUDA's driver, as `bind` finds them.
pub(super) fn bound<T>(bind: impl FnOnce(Library) -> Result<T, String>) -> Result<T, String> {
    load(&CUDA.map(str::to_owned))
        .and_then(bind)
        .map_err(|reason| format!("CUDA's driver cannot be loaded: {reason}"))
}

/// CUDA's reason why `function` has failed, if it has.
pub(super) fn checked(
    error_string: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
    function: &'static str,
    status: Status,
) -> Result<(), CallFailed> {
    if status == 0 {
        return Ok(());
    }
    let mut reason = std::ptr::null();
    // SAFETY: it writes to the pointer, and leaves it alone for a status that it does not know.
    unsafe { (error_string)(status, &raw mut reason) };
    Err(CallFailed { function, status, text: text(reason) })
}

impl Cuda {
    pub(super) fn load() -> Result<Self, String> {
        bound(Self::bind)
    }

    fn check(&self, function: &'static str, status: Status) -> Result<(), CallFailed> {
        checked(self.error_string, function, status)
    }

    /// The primary context of device `ordinal`, which CubeCL uses. It is kept as long as the process lives.
    pub(super) fn context(&self, ordinal: usize) -> Result<Context, CallFailed> {
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: each call writes to the pointer that it is given, and they are in the order that CUDA asks for.
        unsafe {
            self.check("cuInit", (self.init)(0))?;
            let status = (self.device_get)(&raw mut device, ordinal as c_int);
            self.check("cuDeviceGet", status)?;
            let status = (self.primary_context)(&raw mut context, device);
            self.check("cuDevicePrimaryCtxRetain", status)?;
        }
        Ok(context)
    }

    /// Makes `context` that of this thread.
    ///
    /// # Safety
    ///
    /// It was given by [`context`](Self::context).
    pub(super) unsafe fn enter(&self, context: Context) -> Result<(), CallFailed> {
        // SAFETY: the caller's.
        self.check("cuCtxSetCurrent", unsafe { (self.set_context)(context) })
    }

    /// A stream of the current context, which does not wait for the default one.
    pub(super) fn stream(&self) -> Result<Stream, CallFailed> {
        self.stream_of(0)
    }

    /// One whose kernels come before those of others.
    pub(super) fn urgent_stream(&self) -> Result<Stream, CallFailed> {
        // What is beyond the highest priority is the highest.
        self.stream_of(c_int::MIN)
    }

    fn stream_of(&self, priority: c_int) -> Result<Stream, CallFailed> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: it writes to the pointer.
        let status = unsafe { (self.stream_create)(&raw mut stream, NON_BLOCKING, priority) };
        self.check("cuStreamCreateWithPriority", status).map(|()| stream)
    }

    /// An event of the current context, whose time is taken.
    pub(super) fn event(&self) -> Result<Event, CallFailed> {
        let mut event = std::ptr::null_mut();
        // SAFETY: it writes to the pointer.
        let status = unsafe { (self.event_create)(&raw mut event, 0) };
        self.check("cuEventCreate", status).map(|()| event)
    }

    /// Has `stream` wait for all that any stream of `context` was asked for until now.
    ///
    /// # Safety
    ///
    /// All three live and belong together. Nothing of the context is being recorded into a graph.
    pub(super) unsafe fn wait_for_context(
        &self,
        stream: Stream,
        context: Context,
        event: Event,
    ) -> Result<(), CallFailed> {
        // SAFETY: the caller's.
        unsafe {
            self.check("cuCtxRecordEvent", (self.context_record)(context, event))?;
            self.check("cuStreamWaitEvent", (self.stream_wait)(stream, event, 0))
        }
    }

    /// Has all streams of `context` wait for `event`, with all that they are asked for from now on.
    ///
    /// # Safety
    ///
    /// As [`wait_for_context`](Self::wait_for_context).
    pub(super) unsafe fn context_waits(
        &self,
        context: Context,
        event: Event,
    ) -> Result<(), CallFailed> {
        // SAFETY: the caller's.
        self.check("cuCtxWaitEvent", unsafe { (self.context_wait)(context, event) })
    }

    /// Notes when `stream` comes here.
    ///
    /// # Safety
    ///
    /// Both live and belong to one context.
    pub(super) unsafe fn record(&self, event: Event, stream: Stream) -> Result<(), CallFailed> {
        // SAFETY: the caller's.
        self.check("cuEventRecord", unsafe { (self.event_record)(event, stream) })
    }

    /// Milliseconds between two events, if both are over.
    ///
    /// # Safety
    ///
    /// Both live and were recorded.
    pub(super) unsafe fn elapsed_ms(
        &self,
        from: Event,
        to: Event,
    ) -> Result<Option<f32>, CallFailed> {
        let mut elapsed_ms = 0.0;
        // SAFETY: the caller's; it writes to the number.
        let status = unsafe { (self.event_elapsed)(&raw mut elapsed_ms, from, to) };
        match status {
            NOT_READY => Ok(None),
            status => self.check("cuEventElapsedTime", status).map(|()| Some(elapsed_ms)),
        }
    }

    /// Whether all that was asked of the stream is done.
    ///
    /// # Safety
    ///
    /// The stream lives.
    pub(super) unsafe fn is_done(&self, stream: Stream) -> Result<bool, CallFailed> {
        // SAFETY: the caller's.
        match unsafe { (self.stream_query)(stream) } {
            NOT_READY => Ok(false),
            status => self.check("cuStreamQuery", status).map(|()| true),
        }
    }

    /// Ends the stream.
    ///
    /// # Safety
    ///
    /// It was made here, and is used no more.
    pub(super) unsafe fn end(&self, stream: Stream) -> Result<(), CallFailed> {
        // SAFETY: the caller's.
        self.check("cuStreamDestroy", unsafe { (self.stream_destroy)(stream) })
    }

    /// Ends the event.
    ///
    /// # Safety
    ///
    /// It was made by [`event`](Self::event), and is used no more.
    pub(super) unsafe fn end_event(&self, event: Event) -> Result<(), CallFailed> {
        // SAFETY: the caller's.
        self.check("cuEventDestroy", unsafe { (self.event_destroy)(event) })
    }
}
