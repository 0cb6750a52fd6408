//! The functions of NCCL that are called.

use super::library::{CallFailed, Status, Stream, functions, load, text};
use std::ffi::{c_char, c_int, c_void};

/// Names that NCCL is looked for by. The wheel of `PyPI` has the first one alone.
const NCCL: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// Where to find it, if the program is told.
pub(crate) const NCCL_VARIABLE: &str = "BLACKBURN_NCCL";

/// `ncclUniqueId`, by which ranks find each other.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// `ncclComm_t`.
pub(super) type Communicator = *mut c_void;

/// `ncclInProgress`: no failure yet.
const IN_PROGRESS: Status = 7;

/// `ncclDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub(super) enum DataType {
    Float16 = 6,
    Float32 = 7,
    Float64 = 8,
    Bfloat16 = 9,
}

impl DataType {
    /// Bytes of a number.
    pub(super) fn size(self) -> usize {
        match self {
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Float32 => 4,
            Self::Float64 => 8,
        }
    }
}

/// `ncclSum`.
const SUM: c_int = 0;

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
        reduce = "ncclReduce":
            fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Communicator, Stream) -> Status;
        send = "ncclSend":
            fn(*const c_void, usize, c_int, c_int, Communicator, Stream) -> Status;
        receive = "ncclRecv":
            fn(*mut c_void, usize, c_int, c_int, Communicator, Stream) -> Status;
    }
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

    /// Adds `from` up over all ranks, into `to` of rank `root`; others may give 0 for it.
    ///
    /// # Safety
    ///
    /// As [`sum`](Self::sum), with that exception.
    #[expect(clippy::too_many_arguments, reason = "the library's own")]
    pub(super) unsafe fn sum_at(
        &self,
        from: u64,
        to: u64,
        count: usize,
        dtype: DataType,
        root: usize,
        communicator: Communicator,
        stream: Stream,
    ) -> Result<(), CallFailed> {
        let (from, to, dtype) = (from as *const c_void, to as *mut c_void, dtype as c_int);
        // SAFETY: the caller's.
        let status = unsafe {
            (self.reduce)(from, to, count, dtype, SUM, root as c_int, communicator, stream)
        };
        self.check("ncclReduce", status)
    }

    /// Sends `from` to rank `to`.
    ///
    /// # Safety
    ///
    /// As [`sum`](Self::sum).
    pub(super) unsafe fn send(
        &self,
        from: u64,
        count: usize,
        dtype: DataType,
        to: usize,
        communicator: Communicator,
        stream: Stream,
    ) -> Result<(), CallFailed> {
        let (from, dtype, to) = (from as *const c_void, dtype as c_int, to as c_int);
        // SAFETY: the caller's.
        let status = unsafe { (self.send)(from, count, dtype, to, communicator, stream) };
        self.check("ncclSend", status)
    }

    /// Puts what rank `from` sends into `to`.
    ///
    /// # Safety
    ///
    /// As [`sum`](Self::sum).
    pub(super) unsafe fn receive(
        &self,
        to: u64,
        count: usize,
        dtype: DataType,
        from: usize,
        communicator: Communicator,
        stream: Stream,
    ) -> Result<(), CallFailed> {
        let (to, dtype, from) = (to as *mut c_void, dtype as c_int, from as c_int);
        // SAFETY: the caller's.
        let status = unsafe { (self.receive)(to, count, dtype, from, communicator, stream) };
        self.check("ncclRecv", status)
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
