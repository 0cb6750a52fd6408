//! Memory: the device's buffers, a block's shared and tensor memory, and where each space lies among generic
//! addresses.

mod global;
mod shared;
mod tensor;

pub(crate) use global::Global;
pub(crate) use shared::Shared;
pub(crate) use tensor::{CELLS, TensorMemory, TensorPlace, cell, place_of};

use crate::{
    error::{FaultKind, Outcome, Trouble},
    ptx::Space,
};

/// The first shared address: what lies below belongs to the system, as on the hardware.
pub(crate) const SHARED_BASE: u64 = 1024;
/// Where the rank of a block in its cluster stands in shared addresses, as on the hardware: others' kernels find the
/// first block of a pair by clearing one bit.
const RANK_SHIFT: u32 = 24;
/// The most blocks of a cluster, and bits of a rank.
pub(crate) const MOST_BLOCKS: u32 = 16;
/// Where a module's variables lie.
pub(crate) const MODULE_BASE: u64 = 0x6000_0000_0000;
/// Where buffers begin.
pub(crate) const BUFFER_BASE: u64 = 0x7000_0000_0000;

/// Bits of generic addresses that tell spaces apart; global memory has none of them.
const WINDOW_SHIFT: u32 = 48;

/// What a space's addresses are increased by to be generic.
pub(crate) fn window(space: Space) -> u64 {
    match space {
        Space::Generic | Space::Global => 0,
        Space::Shared | Space::Cluster => 1 << WINDOW_SHIFT,
        Space::Local => 2 << WINDOW_SHIFT,
        Space::Param => 3 << WINDOW_SHIFT,
    }
}

/// The space of a generic address, and the address there.
pub(crate) fn resolve(address: u64) -> (Space, u64) {
    let inside = address & ((1 << WINDOW_SHIFT) - 1);
    match address >> WINDOW_SHIFT {
        1 => (Space::Cluster, inside),
        2 => (Space::Local, inside),
        3 => (Space::Param, inside),
        _ => (Space::Global, address),
    }
}

/// The rank of the block in whose memory a shared address lies.
pub(crate) fn rank_of(shared: u64) -> usize {
    (shared >> RANK_SHIFT) as usize
}

/// A shared address as its own block counts.
pub(crate) fn within_block(shared: u64) -> u64 {
    shared & ((1 << RANK_SHIFT) - 1)
}

/// The same place in the memory of the block of that rank. An address that is generic stays so.
pub(crate) fn in_block(rank: usize, shared: u64) -> u64 {
    shared & !(0xff << RANK_SHIFT) | (rank as u64) << RANK_SHIFT
}

/// Refuses an address that is no multiple of `bytes`.
pub(crate) fn check_alignment(address: u64, bytes: u64) -> Outcome {
    if address.is_multiple_of(bytes) {
        return Ok(());
    }
    let reason = format!("address {address:#x} is no multiple of {bytes}");
    Err(Trouble::new(FaultKind::Misaligned, reason))
}
