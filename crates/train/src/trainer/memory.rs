//! What a trainer's memory will be.

use super::{StepLoss, Trainer, TrainerConfig, TrainerError, TrainerOptimizer};
use crate::{
    graph::PassTensors,
    memory::{self, Census, MemoryEstimate, MemoryMonitor, MemoryWatch},
    precision::{Precision, PrecisionPolicy},
};
use blackburn_backend::graph;
use blackburn_distributed::Group;
use burn::{
    module::{Module, ModuleDisplay},
    tensor::Device,
};
use std::cell::{Cell, RefCell};

/// Steps after which the optimizer has its state, and a step finds it there.
const STEPS: usize = 2;

/// Bytes of a number in f32, which moments, velocities, averages and sums of gradients are kept in.
const F32: u64 = 4;

impl TrainerConfig {
    /// What a step will take of `device`'s memory, before anything is computed: the model, the batch and two steps are
    /// gone through in a [dry run](memory::dry_run), whose conditions hold. `batch` makes what [`Trainer::step`] gets,
    /// best by `Tensor::zeros`; it is given the trainer for [`Trainer::input`].
    ///
    /// ```
    /// use blackburn_train::{precision::full_precision, trainer::{Trainer, TrainerConfig}};
    /// use burn::{nn::LinearConfig, prelude::*};
    ///
    /// let device = Device::flex().autodiff();
    /// let memory = TrainerConfig::new(1e-3).estimate(
    ///     &device,
    ///     || LinearConfig::new(256, 10).init(&device),
    ///     |trainer: &Trainer<_, _>| trainer.input(Tensor::<2>::zeros([32, 256], &device)),
    ///     |model, x| full_precision(model.forward(x)).mean(),
    /// )?;
    /// // Two moments of AdamW in f32, of 2570 numbers.
    /// assert_eq!(memory.optimizer_bytes, Some(2 * 4 * 2570));
    /// println!("{memory}");
    /// # Ok::<(), blackburn_train::trainer::TrainerError>(())
    /// ```
    ///
    /// Where there are several ranks, each asks for itself, and none waits for another. On a device without pools, as a
    /// CPU, activations are not known, and only the model is made.
    ///
    /// The recording of passes is not part of the dry run: parameters and inputs that it copies are added, and it may
    /// take some pages more (14 MB on a software GPU). Buffers of NCCL, the CUDA context and compiled kernels are not
    /// counted.
    ///
    /// # Errors
    ///
    /// As [`init`](Self::init) and [`Trainer::step`].
    pub fn estimate<M, I, L>(
        &self,
        device: &Device,
        model: impl Fn() -> M,
        batch: impl Fn(&Trainer<M, I, L::Outputs>) -> I,
        loss: impl Fn(&M, I) -> L,
    ) -> Result<MemoryEstimate, TrainerError>
    where
        M: Module + ModuleDisplay,
        I: PassTensors,
        L: StepLoss,
    {
        let mut alone = self.clone();
        (alone.group, alone.is_sharded) = (Group::alone(), false);
        alone.is_recorded = false;
        // Metrics would be of losses that nobody computed.
        alone.metrics_every = usize::MAX;
        let begin = || {
            let mut trainer: Trainer<M, I, L::Outputs> = alone.build(model(), None)?;
            // What comes out is compared with a limit, and not what is counted on the way.
            trainer.memory_watch = None;
            Ok::<_, TrainerError>(trainer)
        };
        let work = |monitor: &mut MemoryMonitor| {
            let mut trainer = begin()?;
            let kept = dry_steps(&mut trainer, monitor, &batch, &loss)?;
            Ok::<_, TrainerError>((trainer.census()?, kept))
        };
        let Some((done, grown)) = memory::dry_run(device, work)? else {
            return Ok(self.of_census(&begin()?.census()?, graph::is_supported(device)));
        };
        let (census, kept) = done?;
        let is_gpu = graph::is_supported(device);
        let mut estimate = self.of_census(&census, is_gpu);
        let Kept { inputs_bytes, activations_bytes } = kept;
        estimate.activations_bytes = Some(activations_bytes.saturating_sub(census.cast_bytes));
        // The dry run has made casts, and the whole state of the optimizer. A recording has copies and the inputs of
        // its own, and one rank of several has its share.
        let mut reserved_bytes =
            (grown.reserved_bytes + estimate.copies_bytes).saturating_sub(census.cast_bytes);
        if self.is_recorded && is_gpu {
            reserved_bytes += inputs_bytes;
        }
        let whole = self.state_bytes(&census).unwrap_or_default();
        let elsewhere = whole - estimate.optimizer_bytes.unwrap_or(whole);
        estimate.reserved_bytes = Some(reserved_bytes.saturating_sub(elsewhere));
        Ok(estimate)
    }

