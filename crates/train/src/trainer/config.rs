//! Options of a trainer.

use super::{Trainer, TrainerError, repeat::Repeats, state::Saved, together::Stepper};
use crate::{
    checkpoint::Checkpoint,
    ema::EmaConfig,
    graph::{GradientGraph, PassTensors},
    memory::MemoryWatch,
    optim::{AdamWGroups, SgdGroups, StepGate},
    precision::{Precision, PrecisionPolicy},
    scaler::{GradScaler, GradScalerConfig},
    schedule::{Schedule, ScheduleError},
};
use blackburn_backend::{expect_kernels, fp8_linear::Tally};
use blackburn_distributed::Group;
use burn::{
    module::{Module, ModuleDisplay},
    optim::ModuleOptimizer,
    tensor::Device,
};
use std::{collections::BTreeMap, fmt, sync::Arc};

/// Milestones of a pass whose gradients move beside it. Each takes the device a few microseconds.
const MILESTONES: usize = 96;
/// Elements of gradients between two of them at least: what takes as long to move as a milestone takes.
const LEAST_BETWEEN: usize = 1 << 20;

/// A learning rate by step.
type Rate = Arc<dyn Fn(usize) -> f64 + Send + Sync>;

/// What a [`Trainer`] updates parameters with.
#[derive(Clone)]
#[non_exhaustive]
pub enum TrainerOptimizer {
    /// AdamW. Clipping, loss scaling and the update are one pass over gradients and parameters on GPUs.
    AdamW(AdamWGroups),
    /// Gradient descent with momentum, likewise.
    Sgd(SgdGroups),
    /// One of Burn's. Gradients are clipped in a pass of their own, and steps wait for the device where the
    /// loss is scaled.
    Other(Box<ModuleOptimizer>),
}

impl fmt::Debug for TrainerOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AdamW(groups) => groups.fmt(f),
            Self::Sgd(groups) => groups.fmt(f),
            Self::Other(_) => f.write_str("Other"),
        }
    }
}

impl fmt::Display for TrainerOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AdamW(AdamWGroups { beta_1, beta_2, weight_decay, .. }) => {
                write!(f, "AdamW, betas {beta_1} and {beta_2}, weight decay {weight_decay}")
            }
            Self::Sgd(SgdGroups { momentum, weight_decay, .. }) => {
                write!(f, "gradient descent, momentum {momentum}, weight decay {weight_decay}")
            }
            Self::Other(_) => f.write_str("of Burn's, which clips in a pass of its own"),
        }
    }
}

impl From<AdamWGroups> for TrainerOptimizer {
    fn from(groups: AdamWGroups) -> Self {
        Self::AdamW(groups)
    }
}

impl From<SgdGroups> for TrainerOptimizer {
    fn from(groups: SgdGroups) -> Self {
        Self::Sgd(groups)
    }
}

impl From<ModuleOptimizer> for TrainerOptimizer {
    fn from(optimizer: ModuleOptimizer) -> Self {
        Self::Other(Box::new(optimizer))
    }
}

impl TrainerOptimizer {
    /// Whether steps read the gate, which clips, takes the loss scale out and leaves steps out.
    pub(super) fn is_gated(&self) -> bool {
        !matches!(self, Self::Other(_))
    }

    pub(super) fn init<M: Module>(
        &self,
        model: &M,
        device: &Device,
        gate: &StepGate,
    ) -> ModuleOptimizer {
        match self {
            Self::AdamW(groups) => groups.init_gated(model, device, gate),
            Self::Sgd(groups) => groups.init_gated(model, device, gate),
            Self::Other(optimizer) => optimizer.as_ref().clone(),
        }
    }
}

/// Whether losses are scaled.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scaling {
    /// In precisions that need it, by the default rules.
    WhereNeeded,
    By(GradScalerConfig),
    Off,
}

/// How a model is trained. [`init`](Self::init) makes a [`Trainer`] of it.
#[derive(Clone)]
pub struct TrainerConfig {
    pub(super) rate: Rate,
    rate_error: Option<ScheduleError>,
    pub(super) policy: Option<PrecisionPolicy>,
    pub(super) optimizer: TrainerOptimizer,
    pub(super) max_norm: f64,
    pub(super) micro_batches: usize,
    pub(super) scaling: Scaling,
    pub(super) ema: Option<EmaConfig>,
    pub(super) seed: Option<u64>,
    pub(super) is_recorded: bool,
    pub(super) metrics_every: usize,
    pub(super) group: Group,
    pub(super) is_sharded: bool,
}

impl fmt::Debug for TrainerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainerConfig")
            .field("first_rate", &(self.rate)(0))
            .field("policy", &self.policy)
            .field("optimizer", &self.optimizer)
            .field("max_norm", &self.max_norm)
            .field("micro_batches", &self.micro_batches)
            .field("scaling", &self.scaling)
            .field("ema", &self.ema)
            .field("seed", &self.seed)
            .field("is_recorded", &self.is_recorded)
            .field("metrics_every", &self.metrics_every)
            .field("group", &self.group)
            .field("is_sharded", &self.is_sharded)
            .finish()
    }
}

