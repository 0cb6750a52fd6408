//! Whether the device takes a step, told without waiting for it.

use blackburn_backend::adamw::Taken;
use burn::tensor::Tensor;
use std::sync::{Arc, Mutex, PoisonError};

/// Between a [`GradScaler`](crate::scaler::GradScaler), which finds out on the device whether
/// gradients overflowed, and an optimizer that takes the step or leaves everything as it was.
///
/// Clones are one gate.
#[derive(Clone, Debug, Default)]
pub struct StepGate(Arc<Mutex<Option<Reading>>>);

/// Of one element each, in f32, on the device.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    /// 1 where the step is taken, 0 where it is not.
    pub(crate) taken: Tensor<1>,
    /// How many steps before this one were not.
    pub(crate) skipped: Tensor<1>,
    /// What gradients are multiplied by first.
    pub(crate) factor: Tensor<1>,
}

impl StepGate {
    /// A gate that lets every step pass until a scaler says otherwise.
    pub fn new() -> Self {
        Self::default()
    }

    pub(crate) fn set(&self, reading: Option<Reading>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = reading;
    }

    pub(crate) fn read(&self) -> Option<Reading> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// As the kernels' operations take it.
impl From<Reading> for Taken {
    fn from(Reading { taken, skipped, factor }: Reading) -> Self {
        Self { taken, skipped, factor }
    }
}
