//! What a device was given to do: Burn's operations, the blocks that they ran in, and the kernels of each
//! block with their times.
//!
//! Two observers are behind it: `burn_fusion::observer` tells of every block that runs, and
//! `cubecl::logging::LaunchObserver` of every kernel, timed between two events on the device where the runtime
//! has them. A block is what one fusion replaces, or one operation by itself. Both observers are
//! process-wide, so what other threads do meanwhile is observed as well.
//!
//! To time a kernel the host waits for it, so kernels run one by one: their times are their own, and the
//! time that the whole takes is not. `blackburn_train::profile` measures that apart.

#[cfg(feature = "gpu")]
mod cost;
#[cfg(feature = "gpu")]
mod observer;
mod traffic;

use burn::tensor::Device;
use std::{collections::BTreeMap, time::Duration};
pub use traffic::traffic_bytes;

/// Why a device's work is not observed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ObserveError {
    /// The device runs no stream of operations that could be watched: a CPU.
    #[error("{device} tells of no kernels and operations; only GPUs do")]
    Unsupported {
        /// The device.
        device: String,
    },
    /// Another observation runs in this process, and there is room for one.
    #[error("another observation of kernels runs in this process; let it finish first")]
    Busy,
    /// The device failed.
    #[error("the device failed while it was observed: {reason}")]
    Device {
        /// What it said.
        reason: String,
    },
}

/// Whether `device` can be observed: a GPU, or a software device that passes for one.
pub fn is_observable(device: &Device) -> bool {
    crate::tensors::is_gpu(&device.clone().without_autodiff())
}

/// One block of operations that ran: those that one fusion replaces, or one by itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockRecord {
    /// In the order in which they run; with none, the kernels were launched outside of any block.
    pub operations: Vec<OperationRecord>,
    /// The kernels that the block launched, in order.
    pub launches: Vec<LaunchRecord>,
}

/// Whose kernels a block ran on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Server {
    /// Blackburn's.
    Blackburn,
    /// Those that Burn's fusion writes.
    BurnFused,
    /// Burn's kernels of single operations.
    Burn,
    /// None: a view, or the end of a tensor.
    Nobody,
}

impl BlockRecord {
    /// Whose kernels the block ran on, by the crates that the kernels are of.
    pub fn server(&self) -> Server {
        let any = |part: &str| self.launches.iter().any(|launch| launch.kernel.contains(part));
        if self.launches.is_empty() {
            Server::Nobody
        } else if any("blackburn_kernels::") {
            Server::Blackburn
        } else if any("burn_cubecl_fusion::") {
            Server::BurnFused
        } else {
            Server::Burn
        }
    }
}

/// One kernel that was launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchRecord {
    /// The name of its type, with the path of its module and its type arguments.
    pub kernel: &'static str,
    /// How long it took. `None` where the runtime could not time it.
    pub time: Option<Duration>,
    /// Whether the device's clock timed it. The host's time includes handing the kernel over and
    /// waiting for it.
    pub by_device: bool,
}

/// What an operation does with memory, as far as it decides what may be fused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationKind {
    /// Another way to look at a tensor: reshape, transposition, broadcast.
    View,
    /// Element by element: arithmetic, casts, masks, constants.
    ElementWise,
    /// Fewer elements out than in: sums, means, extremes.
    Reduction,
    /// A matrix product, a convolution or attention.
    Product,
    /// The rest: indexing, sorting, pooling, operations of other crates.
    Other,
    /// The end of a tensor.
    Drop,
}

/// One of Burn's operations, with what it reads and writes.
#[derive(Clone, Debug, PartialEq)]
pub struct OperationRecord {
    /// As Burn's intermediate representation names it: `Matmul`, `Add`; an extension operation by its id.
    pub name: String,
    /// What it does.
    pub kind: OperationKind,
    /// The tensors that it reads.
    pub reads: Vec<TensorUse>,
    /// The tensors that it makes.
    pub writes: Vec<TensorUse>,
    /// Whether the bytes of reads and writes are what it has to move. Not so for indexing, which reads or
    /// writes as much of a tensor as the indices say.
    pub bytes_known: bool,
    /// The arithmetic of a matrix product, a convolution or attention, from its shapes.
    pub arithmetic: Option<Arithmetic>,
}

