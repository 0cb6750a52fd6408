//! Numbers to compute with, and what to compare.

use burn::{
    module::{Module, ModuleVisitor, Param},
    prelude::*,
    store::ModuleRecord,
    tensor::Gradients,
};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Taken by tests that draw from dropout's seed: there is one for the process.
pub(crate) fn drawing() -> MutexGuard<'static, ()> {
    static DRAWING: Mutex<()> = Mutex::new(());
    DRAWING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Numbers between -1 and 1 without a pattern that matters, the same each time.
pub(crate) fn tensor<const D: usize>(shape: [usize; D], start: f32, device: &Device) -> Tensor<D> {
    let elements = shape.iter().product::<usize>();
    let numbers = (0..elements).map(|i| (start + 1.7 * i as f32 + 0.01 * (i * i) as f32).sin());
    Tensor::from_data(TensorData::new(numbers.collect(), shape), device)
}

pub(crate) fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().expect("numbers are f32")
}

/// Whether numbers are those expected, but for rounding in f32.
#[track_caller]
pub(crate) fn assert_close(name: &str, actual: &[f32], expected: &[f32]) {
    assert_eq!(actual.len(), expected.len(), "{name}");
    let largest = expected.iter().fold(1f32, |largest, e| largest.max(e.abs()));
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        // Sums of some dozens of terms; NaN is not below it either.
        assert!((a - e).abs() < 2e-5 * largest, "{name}: {a} for {e} at {i}");
    }
}

#[track_caller]
pub(crate) fn assert_same<const D: usize>(name: &str, actual: Tensor<D>, expected: Tensor<D>) {
    assert_eq!(actual.dims(), expected.dims(), "{name}");
    assert_close(name, &values(actual), &values(expected));
}

/// `to` with the parameters of `from`, by way of bytes.
pub(crate) fn loaded<M: Module, N: Module>(to: N, from: &M) -> N {
    let bytes = from.clone().into_record().into_bytes().expect("a record");
    let record = ModuleRecord::from_bytes(bytes).expect("the same record");
    to.try_load_record(record).expect("a record that fits")
}

/// The gradients of all parameters of `module`, by order, from `output`.
pub(crate) fn gradients<M: Module>(module: &M, output: Tensor<3>) -> Vec<Vec<f32>> {
    let factors = tensor(output.dims(), 0.3, &output.device());
    let gradients = (output * factors).sum().backward();
    let mut found = Found { gradients: &gradients, values: Vec::new() };
    module.visit(&mut found);
    found.values
}

struct Found<'a> {
    gradients: &'a Gradients,
    values: Vec<Vec<f32>>,
}

impl ModuleVisitor for Found<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = param.val().grad(self.gradients).expect("each parameter has a gradient");
        self.values.push(values(gradient));
    }
}

#[track_caller]
pub(crate) fn assert_same_gradients(actual: &[Vec<f32>], expected: &[Vec<f32>]) {
    assert_eq!(actual.len(), expected.len());
    for (i, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        assert_close(&format!("gradient {i}"), actual, expected);
    }
}
