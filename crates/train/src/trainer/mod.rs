//! A training step as one call.
//!
//! A [`Trainer`] holds a model and all that a step needs, and does it in the right order: passes over
//! micro-batches, recorded where they can be; gradients by weight; loss scaling; clipping by the global norm;
//! the optimizer; the average of the weights; the schedule.
//!
//! ```
//! use blackburn_train::{
//!     precision::full_precision, schedule::WarmupCosine, trainer::{Trainer, TrainerConfig},
//! };
//! use burn::{nn::{LinearConfig, loss::{MseLoss, Reduction}}, prelude::*};
//!
//! let device = Device::flex().autodiff();
//! let model = LinearConfig::new(4, 1).init(&device);
//! let schedule = WarmupCosine { peak: 1e-2, floor: 1e-3, warmup_steps: 5, total_steps: 50 };
//! let mut trainer: Trainer<_, _> =
//!     TrainerConfig::new(schedule).with_max_norm(1.0).with_metrics_every(10).init(model)?;
//! for _ in 0..50 {
//!     let x = Tensor::<2>::ones([8, 4], &device);
//!     let y = Tensor::<2>::ones([8, 1], &device);
//!     let step = trainer.step((trainer.input(x), y), |model, (x, y)| {
//!         MseLoss::new().forward(full_precision(model.forward(x)), y, Reduction::Mean)
//!     })?;
//!     if let Some(metrics) = step.metrics {
//!         println!("{metrics}");
//!     }
//! }
//! let model = trainer.into_model()?;
//! # let _ = model;
//! # Ok::<(), blackburn_train::trainer::TrainerError>(())
//! ```
//!
//! # Types
//!
//! Burn's operations convert no types by themselves. Where a policy computes in 16 bits, cast two things: what
//! the model reads, by [`Trainer::input`], and what it returns, by
//! [`full_precision`](crate::precision::full_precision), before the loss. Token ids and classes stay as they
//! are. In f32 both casts do nothing.
//!
//! # What the closure may do
//!
//! It is a function of the model and the batch that it is given, and of nothing that changes from step to step:
//! on GPUs its pass is recorded and replayed. Put everything else that changes into the batch, as a tensor.
//! [`graph`](crate::graph) says what is checked. Besides the loss, it may return further tensors, such as the
//! number of right answers: `(loss, right)` gives `step.outputs`, one for each micro-batch.
//!
//! # What it prints
//!
//! A trainer logs [`Trainer::report`] once, at the level `info` of `tracing`, when it knows whether passes are
//! recorded: what each layer is computed in, which kernels ran, what was left to Burn and why, and which of the
//! model's modules have a faster function.
//!
//! # Several GPUs
//!
//! [`TrainerConfig::with_group`] trains on all ranks of a [`Group`]: each gives its own
//! part of the batch to `step`, and all take the same step. [`Trainer::save`] is called by all ranks, and rank 0
//! writes. A rank that has no more data calls `step_of` without micro-batches until the others are done, too.
//! Further tensors that the closure returns are those of the rank.
//!
//! # Checkpoints
//!
//! [`Trainer::save`] writes the whole state, and [`TrainerConfig::resume`] goes on from it:
//!
//! ```
//! use blackburn_train::{checkpoint::Checkpoints, trainer::{Trainer, TrainerConfig, saved_extra}};
//! use burn::{nn::LinearConfig, prelude::*};
//!
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! let device = Device::flex().autodiff();
//! let config = TrainerConfig::new(1e-3).with_seed(42);
//! let checkpoints = Checkpoints::new(folder, "my-program");
//! let mut trainer: Trainer<_, Tensor<2>> = config.init(LinearConfig::new(4, 1).init(&device))?;
//! trainer.step(Tensor::ones([8, 4], &device), |model, x| model.forward(x).mean())?;
//! trainer.save(&checkpoints, &"epoch 1")?;
//!
//! let newest = checkpoints.newest()?;
//! let trainer: Trainer<_, Tensor<2>> =
//!     config.resume(LinearConfig::new(4, 1).init(&device), &newest)?;
//! assert_eq!(trainer.steps_taken(), 1);
//! assert_eq!(saved_extra::<String>(&newest)?, "epoch 1");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod batch;
mod config;
mod error;
mod memory;
mod metrics;
mod pass;
mod repeat;
mod report;
mod state;
mod step;
mod together;

pub use batch::MicroBatch;
pub use config::{TrainerConfig, TrainerOptimizer};
pub use error::TrainerError;
use metrics::Meter;
pub use metrics::Metrics;
use pass::pass;
use repeat::Repeats;
pub use report::{DropIn, TrainerReport};
pub use state::{saved_extra, saved_model};
pub use step::{Step, StepLoss};
use together::Stepper;

