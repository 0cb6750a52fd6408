//! A server that keeps launches, and hands them on to a machine if there is one.

use super::{Gpu, machine::Hardware};
use cubecl::ir::{DeviceProperties, TargetProperties};
use cubecl_common::{
    bytes::Bytes,
    device::{DeviceId, DeviceService, ServerUtilitiesHandle, ServiceId},
    profile::{Instant, ProfileDuration, ProfileTicks, TimingMethod},
};
use cubecl_environment::{backtrace::BackTrace, future::DynFut, stream::StreamId};
use cubecl_server::{
    allocator::PitchedMemoryLayoutPolicy,
    dry_run::LaunchMode,
    id::KernelId,
    kernel::CubeKernel,
    logging::ServerLogger,
    memory_management::{ManagedMemoryHandle, MemoryAllocationMode, StreamMemoryReport},
    server::{
        BufferBinding, CopyDescriptor, CubeCount, IoError, KernelArguments, ProfileError,
        ProfilingToken, Server, ServerCommunication, ServerError, ServerStorage, ServerUtilities,
    },
    storage::{ComputeStorage, ManagedResource, StorageHandle, StorageId},
};
use std::{
    collections::HashSet,
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

/// Kernels that were launched, each once.
pub(super) type Launches = Arc<Mutex<Vec<Launched>>>;

/// What the machine said of the first thing that went wrong.
pub(super) type Failure = Arc<Mutex<Option<String>>>;

/// A kernel that was launched, before it is compiled.
pub(crate) struct Launched {
    pub(crate) kernel: Box<dyn CubeKernel>,
}

impl Launched {
    /// The name of the function that the kernel was written as: the module around its type.
    pub(crate) fn function(&self) -> &'static str {
        let path = self.kernel.name().split('<').next().unwrap_or_default();
        path.rsplit("::").nth(1).unwrap_or(path)
    }
}

pub(super) struct RecordingServer {
    utilities: Arc<ServerUtilities>,
    launches: Launches,
    seen: HashSet<KernelId>,
    /// Handles count their copies to know whether somebody else holds the memory, with one for the server.
    memory: Vec<ManagedMemoryHandle>,
    hardware: Option<(Hardware, Gpu)>,
    failure: Failure,
}

impl fmt::Debug for RecordingServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordingServer").finish_non_exhaustive()
    }
}

impl RecordingServer {
    pub(super) fn new(
        device: DeviceId,
        (properties, target): (DeviceProperties, TargetProperties),
        hardware: Option<(Hardware, Gpu)>,
        launches: Launches,
        failure: Failure,
    ) -> Self {
        let alignment = properties.memory.alignment as usize;
        let (utilities, _captures) = ServerUtilities::init(
            ServiceId::of::<Self>(device),
            "cuda",
            properties,
            target,
            Arc::new(ServerLogger::default()),
            PitchedMemoryLayoutPolicy::new(alignment),
        );
        Self {
            utilities: Arc::new(utilities),
            launches,
            seen: HashSet::new(),
            memory: Vec::new(),
            hardware,
            failure,
        }
    }

    /// Does something with the machine, unless something went wrong before. What goes wrong is kept: here
    /// nobody could tell it to the caller.
    fn with<T>(&mut self, act: impl FnOnce(&mut Hardware, &Gpu) -> Result<T, String>) -> Option<T> {
        let (hardware, gpu) = self.hardware.as_mut()?;
        let mut failure = self.failure.lock().expect("no reader panicked");
        if failure.is_some() {
            return None;
        }
        act(hardware, gpu).map_err(|reason| *failure = Some(reason)).ok()
    }
}

impl DeviceService for RecordingServer {
    fn init(device: DeviceId) -> Self {
        unreachable!("{device} was registered with the server it has")
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone()
    }
}

impl ServerCommunication for RecordingServer {}

