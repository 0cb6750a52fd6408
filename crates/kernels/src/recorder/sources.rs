//! What all launchers launch on a GPU.

use super::{Gpu, Launched, RecordError, Recorder};
use crate::{
    Promise,
    variants::{Variant, variants},
};
use serde::Serialize;
use std::{collections::HashMap, num::NonZero, sync::Mutex, thread, vec};

/// A kernel that a launcher launches, and what it promises.
#[derive(Clone, Debug, Serialize)]
pub struct CudaKernel {
    /// Kernel, types and what else tells launches apart.
    pub name: String,
    /// Where [`source`](Self::source) is written: `name` in a folder of the architecture.
    pub file: String,
    /// Symbol of the entry point.
    pub entry: String,
    /// What to compile for.
    pub architectures: [&'static str; 1],
    /// The tensor-core instruction that must be there, if the kernel uses one.
    pub tensor_core: Option<&'static str>,
    /// Registers a unit may use for the occupancy that the kernel counts on.
    pub max_registers: u32,
    /// Bytes of registers that are known to spill.
    pub spill_bytes: u32,
    /// Dynamic shared memory of a launch, in bytes.
    pub shared_memory_bytes: usize,
    /// CUDA C++.
    #[serde(skip)]
    pub source: String,
}

/// A kernel that was launched, before it is compiled.
pub(super) struct Job {
    pub(super) name: String,
    promise: Promise,
    launched: Launched,
}

/// Every kernel that the launchers of this crate launch on `gpu`, once each.
///
/// # Errors
///
/// The first launch that is refused, kernel that does not compile, and kernel that promises nothing.
pub fn record(gpu: Gpu) -> Result<Vec<CudaKernel>, RecordError> {
    let recorder = Recorder::new(gpu);
    let jobs = launch_all(&recorder, &variants(recorder.client()))?;
    let count = jobs.len();
    let queue = Mutex::new(jobs.into_iter().enumerate());
    let take = |queue: &Mutex<std::iter::Enumerate<vec::IntoIter<Job>>>| {
        queue.lock().expect("no worker panicked").next()
    };
    let worker = || {
        let mut done = Vec::new();
        while let Some((place, job)) = take(&queue) {
            done.push((place, compile(&recorder, gpu, job)?));
        }
        Ok::<_, RecordError>(done)
    };
    let workers = thread::available_parallelism().map_or(1, NonZero::get).min(count);
    let mut kernels = thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
        let mut kernels = Vec::with_capacity(count);
        for thread in threads {
            kernels.extend(thread.join().expect("a worker panicked")?);
        }
        Ok::<_, RecordError>(kernels)
    })?;
    kernels.sort_by_key(|(place, _)| *place);
    Ok(kernels.into_iter().map(|(_, kernel)| kernel).collect())
}

/// Launches every variant, and names what each of them is the first to launch.
pub(super) fn launch_all(
    recorder: &Recorder,
    variants: &[Variant],
) -> Result<Vec<Job>, RecordError> {
    let mut jobs = Vec::new();
    let mut seen = HashMap::new();
    for variant in variants {
        variant
            .launch(recorder.client())
            .map_err(|error| recorder.failed(&variant.name, &error))?;
        for launched in recorder.take()? {
            let kernel = launched.function().trim_end_matches("_kernel").to_owned();
            let promise = variant.promises.iter().find(|(name, _)| *name == kernel);
            let Some((_, promise)) = promise else {
                let reason = format!("`{kernel}` is launched and promises nothing");
                return Err(recorder.failed(&variant.name, &reason));
            };
            let name = format!("{kernel}_{}", variant.name);
            // One call may launch a kernel in several forms.
            let count = seen.entry(name.clone()).and_modify(|count| *count += 1).or_insert(1);
            let name = if *count > 1 { format!("{name}_{count}") } else { name };
            jobs.push(Job { name, promise: *promise, launched });
        }
    }
    Ok(jobs)
}

fn compile(recorder: &Recorder, gpu: Gpu, job: Job) -> Result<CudaKernel, RecordError> {
    let Job { name, promise, launched } = job;
    let compiled = recorder.compile(&launched)?;
    Ok(CudaKernel {
        file: format!("{}/{name}.cu", gpu.architecture),
        name,
        entry: compiled.entry,
        architectures: [gpu.architecture],
        tensor_core: promise.tensor_core,
        max_registers: promise.max_registers,
        spill_bytes: promise.spill_bytes,
        shared_memory_bytes: compiled.shared_memory_bytes,
        source: compiled.source,
    })
}