use crate::{
    ema::Ema,
    graph::{GradientGraph, GraphError, GraphStatus, PassTensors},
    memory::MemoryWatch,
    precision::{Precision, PrecisionPolicy},
    scaler::{GradScaler, Origin},
    schedule::{Schedule, ScheduleError},
};
use blackburn_backend::{fp8_linear::Tally, graph, profile, random};
use blackburn_distributed::{GradientSums, Group};
use burn::{
    module::{Module, ModuleDisplay},
    optim::GradientsParams,
    tensor::{DType, Device, Tensor},
};
use std::{cell::Cell, collections::BTreeMap, fmt, sync::Arc, time::Instant};

/// Steps that a loss scaler left out, one after another, by which the scale has come down from anywhere.
const HOPELESS: u32 = 40;

/// Micro-batches, the factors of their losses, and the loss scale.
type Inputs<I> = (Vec<I>, Tensor<1>, Tensor<1>);
/// The mean loss, and what else each micro-batch gave.
type Outputs<O> = (Tensor<1>, Vec<O>);

/// Trains a model. See the [module](self).
///
/// `I` is the batch, and `O` what the closure returns beside the loss.
pub struct Trainer<M, I, O = ()> {
    config: TrainerConfig,
    device: Device,
    policy: PrecisionPolicy,
    /// There but while the optimizer has it: parameters that a copy holds could not be updated in place.
    model: Option<M>,
    optimizer: Stepper,
    /// A group of one without others.
    group: Group,
    /// Whether all ranks know how all of them run their passes.
    is_recording_agreed: bool,
    scaler: GradScaler,
    ema: Option<Ema>,
    passes: GradientGraph<M, Inputs<I>, Outputs<O>>,
    repeats: Repeats,
    steps_taken: usize,
    meter: Meter,
    /// Of the last step, and on the device.
    factors: Option<(Vec<f64>, Tensor<1>)>,
    /// Operations of the last step that ran, by provider.
    served: BTreeMap<&'static str, u64>,
    /// Its matrix products.
    products: Tally,
    is_reported: bool,
    /// None while memory is estimated.
    memory_watch: Option<MemoryWatch>,
    /// Steps of this process.
    steps_here: usize,
}

impl<M: Module, I, O> fmt::Debug for Trainer<M, I, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trainer")
            .field("config", &self.config)
            .field("device", &self.device)
            .field("steps_taken", &self.steps_taken)
            .finish_non_exhaustive()
    }
}

impl<M: Module + ModuleDisplay, I: PassTensors, O: PassTensors> Trainer<M, I, O> {
    /// The model as it is now.
    ///
    /// # Errors
    ///
    /// When an earlier step panicked while it changed the model.
    pub fn model(&self) -> Result<&M, TrainerError> {
        self.repeats.show();
        self.model.as_ref().ok_or(TrainerError::Lost)
    }

    /// The model, trained. Parameters are stored in f32 and still computed in what the policy says, unless it
    /// has no f32 masters.
    ///
    /// # Errors
    ///
    /// When an earlier step panicked while it changed the model.
    pub fn into_model(self) -> Result<M, TrainerError> {
        self.model.ok_or(TrainerError::Lost)
    }

    /// The steps taken so far, those that a loss scaler left out included.
    pub fn steps_taken(&self) -> usize {
        self.steps_taken
    }

    /// The learning rate of the next step.
    pub fn learning_rate(&self) -> f64 {
        (self.config.rate)(self.steps_taken)
    }

    /// Goes on by another schedule. It is asked for the steps to come by their numbers in the whole training.
    ///
    /// # Errors
    ///
    /// When its options contradict themselves; the old one stays then.
    pub fn set_learning_rate(&mut self, schedule: impl Schedule) -> Result<(), ScheduleError> {
        schedule.validate()?;
        self.config.rate = Arc::new(move |step| schedule.at(step));
        Ok(())
    }

    /// What the model computes in.
    pub fn precision(&self) -> Precision {
        self.policy.precision()
    }

    /// What each parameter is stored and computed in.
    pub fn policy(&self) -> &PrecisionPolicy {
        &self.policy
    }

    /// The loss scaler, which does nothing where losses are not scaled.
    pub fn scaler(&self) -> &GradScaler {
        &self.scaler
    }

    /// The average of the weights, where one is kept.
    pub fn ema(&self) -> Option<&Ema> {
        self.ema.as_ref()
    }

    /// Whether passes are recorded.
    pub fn graph_status(&self) -> GraphStatus {
        self.passes.status(&self.device)
    }

    /// Runs passes one by one from now on, for a profile of their kernels, say.
    pub fn stop_recording(&mut self) {
        self.passes = GradientGraph::disabled(self.policy.clone());
    }

