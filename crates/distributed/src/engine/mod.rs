//! What moves numbers between ranks.

// What CUDA needs is tested in builds without it, too.
#![cfg_attr(
    all(test, not(feature = "cuda")),
    allow(dead_code, reason = "only a build with CUDA calls all of it")
)]

#[cfg(any(feature = "cuda", test))]
mod cuda_copies;
#[cfg(any(feature = "cuda", test))]
mod cuda_library;
#[cfg(any(feature = "cuda", test))]
mod exchange;
#[cfg(any(feature = "cuda", test))]
mod exchange_kernels;
#[cfg(any(feature = "cuda", test))]
mod exchange_meeting;
#[cfg(any(feature = "cuda", test))]
mod exchange_memory;
#[cfg(any(feature = "cuda", test))]
mod exchange_plan;
pub(crate) mod host;
#[cfg(any(feature = "cuda", test))]
mod host_memory;
#[cfg(any(feature = "cuda", test))]
mod library;
#[cfg(feature = "cuda")]
pub(crate) mod nccl;
#[cfg(feature = "cuda")]
mod nccl_connection;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod nccl_library;
#[cfg(feature = "cuda")]
mod nccl_moves;
#[cfg(any(feature = "cuda", test))]
mod places;
pub(crate) mod tcp;

#[cfg(feature = "cuda")]
pub(crate) use blackburn_backend::cuda_memory::{AnyTensor, is_cuda};
use blackburn_backend::graph::Progress;
use burn::tensor::{Device, Tensor};
use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// A tensor of any number of dimensions, for engines that know where it lies: none in a build without CUDA.
#[cfg(not(feature = "cuda"))]
#[derive(Clone, Debug)]
pub(crate) struct AnyTensor;

#[cfg(not(feature = "cuda"))]
impl AnyTensor {
    pub(crate) fn of<const D: usize>(_: Tensor<D>) -> Self {
        Self
    }
}

/// No device is one of CUDA's in a build without it.
#[cfg(not(feature = "cuda"))]
pub(crate) fn is_cuda(_: &Device) -> bool {
    false
}

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

    /// Adds each tensor up over all ranks, as [`sum`](Self::sum) does, for the rank beside it alone. In the places
    /// of others' tensors is anything.
    fn sum_at(&self, tensors: Vec<(Tensor<1>, usize)>) -> Result<Vec<Tensor<1>>, EngineError> {
        self.sum(tensors.into_iter().map(|(tensor, _)| tensor).collect())
    }

    /// A number by which ranks find out whether these tensors of theirs lie alike in memory, gaps between elements
    /// included, and are there at the same milestones of `progress`. `None` where this engine adds nothing up in place.
    fn layout(
        &self,
        _tensors: &[AnyTensor],
        _progress: Option<&Progress>,
    ) -> Result<Option<u32>, EngineError> {
        Ok(None)
    }

    /// Whether tensors on `device` that are there at a milestone move before the pass is over, on this rank.
    fn moves_beside(&self, _device: &Device) -> bool {
        false
    }

    /// Adds tensors up where they lie, all their clones included, for tensors whose [`layout`](Self::layout) was
    /// asked for and is the same on all ranks: for all ranks, or each for the rank beside it. Those that are there at a
    /// milestone of `progress` may move before its replay is over. Adds `extras` up as [`sum`](Self::sum) does.
    fn sum_in_place(
        &self,
        tensors: Vec<(AnyTensor, Option<usize>)>,
        extras: Vec<Tensor<1>>,
        _progress: Option<&Progress>,
    ) -> Result<Vec<Tensor<1>>, EngineError> {
        drop(tensors);
        self.sum(extras)
    }

    /// Gives all ranks each tensor as the rank beside it has it.
    fn spread(&self, tensors: Vec<(Tensor<1>, usize)>) -> Result<Vec<Tensor<1>>, EngineError>;

    /// As [`spread`](Self::spread), while the device goes on with what it is asked for. The results may be read, and
    /// what was given may be changed, behind [`join`](Self::join).
    fn spread_beside(
        &self,
        tensors: Vec<(Tensor<1>, usize)>,
    ) -> Result<Vec<Tensor<1>>, EngineError> {
        self.spread(tensors)
    }

    /// Has the device wait for all that moves beside its work.
    fn join(&self) -> Result<(), EngineError> {
        Ok(())
    }

    /// Gives all ranks the bytes of `root`, whose number they need not know.
    fn spread_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>, EngineError>;

    /// How long numbers have moved until now.
    fn moving(&self) -> Moved;

    /// Ends what is under way, here and in other threads, and all that comes after.
    fn abort(&self);
}

/// How long numbers have moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// All in all, waits for ranks that were late included.
    pub all: Duration,
    /// Of that, while the device had other work to go on with.
    pub beside: Duration,
}

/// A sum of times.
#[derive(Debug, Default)]
pub(crate) struct Clock(AtomicU64);

impl Clock {
    /// Runs `work`, whose time counts.
    fn timed<T>(&self, work: impl FnOnce() -> T) -> T {
        let since = Instant::now();
        let done = work();
        self.add(since.elapsed());
        done
    }

    fn add(&self, time: Duration) {
        self.0.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    fn total(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}
