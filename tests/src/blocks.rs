//! Watching what Burn's fusion makes of a piece of a program.

use burn::tensor::Device;
use burn_fusion::observer::{BlockOperations, FusionObservation, FusionObserver};
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
/// A launch is attributed to the block that its thread was running, so kernels that other tests
/// launch by hand do not show. Work that other tests give to Burn at the same time does.
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
    let blocks = Arc::new(Blocks::default());
    let watching = (FusionObservation::new(blocks.clone()), LaunchObservation::new(blocks.clone()));
    let result = work()?;
    sync()?;
    drop(watching);
    let state = blocks.0.lock().map_err(|_| "an observer panicked")?;
    Ok((result, state.ran.clone()))
}

#[derive(Default)]
struct Blocks(Mutex<State>);

#[derive(Default)]
struct State {
    running: HashMap<ThreadId, Block>,
    ran: Vec<Block>,
}

impl FusionObserver for Blocks {
    fn registered(&self, _operation: &OperationIr) {}

    fn block_starts(&self, block: BlockOperations<'_>) {
        let block = Block { operations: block.iter().len(), kernels: Vec::new() };
        if let Ok(mut state) = self.0.lock() {
            state.running.insert(thread::current().id(), block);
        }
    }

    fn block_ran(&self) {
        if let Ok(mut state) = self.0.lock()
            && let Some(block) = state.running.remove(&thread::current().id())
        {
            state.ran.push(block);
        }
    }
}

impl LaunchObserver for Blocks {
    fn launched(&self, kernel: &'static str) {
        if let Ok(mut state) = self.0.lock()
            && let Some(block) = state.running.get_mut(&thread::current().id())
        {
            block.kernels.push(kernel);
        }
    }
}
