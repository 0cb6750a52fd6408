//! The functions of NCCL and of CUDA's driver that are called, loaded at run time.

use libloading::Library;
use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    fmt,
};

/// Names that NCCL is looked for by. The wheel of `PyPI` has the second one alone.
const NCCL: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// Where to find it, if the program is told.
pub(crate) const NCCL_VARIABLE: &str = "BLACKBURN_NCCL";
const CUDA: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// `ncclUniqueId`, by which ranks find each other.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// `ncclComm_t`.
pub(super) type Communicator = *mut c_void;
/// `CUstream`.
pub(super) type Stream = *mut c_void;
type Status = c_int;

/// `ncclInProgress`: no failure yet.
pub(super) const IN_PROGRESS: Status = 7;
/// `CUDA_ERROR_NOT_READY`.
pub(super) const NOT_READY: Status = 600;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;

/// `ncclDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum DataType {
    Float16 = 6,
    Float32 = 7,
    Float64 = 8,
    Bfloat16 = 9,
}

/// `ncclSum`.
const SUM: c_int = 0;

/// Declares a struct of functions, and how it is loaded.
macro_rules! functions {
    ($(#[$meta:meta])* $name:ident { $($field:ident = $symbol:literal: fn($($argument:ty),*) -> $result:ty;)* }) => {
        $(#[$meta])*
        pub(super) struct $name {
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
            // Unloaded last: the functions are its own.
            _library: Library,
        }

        impl $name {
            fn bind(library: Library) -> Result<Self, String> {
                $(
                    // SAFETY: the symbol has this signature in every version of the library that has it.
                    let $field = unsafe {
                        *library
                            .get::<unsafe extern "C" fn($($argument),*) -> $result>($symbol.as_bytes())
                            .map_err(|error| format!("it has no {}: {error}", $symbol))?
                    };
                )*
                Ok(Self { $($field,)* _library: library })
            }
        }
    };
}

functions! {
    /// NCCL.
    Nccl {
        get_version = "ncclGetVersion": fn(*mut c_int) -> Status;
        get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> Status;
        init_rank = "ncclCommInitRank": fn(*mut Communicator, c_int, UniqueId, c_int) -> Status;
        abort = "ncclCommAbort": fn(Communicator) -> Status;
        async_error = "ncclCommGetAsyncError": fn(Communicator, *mut Status) -> Status;
        error_string = "ncclGetErrorString": fn(Status) -> *const c_char;
        group_start = "ncclGroupStart": fn() -> Status;
        group_end = "ncclGroupEnd": fn() -> Status;
        all_reduce = "ncclAllReduce":
            fn(*const c_void, *mut c_void, usize, c_int, c_int, Communicator, Stream) -> Status;
        broadcast = "ncclBroadcast":
            fn(*const c_void, *mut c_void, usize, c_int, c_int, Communicator, Stream) -> Status;
    }
}

functions! {
    /// CUDA's driver.
    Cuda {
        init = "cuInit": fn(c_uint) -> Status;
        device_get = "cuDeviceGet": fn(*mut c_int, c_int) -> Status;
        primary_context = "cuDevicePrimaryCtxRetain": fn(*mut *mut c_void, c_int) -> Status;
        set_context = "cuCtxSetCurrent": fn(*mut c_void) -> Status;
        stream_create = "cuStreamCreate": fn(*mut Stream, c_uint) -> Status;
        stream_query = "cuStreamQuery": fn(Stream) -> Status;
        stream_destroy = "cuStreamDestroy_v2": fn(Stream) -> Status;
        error_string = "cuGetErrorString": fn(Status, *mut *const c_char) -> Status;
    }
}

/// A function of a library that failed.
#[derive(Debug)]
pub(super) struct CallFailed {
    function: &'static str,
    status: Status,
    text: String,
}

impl fmt::Display for CallFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed: {} ({})", self.function, self.text, self.status)
    }
}

