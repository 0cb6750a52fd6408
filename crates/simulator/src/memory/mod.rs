//! Memory: the device's buffers, a block's shared and tensor memory, and where each space lies among generic
//! addresses.

mod global;
mod shared;
mod tensor;

pub(crate) use global::Global;
pub(crate) use shared::Shared;
pub(crate) use tensor::{CELLS, TensorMemory, TensorPlace, cell};

use crate::{
    error::{FaultKind, Outcome, Trouble},
    ptx::Space,
};

/// The first shared address: what lies below belongs to the system, as on the hardware.
pub(crate) const SHARED_BASE: u64 = 1024;
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
        Space::Shared => 1 << WINDOW_SHIFT,
        Space::Local => 2 << WINDOW_SHIFT,
        Space::Param => 3 << WINDOW_SHIFT,
    }
}

/// The space of a generic address, and the address there.
pub(crate) fn resolve(address: u64) -> (Space, u64) {
    let inside = address & ((1 << WINDOW_SHIFT) - 1);
    match address >> WINDOW_SHIFT {
        1 => (Space::Shared, inside),
        2 => (Space::Local, inside),
        3 => (Space::Param, inside),
        _ => (Space::Global, address),
    }
}

/// Refuses an address that is no multiple of `bytes`.
pub(crate) fn check_alignment(address: u64, bytes: u64) -> Outcome {
    if address.is_multiple_of(bytes) {
        return Ok(());
    }
    let reason = format!("address {address:#x} is no multiple of {bytes}");
    Err(Trouble::new(FaultKind::Misaligned, reason))
}
