//! How many of Burn's operations ran on Blackburn's kernels, by provider.

use std::{collections::BTreeMap, sync::Mutex};

static SERVED: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// Counts operations that `provider` has run.
pub(crate) fn count(provider: &'static str, operations: usize) {
    if let Ok(mut served) = SERVED.lock() {
        *served.entry(provider).or_default() += operations as u64;
    }
}

/// The counts since the process began.
pub(crate) fn counts() -> BTreeMap<&'static str, u64> {
    SERVED.lock().map(|served| served.clone()).unwrap_or_default()
}