fn load(names: &[String]) -> Result<Library, String> {
    let mut reasons = Vec::new();
    for name in names {
        // SAFETY: the initializers of these libraries may run at any time.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => reasons.push(format!("{name}: {error}")),
        }
    }
    Err(reasons.join("; "))
}

fn text(text: *const c_char) -> String {
    if text.is_null() {
        return "no reason given".into();
    }
    // SAFETY: the libraries give texts that end with a zero and live as long as they do.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

impl Nccl {
    /// Loads it from where `variable` says, or where the system looks.
    pub(super) fn load(variable: Option<String>) -> Result<Self, String> {
        let names = match variable {
            Some(path) => vec![path],
            None => NCCL.map(str::to_owned).to_vec(),
        };
        load(&names).and_then(Self::bind).map_err(|reason| {
            format!(
                "NCCL cannot be loaded: {reason}. Install it (`apt install libnccl2`, or `pip install \
                 nvidia-nccl-cu12`), and set {NCCL_VARIABLE} to the path of libnccl.so.2 where the system does \
                 not find it; {NCCL_VARIABLE}=off moves numbers through the host, which is slow"
            )
        })
    }

    fn check(&self, function: &'static str, status: Status) -> Result<(), CallFailed> {
        if status == 0 || status == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: it takes any status.
        let reason = unsafe { (self.error_string)(status) };
        Err(CallFailed { function, status, text: text(reason) })
    }

    /// For example 22803 for 2.28.3.
    pub(super) fn version(&self) -> Result<i32, CallFailed> {
        let mut version = 0;
        // SAFETY: it writes to the number.
        let status = unsafe { (self.get_version)(&raw mut version) };
        self.check("ncclGetVersion", status).map(|()| version)
    }

    pub(super) fn unique_id(&self) -> Result<UniqueId, CallFailed> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: it writes to the identifier.
        let status = unsafe { (self.get_unique_id)(&raw mut id) };
        self.check("ncclGetUniqueId", status).map(|()| id)
    }

    /// Waits for all ranks.
    pub(super) fn communicator(
        &self,
        ranks: usize,
        id: UniqueId,
        rank: usize,
    ) -> Result<Communicator, CallFailed> {
        let mut communicator = std::ptr::null_mut();
        // SAFETY: it writes to the pointer; the current context is of this rank's device.
        let status =
            unsafe { (self.init_rank)(&raw mut communicator, ranks as c_int, id, rank as c_int) };
        self.check("ncclCommInitRank", status).map(|()| communicator)
    }

    /// Ends the communicator, and kernels of it that wait for a rank that is gone.
    ///
    /// # Safety
    ///
    /// It was made by [`communicator`](Self::communicator), and is used no more.
    pub(super) unsafe fn end(&self, communicator: Communicator) -> Result<(), CallFailed> {
        // SAFETY: the caller's.
        let status = unsafe { (self.abort)(communicator) };
        self.check("ncclCommAbort", status)
    }

    /// A failure that came up while kernels ran.
    ///
    /// # Safety
    ///
    /// The communicator lives.
    pub(super) unsafe fn look(&self, communicator: Communicator) -> Result<(), CallFailed> {
        let mut found = 0;
        // SAFETY: the caller's; it writes to the number.
        let status = unsafe { (self.async_error)(communicator, &raw mut found) };
        self.check("ncclCommGetAsyncError", status)?;
        self.check("a collective", found)
    }

    /// Has `calls` made as one.
    pub(super) fn grouped(
        &self,
        calls: impl FnOnce() -> Result<(), CallFailed>,
    ) -> Result<(), CallFailed> {
        // SAFETY: it takes nothing.
        self.check("ncclGroupStart", unsafe { (self.group_start)() })?;
        let made = calls();
        // SAFETY: it ends what was started above, whether the calls succeeded or not.
        let ended = self.check("ncclGroupEnd", unsafe { (self.group_end)() });
        made.and(ended)
    }

    /// Adds `from` up over all ranks, into `to`.
    ///
    /// # Safety
    ///
    /// The communicator and the stream live. Both addresses are of `count` numbers of that type in the memory of
    /// the communicator's device, until the stream is done.
    pub(super) unsafe fn sum(
        &self,
        from: u64,
        to: u64,
        count: usize,
        dtype: DataType,
        communicator: Communicator,
        stream: Stream,
    ) -> Result<(), CallFailed> {
        let (from, to) = (from as *const c_void, to as *mut c_void);
        // SAFETY: the caller's.
        let status = unsafe {
            (self.all_reduce)(from, to, count, dtype as c_int, SUM, communicator, stream)
        };
        self.check("ncclAllReduce", status)
    }

    /// Copies `from` of rank `root` into `to` of all.
    ///
    /// # Safety
    ///
    /// As [`sum`](Self::sum).
    #[expect(clippy::too_many_arguments, reason = "the library's own")]
    pub(super) unsafe fn copy(
        &self,
        from: u64,
        to: u64,
        count: usize,
        dtype: DataType,
        root: usize,
        communicator: Communicator,
        stream: Stream,
    ) -> Result<(), CallFailed> {
        let (from, to, root) = (from as *const c_void, to as *mut c_void, root as c_int);
        // SAFETY: the caller's.
        let status = unsafe {
            (self.broadcast)(from, to, count, dtype as c_int, root, communicator, stream)
        };
        self.check("ncclBroadcast", status)
    }
}

