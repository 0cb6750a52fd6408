//! Why a trainer does not do what it was asked.

use crate::{
    accumulate::AccumulateError, checkpoint::CheckpointError, ema::EmaError, graph::GraphError,
    memory::MemoryError, precision::PrecisionError, scaler::ScalerError, schedule::ScheduleError,
};
use blackburn_backend::readback::ReadbackError;
use blackburn_distributed::DistributedError;
use burn::tensor::{DType, ExecutionError};

/// What went wrong. The model is what it was before the call, unless the message says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainerError {
    /// An option makes no sense.
    #[error("TrainerConfig: option `{option}`: expected {expected}, got {actual}")]
    Option {
        /// Its name.
        option: &'static str,
        /// What it may be.
        expected: &'static str,
        /// What it is.
        actual: String,
    },
    /// The model has no parameters, so it is on no device.
    #[error("TrainerConfig::init: argument `model`: expected at least one parameter, got none")]
    NoParameters,
    /// The model was made on a device without autodiff.
    #[error(
        "TrainerConfig::init: argument `model`: expected a model on a device with autodiff, got one on \
         {device}: make it on `device.autodiff()`"
    )]
    NoAutodiff {
        /// The model's device.
        device: String,
    },
    /// The learning rate's options contradict themselves.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// The policy does not fit the model or the device.
    #[error(transparent)]
    Precision(#[from] PrecisionError),
    /// The loss scaler's options contradict themselves, or its state is damaged.
    #[error(transparent)]
    Scaler(#[from] ScalerError),
    /// The average does not fit the model.
    #[error(transparent)]
    Ema(#[from] EmaError),
    /// The checkpoint cannot be read, or is not of this model.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The device failed, or the pass depends on values that changed after it was recorded.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// The device failed.
    #[error("Trainer::step: the device failed: {0}")]
    Device(#[from] ExecutionError),
    /// Numbers of earlier steps cannot be read.
    #[error("Trainer::step: {0}")]
    Metrics(#[from] ReadbackError),
    /// The training does not fit into the limit of memory. Where a step tells, it was taken.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The batch cannot be learned from.
    #[error("Trainer::step: argument `{argument}`: expected {expected}, got {actual}")]
    Batch {
        /// Which argument.
        argument: &'static str,
        /// What it may be.
        expected: String,
        /// What it is.
        actual: String,
    },
    /// The loss is not one number in f32.
    #[error(
        "Trainer::step: the closure's loss: expected one number in f32, got {elements} in {dtype:?}. Cast \
         what the model returns by `full_precision` before the loss is computed, and take the loss's mean"
    )]
    Loss {
        /// Its type.
        dtype: DType,
        /// How many numbers it has.
        elements: usize,
    },
    /// The loss does not depend on the model.
    #[error(
        "Trainer::step: the closure's loss: expected one that depends on a parameter of the model that it is \
         given, got one without gradients: {0}"
    )]
    Gradients(AccumulateError),
    /// The loss or the gradient norm of a step is not finite. The parameters are those after later steps.
    #[error(
        "Trainer::step: training diverged: the {what} of step {step} is {value}. Go back to a checkpoint from \
         before, with a lower learning rate, a longer warm-up or a smaller maximum norm"
    )]
    Diverged {
        /// `loss` or `gradient norm`.
        what: &'static str,
        /// The first such step, counted from 1.
        step: usize,
        /// What it is.
        value: f32,
    },
    /// The loss scaler left out all of the last steps, so that the scale is not what is wrong.
    #[error(
        "Trainer::step: {skipped} steps one after another had gradients that are not finite, the last one at \
         a loss scale of {scale}. The model itself overflows: see \
         blackburn::train::nonfinite::nonfinite_gradients, or train in bf16"
    )]
    Hopeless {
        /// Steps that were left out, one after another.
        skipped: u32,
        /// The loss scale by now.
        scale: f32,
    },
    /// Another rank has failed, or differs from this one.
    #[error(transparent)]
    Distributed(#[from] DistributedError),
    /// The optimizer panicked in an earlier step, and took the model with it.
    #[error("Trainer: an earlier step panicked while it changed the model; load a checkpoint")]
    Lost,
}
