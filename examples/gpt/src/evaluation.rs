//! Loss on held-out text.

use crate::{
    loader::{self, Batch},
    model::{Computation, Gpt},
};
use anyhow::{Result, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};

/// A loss, and what it was measured on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Evaluation {
    /// Mean cross-entropy in nats per token.
    pub(crate) loss: f64,
    /// Tokens predicted.
    pub(crate) tokens: u64,
}

impl Evaluation {
    /// exp(loss): among how many equally likely tokens the model hesitates.
    pub(crate) fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

/// Ids `[batch, context]` of a batch, inputs and targets.
pub(crate) fn tensors(batch: Batch, device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let shape = [batch.batch, batch.context];
    let tensor = |ids| Tensor::from_data(TensorData::new(ids, shape), device);
    (tensor(batch.inputs), tensor(batch.targets))
}

/// The mean loss of `model` over at most `max_batches` batches spread evenly over `tokens`; the
/// model is one without automatic differentiation (`valid()`).
pub(crate) fn evaluate(
    model: &Gpt,
    tokens: &[u16],
    batch: usize,
    context: usize,
    max_batches: usize,
    how: &Computation,
    device: &Device,
) -> Result<Evaluation> {
    let (mut sum, mut count) = (0.0, 0u64);
    for batch in loader::sequential_batches(tokens, batch, context, max_batches)? {
        let predicted = (batch.batch * batch.context) as u64;
        let (inputs, targets) = tensors(batch, device);
        let loss: f32 = model.loss(inputs, targets, how).into_scalar();
        sum += f64::from(loss) * predicted as f64;
        count += predicted;
    }
    ensure!(count > 0, "there is nothing to measure on");
    Ok(Evaluation { loss: sum / count as f64, tokens: count })
}
