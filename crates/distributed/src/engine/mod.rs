//! What moves numbers between ranks.

pub(crate) mod host;
#[cfg(feature = "cuda")]
pub(crate) mod nccl;
// Tested in builds without CUDA, too.
#[cfg(any(feature = "cuda", test))]
#[cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, reason = "only a build with CUDA calls all of it")
)]
pub(crate) mod nccl_library;
pub(crate) mod tcp;

use burn::tensor::Tensor;
use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Numbers that did not come through.
#[derive(Debug)]
pub(crate) struct EngineError {
    /// The rank at the other end.
    pub(crate) rank: usize,
    /// What happened, after "rank N".
    pub(crate) what: String,
}

/// Moves tensors between ranks. All ranks call the same functions with tensors of the same lengths and types, in
/// the same order, one call at a time.
pub(crate) trait Engine: Send + Sync + fmt::Debug {
    /// Adds each tensor up over all ranks. All ranks get the same bits. A sum of two is rounded once.
    fn sum(&self, tensors: Vec<Tensor<1>>) -> Result<Vec<Tensor<1>>, EngineError>;

    /// Gives all ranks each tensor as the rank beside it has it.
    fn spread(&self, tensors: Vec<(Tensor<1>, usize)>) -> Result<Vec<Tensor<1>>, EngineError>;

    /// Gives all ranks the bytes of `root`, whose number they need not know.
    fn spread_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>, EngineError>;

    /// How long numbers have moved until now.
    fn moving(&self) -> Duration;

    /// Ends what is under way, here and in other threads, and all that comes after.
    fn abort(&self);
}

/// A sum of times.
#[derive(Debug, Default)]
pub(crate) struct Clock(AtomicU64);

impl Clock {
    /// Runs `work`, whose time counts.
    fn timed<T>(&self, work: impl FnOnce() -> T) -> T {
        let since = Instant::now();
        let done = work();
        self.0.fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
        done
    }

    fn total(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}
