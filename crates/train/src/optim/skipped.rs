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
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

/// Of the steps that a parameter's `time` counts, those that were taken back. None at first.
#[derive(Clone, Debug, Default)]
pub struct Skipped(Option<Arc<LastStep>>);

/// The last step of parameters with the same past.
#[derive(Debug)]
pub(super) struct LastStep {
    count: Mutex<Count>,
    /// The number of the scaler's reading, if the count is all that the scaler has counted.
    as_scaler: Option<u64>,
    /// The count, once it was asked for.
    read: OnceLock<usize>,
}

/// Steps that were taken back up to the last one and with it. Tensors of one element.
#[derive(Clone, Debug)]
struct Count {
    /// All of them, or those before the last step, where `taken` is there.
    steps: Tensor<1>,
    /// 1 if the last step was taken, 0 if it was taken back.
    taken: Option<Tensor<1>>,
}

impl Count {
    fn known(steps: Tensor<1>) -> Self {
        Self { steps, taken: None }
    }

    fn sum(self) -> Tensor<1> {
        match self.taken {
            Some(taken) => self.steps + taken.neg().add_scalar(1.0),
            None => self.steps,
        }
    }

    fn map(self, change: impl Fn(Tensor<1>) -> Tensor<1>) -> Self {
        Self { steps: change(self.steps), taken: self.taken.map(change) }
    }

    fn is_on(&self, device: &Device) -> bool {
        self.steps.device() == *device
    }
}

impl LastStep {
    fn count(&self) -> MutexGuard<'_, Count> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the scaler's count for its own, where they are one: its own tensors are let go of then, before
    /// the next steps begin. Let go of later, they would be seen among those steps, and part their launches.
    pub(super) fn settle(&self, scalers: &Tensor<1>) {
        *self.count() = Count::known(scalers.clone());
    }
}

impl Skipped {
    /// The count. It waits for the device, once for parameters with the same past.
    pub(super) fn read(&self) -> usize {
        let Some(last) = &self.0 else { return 0 };
        *last.read.get_or_init(|| {
            let count: f32 = last.count().clone().sum().into_scalar();
            count as usize
        })
    }

    pub(super) fn to_device(&self, device: &Device) -> Self {
        let moved = |last: &Arc<LastStep>| {
            let count = last.count().clone();
            if count.is_on(device) {
                return last.clone();
            }
            let count = Mutex::new(count.map(|count| count.to_device(device)));
            Arc::new(LastStep { count, as_scaler: None, read: last.read.clone() })
        };
        Self(self.0.as_ref().map(moved))
    }

    /// The count before the step of `reading`, and the reading's number if it is the scaler's.
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
            Some(last) => (last.count().clone().sum(), None),
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
    /// By the address of the step before.
    by_past: HashMap<usize, Class>,
}

/// Parameters with the same past.
#[derive(Debug)]
struct Class {
    /// Kept so that no other is at its address.
    _past: Skipped,
    before: Tensor<1>,
    next: Skipped,
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
        let Some((gate, reading)) = gate.and_then(|gate| Some((gate, gate.read()?))) else {
            return (time.saturating_sub(skipped.read()) + 1, None, Skipped::default());
        };
        let (reading, skipped) = self.count(skipped, reading, gate);
        (time + 1, Some(reading), skipped)
    }

    /// `reading` with what was taken back of the parameter's own steps instead of the scaler's, and the count
    /// for its next step.
    fn count(&self, skipped: Skipped, reading: Reading, gate: &StepGate) -> (Reading, Skipped) {
        let mut counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counted.reading != reading.number {
            *counted = Counted { reading: reading.number, by_past: HashMap::new() };
        }
        let past = skipped.0.as_ref().map_or(0, |last| Arc::as_ptr(last).addr());
        let class = counted.by_past.entry(past).or_insert_with(|| {
            let (before, as_scaler) = skipped.before(&reading);
            let count = Count { steps: before.clone(), taken: Some(reading.taken.clone()) };
            let count = Mutex::new(count);
            let last = Arc::new(LastStep { count, as_scaler, read: OnceLock::new() });
            if as_scaler.is_some() {
                gate.follow(&last);
            }
            Class { _past: skipped, before, next: Skipped(Some(last)) }
        });
        (Reading { skipped: class.before.clone(), ..reading }, class.next.clone())
    }
}

#[cfg(test)]
mod tests;
