//! What providers leave to Burn, told once for each reason.

use blackburn_kernels::KernelError;
use std::{collections::BTreeSet, sync::Mutex};

/// Reasons hold sizes, of which a program may have very many.
const MOST_REASONS: usize = 64;

static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Logs that `provider` leaves operations to Burn for `reason`, the first time that it does.
pub(crate) fn tell_once(provider: &'static str, reason: &KernelError) {
    let message = format!("{provider}: {reason}; Burn's own operations take over");
    let Ok(mut told) = TOLD.lock() else { return };
    if told.len() < MOST_REASONS && told.insert(message.clone()) {
        tracing::debug!("{message}");
    }
}

/// What a kernel returned. `None`, told once in the name of `op`, where Burn's operations take over.
///
/// # Panics
///
/// On errors of another kind, which are the caller's or the device's.
pub(crate) fn served<T>(op: &'static str, result: Result<T, KernelError>) -> Option<T> {
    match result {
        Ok(done) => Some(done),
        Err(reason @ KernelError::Unsupported { .. }) => {
            tell_once(op, &reason);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// What was told so far, in alphabetical order.
pub(crate) fn told() -> Vec<String> {
    TOLD.lock().map(|told| told.iter().cloned().collect()).unwrap_or_default()
}

/// What `op` leaves to Burn.
pub(crate) fn unsupported(op: &'static str, reason: &str) -> KernelError {
    KernelError::Unsupported { op, reason: reason.into() }
}
