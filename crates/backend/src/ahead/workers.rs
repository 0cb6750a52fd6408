//! The threads that compile, and who waits for them.

use super::cache::{Cache, Entry, hash_of};
use blackburn_kernels::{
    ahead::{Wait, rest},
    recorder,
};
use blackburn_nvrtc::{Nvrtc, options};
use cubecl::{client::Client, cuda::install::cuda_path, ir::DeviceProperties};
use cubecl_server::kernel::CubeKernel;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::{
    ffi::c_char,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

/// NVRTC recurses deeply.
const STACK_BYTES: usize = 16 << 20;

/// Kernels that are all in the cache, one after another, after which the others are taken to be there, too: a program
/// that was started before.
const ENOUGH_FOUND: usize = 16;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number of things that are still to be done.
#[derive(Default)]
struct Pending {
    count: Mutex<usize>,
    fell: Condvar,
}

impl Pending {
    fn wait(&self) {
        let done = self.fell.wait_while(lock(&self.count), |count| *count > 0);
        drop(done.unwrap_or_else(PoisonError::into_inner));
    }
}

/// One of the things that are to be done, until it is dropped.
struct Task(Arc<Pending>);

impl Task {
    fn of(pending: &Arc<Pending>) -> Self {
        *lock(&pending.count) += 1;
        Self(Arc::clone(pending))
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        *lock(&self.0.count) -= 1;
        self.0.fell.notify_all();
    }
}

pub(super) struct Workers {
    pool: ThreadPool,
    pending: Arc<Pending>,
    /// Kernels that were in the cache since the last one that was not.
    found: Arc<AtomicUsize>,
}

impl Workers {
    /// `None` where the system gives no threads.
    pub(super) fn new(threads: usize) -> Option<Self> {
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|place| format!("blackburn-compile-{place}"))
            .stack_size(STACK_BYTES)
            // The kernel is not there then, and CubeCL compiles it.
            .panic_handler(|_| tracing::debug!("a kernel was not compiled ahead: a panic"))
            .build();
        let pool = pool.inspect_err(|error| tracing::debug!("no threads to compile on: {error}"));
        Some(Self { pool: pool.ok()?, pending: Arc::default(), found: Arc::default() })
    }

    /// Has `kernel` compiled. The result waits until it is.
    pub(super) fn compile(&self, target: &Arc<Target>, kernel: Box<dyn CubeKernel>) -> Wait {
        let this = Arc::new(Pending::default());
        let tasks = [Task::of(&this), Task::of(&self.pending)];
        let (target, found) = (Arc::clone(target), Arc::clone(&self.found));
        self.pool.spawn(move || {
            let _until_done = tasks;
            match target.compile(&*kernel) {
                Ok(Outcome::Found) => {
                    if found.fetch_add(1, Ordering::Relaxed) + 1 >= ENOUGH_FOUND {
                        rest();
                    }
                }
                Ok(Outcome::Compiled) => found.store(0, Ordering::Relaxed),
                Err(reason) => {
                    tracing::debug!("{} was not compiled ahead: {reason}", kernel.name());
                }
            }
        });
        Box::new(move || this.wait())
    }

    /// Takes no longer for granted that kernels are in the cache.
    pub(super) fn expect_new(&self) {
        self.found.store(0, Ordering::Relaxed);
    }

    /// Waits until everything is compiled.
    pub(super) fn finish(&self) {
        self.pending.wait();
    }
}

/// How a kernel came into the cache.
enum Outcome {
    Found,
    Compiled,
}

/// A device to compile for.
pub(super) struct Target {
    capability: u32,
    properties: Arc<DeviceProperties>,
    nvrtc: Nvrtc,
    options: Vec<String>,
    cache: Mutex<Cache>,
}

impl Target {
    pub(super) fn of(client: &Client, capability: u32) -> Result<Arc<Self>, String> {
        let properties = client.properties_shared();
        let cache =
            Cache::open(&properties.identity.fingerprint).ok_or("nothing is kept on disk")?;
        let root = cuda_path().ok_or("no CUDA toolkit")?;
        // The architecture's own instructions begin with Hopper.
        let own = if capability >= 90 { "a" } else { "" };
        Ok(Arc::new(Self {
            capability,
            properties,
            nvrtc: Nvrtc::installed().map_err(|error| format!("{error:#}"))?,
            options: options(&root, &format!("sm_{capability}{own}")),
            cache: Mutex::new(cache),
        }))
    }

    /// Puts `kernel` into the cache, if it is not there.
    fn compile(&self, kernel: &dyn CubeKernel) -> Result<Outcome, String> {
        let id = kernel.id();
        let key = lock(&self.cache).key(&id);
        if lock(&self.cache).has(&key) {
            return Ok(Outcome::Found);
        }
        let compiled = recorder::compile(kernel, self.capability, &self.properties)?;
        let source = hash_of(&compiled.source);
        if lock(&self.cache).has_source(source) {
            return Ok(Outcome::Found);
        }
        // Machine code: the driver would compile PTX once more.
        let code = self.nvrtc.compile_to_cubin(&compiled.source, &self.options);
        let code = code.map_err(|error| format!("{error:#}"))??;
        let entry = Entry {
            entrypoint_name: compiled.entry,
            shared_mem_bytes: compiled.shared_memory_bytes,
            ptx: code.into_iter().map(|byte| byte as c_char).collect(),
            io: compiled.io,
        };
        lock(&self.cache).keep(key, source, entry);
        Ok(Outcome::Compiled)
    }
}
