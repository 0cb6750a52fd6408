//! What a device's memory holds, what a training will need of it, and a limit to it.
//!
//! Burn's GPU backends take memory from the device in pages and keep them for reuse: *reserved* is what they took,
//! *in use* what tensors lie in. A CPU has no such pools, and nothing here reads or limits its memory.
//!
//! | asked | answered by |
//! |---|---|
//! | what does the device hold | [`MemoryMonitor`] |
//! | what will a training need | [`TrainerConfig::estimate`](crate::trainer::TrainerConfig::estimate), for any loop [`dry_run`] |
//! | will it stay below a limit | [`set_limit`] and [`MemoryWatch`]; a [`Trainer`](crate::trainer::Trainer) watches by itself |
//! | how does another phase, or another program, get what is not needed any more | [`release`] |

mod census;
mod dry;
mod estimate;
mod limit;
mod monitor;

pub(crate) use census::Census;
pub use dry::{dry_run, release};
pub use estimate::MemoryEstimate;
pub use limit::{MemoryError, MemoryWatch, limit, set_limit};
pub use monitor::{MemoryMonitor, PoolMemory};

/// A number of bytes for a reader.
pub(crate) fn shown(bytes: u64) -> String {
    let units = [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match units.into_iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{:.2} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests;
