//! The training strategy.

use std::sync::{Arc, Mutex, PoisonError};

use blackburn_distributed::Group;
use burn::{
    data::dataloader::split::split_dataloader,
    tensor::Device,
    train::{
        EventProcessorTraining, Learner, LearnerEvent, LearnerModel, SupervisedLearningStrategy,
        SupervisedTrainingEventProcessor, TrainLoader, TrainStep, TrainingComponents,
        TrainingError, TrainingStrategy, ValidLoader, checkpoint::CheckpointerError,
    },
};

use super::{
    epoch::{TrainEpoch, Workers, failure, validate},
    meetings::{Meetings, Next},
    report::StepOutput,
    window::StepHook,
};

/// Steps between two looks for a loss that is not finite: a look waits for the device.
const CHECK_EVERY: usize = 50;

/// burn-train's training loop with the toolkit's optimizer step:
///
/// 1. The gradients of `grads_accumulation` micro-batches, as set on `SupervisedTraining`, become
///    the mean over all their samples or tokens, however unequal the micro-batches are. The
///    incomplete last window of an epoch counts as a step of its own. Burn's own strategies add
///    gradients up and leave it to the user to lower the learning rate.
/// 2. A [`StepHook`] may change the gradients and refuse the step.
/// 3. They are clipped by their global norm, which the metric [`GradientNorm`](super::GradientNorm)
///    shows. Burn's own clipping is for each tensor by itself.
/// 4. The learning-rate schedule and the optimizer take their step.
///
/// A loss or a gradient norm that is not finite ends the training with an error in
/// `LearningResult::error`, before the epoch is validated and saved, so that no checkpoint of a
/// diverged model displaces a good one. It is looked for every 50 steps and at the end of an epoch.
///
/// Checkpoints, resuming, early stopping, interruption, metrics, loggers and renderers work as with
/// burn-train's own strategies. A stop leaves the window that it cuts short unapplied.
///
/// With several devices each computes its micro-batches' gradients on a thread of its own, and the
/// first one adds them up and runs the optimizer, as burn-train's `OptimMainDevice` does; a round
/// of micro-batches, one from each device, counts once for `grads_accumulation`. Optimizers spread
/// over devices and distributed data parallel are burn-train's own strategies, without the four
/// points above. With [`with_group`](Self::with_group) each device has a process of its own.
///
/// ```no_run
/// # use blackburn_train::learner::{StepOutput, ToolkitStrategy};
/// # use burn::{tensor::Device, train::{LearnerModel, SupervisedTraining, TrainStep}};
/// # fn with<M: LearnerModel>(training: SupervisedTraining<M>, device: &Device) -> SupervisedTraining<M>
/// # where <M as TrainStep>::Output: StepOutput {
/// training
///     .grads_accumulation(4)
///     .with_training_strategy(ToolkitStrategy::new(device).with_max_norm(1.0).into())
/// # }
/// ```
pub struct ToolkitStrategy<M: LearnerModel> {
    devices: Vec<Device>,
    max_norm: f64,
    check_every: usize,
    hook: Mutex<Option<Box<dyn StepHook<M>>>>,
    group: Group,
}

impl<M: LearnerModel> ToolkitStrategy<M> {
    /// Training on `device`, without clipping and without a hook.
    ///
    /// `SupervisedTraining::gradient_checkpointing` does not reach strategies of others: give a
    /// device that has it, `device.autodiff().gradient_checkpointing()`.
    pub fn new(device: &Device) -> Self {
        Self {
            devices: vec![with_autodiff(device)],
            max_norm: f64::INFINITY,
            check_every: CHECK_EVERY,
            hook: Mutex::new(None),
            group: Group::alone(),
        }
    }

    /// Adds a device that takes its share of each training epoch's data.
    #[must_use]
    pub fn with_device(mut self, device: &Device) -> Self {
        self.devices.push(with_autodiff(device));
        self
    }

    /// Clips the gradients to this global norm.
    ///
    /// # Panics
    ///
    /// When `max_norm` is not positive.
    #[must_use]
    pub fn with_max_norm(mut self, max_norm: f64) -> Self {
        assert!(
            max_norm > 0.0,
            "ToolkitStrategy::with_max_norm: argument `max_norm`: expected a positive number, got \
             {max_norm}"
        );
        self.max_norm = max_norm;
        self
    }

    /// Looks for a loss that is not finite every `steps` optimizer steps instead of every 50. A
    /// look waits for the device.
    ///
    /// # Panics
    ///
    /// When `steps` is zero.
    #[must_use]
    pub fn with_check_every(mut self, steps: usize) -> Self {
        assert!(
            steps > 0,
            "ToolkitStrategy::with_check_every: argument `steps`: expected at least 1, got 0"
        );
        self.check_every = steps;
        self
    }

    /// Trains on all ranks of `group`, each with its own part of the training data, on one device each. They begin
    /// with rank 0's parameters, and validate on all of the validation data. Rank 0 saves. Give each rank's
    /// `SupervisedTraining` the folder of [`rank_folder`](super::rank_folder), and only rank 0's a renderer that
    /// shows something.
    ///
    /// A rank that stops, for whatever reason, stops all of them before their next step.
    #[must_use]
    pub fn with_group(mut self, group: &Group) -> Self {
        self.group = group.clone();
        self
    }