impl TrainerConfig {
    /// Training at a learning rate: a number, a schedule such as
    /// [`WarmupCosine`](crate::schedule::WarmupCosine), or any function of the step, counted from 0.
    ///
    /// Without further options it is AdamW as [`AdamWGroups`] has it, in bf16 with f32 parameters on GPUs that
    /// compute in it and in f32 elsewhere, with recorded passes, and without clipping, accumulation, averages
    /// or a seed.
    pub fn new(learning_rate: impl Schedule) -> Self {
        let rate_error = learning_rate.validate().err();
        Self {
            rate: Arc::new(move |step| learning_rate.at(step)),
            rate_error,
            policy: None,
            optimizer: AdamWGroups::default().into(),
            max_norm: f64::INFINITY,
            micro_batches: 1,
            scaling: Scaling::WhereNeeded,
            ema: None,
            seed: None,
            is_recorded: true,
            metrics_every: 50,
            group: Group::alone(),
            is_sharded: false,
        }
    }

    /// Computes in `precision`, with parameters in f32.
    #[must_use]
    pub fn with_precision(self, precision: Precision) -> Self {
        self.with_policy(PrecisionPolicy::new(precision))
    }

    /// Computes as `policy` says. Do not [apply](PrecisionPolicy::apply) it to the model before.
    #[must_use]
    pub fn with_policy(mut self, policy: PrecisionPolicy) -> Self {
        self.policy = Some(policy);
        self
    }

    /// Updates parameters by another optimizer: [`AdamWGroups`], [`SgdGroups`], or one of Burn's.
    #[must_use]
    pub fn with_optimizer(mut self, optimizer: impl Into<TrainerOptimizer>) -> Self {
        self.optimizer = optimizer.into();
        self
    }

    /// Clips gradients to this global norm. See [`clip_global_norm`](crate::clip::clip_global_norm).
    #[must_use]
    pub fn with_max_norm(mut self, max_norm: f64) -> Self {
        self.max_norm = max_norm;
        self
    }

    /// Splits each batch into so many parts along the first dimension of its tensors, whose gradients are added
    /// up: the step is that of the whole batch, and activations take the memory of a part.
    #[must_use]
    pub fn with_micro_batches(mut self, parts: usize) -> Self {
        self.micro_batches = parts;
        self
    }

    /// Scales losses by these rules. Without this they are scaled in f16 alone, by `PyTorch`'s rules.
    #[must_use]
    pub fn with_loss_scaling(mut self, scaling: GradScalerConfig) -> Self {
        self.scaling = Scaling::By(scaling);
        self
    }

    /// Scales no losses, in f16 neither: small gradients are zero there.
    #[must_use]
    pub fn without_loss_scaling(mut self) -> Self {
        self.scaling = Scaling::Off;
        self
    }

    /// Keeps an average of the weights, which [`Trainer::valid`] gives.
    #[must_use]
    pub fn with_ema(mut self, ema: EmaConfig) -> Self {
        self.ema = Some(ema);
        self
    }

    /// Draws random numbers of a step (dropout, stochastic rounding) from `seed` and the step's number, so that
    /// a run repeats, and a run that is resumed goes on as if it had not been interrupted.
    ///
    /// Kernels that add by atomics in any order, as Burn's do for some gradients, may still differ in the last
    /// bits.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Runs passes one by one, without a recording: for closures that depend on more than the model and the
    /// batch. See [`graph`](crate::graph).
    #[must_use]
    pub fn without_recording(mut self) -> Self {
        self.is_recorded = false;
        self
    }

    /// Gives [`Step::metrics`](super::Step::metrics), and looks for a loss that is not finite, at every step whose
    /// number is a multiple of `steps` instead of 50. On a GPU they and the error come with the step after, so that
    /// the device need not wait.
    #[must_use]
    pub fn with_metrics_every(mut self, steps: usize) -> Self {
        self.metrics_every = steps;
        self
    }

    /// Trains on all ranks of `group`. A step is of the batches of all ranks, by their weights, and all ranks
    /// have the same parameters after it, bit for bit. They begin with rank 0's.
    ///
    /// [Seeds](Self::with_seed) are those of rank 0. Dropout draws other numbers on each rank, and stochastic
    /// rounding the same.
    #[must_use]
    pub fn with_group(mut self, group: &Group) -> Self {
        self.group = group.clone();
        self
    }

    /// Splits the optimizer's state over the ranks of the [group](Self::with_group): each keeps and updates its
    /// share of the parameters, and sends them to the others. See [`Sharded`](blackburn_distributed::Sharded).
    #[must_use]
    pub fn with_sharded_optimizer(mut self) -> Self {
        self.is_sharded = true;
        self
    }

