//! Watching what Burn's fusion makes of a piece of a program.

use blackburn_kernels::ahead::is_looking;
use burn::tensor::Device;
use burn_fusion::{
    observer::{BlockOperations, FusionObservation, FusionObserver},
    stream::StreamId,
};
use burn_ir::OperationIr;
use cubecl::logging::{LaunchObservation, LaunchObserver};
use libtest_mimic::Failed;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    thread::{self, ThreadId},
};

/// A block of operations that ran: what one fusion covers, or one operation by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// How many operations it covers.
    pub operations: usize,
    /// The kernels that it launched, by their type names.
    pub kernels: Vec<&'static str>,
}

impl Block {
    /// Whether it covers that many operations by one launch of the kernel whose name ends so.
    pub fn is_one_kernel(&self, operations: usize, name: &str) -> bool {
        self.operations == operations
            && matches!(self.kernels[..], [kernel] if kernel.ends_with(name))
    }
}

/// Does `work` on `device`, and returns with its result the blocks that Burn ran for it.
///
/// Other tests run at the same time, on threads of their own. Burn keeps the operations of each thread
/// in a stream of their own, and only blocks of this thread's stream count. So work that `work` gives
/// to other threads does not show, and neither do kernels that are launched without Burn.
///
/// # Errors
///
/// What `work` reports, or a device that failed.
pub fn blocks_of<T>(
    device: &Device,
    work: impl FnOnce() -> Result<T, Failed>,
) -> Result<(T, Vec<Block>), Failed> {
    /// CubeCL has one launch observer at a time.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);

    let sync = || device.sync().map_err(|error| error.to_string());
    sync()?;
    let blocks = Arc::new(Blocks { stream: StreamId::current(), state: Mutex::default() });
    let watching = (FusionObservation::new(blocks.clone()), LaunchObservation::new(blocks.clone()));
    let result = work()?;
    sync()?;
    drop(watching);
    let state = blocks.state.lock().map_err(|_| "an observer panicked")?;
    Ok((result, state.ran.clone()))
}

struct Blocks {
    /// Whose blocks count.
    stream: StreamId,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    running: HashMap<ThreadId, Block>,
    ran: Vec<Block>,
}

impl FusionObserver for Blocks {
    fn registered(&self, _operation: &OperationIr) {}

    fn block_starts(&self, block: BlockOperations<'_>) {
        // Burn's server runs on a thread of its own, which takes on the stream that it works for.
        if StreamId::current() != self.stream {
            return;
        }
        let block = Block { operations: block.iter().len(), kernels: Vec::new() };
        if let Ok(mut state) = self.state.lock() {
            state.running.insert(thread::current().id(), block);
        }
    }

    fn block_ran(&self) {
        if let Ok(mut state) = self.state.lock()
            && let Some(block) = state.running.remove(&thread::current().id())
        {
            state.ran.push(block);
        }
    }
}

impl LaunchObserver for Blocks {
    fn launched(&self, kernel: &'static str) {
        if is_looking() {
            return;
        }
        if let Ok(mut state) = self.state.lock()
            && let Some(block) = state.running.get_mut(&thread::current().id())
        {
            block.kernels.push(kernel);
        }
    }
}