    /// What `numbers` parameters take that are all trained in the same precision, without a model or a device: that of
    /// the policy, or f32 without one. Passes are not recorded where `is_gpu` is not set.
    pub fn memory_of(&self, numbers: u64, is_gpu: bool) -> MemoryEstimate {
        let policy = self.policy.clone();
        let policy = policy.unwrap_or_else(|| PrecisionPolicy::new(Precision::F32));
        self.of_census(&Census::of_numbers(numbers, &policy), is_gpu)
    }

    fn of_census(&self, census: &Census, is_gpu: bool) -> MemoryEstimate {
        let is_recorded = self.is_recorded && is_gpu;
        // A recording has a copy of each parameter, which gradients are of the type of.
        let (copies_bytes, gradients_bytes) = match is_recorded {
            true => (census.computed_bytes, census.trained_computed_bytes),
            false => (census.cast_bytes, census.trained_stored_bytes),
        };
        // Micro-batches are summed in f32.
        let sum_bytes = if self.micro_batches > 1 { F32 * census.trained } else { 0 };
        let ranks = if self.is_sharded { self.group.size() as u64 } else { 1 };
        MemoryEstimate {
            parameters_bytes: census.stored_bytes,
            copies_bytes,
            gradients_bytes: gradients_bytes + sum_bytes,
            optimizer_bytes: self.state_bytes(census).map(|bytes| bytes.div_ceil(ranks)),
            average_bytes: self.ema.map_or(0, |_| F32 * census.trained),
            activations_bytes: None,
            reserved_bytes: None,
        }
    }

    /// The optimizer's state on all ranks together.
    fn state_bytes(&self, census: &Census) -> Option<u64> {
        match &self.optimizer {
            TrainerOptimizer::AdamW(_) => Some(2 * F32 * census.trained),
            TrainerOptimizer::Sgd(groups) if groups.momentum == 0.0 => Some(0),
            TrainerOptimizer::Sgd(_) => Some(F32 * census.trained),
            TrainerOptimizer::Other(_) => None,
        }
    }
}

impl<M: Module + ModuleDisplay, I: PassTensors, O: PassTensors> Trainer<M, I, O> {
    /// What this trainer's steps take, but for activations, which [`TrainerConfig::estimate`] finds.
    ///
    /// # Errors
    ///
    /// When an earlier step panicked while it changed the model.
    pub fn memory(&self) -> Result<MemoryEstimate, TrainerError> {
        Ok(self.config.of_census(&self.census()?, graph::is_supported(&self.device)))
    }

    fn census(&self) -> Result<Census, TrainerError> {
        Ok(Census::of(self.model()?, &self.policy))
    }

    /// Refuses a trainer that is beyond the [limit](memory::limit) without any activations.
    pub(super) fn fitting(self) -> Result<Self, TrainerError> {
        if let (Some(limit), Some(_)) = (memory::limit(), MemoryMonitor::new(&self.device).read()) {
            self.memory()?.check(limit)?;
        }
        Ok(self)
    }

    /// Looks at the limit after each of the first steps, in which memory grows as a rule, and then every some steps.
    pub(super) fn check_memory(&mut self, is_due: bool) -> Result<(), TrainerError> {
        /// Passes are recorded by then, and the optimizer has its state.
        const FIRST: usize = 8;
        self.steps_here += 1;
        match self.steps_here <= FIRST || is_due {
            true => Ok(self.memory_watch.as_mut().map_or(Ok(()), MemoryWatch::check)?),
            false => Ok(()),
        }
    }
}

/// What forward passes leave in use, in bytes.
struct Kept {
    /// Of all micro-batches.
    inputs_bytes: u64,
    /// What the first micro-batch leaves for the backward pass, with the inputs of all.
    activations_bytes: u64,
}

/// Steps of which nothing is computed. Returns what the last one keeps.
fn dry_steps<M: Module + ModuleDisplay, I: PassTensors, L: StepLoss>(
    trainer: &mut Trainer<M, I, L::Outputs>,
    monitor: &mut MemoryMonitor,
    batch: &impl Fn(&Trainer<M, I, L::Outputs>) -> I,
    loss: &impl Fn(&M, I) -> L,
) -> Result<Kept, TrainerError> {
    let monitor = RefCell::new(monitor);
    let in_use = || monitor.borrow_mut().read().map_or(0, |memory| memory.in_use_bytes);
    let mut kept = Kept { inputs_bytes: 0, activations_bytes: 0 };
    for _ in 0..STEPS {
        let before = in_use();
        let batch = batch(trainer);
        kept.inputs_bytes = in_use().saturating_sub(before);
        let after_first = Cell::new(None);
        trainer.step(batch, |model, batch| {
            let loss = loss(model, batch);
            // Sums of gradients lie beside what later ones keep.
            if after_first.get().is_none() {
                after_first.set(Some(in_use()));
            }
            loss
        })?;
        kept.activations_bytes = after_first.get().unwrap_or(before).saturating_sub(before);
    }
    Ok(kept)
}