    /// A trainer of `model`, which was made on a device with autodiff. `I` and `O` are inferred from the first
    /// [`step`](Trainer::step).
    ///
    /// # Errors
    ///
    /// When an option makes no sense, the model is on no device with autodiff, the precision does not fit
    /// the model or its device, or parameters, gradients and states alone are beyond the
    /// [limit](crate::memory::set_limit).
    pub fn init<M: Module + ModuleDisplay, I: PassTensors, O: PassTensors>(
        &self,
        model: M,
    ) -> Result<Trainer<M, I, O>, TrainerError> {
        self.build(model, None)?.fitting()
    }

    /// A trainer that goes on where `checkpoint` was saved by [`Trainer::save`]. `model` is one of the same
    /// shape, initialized anyhow.
    ///
    /// # Errors
    ///
    /// As [`init`](Self::init), and when the checkpoint is not of such a model and such options: it has an
    /// average and no such option is set, say.
    pub fn resume<M: Module + ModuleDisplay, I: PassTensors, O: PassTensors>(
        &self,
        model: M,
        checkpoint: &Checkpoint,
    ) -> Result<Trainer<M, I, O>, TrainerError> {
        self.build(model, Some(Saved::new(checkpoint)?))?.fitting()
    }

    pub(super) fn build<M: Module + ModuleDisplay, I: PassTensors, O: PassTensors>(
        &self,
        model: M,
        saved: Option<Saved<'_>>,
    ) -> Result<Trainer<M, I, O>, TrainerError> {
        self.check()?;
        let device = model.devices().first().cloned().ok_or(TrainerError::NoParameters)?;
        if !device.is_autodiff() {
            return Err(TrainerError::NoAutodiff { device: format!("{device:?}") });
        }
        expect_kernels();
        let policy = self
            .policy
            .clone()
            .unwrap_or_else(|| PrecisionPolicy::new(Precision::fastest(&device)));
        let mut model = policy.apply(model)?;
        let mut scaler = match self.scaling {
            Scaling::By(rules) => rules.init(&device)?,
            Scaling::WhereNeeded if policy.precision().needs_loss_scaling() => {
                GradScalerConfig::default().init(&device)?
            }
            Scaling::WhereNeeded | Scaling::Off => GradScaler::disabled(&device),
        };
        let mut steps_taken = 0;
        if let Some(saved) = &saved {
            steps_taken = saved.check(&policy, scaler.is_enabled(), self.ema.is_some())?;
            model = saved.model(model)?;
            saved.restore_scaler(&mut scaler)?;
        }
        let model = self.group.broadcast(model)?;
        let seed = self.common_seed()?;
        let optimizer = self.optimizer.init(&model, &device, scaler.gate());
        let mut optimizer = match self.is_sharded {
            true => Stepper::Sharded(Box::new(self.group.sharded(optimizer, &model)?)),
            false => Stepper::Whole(optimizer),
        };
        let mut ema = self.ema.map(|ema| ema.init(&model)).transpose()?;
        if let Some(saved) = &saved {
            optimizer = saved.optimizer(optimizer)?;
            ema = self.ema.map(|ema| saved.ema(ema, &model)).transpose()?;
        }
        self.agree(&policy, scaler.is_enabled(), steps_taken, seed)?;
        let passes = match self.is_recorded {
            // A split optimizer has each sum on one rank alone.
            true if !self.is_sharded && self.group.moves_beside(&device) => {
                let elements = Module::num_params(&model).div_ceil(MILESTONES).max(LEAST_BETWEEN);
                GradientGraph::new(policy.clone()).with_milestones(elements)
            }
            true => GradientGraph::new(policy.clone()),
            false => GradientGraph::disabled(policy.clone()),
        };
        Ok(Trainer {
            config: Self { seed, ..self.clone() },
            memory_watch: Some(MemoryWatch::new(&device)),
            steps_here: 0,
            device,
            policy,
            model: Some(model),
            optimizer,
            group: self.group.clone(),
            is_recording_agreed: self.group.size() == 1,
            scaler,
            ema,
            passes,
            repeats: Repeats::default(),
            steps_taken,
            meter: super::Meter::default(),
            factors: None,
            served: BTreeMap::new(),
            products: Tally::default(),
            is_reported: false,
        })
    }

    fn check(&self) -> Result<(), TrainerError> {
        let refused = |option, expected, actual: String| {
            Err(TrainerError::Option { option, expected, actual })
        };
        if let Some(error) = &self.rate_error {
            return Err(error.clone().into());
        }
        if self.max_norm.is_nan() || self.max_norm <= 0.0 {
            return refused("max_norm", "a positive number", self.max_norm.to_string());
        }
        if self.micro_batches == 0 {
            return refused("micro_batches", "at least 1", "0".into());
        }
        if self.metrics_every == 0 {
            return refused("metrics_every", "at least 1", "0".into());
        }
        Ok(())
    }
}
