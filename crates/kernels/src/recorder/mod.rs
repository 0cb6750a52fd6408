//! A CubeCL client of a GPU that is not there: it allocates nothing, runs nothing, and keeps every kernel
//! that is launched on it as CUDA C++.
//!
//! Launchers do not notice the difference, so what comes out is what they launch on such a GPU: the plan
//! that its properties lead to, by the kernel that the plan asks for. [`record`] calls all of them;
//! `cargo xtask sass` compiles the result.
//!
//! With a [`Machine`] behind it, memory holds bytes and kernels run: [`Recorder::on`].

mod device;
mod machine;
mod server;
mod sources;
mod twin;

pub use device::Gpu;
pub use machine::{Machine, MachineArgument, MachineLaunch, MappedBox, MappedTensor};
pub use sources::{CudaKernel, record};

use crate::{buffer::Buffer, family};
use cubecl::{Compiler, client::Client, ir::DeviceProperties};
use cubecl_common::device::DeviceId;
use cubecl_cpp::{shared::CppCompiler, target::Cuda};
use cubecl_server::{
    kernel::{BufferIOAttr, CubeKernel},
    validation::{validate_cube_dim, validate_units},
};
use machine::Hardware;
use server::{Failure, Launches, RecordingServer};
use std::{
    fmt, mem,
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
};

pub(crate) use server::Launched;
pub(crate) use twin::Twin;

/// Why a launch could not be recorded.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{what} on {architecture}: {reason}")]
pub struct RecordError {
    /// The kernel or the launch.
    pub what: String,
    /// For which GPU.
    pub architecture: &'static str,
    /// What stands in the way.
    pub reason: String,
}

/// Makes a client, and keeps what is launched on it.
pub struct Recorder {
    gpu: Gpu,
    client: Client,
    launches: Launches,
    failure: Failure,
}

impl Recorder {
    /// A device of its own. It has a thread until the process ends.
    pub fn new(gpu: Gpu) -> Self {
        Self::build(gpu, None)
    }

    /// As [`new`](Self::new), with memory that holds bytes, and kernels that run.
    pub fn on(gpu: Gpu, machine: impl Machine) -> Self {
        Self::build(gpu, Some(Box::new(machine)))
    }

    fn build(gpu: Gpu, machine: Option<Box<dyn Machine>>) -> Self {
        /// A process may register one server of a type for each device.
        static NEXT: AtomicU16 = AtomicU16::new(0);

        // What is recorded is looked at because it has not run.
        family::offer_unproven();
        let id = DeviceId { type_id: 0, index_id: NEXT.fetch_add(1, Ordering::Relaxed) };
        let (launches, failure) = (Launches::default(), Failure::default());
        let server = RecordingServer::new(
            id,
            (gpu.properties(), device::target_properties()),
            machine.map(|machine| (Hardware::new(machine), gpu)),
            Arc::clone(&launches),
            Arc::clone(&failure),
        );
        let client = Client::try_init(id, server).expect("the device is new");
        Self { gpu, client, launches, failure }
    }

    /// What launchers take.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The kernels that were launched since the last call for the first time, in order.
    ///
    /// # Errors
    ///
    /// What CubeCL says when it cannot wait for launches.
    pub(crate) fn take(&self) -> Result<Vec<Launched>, RecordError> {
        // Launches are queued for the device's thread; this waits for them.
        self.client.flush().map_err(|error| self.failed("the device", &error))?;
        Ok(mem::take(&mut *self.launches.lock().expect("no launch panicked")))
    }

    /// CUDA C++ of a kernel, as CubeCL's CUDA runtime would have it compiled.
    ///
    /// # Errors
    ///
    /// What CubeCL says of a kernel that it cannot compile, or that the device would refuse.
    pub(crate) fn compile(&self, launched: &Launched) -> Result<Compiled, RecordError> {
        let Gpu { architecture, capability, .. } = self.gpu;
        compile(&*launched.kernel, capability, self.client.properties()).map_err(|reason| {
            RecordError { what: launched.kernel.name().into(), architecture, reason }
        })
    }

    /// The bytes of a buffer, once everything that was launched is done.
    ///
    /// # Errors
    ///
    /// What the machine said of the first thing that went wrong on it.
    pub fn read(&self, buffer: &Buffer) -> Result<Vec<u8>, RecordError> {
        let read = self.client.read_one(buffer.handle.clone());
        self.check()?;
        let bytes = read.map_err(|error| self.failed("the device", &error))?;
        Ok(bytes[..buffer.elements * buffer.dtype.size()].to_vec())
    }

    /// Waits for everything that was launched.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn check(&self) -> Result<(), RecordError> {
        self.client.flush().map_err(|error| self.failed("the device", &error))?;
        match &*self.failure.lock().expect("no launch panicked") {
            None => Ok(()),
            Some(reason) => Err(self.failed("a launch", reason)),
        }
    }

    fn failed(&self, what: &str, reason: &dyn fmt::Display) -> RecordError {
        let architecture = self.gpu.architecture;
        RecordError { what: what.into(), architecture, reason: reason.to_string() }
    }
}

/// CUDA C++ of a kernel, for a GPU of a compute capability (times ten) with these properties, as CubeCL's CUDA runtime
/// would have it compiled.
///
/// # Errors
///
/// What CubeCL says of a kernel that it cannot compile, or that the device would refuse.
pub fn compile(
    kernel: &dyn CubeKernel,
    capability: u32,
    properties: &DeviceProperties,
) -> Result<Compiled, String> {
    let id = kernel.id();
    validate_cube_dim(properties, &id).map_err(|error| error.to_string())?;
    validate_units(properties, &id).map_err(|error| error.to_string())?;
    let definition = cubecl::define_kernel(kernel).map_err(|error| error.to_string())?;
    let entry = definition.settings.kernel_name.clone();
    let compiled = CppCompiler::<Cuda>::default()
        .compile(definition, &device::options(capability))
        .map_err(|error| error.to_string())?;
    let (asked, most) = (compiled.shared_memory_size, properties.hardware.max_shared_memory_size);
    if asked > most {
        return Err(format!("{asked} bytes of shared memory, of {most}"));
    }
    let io = CppCompiler::<Cuda>::buffer_io(&compiled);
    Ok(Compiled { entry, shared_memory_bytes: asked, io, source: compiled.source })
}

/// A kernel as CUDA C++.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Symbol of the entry point.
    pub entry: String,
    /// Dynamic shared memory of a launch, in bytes.
    pub shared_memory_bytes: usize,
    /// What it does with each buffer.
    pub io: Option<Vec<BufferIOAttr>>,
    /// CUDA C++.
    pub source: String,
}

#[cfg(test)]
mod tests;