impl Server for RecordingServer {
    fn initialize_memory(
        &mut self,
        memory: ManagedMemoryHandle,
        bytes: u64,
        _: StreamId,
    ) -> Result<(), ServerError> {
        if let Some((hardware, _)) = &mut self.hardware {
            hardware.allocate(memory.clone().binding().id().value, bytes);
        }
        self.memory.push(memory);
        Ok(())
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities> {
        self.utilities.clone()
    }

    /// Zeros where nothing is stored.
    fn read(
        &mut self,
        descriptors: Vec<CopyDescriptor>,
        _: StreamId,
    ) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        let mut stored = |from: CopyDescriptor| {
            let elements: usize = from.shape.iter().product();
            let read = self.with(|hardware, _| hardware.read(&from));
            Bytes::from_bytes_vec(read.unwrap_or_else(|| vec![0; elements * from.elem_size]))
        };
        let bytes = descriptors.into_iter().map(&mut stored).collect();
        Box::pin(async move { Ok(bytes) })
    }

    fn write(&mut self, descriptors: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {
        for (to, data) in descriptors {
            self.with(|hardware, _| hardware.write(&to, &data));
        }
    }

    fn sync(&mut self, _: Vec<BufferBinding>, _: StreamId) -> DynFut<Result<(), ServerError>> {
        Box::pin(async { Ok(()) })
    }

    fn check(&mut self, _: Vec<BufferBinding>, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    /// Runs the kernel, if there is a machine, and keeps it, if it is new. A panic here would only be logged,
    /// so without a machine nothing is compiled yet.
    unsafe fn launch(
        &mut self,
        kernel: Box<dyn CubeKernel>,
        count: CubeCount,
        arguments: KernelArguments,
        _: StreamId,
        mode: LaunchMode,
    ) {
        if !mode.is_skipped() {
            let properties = Arc::clone(&self.utilities.properties);
            self.with(|hardware, gpu| {
                hardware.launch(&*kernel, count, &arguments, (gpu, &properties))
            });
        }
        if self.seen.insert(kernel.id()) {
            self.launches.lock().expect("no reader panicked").push(Launched { kernel });
        }
    }

    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_report(&mut self, _: StreamId) -> Option<StreamMemoryReport> {
        None
    }

    fn memory_cleanup(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        Ok(ProfilingToken { id: 0 })
    }

    /// A microsecond: tuners end, on whichever they like.
    fn end_profile(
        &mut self,
        _: StreamId,
        _: ProfilingToken,
    ) -> Result<ProfileDuration, ProfileError> {
        let start = Instant::now();
        let ticks = ProfileTicks::from_start_end(start, start + Duration::from_micros(1));
        Ok(ProfileDuration::new(Box::pin(async move { Some(ticks) }), TimingMethod::Device))
    }

    fn allocation_mode(&mut self, _: MemoryAllocationMode, _: StreamId) {}
}

/// [`Client::try_init`](cubecl::client::Client::try_init) asks for a server with storage.
pub(super) struct NoStorage;

fn nothing_stored() -> IoError {
    IoError::UnsupportedIoOperation { backtrace: BackTrace::capture() }
}

impl ComputeStorage for NoStorage {
    type Resource = ();

    fn alignment(&self) -> usize {
        1
    }

    fn get(&mut self, _: &StorageHandle) -> Result<(), IoError> {
        Err(nothing_stored())
    }

    fn alloc(&mut self, _: u64) -> Result<StorageHandle, IoError> {
        Err(nothing_stored())
    }

    fn dealloc(&mut self, _: StorageId) {}

    fn flush(&mut self) {}

    fn bytes_allocated(&self) -> u64 {
        0
    }
}

impl ServerStorage for RecordingServer {
    type Storage = NoStorage;

    fn get_resource(
        &mut self,
        _: BufferBinding,
        _: StreamId,
    ) -> Result<ManagedResource<()>, ServerError> {
        Err(nothing_stored().into())
    }
}
