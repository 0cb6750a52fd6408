//! Whether the device takes a step, told without waiting for it.

use super::{repeat_count::RepeatCount, skipped::LastStep};
use blackburn_backend::steps::{Taken, Together};
use burn::tensor::Tensor;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Between a [`GradScaler`](crate::scaler::GradScaler), which finds out on the device whether
/// gradients overflowed, and an optimizer that takes the step or leaves everything as it was.
///
/// Clones are one gate.
#[derive(Clone, Debug, Default)]
pub struct StepGate(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Readings so far.
    readings: u64,
    last: Option<Reading>,
    /// Steps by the last reading whose count is the scaler's.
    followers: Vec<Arc<LastStep>>,
    /// Of the step that is about to be taken.
    repeats: RepeatCount,
    /// What kernels take steps together by.
    together: Together,
}

/// What the device says of a step. Tensors of one element each, in f32.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    /// 1 where the step is taken, 0 where it is not.
    pub(crate) taken: Tensor<1>,
    /// How many steps before this one were not, from the scaler's first one on.
    pub(crate) skipped: Tensor<1>,
    /// What gradients are multiplied by first.
    pub(crate) factor: Tensor<1>,
    /// Whether this is the scaler's first step, or the first after it was restored.
    pub(crate) is_first: bool,
    /// Which of the gate's readings it is. The gate sets it.
    pub(crate) number: u64,
}

impl StepGate {
    /// A gate that lets every step pass until a scaler says otherwise.
    pub fn new() -> Self {
        Self::default()
    }

    pub(crate) fn set(&self, reading: Option<Reading>) {
        let mut state = self.state();
        let followers = std::mem::take(&mut state.followers);
        if let Some(reading) = reading.as_ref().filter(|reading| !reading.is_first) {
            followers.iter().for_each(|last| last.settle(&reading.skipped));
        }
        state.readings += 1;
        let number = state.readings;
        state.last = reading.map(|reading| Reading { number, ..reading });
    }

    pub(crate) fn read(&self) -> Option<Reading> {
        self.state().last.clone()
    }

    /// Has `last`, a step by the last reading, take the next one's count for its own.
    pub(super) fn follow(&self, last: &Arc<LastStep>) {
        self.state().followers.push(last.clone());
    }

    /// How often the step that is taken next will be repeated: zero times so far.
    pub(crate) fn begin_repeats(&self) -> RepeatCount {
        let repeats = RepeatCount::default();
        self.state().repeats = repeats.clone();
        repeats
    }

    /// How often the step that is taken now will have been repeated.
    pub(super) fn repeats(&self) -> RepeatCount {
        self.state().repeats.clone()
    }

    /// What the kernel's steps of all parameters are taken together by.
    pub(crate) fn together(&self) -> Together {
        self.state().together.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As the kernels' operations take it.
impl From<Reading> for Taken {
    fn from(Reading { taken, skipped, factor, .. }: Reading) -> Self {
        Self { taken, skipped, factor }
    }
}
