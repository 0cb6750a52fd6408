//! One pass over the training data, and one over the validation data.

use burn::{
    data::dataloader::{DataLoaderIterator, Progress},
    tensor::Device,
    train::{
        EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearnerModel,
        SupervisedTrainingEventProcessor, TrainLoader, TrainOutput, TrainStep, TrainingError,
        TrainingItem, ValidLoader,
        train::{MultiDevicesTrainStep, WorkerFailure},
    },
};

use super::{
    meetings::{Meetings, Next},
    report::StepOutput,
    window::{Completed, StepHook, Watch, complete},
};
use crate::accumulate::GradientSum;

/// An error of the training itself, in the only one of burn-train's kinds that holds a message.
pub(super) fn failure(message: String) -> TrainingError {
    TrainingError::Workers(vec![WorkerFailure { device_id: 0, message }])
}

/// Where the forward and backward passes run.
pub(super) enum Workers<M: LearnerModel> {
    Here,
    Threads(MultiDevicesTrainStep<M>),
}

type Iterators<'a, M> = Vec<Box<dyn DataLoaderIterator<<M as TrainStep>::Input> + 'a>>;
type Outputs<M> = Vec<TrainOutput<<M as TrainStep>::Output>>;

impl<M: LearnerModel> Workers<M> {
    pub(super) fn new(devices: &[Device]) -> Self {
        match devices {
            [_] => Self::Here,
            _ => Self::Threads(MultiDevicesTrainStep::new(devices)),
        }
    }

    /// A micro-batch of each device that has one left; none at the end of the data.
    fn round(
        &self,
        iterators: &mut Iterators<'_, M>,
        learner: &Learner<M>,
    ) -> Result<(Outputs<M>, Progress), TrainingError> {
        match self {
            Self::Here => {
                let Some(item) = iterators[0].next() else {
                    return Ok((Vec::new(), Progress::new(0, 0, None)));
                };
                Ok((vec![learner.train_step(item?)], iterators[0].progress()))
            }
            Self::Threads(step) => {
                let (outputs, progress) = step.step(iterators, &learner.model())?;
                Ok((outputs.into_iter().map(|worker| worker.output).collect(), progress))
            }
        }
    }
}

/// A pass over the training data.
pub(super) struct TrainEpoch<'a, M: LearnerModel> {
    pub(super) epoch: usize,
    pub(super) loaders: &'a [TrainLoader<M>],
    pub(super) workers: &'a Workers<M>,
    /// The optimizer's device.
    pub(super) device: &'a Device,
    /// Rounds to a step.
    pub(super) accumulate: usize,
    pub(super) max_norm: f64,
    /// Steps between two looks at the watched values.
    pub(super) check_every: usize,
    pub(super) hook: Option<&'a mut Box<dyn StepHook<M>>>,
    pub(super) interrupter: &'a Interrupter,
    pub(super) meetings: &'a Meetings<'a>,
}

