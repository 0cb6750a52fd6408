use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// The time of an operation stream, in operations that Burn showed to a provider's fuser or to clones of it
/// in other blocks. All of them share one clock.
///
/// Burn shows an operation only to the blocks that it belongs to, and goes on until no fuser waits. One
/// that waits for an operation that never comes makes it go on until it has as many blocks as it may
/// have, and cut off whatever is under way there: without a bias, the residual behind the next product.
#[derive(Clone, Debug, Default)]
pub(super) struct StreamClock(Arc<AtomicU64>);

impl StreamClock {
    pub(super) fn tick(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