/// Multiplications and additions of one product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arithmetic {
    /// Floating-point operations: two for each pair of numbers multiplied and added.
    pub flops: u64,
    /// Bytes of an operand's element: 2 for bf16 and f16, 4 for f32.
    pub element_bytes: u8,
}

/// A tensor that an operation reads or makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorUse {
    /// Its id in Burn's stream.
    pub id: u64,
    /// The bytes of its elements, without padding.
    pub bytes: u64,
    /// Whether the stream has no more use for it.
    pub last: bool,
}

/// Does `work` with every kernel timed, and returns with its result the blocks that ran, in order.
///
/// What was asked of `device` before is let through first and not observed; what `work` asks for is done
/// when this returns. Launches of all threads and devices are observed: keep others quiet meanwhile.
///
/// # Errors
///
/// [`ObserveError`]; with [`Unsupported`](ObserveError::Unsupported) and [`Busy`](ObserveError::Busy)
/// `work` was not begun.
pub fn observe<T>(
    device: &Device,
    work: impl FnOnce() -> T,
) -> Result<(T, Vec<BlockRecord>), ObserveError> {
    if !is_observable(device) {
        return Err(ObserveError::Unsupported { device: format!("{device:?}") });
    }
    #[cfg(feature = "gpu")]
    return observer::observe(device, work);
    #[cfg(not(feature = "gpu"))]
    {
        // Not reached: without a GPU backend no device can be observed.
        drop(work);
        Err(ObserveError::Unsupported { device: format!("{device:?}") })
    }
}

/// Why Blackburn's providers and operations left work to Burn, in the life of the process: each reason
/// once, in alphabetical order.
pub fn declined() -> Vec<String> {
    #[cfg(feature = "gpu")]
    return crate::declined::told();
    #[cfg(not(feature = "gpu"))]
    Vec::new()
}

/// How many operations of Burn's stream ran on Blackburn's kernels since the process began, by provider.
/// Replays of a recorded graph do not count.
pub fn served() -> BTreeMap<&'static str, u64> {
    #[cfg(feature = "gpu")]
    return crate::served::counts();
    #[cfg(not(feature = "gpu"))]
    BTreeMap::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_of_the_crate_whose_kernels_it_ran() {
        let block = |kernels: &[&'static str]| {
            let launch = |kernel| LaunchRecord { kernel, time: None, by_device: false };
            let launches = kernels.iter().copied().map(launch).collect();
            BlockRecord { operations: Vec::new(), launches }.server()
        };
        assert_eq!(block(&[]), Server::Nobody);
        assert_eq!(block(&["burn_cubecl::kernel::cast::Cast<f32>"]), Server::Burn);
        // Burn's fused products are kernels of another crate over arguments of the fusion's.
        let fused = "cubek_matmul::Matmul<burn_cubecl_fusion::engine::FusedArgs>";
        assert_eq!(block(&[fused]), Server::BurnFused);
        // An operand that is copied first leaves the block Blackburn's.
        let ours = "blackburn_kernels::gelu::forward::Gelu";
        assert_eq!(block(&["burn_cubecl::kernel::Contiguous", ours]), Server::Blackburn);
    }

    #[cfg(feature = "flex")]
    #[test]
    fn a_cpu_is_not_observed_and_nothing_is_begun() {
        let device = Device::flex();
        let mut begun = false;
        let error = observe(&device, || begun = true).expect_err("nothing to observe");
        assert!(!begun && error.to_string().contains("only GPUs do"), "{error}");
    }
}
