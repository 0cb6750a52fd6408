//! A CubeCL client of a GPU that is not there: it allocates nothing, runs nothing, and keeps every kernel
//! that is launched on it as CUDA C++.
//!
//! Launchers do not notice the difference, so what comes out is what they launch on such a GPU: the plan
//! that its properties lead to, by the kernel that the plan asks for. [`record`] calls all of them;
//! `cargo xtask sass` compiles the result.

mod device;
mod server;
mod sources;

pub use device::Gpu;
pub use sources::{CudaKernel, record};

use cubecl::{Compiler, client::Client};
use cubecl_common::device::DeviceId;
use cubecl_cpp::{shared::CppCompiler, target::Cuda};
use cubecl_server::validation::{validate_cube_dim, validate_units};
use server::{Launches, RecordingServer};
use std::{
    fmt, mem,
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
};

pub(crate) use server::Launched;

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
}

impl Recorder {
    /// A device of its own. It has a thread until the process ends.
    pub fn new(gpu: Gpu) -> Self {
        /// A process may register one server of a type for each device.
        static NEXT: AtomicU16 = AtomicU16::new(0);

        let device = DeviceId { type_id: 0, index_id: NEXT.fetch_add(1, Ordering::Relaxed) };
        let launches = Launches::default();
        let server = RecordingServer::new(device, &gpu, Arc::clone(&launches));
        let client = Client::try_init(device, server).expect("the device is new");
        Self { gpu, client, launches }
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
        let name = launched.kernel.name();
        let id = launched.kernel.id();
        let properties = self.client.properties();
        validate_cube_dim(properties, &id).map_err(|error| self.failed(name, &error))?;
        validate_units(properties, &id).map_err(|error| self.failed(name, &error))?;
        let definition =
            cubecl::define_kernel(&*launched.kernel).map_err(|error| self.failed(name, &error))?;
        let entry = definition.settings.kernel_name.clone();
        let compiled = CppCompiler::<Cuda>::default()
            .compile(definition, &self.gpu.options())
            .map_err(|error| self.failed(name, &error))?;
        let (asked, most) = (compiled.shared_memory_size, self.gpu.shared_bytes);
        if asked > most {
            let reason = format!("{asked} bytes of shared memory, of {most}");
            return Err(self.failed(name, &reason));
        }
        Ok(Compiled { entry, shared_memory_bytes: asked, source: compiled.source })
    }

    fn failed(&self, what: &str, reason: &dyn fmt::Display) -> RecordError {
        let architecture = self.gpu.architecture;
        RecordError { what: what.into(), architecture, reason: reason.to_string() }
    }
}

/// A kernel as CUDA C++.
pub(crate) struct Compiled {
    /// Symbol of the entry point.
    pub(crate) entry: String,
    /// Dynamic shared memory of a launch, in bytes.
    pub(crate) shared_memory_bytes: usize,
    pub(crate) source: String,
}

#[cfg(test)]
mod tests;
