//! What becomes of one optimizer step's gradients.

use std::io;

use blackburn_distributed::{DistributedError, Group};
use burn::{
    optim::GradientsParams,
    tensor::{Tensor, TensorReadError},
    train::{Learner, LearnerModel},
};

use crate::{accumulate::GradientSum, clip::clip_global_norm};

/// What a [`StepHook`] says of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Clip and take the step.
    Apply,
    /// Leave the parameters, the optimizer's state and the learning-rate schedule as they are.
    Skip,
}

/// A look at the gradients between accumulation and clipping: where a loss scaler removes its
/// scale and refuses a step that overflowed.
///
/// The loss is scaled where it is differentiated, in the model's training step; the model and the
/// hook share the scaler. A closure `FnMut(&mut GradientsParams, &M) -> Verdict` is a hook that
/// keeps no state beside checkpoints.
///
/// A hook answers for the gradients: with one, gradients that are not finite are no reason to stop
/// the training. The loss is watched all the same.
pub trait StepHook<M>: Send {
    /// Sees the accumulated mean gradients of `model`, may change them, and decides.
    fn before_step(&mut self, gradients: &mut GradientsParams, model: &M) -> Verdict;

    /// The loss scale that the gradients had, one element, for the metric
    /// [`LossScale`](super::LossScale). Asked for after each [`before_step`](Self::before_step).
    fn loss_scale(&self) -> Option<Tensor<1>> {
        None
    }

    /// The learner is about to write its checkpoint of `epoch`: write yours beside it, and have it on the
    /// disk when this returns. A learner's checkpoint without yours cannot be resumed from; yours without
    /// the learner's is never asked for.
    ///
    /// # Errors
    ///
    /// An error ends the training, without a checkpoint of that epoch, and stands in its result.
    fn save(&mut self, _epoch: usize) -> io::Result<()> {
        Ok(())
    }

    /// The learner has resumed from its checkpoint of `epoch`: read yours.
    ///
    /// # Errors
    ///
    /// An error ends the training before its first step and stands in its result. Refuse a
    /// checkpoint that is not yours with [`io::ErrorKind::InvalidData`].
    fn load(&mut self, _epoch: usize) -> io::Result<()> {
        Ok(())
    }
}

impl<M, F> StepHook<M> for F
where
    F: FnMut(&mut GradientsParams, &M) -> Verdict + Send,
{
    fn before_step(&mut self, gradients: &mut GradientsParams, model: &M) -> Verdict {
        self(gradients, model)
    }
}

/// What a completed window tells the metrics.
#[derive(Default)]
pub(super) struct Completed {
    pub(super) gradient_norm: Option<Tensor<1>>,
    pub(super) loss_scale: Option<Tensor<1>>,
}

/// Takes the step that the accumulated gradients are for, and those of all other ranks.
pub(super) fn complete<M: LearnerModel>(
    sum: &mut GradientSum,
    learner: &mut Learner<M>,
    max_norm: f64,
    hook: Option<&mut (dyn StepHook<M> + 'static)>,
    group: &Group,
) -> Result<Completed, DistributedError> {
    let mut completed = Completed::default();
    // The copy of the model is dropped before the step: the optimizer then owns the parameters,
    // and may update them in place.
    let gradients = {
        let model = learner.model();
        let weight = sum.weight();
        let own = sum.mean(&model);
        let mut gradients = match own {
            None if group.size() == 1 => return Ok(completed),
            own => group.mean(&model, own.unwrap_or_default(), weight)?,
        };
        if let Some(hook) = hook {
            let verdict = hook.before_step(&mut gradients, &model);
            completed.loss_scale = hook.loss_scale();
            if verdict == Verdict::Skip {
                return Ok(completed);
            }
        }
        completed.gradient_norm = Some(clip_global_norm(&mut gradients, &model, max_norm));
        gradients
    };
    learner.lr_step();
    learner.optimizer_step(gradients);
    Ok(completed)
}

/// Finds losses and norms that are not finite, without waiting for each.
///
/// A sum is not finite if one of its terms is not, so one addition on the device watches a value.
#[derive(Default)]
pub(super) struct Watch {
    sum: Option<Tensor<1>>,
}

impl Watch {
    pub(super) fn add(&mut self, value: Tensor<1>) {
        self.sum = Some(match self.sum.take() {
            Some(sum) => {
                let device = sum.device();
                sum.add(value.to_device(&device))
            }
            None => value,
        });
    }

    /// Whether all values since the last call were finite. Waits for the device.
    pub(super) fn all_finite(&mut self) -> Result<bool, TensorReadError> {
        match self.sum.take() {
            Some(sum) => Ok(sum.try_into_scalar::<f32>()?.is_finite()),
            None => Ok(true),
        }
    }
}
