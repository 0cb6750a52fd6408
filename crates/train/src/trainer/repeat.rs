//! Steps that repeat the last one: the same replay and the same update, without a look at each parameter.
//!
//! A step's host time goes into what it does for each parameter. Where the pass is replayed and a kernel updates all
//! parameters in place, the tensors of a step are those of the last one, and so it is asked for as a whole. It has the
//! same bits.
//!
//! Parameters are overwritten then, and Burn's tensors are values: a clone of one must not change. So a step that
//! follows a look at the model is taken in the usual way, which finds out who holds what.

use super::{Inputs, Trainer, TrainerError};
use crate::{
    graph::{GraphError, PassTensors},
    optim,
};
use blackburn_backend::{
    graph,
    loss_scale::Measured,
    steps::repeat::{self, Repeated, Watch},
};
use burn::{
    module::{Module, ModuleDisplay},
    optim::GradientsParams,
    tensor::Tensor,
};
use std::sync::atomic::{AtomicBool, Ordering};

/// What is known of the last step.
#[derive(Debug, Default)]
pub(super) struct Repeats {
    /// Whether somebody has seen the model since the last step in the usual way, and may hold parameters.
    is_shown: AtomicBool,
    /// Of a step in the usual way that is being taken, with the parameters that it updates, and the count of its
    /// repetitions.
    watched: Option<(Watch, usize, optim::RepeatCount)>,
    /// What can be repeated.
    last: Option<(Repeated, optim::RepeatCount)>,
    /// Steps that repeated one.
    steps: usize,
}

impl Repeats {
    /// Takes note that somebody sees the model.
    pub(super) fn show(&self) {
        self.is_shown.store(true, Ordering::Relaxed);
    }

    /// Who watches the step that is taken.
    pub(super) fn watch(&self) -> Option<&Watch> {
        self.watched.as_ref().map(|(watch, ..)| watch)
    }

    /// Keeps what was watched, now that the device was asked for it.
    pub(super) fn end_watch(&mut self) {
        if let Some((watch, parameters, repeats)) = self.watched.take() {
            self.last = watch.end(parameters).map(|steps| (steps, repeats));
        }
    }
}

impl<M: Module + ModuleDisplay, I: PassTensors, O: PassTensors> Trainer<M, I, O> {
    /// Steps of this trainer that were asked of the device as a whole, since they repeated the one before: the others
    /// take the host some tens of microseconds for each parameter. A step that follows [`model`](Self::model) or
    /// [`valid`](Self::valid) is one of those, and so are all steps with a loss scaler, with an optimizer of Burn's, or
    /// in a group.
    pub fn steps_repeated(&self) -> usize {
        self.repeats.steps
    }

    /// Whether the step for `inputs` can repeat the last one. What it would have repeated is let go of otherwise.
    pub(super) fn repeats(&mut self, inputs: &Inputs<I>, learning_rate: f64) -> bool {
        let is_shown = self.repeats.is_shown.load(Ordering::Relaxed);
        // A rate that makes no step is refused by name in the usual way.
        let is_step = learning_rate.is_finite();
        let is_last = self.repeats.last.is_some() && !is_shown && is_step;
        let is_repeated = is_last && self.passes.repeats(inputs);
        if !is_repeated {
            self.repeats.last = None;
        }
        is_repeated
    }

    /// Watches the update by `gradients`, if it can be repeated by what is known of it now.
    pub(super) fn begin_watch(&mut self, gradients: &GradientsParams) {
        // Whoever holds parameters keeps their memory, and the step in the usual way takes another.
        self.repeats.is_shown.store(false, Ordering::Relaxed);
        let gate = self.scaler.gate();
        let repeats = gate.begin_repeats();
        let is_repeatable = self.passes.was_replayed()
            && self.group.size() == 1
            && self.config.optimizer.is_gated()
            && !self.scaler.is_enabled()
            // An average begins with clones of parameters.
            && self.ema.as_ref().is_none_or(|ema| ema.updates() > 0);
        let watch = is_repeatable.then(|| Watch::begin(&gate.together(), &self.device)).flatten();
        self.repeats.watched = watch.map(|watch| (watch, gradients.len(), repeats));
    }

    /// Takes a step as the last one, which [`repeats`](Self::repeats) has to allow. Gives the mean loss, what else the
    /// micro-batches gave, and the norm of the gradients.
    pub(super) fn repeat(
        &mut self,
        inputs: Inputs<I>,
        learning_rate: f64,
    ) -> Result<(Tensor<1>, Vec<O>, Tensor<1>), TrainerError> {
        let model = self.model.as_ref().ok_or(TrainerError::Lost)?;
        let device = self.device.clone().without_autodiff();
        let (mean_loss, outputs) = self.passes.repeat(&device, model, inputs)?;
        let (Some((steps, repeats)), Some((taken, skipped))) =
            (&self.repeats.last, self.scaler.always_taken())
        else {
            unreachable!("`repeats` has seen a step without a loss scaler")
        };
        // The stream does not know what the update reads and writes: what is there comes before it.
        graph::hand_over(&device).map_err(GraphError::from)?;
        let largest = (self.config.max_norm as f32).max(f32::MIN_POSITIVE);
        let Measured { norm, .. } = repeat::repeat(steps, taken, skipped, learning_rate, largest);
        repeats.count_one();
        self.repeats.steps += 1;
        self.steps_taken += 1;
        if let Some(ema) = &mut self.ema {
            // For the same reason it comes before what reads parameters.
            graph::hand_over(&device).map_err(GraphError::from)?;
            ema.update(model)?;
        }
        Ok((mean_loss, outputs, norm))
    }
}
