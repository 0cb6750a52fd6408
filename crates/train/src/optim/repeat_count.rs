//! How often a step was repeated.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// Steps that repeated one, of which the optimizer was not told. Clones are one count.
///
/// An optimizer's states have the number of the parameter's last step. Where a trainer repeats the step of all
/// parameters at once, the states stay as they are, and so the number is that and this count.
#[derive(Clone, Debug, Default)]
pub struct RepeatCount(Arc<AtomicUsize>);

impl RepeatCount {
    /// Takes note of another one.
    pub(crate) fn count_one(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// `time`, the number of the step that was repeated, and the repetitions.
    pub(super) fn after(&self, time: usize) -> usize {
        time.saturating_add(self.0.load(Ordering::Relaxed))
    }
}