    /// A tensor of numbers that the model reads, in the type that it computes in.
    pub fn input<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        self.policy.input(tensor)
    }

    /// Takes a step: the mean loss of `batch` by `loss`, its gradients, and an update of the model.
    ///
    /// # Errors
    ///
    /// When the batch cannot be split as asked, the loss is not one number in f32 or does not depend on the
    /// model, the device fails, training has diverged, or memory has grown beyond the
    /// [limit](crate::memory::set_limit): then the step was taken.
    pub fn step<L: StepLoss<Outputs = O>>(
        &mut self,
        batch: I,
        loss: impl Fn(&M, I) -> L,
    ) -> Result<Step<O>, TrainerError> {
        let parts = batch::split(batch, self.config.micro_batches)?;
        self.step_of(parts, loss)
    }

    /// Takes one step over `micro_batches`, whose mean losses count by weight. For micro-batches that are
    /// loaded one by one, and for losses that are means of something else than rows, such as tokens that are not
    /// padding.
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step), and when a weight is negative or not finite, or all are 0.
    pub fn step_of<L: StepLoss<Outputs = O>>(
        &mut self,
        micro_batches: Vec<MicroBatch<I>>,
        loss: impl Fn(&M, I) -> L,
    ) -> Result<Step<O>, TrainerError> {
        let batch::Weighted { tensors, factors, weight } = batch::weighted(micro_batches)?;
        let tensors: Vec<I> = tensors.into_iter().map(PassTensors::untracked).collect();
        if tensors.is_empty() && self.group.size() == 1 {
            return Err(batch::nothing_counts());
        }
        self.group.at_step(self.steps_taken + 1)?;
        self.seed_step(self.group.rank());
        let learning_rate = self.learning_rate();
        let before = (!self.is_reported).then(|| (profile::served(), Tally::now()));

        self.begin_to_count();
        let begun = Instant::now();
        let inputs = (tensors, self.factors_on_device(factors), self.scaler.current_scale());
        let (mean_loss, outputs, gradient_norm) = match self.repeats(&inputs, learning_rate) {
            true => self.repeat(inputs, learning_rate)?,
            false => self.pass_and_update(inputs, weight, learning_rate, loss)?,
        };
        // Hand the step over to the device now, and go on preparing the next one.
        graph::hand_over(&self.device).map_err(GraphError::from)?;
        self.repeats.end_watch();
        let elapsed = begun.elapsed();
        tracing::trace!("step {}, the host's time: {elapsed:?}", self.steps_taken);
        if let Some((served, products)) = before {
            self.report_once(&served, products);
        }
        let is_due = self.count(&mean_loss, &gradient_norm, learning_rate)?;
        self.check_memory(is_due)?;
        let (number, metrics) = (self.steps_taken, self.meter.take_due());
        Ok(Step { number, learning_rate, mean_loss, gradient_norm, outputs, metrics })
    }

    /// Takes a step. Gives the mean loss, what else the micro-batches gave, and the norm of the gradients.
    fn pass_and_update<L: StepLoss<Outputs = O>>(
        &mut self,
        inputs: Inputs<I>,
        weight: f64,
        learning_rate: f64,
        loss: impl Fn(&M, I) -> L,
    ) -> Result<(Tensor<1>, Vec<O>, Tensor<1>), TrainerError> {
        let ((mean_loss, outputs), gradients) = match inputs.0.is_empty() {
            true => ((self.nothing(), Vec::new()), GradientsParams::new()),
            false => self.run_passes(inputs, loss)?,
        };
        let (sums, mean_loss) = self.meet(gradients, mean_loss, weight)?;
        self.begin_watch(&sums.gradients);
        let gradient_norm = self.update(sums, learning_rate)?;
        // The model has changed, whatever the device says.
        self.steps_taken += 1;
        Ok((mean_loss, outputs, gradient_norm))
    }

    /// The mean loss of micro-batches, and its gradients.
    fn run_passes<L: StepLoss<Outputs = O>>(
        &mut self,
        inputs: Inputs<I>,
        loss: impl Fn(&M, I) -> L,
    ) -> Result<(Outputs<O>, GradientsParams), TrainerError> {
        let model = self.model.as_ref().ok_or(TrainerError::Lost)?;
        // The pass itself returns tensors and nothing else.
        let refusal = Cell::new(None);
        let done =
            self.passes.run(model, inputs, |model, inputs| match pass(model, inputs, &loss) {
                Ok(done) => done,
                Err(error) => {
                    refusal.set(Some(error));
                    ((Tensor::zeros([1], &self.device), Vec::new()), GradientsParams::new())
                }
            })?;
        refusal.into_inner().map_or(Ok(done), Err)
    }

    /// Seeds what follows by the number of the step, and on ranks other than 0 by theirs.
    fn seed_step(&self, rank: usize) {
        let Some(seed) = self.config.seed else { return };
        /// Far from each other, unlike the seeds of steps: 2^64 over the golden ratio.
        const APART: u64 = 0x9e37_79b9_7f4a_7c15;
        let step = seed.wrapping_add(1 + self.steps_taken as u64);
        let seed = step.wrapping_add(APART.wrapping_mul(rank as u64));
        self.device.seed(seed);
        random::seed(seed);
    }

    /// Most steps have the factors of the step before.
    fn factors_on_device(&mut self, factors: Vec<f64>) -> Tensor<1> {
        if let Some((_, tensor)) = self.factors.as_ref().filter(|(last, _)| *last == factors) {
            return tensor.clone();
        }
        let numbers: Vec<f32> = factors.iter().map(|factor| *factor as f32).collect();
        let device = self.device.clone().without_autodiff();
        let tensor = Tensor::from_data(numbers.as_slice(), (&device, DType::F32));
        self.factors.insert((factors, tensor)).1.clone()
    }

    /// Changes the model by gradients of the scaled loss, summed up over ranks. Returns the norm of their means without
    /// the scale.
    fn update(
        &mut self,
        sums: GradientSums,
        learning_rate: f64,
    ) -> Result<Tensor<1>, TrainerError> {
        let model = self.model.take().ok_or(TrainerError::Lost)?;
        let max_norm = self.config.max_norm;
        let GradientSums { mut gradients, factor, .. } = sums;
        let (apart, watch) = (self.optimizer.apart(&self.group), self.repeats.watch());
        let origin = Origin { factor, apart, watch };
        let measured = match self.config.optimizer.is_gated() {
            true => self.scaler.unscale_sums_in_step(&gradients, &model, max_norm, &origin),
            false => self.scaler.unscale_sums(&mut gradients, &model, max_norm, &origin),
        };
        let norm = match measured {
            Ok(norm) => norm,
            Err(error) => {
                self.model = Some(model);
                return Err(error.into());
            }
        };
        let is_left_out = !self.config.optimizer.is_gated() && self.scaler.overflowed();
        let model = match is_left_out {
            true => model,
            false => self.optimizer.step(learning_rate, model, gradients)?,
        };
        let averaged = self.ema.as_mut().map_or(Ok(()), |ema| ema.update(&model));
        self.model = Some(model);
        self.scaler.update()?;
        Ok(averaged.map(|()| norm)?)
    }

    /// What the trainer uses by now, and what it cannot.
    ///
    /// # Errors
    ///
    /// When an earlier step panicked while it changed the model.
    pub fn report(&self) -> Result<TrainerReport, TrainerError> {
        let model = self.model()?;
        let device = self.device.clone().without_autodiff();
        let drop_ins = match graph::is_supported(&device) {
            true => report::drop_ins(model),
            // On CPUs they are Burn's operations too.
            false => Vec::new(),
        };
        Ok(TrainerReport {
            device: format!("{:?}", device.as_dispatch()),
            precision: self.policy.report(model),
            optimizer: self.config.optimizer.to_string(),
            recorded: TrainerReport::recorded(self.graph_status()),
            served: self.served.clone(),
            products: self.products,
            declined: profile::declined(),
            drop_ins,
        })
    }

    /// Logs the report when it is known whether passes are recorded.
    fn report_once(&mut self, before: &BTreeMap<&'static str, u64>, products: Tally) {
        let status = self.graph_status();
        if status != GraphStatus::Recorded {
            // Burn's fusion settles in the first steps; a replay would show as nothing.
            let new = |(name, count): (&'static str, u64)| {
                let count = count - before.get(name).copied().unwrap_or_default();
                (count > 0).then_some((name, count))
            };
            self.served = profile::served().into_iter().filter_map(new).collect();
            self.products = Tally::now().since(products);
        }
        /// Steps after which operations are served as they will be.
        const SETTLED: usize = 3;
        if status == GraphStatus::WarmUp || self.steps_taken < SETTLED {
            return;
        }
        self.is_reported = true;
        if let Ok(report) = self.report() {
            tracing::info!("{report}");
        }
    }
}

impl<M: Module + ModuleDisplay, I: PassTensors, O: PassTensors> Trainer<M, I, O> {
    /// The model for validation, off the autodiff graph, with the averages in place of its weights where an
    /// average is kept.
    ///
    /// # Errors
    ///
    /// When an earlier step panicked while it changed the model.
    pub fn valid(&self) -> Result<M, TrainerError> {
        let model = self.model()?;
        let model = match &self.ema {
            Some(ema) => ema.apply(model.clone())?,
            None => model.clone(),
        };
        Ok(model.valid())
    }
}

#[cfg(test)]
mod tests;