impl<M: LearnerModel> TrainEpoch<'_, M>
where
    <M as TrainStep>::Output: StepOutput,
{
    /// Runs to the end of the data, or to a stop, which leaves an incomplete window unapplied.
    pub(super) fn run(
        mut self,
        learner: &mut Learner<M>,
        processor: &mut SupervisedTrainingEventProcessor<M>,
    ) {
        if let Err(error) = self.rounds(learner, processor) {
            self.interrupter.fail(error);
        }
    }

    fn rounds(
        &mut self,
        learner: &mut Learner<M>,
        processor: &mut SupervisedTrainingEventProcessor<M>,
    ) -> Result<(), TrainingError> {
        let mut iterators: Iterators<'_, M> =
            self.loaders.iter().map(|loader| loader.iter()).collect();
        let (mut sum, mut watch) = (GradientSum::new(), Watch::default());
        let (mut rounds, mut steps, mut iteration, mut checked) = (0, 0, 0, 0);
        loop {
            let (mut outputs, progress) = self.workers.round(&mut iterators, learner)?;
            if outputs.is_empty() {
                break;
            }
            self.add(&mut outputs, &mut sum, &mut watch, learner)?;
            rounds += 1;
            let mut completed = Completed::default();
            if rounds == self.accumulate || progress.is_completed() {
                if self.meetings.meet(true, self.interrupter)? == Next::Stop {
                    return Ok(());
                }
                completed = self.complete(&mut sum, &mut watch, learner)?;
                rounds = 0;
                steps += 1;
            }
            for output in outputs {
                iteration += 1;
                let mut item = output.item;
                let report = item.report_mut();
                report.gradient_norm.clone_from(&completed.gradient_norm);
                report.loss_scale.clone_from(&completed.loss_scale);
                let lr = Some(learner.lr_current());
                let item = TrainingItem::new(item, progress.clone(), Some(iteration), lr);
                self.interrupter
                    .fail_on_error(processor.process_train(LearnerEvent::ProcessedItem(item)));
            }
            if rounds == 0 && steps % self.check_every == 0 {
                self.check(&mut watch, checked + 1, iteration)?;
                checked = iteration;
            }
            if self.interrupter.should_stop() {
                return Ok(());
            }
        }
        // Only where a loader ends without having said that it is complete.
        if sum.parts() > 0 && self.meetings.meet(true, self.interrupter)? == Next::Step {
            self.complete(&mut sum, &mut watch, learner)?;
        }
        // Others may have more data.
        while self.meetings.meet(false, self.interrupter)? == Next::Step {
            self.complete(&mut sum, &mut watch, learner)?;
        }
        self.check(&mut watch, checked + 1, iteration)
    }

    fn add(
        &self,
        outputs: &mut Outputs<M>,
        sum: &mut GradientSum,
        watch: &mut Watch,
        learner: &Learner<M>,
    ) -> Result<(), TrainingError> {
        let model = learner.model();
        for output in outputs {
            let report = output.item.report_mut();
            if report.items == 0 {
                return Err(failure(
                    "StepReport: argument `items`: expected the number of samples or tokens of \
                     the micro-batch, got 0"
                        .to_owned(),
                ));
            }
            watch.add(report.loss.clone());
            let mut gradients = std::mem::take(&mut output.grads);
            if self.loaders.len() > 1 {
                gradients = gradients.to_device(self.device, &model);
            }
            if gradients.is_empty() {
                return Err(failure(
                    "ToolkitStrategy: no parameter of the model has a gradient: expected \
                     `TrainStep::step` to differentiate a loss that depends on one, on a device \
                     with autodiff"
                        .to_owned(),
                ));
            }
            let weight = report.items as f64;
            sum.try_add(&model, gradients, weight).map_err(|error| failure(error.to_string()))?;
        }
        Ok(())
    }

    fn complete(
        &mut self,
        sum: &mut GradientSum,
        watch: &mut Watch,
        learner: &mut Learner<M>,
    ) -> Result<Completed, TrainingError> {
        let hook = self.hook.as_deref_mut().map(Box::as_mut);
        let watched = hook.is_none();
        let completed = complete(sum, learner, self.max_norm, hook, self.meetings.group)
            .map_err(|error| failure(error.to_string()))?;
        if let (true, Some(norm)) = (watched, &completed.gradient_norm) {
            watch.add(norm.clone());
        }
        Ok(completed)
    }

    fn check(&self, watch: &mut Watch, from: usize, to: usize) -> Result<(), TrainingError> {
        match watch.all_finite() {
            Ok(true) => Ok(()),
            Ok(false) => Err(failure(format!(
                "training diverged: between iterations {from} and {to} of epoch {} a loss or a \
                 gradient norm is not finite. Nothing of this epoch is saved; checkpoints of \
                 earlier epochs are intact. Try a lower learning rate or a smaller maximum norm",
                self.epoch
            ))),
            Err(error) => Err(failure(format!("the loss cannot be read: {error}"))),
        }
    }
}

/// A pass over the validation data, on one device, as burn-train does it.
pub(super) fn validate<M: LearnerModel>(
    loader: &ValidLoader<M>,
    learner: &Learner<M>,
    processor: &mut SupervisedTrainingEventProcessor<M>,
    interrupter: &Interrupter,
) {
    let model = learner.model().valid();
    let mut iterator = loader.iter();
    let mut iteration = 0;
    while let Some(item) = iterator.next() {
        let item = match item {
            Ok(item) => item,
            Err(error) => return interrupter.fail(error),
        };
        let progress = iterator.progress();
        iteration += 1;
        let output = InferenceStep::step(&model, item);
        let item = TrainingItem::new(output, progress, Some(iteration), None);
        interrupter.fail_on_error(processor.process_valid(LearnerEvent::ProcessedItem(item)));
        if interrupter.should_stop() {
            return;
        }
    }
}
