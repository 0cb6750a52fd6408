//! How many of a parameter's own steps a gate took back.
//!
//! A parameter may be younger than its scaler: unfrozen late, without a gradient in some steps, or new beside
//! a scaler that was restored. So its steps are counted apart from the scaler's. The count stays on the
//! device, and parameters with the same past share it. Where that past is the scaler's own, as it is for a
//! model that begins or resumes together with its scaler, the scaler's count serves and nothing is computed.

use super::gate::{Reading, StepGate};
use burn::tensor::{DType, Device, Tensor};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

/// Of the steps that a parameter's `time` counts, those that were taken back. None at first.
#[derive(Clone, Debug, Default)]
pub struct Skipped(Option<Arc<LastStep>>);

/// The last step of parameters with the same past.
#[derive(Debug)]
struct LastStep {
    /// Steps before it that were taken back. One element, as the other.
    before: Tensor<1>,
    /// Whether this one was taken.
    taken: Tensor<1>,
    /// The reading's number, if `before` is all that the gate's scaler has counted.
    as_scaler: Option<u64>,
    /// The sum of both, once it was asked for.
    after: OnceLock<usize>,
}

impl LastStep {
    fn after(&self) -> Tensor<1> {
        self.before.clone() + self.taken.clone().neg().add_scalar(1.0)
    }
}

impl Skipped {
    /// The count. It waits for the device, once for parameters with the same past.
    pub(super) fn read(&self) -> usize {
        let Some(last) = &self.0 else { return 0 };
        *last.after.get_or_init(|| {
            let count: f32 = last.after().into_scalar();
            count as usize
        })
    }

    pub(super) fn to_device(&self, device: &Device) -> Self {
        let moved = |last: &Arc<LastStep>| {
            if last.taken.device() == *device {
                return last.clone();
            }
            let [before, taken] =
                [&last.before, &last.taken].map(|count| count.clone().to_device(device));
            Arc::new(LastStep { before, taken, as_scaler: None, after: last.after.clone() })
        };
        Self(self.0.as_ref().map(moved))
    }

    /// The count before the step of `reading`.
    fn before(&self, reading: &Reading) -> (Tensor<1>, Option<u64>) {
        let goes_on = |number: u64| !reading.is_first && number + 1 == reading.number;
        match &self.0 {
            None if reading.is_first => (reading.skipped.clone(), Some(reading.number)),
            None => {
                let device = reading.taken.device();
                (Tensor::zeros([1], (&device, DType::F32)), None)
            }
            Some(last) if last.as_scaler.is_some_and(goes_on) => {
                (reading.skipped.clone(), Some(reading.number))
            }
            Some(last) => (last.after(), None),
        }
    }
}

/// Counts once for all parameters with the same past. Clones are one.
#[derive(Clone, Debug, Default)]
pub(super) struct SkippedCounts(Arc<Mutex<Counted>>);

/// What the steps of one reading have come to.
#[derive(Debug, Default)]
struct Counted {
    reading: u64,
    /// By the address of the step before, which is kept so that no other is there.
    by_past: HashMap<usize, [Skipped; 2]>,
}

impl SkippedCounts {
    /// A parameter's step after `time` others of which some were `skipped`: its number, what the gate reads
    /// of it, and the count for the step after. Without a reading, the number is that of steps that were
    /// taken, and the count begins anew.
    pub(super) fn next(
        &self,
        time: usize,
        skipped: Skipped,
        gate: Option<&StepGate>,
    ) -> (usize, Option<Reading>, Skipped) {
        let Some(reading) = gate.and_then(StepGate::read) else {
            return (time.saturating_sub(skipped.read()) + 1, None, Skipped::default());
        };
        let (reading, skipped) = self.count(skipped, reading);
        (time + 1, Some(reading), skipped)
    }

    /// `reading` with what was taken back of the parameter's own steps instead of the scaler's, and the count
    /// for its next step.
    fn count(&self, skipped: Skipped, reading: Reading) -> (Reading, Skipped) {
        let mut counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counted.reading != reading.number {
            *counted = Counted { reading: reading.number, by_past: HashMap::new() };
        }
        let past = skipped.0.as_ref().map_or(0, |last| Arc::as_ptr(last).addr());
        let [_, next] = counted.by_past.entry(past).or_insert_with(|| {
            let (before, as_scaler) = skipped.before(&reading);
            let taken = reading.taken.clone();
            let last = LastStep { before, taken, as_scaler, after: OnceLock::new() };
            [skipped, Skipped(Some(Arc::new(last)))]
        });
        let before = next.0.as_ref().map(|last| last.before.clone());
        let own = before.unwrap_or_else(|| reading.skipped.clone());
        (Reading { skipped: own, ..reading }, next.clone())
    }
}

#[cfg(test)]
mod tests;
