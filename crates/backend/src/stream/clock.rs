use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// Counts the operations that a provider's fuser was shown, the clones of it in other blocks included.
///
/// Burn shows an operation only to the blocks that it belongs to, and goes on until no fuser waits. One
/// that waits for an operation that never comes makes it go on until it has as many blocks as it may
/// have, and cut off whatever is under way there: without a bias, the residual behind the next product.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shown(Arc<AtomicU64>);

impl Shown {
    /// One more.
    pub(crate) fn count(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// How many there were.
    pub(crate) fn so_far(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
