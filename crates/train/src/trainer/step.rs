//! What goes into a step besides the batch, and what comes out.

use super::Metrics;
use crate::graph::PassTensors;
use burn::tensor::Tensor;

/// What the closure of a step returns: the loss, or the loss and further tensors.
pub trait StepLoss {
    /// The further tensors.
    type Outputs: PassTensors;

    /// The loss and the rest.
    fn into_parts(self) -> (Tensor<1>, Self::Outputs);
}

impl StepLoss for Tensor<1> {
    type Outputs = ();

    fn into_parts(self) -> (Tensor<1>, ()) {
        (self, ())
    }
}

impl<O: PassTensors> StepLoss for (Tensor<1>, O) {
    type Outputs = O;

    fn into_parts(self) -> (Tensor<1>, O) {
        self
    }
}

/// What a step gives. Its tensors are on the device, and nothing waits for it until one is read.
#[derive(Clone, Debug)]
pub struct Step<O = ()> {
    /// The number of the step, counted from 1.
    pub number: usize,
    /// The learning rate that it was taken at.
    pub learning_rate: f64,
    /// The mean loss of the batch, one number in f32.
    pub mean_loss: Tensor<1>,
    /// The global norm of the gradients before they were clipped, one number in f32. Not finite where a loss
    /// scaler left the step out.
    pub gradient_norm: Tensor<1>,
    /// What the closure returned beside the loss, for each micro-batch.
    pub outputs: Vec<O>,
    /// What the last steps have come to, every
    /// [some steps](super::TrainerConfig::with_metrics_every). On a GPU they end with the step before this one: the
    /// device was asked for their numbers then, and need not wait.
    pub metrics: Option<Metrics>,
}

impl<O> Step<O> {
    /// The mean loss of the batch. Waits for the device, which is idle then until the next step is prepared: print
    /// [`metrics`](Self::metrics) instead.
    pub fn loss(&self) -> f32 {
        self.mean_loss.clone().into_scalar()
    }
}
