//! The observers of Burn's fusion and of CubeCL's launches, which are one here.

use super::{BlockRecord, LaunchRecord, ObserveError, cost};
use blackburn_kernels::ahead::is_looking;
use burn::tensor::Device;
use burn_fusion::observer::{BlockOperations, FusionObservation, FusionObserver};
use burn_ir::OperationIr;
use cubecl::logging::{Duration, LaunchObservation, LaunchObserver, TimingMethod, TimingRequest};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
    thread::{self, ThreadId},
};

/// As [`super::observe`], for a device that can be observed.
pub(super) fn observe<T>(
    device: &Device,
    work: impl FnOnce() -> T,
) -> Result<(T, Vec<BlockRecord>), ObserveError> {
    /// CubeCL has one launch observer at a time.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = match ONE_AT_A_TIME.try_lock() {
        Ok(turn) => turn,
        Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
        Err(TryLockError::WouldBlock) => return Err(ObserveError::Busy),
    };
    let device = device.clone().without_autodiff();
    let sync = || device.sync().map_err(|error| ObserveError::Device { reason: error.to_string() });

    sync()?;
    let observer = Arc::new(Observer::default());
    let watching =
        (FusionObservation::new(observer.clone()), LaunchObservation::new(observer.clone()));
    let result = work();
    let done = sync();
    drop(watching);
    done?;
    let ran = std::mem::take(&mut observer.state().ran);
    Ok((result, ran))
}

#[derive(Default)]
struct Observer(Mutex<State>);

#[derive(Default)]
struct State {
    /// The block that a thread runs, by its place among all.
    running: HashMap<ThreadId, usize>,
    /// The block of a thread's last launch.
    launched: HashMap<ThreadId, usize>,
    ran: Vec<BlockRecord>,
}

impl Observer {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FusionObserver for Observer {
    fn registered(&self, _operation: &OperationIr) {}

    fn block_starts(&self, block: BlockOperations<'_>) {
        let operations = block.iter().map(cost::record).collect();
        let state = &mut *self.state();
        state.running.insert(thread::current().id(), state.ran.len());
        state.ran.push(BlockRecord { operations, launches: Vec::new() });
    }

    fn block_ran(&self) {
        self.state().running.remove(&thread::current().id());
    }
}

impl LaunchObserver for Observer {
    fn launched(&self, kernel: &'static str) {
        if is_looking() {
            return;
        }
        let thread = thread::current().id();
        let state = &mut *self.state();
        let block = state.running.get(&thread).copied().unwrap_or_else(|| {
            state.ran.push(BlockRecord::default());
            state.ran.len() - 1
        });
        state.ran[block].launches.push(LaunchRecord { kernel, time: None, by_device: false });
        state.launched.insert(thread, block);
    }

    /// Read at once: unread measurements keep timers of the device, of which wgpu has a limited number, and
    /// the time between two events around a kernel would be that of the host where the device waits for it,
    /// in some launches and not in others.
    fn timing(&self) -> TimingRequest {
        TimingRequest::Resolved
    }

    fn timed(&self, kernel: &'static str, duration: Duration, method: TimingMethod) {
        let state = &mut *self.state();
        let Some(block) = state.launched.get(&thread::current().id()) else { return };
        let last = state.ran[*block].launches.last_mut();
        if let Some(launch) = last.filter(|launch| launch.kernel == kernel) {
            launch.time = Some(duration);
            launch.by_device = method == TimingMethod::Device;
        }
    }
}