    /// All ranks begin alike.
    fn begin_together(&self, learner: &mut Learner<M>) -> Result<(), TrainingError> {
        if self.group.size() == 1 {
            return Ok(());
        }
        if self.devices.len() > 1 {
            return Err(failure(format!(
                "ToolkitStrategy: expected one device on each rank of a group, got {}: start a rank for each",
                self.devices.len()
            )));
        }
        let model = self.group.broadcast(learner.model());
        let model = model.map_err(|error| failure(error.to_string()))?;
        learner.load_model(model.into_record());
        Ok(())
    }

    /// This rank's part of the training data, for each of its devices.
    fn shares(&self, train: TrainLoader<M>) -> Vec<TrainLoader<M>> {
        let ranks = vec![self.devices[0].clone(); self.group.size()];
        let own = split_dataloader(train, &ranks).swap_remove(self.group.rank());
        match self.devices.as_slice() {
            [device] => vec![own.to_device(device)],
            devices => split_dataloader(own, devices),
        }
    }

    /// Shows the gradients to `hook` before they are clipped.
    #[must_use]
    pub fn with_hook(mut self, hook: impl StepHook<M> + 'static) -> Self {
        self.hook = Mutex::new(Some(Box::new(hook)));
        self
    }
}

fn with_autodiff(device: &Device) -> Device {
    match device.is_autodiff() {
        true => device.clone(),
        false => device.clone().autodiff(),
    }
}

impl<M: LearnerModel> From<ToolkitStrategy<M>> for TrainingStrategy<M>
where
    <M as TrainStep>::Output: StepOutput,
{
    fn from(strategy: ToolkitStrategy<M>) -> Self {
        Self::Custom(Arc::new(strategy))
    }
}

impl<M: LearnerModel> SupervisedLearningStrategy<M> for ToolkitStrategy<M>
where
    <M as TrainStep>::Output: StepOutput,
{
    fn fit(
        &self,
        components: TrainingComponents<M>,
        mut learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let TrainingComponents {
            num_epochs,
            checkpoint,
            mut checkpointer,
            grad_accumulation,
            interrupter,
            mut early_stopping,
            event_processor: mut processor,
            event_store,
            ..
        } = components;
        let device = &self.devices[0];
        let (train_items, valid_items) = (train.num_items(), valid.num_items());
        let loaders = self.shares(train);
        let valid = valid.to_device(&device.clone().inner());
        let workers = Workers::new(&self.devices);
        learner.fork(device);
        interrupter.fail_on_error(self.begin_together(&mut learner));
        let meetings = Meetings::new(&self.group);
        // Rank 0 saves for all.
        checkpointer = checkpointer.filter(|_| self.group.is_main());
        // A hook that panicked has ended its training with it.
        let mut hook = self.hook.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(hook), Some(epoch)) = (hook.as_mut(), checkpoint) {
            interrupter.fail_on_error(hook.load(epoch).map_err(hook_error));
        }

        for epoch in starting_epoch..=num_epochs {
            match meetings.meet(false, &interrupter) {
                Ok(Next::Stop) => break,
                Ok(Next::Done | Next::Step) => {}
                Err(error) => {
                    interrupter.fail(error);
                    break;
                }
            }
            let started =
                LearnerEvent::StartSplit { epoch_number: epoch, total_items: train_items };
            interrupter.fail_on_error(processor.process_train(started));
            let pass = TrainEpoch {
                epoch,
                loaders: &loaders,
                workers: &workers,
                device,
                // `SupervisedTraining::grads_accumulation` refuses zero.
                accumulate: grad_accumulation.unwrap_or(1),
                max_norm: self.max_norm,
                check_every: self.check_every,
                hook: hook.as_mut(),
                interrupter: &interrupter,
                meetings: &meetings,
            };
            pass.run(&mut learner, &mut processor);
            interrupter.fail_on_error(processor.process_train(LearnerEvent::EndSplit(epoch)));
            if interrupter.should_stop() {
                break;
            }

            let started =
                LearnerEvent::StartSplit { epoch_number: epoch, total_items: valid_items };
            interrupter.fail_on_error(processor.process_valid(started));
            validate(&valid, &learner, &mut processor, &interrupter);
            interrupter.fail_on_error(processor.process_valid(LearnerEvent::EndSplit(epoch)));
            interrupter.fail_on_error(processor.process_train(LearnerEvent::EndEpoch(epoch)));
            if checkpointer.is_some() || early_stopping.is_some() {
                // Both read metrics, which another thread computes.
                interrupter.fail_on_error(processor.flush());
            }
            if interrupter.should_stop() {
                break;
            }

            if let Some(checkpointer) = &mut checkpointer {
                // First: the learner's checkpoint is what resuming looks for, and needs the hook's.
                let saved = hook.as_mut().map_or(Ok(()), |hook| hook.save(epoch));
                interrupter.fail_on_error(saved.map_err(hook_error));
                if interrupter.should_stop() {
                    break;
                }
                checkpointer.checkpoint(&learner, epoch, &event_store);
            }
            if early_stopping.as_mut().is_some_and(|rule| rule.should_stop(epoch, &event_store)) {
                if self.group.size() == 1 {
                    break;
                }
                // The others hear of it when they meet.
                interrupter.stop(Some("early stopping"));
            }
        }
        // A rank that has left the loop early tells the others here.
        interrupter.fail_on_error(meetings.meet(false, &interrupter).map(drop));
        (learner.model(), processor)
    }
}

fn hook_error(error: std::io::Error) -> TrainingError {
    TrainingError::Checkpoint(CheckpointerError::IOError(error))
}
