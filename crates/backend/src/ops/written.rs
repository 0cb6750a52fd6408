//! Memory that is written behind the backs of its holders: by what overwrites its input, by replays, and by whoever was
//! given an address. What is known of the numbers there is forgotten here, wherever it is kept.
//!
//! [`copies`](super::copies) are told apart: who writes one says what it is a copy of.

use super::{attention::mask_maps, fp8_linear::marked};
use crate::tensors::kept_casts;
use cubecl::server::Handle;

/// Forgets what is known of `memory`.
pub(crate) fn forget(memory: &Handle) {
    marked::written(memory);
    mask_maps::written(memory);
    kept_casts::written(memory);
}

/// Forgets what is known of all parameters, activations and gradients.
pub(crate) fn forget_all() {
    marked::forget_casts();
    kept_casts::forget();
}