impl Cuda {
    pub(super) fn load() -> Result<Self, String> {
        load(&CUDA.map(str::to_owned))
            .and_then(Self::bind)
            .map_err(|reason| format!("CUDA's driver cannot be loaded: {reason}"))
    }

    fn check(&self, function: &'static str, status: Status) -> Result<(), CallFailed> {
        if status == 0 {
            return Ok(());
        }
        let mut reason = std::ptr::null();
        // SAFETY: it writes to the pointer, and leaves it alone for a status that it does not know.
        unsafe { (self.error_string)(status, &raw mut reason) };
        Err(CallFailed { function, status, text: text(reason) })
    }

    /// Makes the primary context of device `ordinal`, which CubeCL uses, that of this thread.
    pub(super) fn use_device(&self, ordinal: usize) -> Result<(), CallFailed> {
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: each call writes to the pointer that it is given, and they are in the order that CUDA asks for.
        unsafe {
            self.check("cuInit", (self.init)(0))?;
            let status = (self.device_get)(&raw mut device, ordinal as c_int);
            self.check("cuDeviceGet", status)?;
            let status = (self.primary_context)(&raw mut context, device);
            self.check("cuDevicePrimaryCtxRetain", status)?;
            self.check("cuCtxSetCurrent", (self.set_context)(context))
        }
    }

    /// A stream of the current context, which does not wait for the default one.
    pub(super) fn stream(&self) -> Result<Stream, CallFailed> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: it writes to the pointer.
        let status = unsafe { (self.stream_create)(&raw mut stream, NON_BLOCKING) };
        self.check("cuStreamCreate", status).map(|()| stream)
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
    /// It was made by [`stream`](Self::stream), and is used no more.
    pub(super) unsafe fn end(&self, stream: Stream) -> Result<(), CallFailed> {
        // SAFETY: the caller's.
        self.check("cuStreamDestroy", unsafe { (self.stream_destroy)(stream) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_says_what_to_install() {
        let reason =
            Nccl::load(Some("/nowhere/libnccl.so.2".into())).err().expect("it is not there");
        for expected in
            ["/nowhere/libnccl.so.2", "libnccl2", "nvidia-nccl-cu12", "BLACKBURN_NCCL=off"]
        {
            assert!(reason.contains(expected), "{reason}");
        }
    }

    #[test]
    fn a_library_without_the_functions_is_refused() {
        // It is on every machine that runs these tests.
        let reason = Nccl::load(Some("libc.so.6".into())).err().expect("it is not NCCL");
        assert!(reason.contains("it has no ncclGetVersion"), "{reason}");
    }
}
