//! Blackburn's kernels, compiled several at a time before the device's thread comes to them.
//!
//! NVRTC takes tens of milliseconds to two seconds for a kernel, and CubeCL asks for one after another. Here
//! [workers](Workers) compile each kernel as soon as it is [asked for](blackburn_kernels::ahead), and put it into CubeCL's
//! cache on disk, where the device's thread finds it. Where a kernel is not there in the end, CubeCL compiles it as ever,
//! and says what is wrong with it. Burn's own kernels, which are small, are left to CubeCL.

mod cache;
mod workers;

use blackburn_kernels::{
    DeviceProfile,
    ahead::{KernelSink, arm, watch},
};
use cubecl::client::Client;
use std::{num::NonZero, sync::OnceLock, thread};
use workers::{Target, Workers};

/// More do not help a training step, and each may take hundreds of megabytes.
const MOST_THREADS: usize = 16;

static THREADS: OnceLock<usize> = OnceLock::new();
/// Started for the first device that has kernels to compile.
static WORKERS: OnceLock<Option<Workers>> = OnceLock::new();

/// Has kernels compiled ahead on so many threads, by default one for each core, up to 16. None with 0. The first call
/// counts.
pub(crate) fn start(threads: Option<usize>) {
    let cores = thread::available_parallelism().map_or(1, NonZero::get).min(MOST_THREADS);
    if *THREADS.get_or_init(|| threads.unwrap_or(cores)) > 0 {
        watch(sink_of);
    }
}

/// Has kernels looked out for again.
pub(crate) fn look_out() {
    if let Some(workers) = WORKERS.get().and_then(Option::as_ref) {
        workers.expect_new();
    }
    arm();
}

/// Waits until everything is compiled that was asked for.
pub(crate) fn finish() {
    if let Some(workers) = WORKERS.get().and_then(Option::as_ref) {
        workers.finish();
    }
}

/// Where new kernels of a device go: nowhere if it is no NVIDIA GPU, or nothing is kept on disk.
fn sink_of(client: &Client) -> Option<KernelSink> {
    let capability = DeviceProfile::of(client).compute_capability?;
    let target = Target::of(client, capability)
        .inspect_err(|reason| tracing::debug!("kernels are not compiled ahead: {reason}"))
        .ok()?;
    let workers = WORKERS.get_or_init(|| THREADS.get().copied().and_then(Workers::new)).as_ref()?;
    Some(Box::new(move |kernel| workers.compile(&target, kernel)))
}
