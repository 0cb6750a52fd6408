//! Memory without the work that needs it, and memory that is not needed any more.

use super::{MemoryMonitor, PoolMemory};
use burn::tensor::{Device, ExecutionError};

/// Runs `work` for the memory that it asks `device` for, without computing anything, and tells by how much the device's
/// pools would have grown. `None`, and `work` is not run, where a device has no pools, as a CPU.
///
/// ```
/// use blackburn_train::memory::dry_run;
/// use burn::{nn::LinearConfig, prelude::*};
///
/// let device = Device::flex().autodiff();
/// let found = dry_run(&device, |monitor| {
///     let model = LinearConfig::new(1024, 1024).init(&device);
///     let loss = model.forward(Tensor::<2>::zeros([512, 1024], &device)).mean();
///     // Parameters, and what the forward pass has left for the backward pass.
///     monitor.read();
///     let _gradients = loss.backward();
///     monitor.read();
/// })?;
/// match found {
///     Some(((), memory)) => println!("takes {} bytes", memory.reserved_bytes),
///     None => println!("not known on a CPU"),
/// }
/// # Ok::<(), burn::tensor::ExecutionError>(())
/// ```
///
/// Kernels are compiled, which a first step does in any case, and then left out. Memory is counted by the pools that
/// would serve it and hardly taken from the device: what needs more than the device has is measured all the same. The
/// result is the largest of the readings that `work` makes with its argument, and of one at the end, less what was there
/// before. Pools keep what they once needed, so that one reading of `reserved_bytes` tells the most at any time before,
/// but for pages that they outgrew and gave back. `in_use_bytes` is that of the moments of reading.
///
/// - **Numbers are not computed.** What `work` reads from the device is anything, and what it leaves behind holds
///   anything: make the model, the batch and the optimizer within `work`, and let go of them there. A model from outside
///   keeps its parameters as long as they were used before; running statistics of its norms would be lost.
/// - **All GPUs and threads of the process** compute nothing meanwhile. Do not let others work.
/// - What is written from the host, as by `Tensor::from_data`, takes memory for real. Take `Tensor::zeros`.
/// - Random numbers are drawn: seed the device afterwards.
///
/// # Errors
///
/// When something went wrong on the device earlier, or in `work`.
pub fn dry_run<T>(
    device: &Device,
    work: impl FnOnce(&mut MemoryMonitor) -> T,
) -> Result<Option<(T, PoolMemory)>, ExecutionError> {
    // What was asked for earlier runs as ever, and what nobody uses does not serve the work.
    release(device)?;
    let mut monitor = MemoryMonitor::new(device);
    let Some(before) = monitor.read() else { return Ok(None) };
    let (value, done) = blackburn_backend::dry_run(|| {
        let value = work(&mut monitor);
        let done = device.sync();
        monitor.read();
        (value, done)
    });
    // Pages that were only counted go, before anyone computes in them.
    device.memory_cleanup();
    done?;
    let most = monitor.peak().unwrap_or(before);
    let grown = PoolMemory {
        in_use_bytes: most.in_use_bytes - before.in_use_bytes,
        reserved_bytes: most.reserved_bytes - before.reserved_bytes,
    };
    Ok(Some((value, grown)))
}

/// Gives memory that no tensor lies in back to the device, for another phase whose tensors have other sizes, or for
/// another program. Waits for the device. Returns how many bytes it was; 0 where the device has no pools, as a CPU.
///
/// What comes next takes its memory anew, and steps of the same sizes find none kept: between steps it only costs time.
/// A recorded pass keeps its memory until the [graph](crate::graph), or the trainer that has it, is dropped, and a page
/// goes back only when nothing on it is in use.
///
/// # Errors
///
/// When something went wrong on the device earlier.
pub fn release(device: &Device) -> Result<u64, ExecutionError> {
    // Tensors that were dropped are held by operations that wait in the queue.
    device.sync()?;
    let mut monitor = MemoryMonitor::new(device);
    let Some(before) = monitor.read() else { return Ok(0) };
    device.memory_cleanup();
    let after = monitor.read().unwrap_or(before);
    Ok(before.reserved_bytes.saturating_sub(after.reserved_bytes))
}
