//! The pass that a trainer records.

use super::{Inputs, Outputs, StepLoss, TrainerError};
use crate::{
    accumulate::{AccumulateError, GradientSum},
    graph::PassTensors,
    scaler::scaled,
};
use burn::{
    module::Module,
    optim::GradientsParams,
    tensor::{DType, Tensor},
};

/// Forward and backward pass over all micro-batches.
pub(super) fn pass<M: Module, I: PassTensors, L: StepLoss>(
    model: &M,
    (micro_batches, factors, scale): Inputs<I>,
    loss: &impl Fn(&M, I) -> L,
) -> Result<(Outputs<L::Outputs>, GradientsParams), TrainerError> {
    let count = micro_batches.len();
    let mut sum = GradientSum::new();
    let (mut losses, mut outputs) = (Vec::new(), Vec::new());
    for (index, tensors) in micro_batches.into_iter().enumerate() {
        let (loss, output) = loss(model, tensors).into_parts();
        let elements = loss.dims()[0];
        if loss.dtype() != DType::F32 || elements != 1 {
            return Err(TrainerError::Loss { dtype: loss.dtype(), elements });
        }
        losses.push(loss.clone().without_autodiff());
        outputs.push(output.untracked());
        // One alone counts whole.
        let scale = match count {
            1 => scale.clone(),
            _ => scale.clone() * factors.clone().narrow(0, index, 1),
        };
        if !loss.is_autodiff() {
            return Err(TrainerError::Gradients(AccumulateError::Empty));
        }
        let gradients = GradientsParams::from_grads(scaled(loss, scale).backward(), model);
        sum.try_add(model, gradients, 1.0).map_err(TrainerError::Gradients)?;
    }
    // One alone is no sum: an operation more would end up among those of the optimizer, which go together.
    let mean = match &losses[..] {
        [loss] => loss.clone(),
        _ => (Tensor::cat(losses, 0) * factors).mean(),
    };
    let gradients = sum.mean(model).unwrap_or_default();
    Ok(((mean, outputs), gradients))
}
