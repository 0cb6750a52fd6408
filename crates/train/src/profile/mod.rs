//! Where a training step's time goes, and what to change.
//!
//! A [`Profiler`] is given training steps, one after the other, and makes a [`StepProfile`] of them: the time
//! of a step, what of it the device works and what it waits for the host, the kernels and the operations
//! behind them with bytes, arithmetic and the share of what the device could do, and recommendations by what
//! they would gain. It prints as a table and is written as JSON by serde.
//!
//! ```
//! use blackburn_train::profile::Profiler;
//! use burn::{nn::LinearConfig, optim::{GradientsParams, SgdConfig}, prelude::*};
//!
//! let device = Device::flex().autodiff();
//! let mut model = LinearConfig::new(4, 1).init(&device);
//! let mut optimizer = SgdConfig::new().init();
//! let mut profiler = Profiler::new(&device)?;
//! while !profiler.is_done() {
//!     profiler.step(|| {
//!         let loss = model.forward(Tensor::<2>::ones([3, 4], &device)).mean();
//!         let gradients = GradientsParams::from_grads(loss.backward(), &model);
//!         model = optimizer.step(0.1, model.clone(), gradients);
//!     })?;
//! }
//! let profile = profiler.finish()?;
//! println!("{profile}");
//! # assert!(profile.wall_us > 0.0);
//! # Ok::<(), blackburn_train::profile::ProfileError>(())
//! ```
//!
//! # How it is measured
//!
//! | what | how |
//! |---|---|
//! | a step's time | rounds of steps back to back, between two waits for the device: the median of the rounds. Nothing observes these steps |
//! | a kernel's time | in later steps, between two events on the device around each launch. The host waits for every kernel, so kernels run one by one; what the smallest kernel measures in that way is taken off each |
//! | operations | the blocks that Burn's fusion runs, in the same steps: what one fused kernel replaces, or one operation |
//! | bytes | of a block's inputs, each once, and of the outputs that are needed after it: what the block has to move, not what it does |
//! | arithmetic | of matrix products, convolutions and attention, from their shapes; the rest counts as none |
//! | the roofline | the longer of the times that bytes and arithmetic take at the device's [`Peaks`] |
//! | gaps | a step's time less that of its kernels |
//!
//! Observers are process-wide: what other threads ask of a device meanwhile shows too. On the CPU there is
//! no stream of operations to observe, and a profile is a step's time alone. Nothing that could not be
//! measured is filled in: it is absent.

mod advice;
mod chain;
mod collect;
mod peaks;
mod report;
mod table;

pub use advice::{Advice, Recommendation};
pub use blackburn_backend::profile::ObserveError;
pub use peaks::{PeakSource, Peaks};
pub use report::{BlockRow, Chains, Clock, KernelRow, ServedBy, StepProfile, Verdict};

use blackburn_backend::{
    graph,
    profile::{self as backend, BlockRecord},
};
use burn::tensor::Device;
use std::time::Instant;

/// How many steps a profile takes, and of what kind.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileOptions {
    /// Steps that are not measured, in which kernels are compiled and chosen.
    pub warm_up: usize,
    /// Rounds of steps that are timed as a whole.
    pub rounds: usize,
    /// Steps of a round.
    pub steps_per_round: usize,
    /// Steps whose kernels are timed.
    pub observed: usize,
    /// Whether the steps replay a recorded graph, whose kernels cannot be told apart: then rounds of steps
    /// without the recording are timed too, and their kernels. The caller looks at
    /// [`Phase::is_eager`].
    pub recorded: bool,
    /// What the device could do at best.
    pub peaks: PeakSource,
}

impl Default for ProfileOptions {
    fn default() -> Self {
        Self {
            warm_up: 6,
            rounds: 3,
            steps_per_round: 4,
            observed: 3,
            recorded: false,
            peaks: PeakSource::Measured,
        }
    }
}

/// What the next step is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Kernels are compiled; nothing is measured.
    WarmUp,
    /// The step is timed with its neighbors, as it trains.
    Wall,
    /// As `WarmUp`, without a recorded graph.
    EagerWarmUp,
    /// As `Wall`, without a recorded graph.
    EagerWall,
    /// Each kernel is timed.
    Kernels,
    /// There is none: the profile is complete.
    Done,
}

impl Phase {
    /// Whether a step must ask for each of its kernels, instead of replaying a recorded graph.
    pub fn is_eager(self) -> bool {
        matches!(self, Self::EagerWarmUp | Self::EagerWall | Self::Kernels)
    }
}

/// Why there is no profile.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// An option that makes no sense.
    #[error("Profiler::with_options: option `{option}`: expected at least 1, got 0")]
    Zero {
        /// Its name.
        option: &'static str,
    },
    /// Peaks that are none.
    #[error("Profiler::with_options: peak `{peak}`: expected a positive number, got {actual}")]
    Peak {
        /// Its name.
        peak: &'static str,
        /// What was given.
        actual: f64,
    },
    /// Too few steps were taken.
    #[error(
        "Profiler::finish: expected {expected} steps, got {actual}; take steps until `is_done`"
    )]
    Incomplete {
        /// The steps of a profile.
        expected: usize,
        /// Those taken.
        actual: usize,
    },
    /// An observed step launched no kernel.
    #[error(
        "Profiler::finish: no kernel was launched in the {steps} observed steps: they compute nothing on the \
         device"
    )]
    NoKernels {
        /// The observed steps.
        steps: usize,
    },
    /// An observed step replayed a recorded graph, whose kernels nobody sees.
    #[error(
        "Profiler::step: the step replayed a recorded graph, whose kernels cannot be timed; set \
         ProfileOptions::recorded, and run the step without the recording where Phase::is_eager"
    )]
    Replayed,
    /// What the device does at best could not be measured.
    #[error("Peaks::measure: {reason}")]
    Peaks {
        /// Why not.
        reason: String,
    },
    /// The device's work could not be observed.
    #[error(transparent)]
    Observe(#[from] ObserveError),
    /// The device failed.
    #[error("the device failed while a step was timed: {reason}")]
    Device {
        /// What it said.
        reason: String,
    },
}

/// Takes training steps and finds out where their time goes.
#[derive(Debug)]
pub struct Profiler {
    device: Device,
    options: ProfileOptions,
    schedule: Vec<Phase>,
    taken: usize,
    round: Option<Instant>,
    /// Microseconds of a step, one for each round.
    wall: Vec<f64>,
    eager_wall: Vec<f64>,
    observed: Vec<Vec<BlockRecord>>,
}

impl Profiler {
    /// Profiles steps on `device`, with the default options: 21 steps on a GPU, 18 on the CPU.
    ///
    /// # Errors
    ///
    /// None with these options.
    pub fn new(device: &Device) -> Result<Self, ProfileError> {
        Self::with_options(device, ProfileOptions::default())
    }

    /// Profiles steps on `device`.
    ///
    /// # Errors
    ///
    /// [`ProfileError::Zero`] for no rounds, steps of a round or observed steps, [`ProfileError::Peak`] for
    /// peaks that are not positive.
    pub fn with_options(device: &Device, options: ProfileOptions) -> Result<Self, ProfileError> {
        let counts = [
            ("rounds", options.rounds),
            ("steps_per_round", options.steps_per_round),
            ("observed", options.observed),
        ];
        if let Some((option, _)) = counts.into_iter().find(|(_, count)| *count == 0) {
            return Err(ProfileError::Zero { option });
        }
        if let PeakSource::Given(peaks) = &options.peaks {
            peaks.validate()?;
        }
        let device = device.clone().without_autodiff();
        let timed = options.rounds * options.steps_per_round;
        let mut phases = vec![(Phase::WarmUp, options.warm_up), (Phase::Wall, timed)];
        if backend::is_observable(&device) {
            if options.recorded {
                // The observed steps are a round's, so they have met their kernels.
                phases.push((Phase::EagerWarmUp, options.warm_up));
                phases.push((Phase::EagerWall, timed));
            }
            phases.push((Phase::Kernels, options.observed));
        }
        let steps = phases.into_iter().flat_map(|(phase, count)| std::iter::repeat_n(phase, count));
        Ok(Self {
            device,
            schedule: steps.collect(),
            options,
            taken: 0,
            round: None,
            wall: Vec::new(),
            eager_wall: Vec::new(),
            observed: Vec::new(),
        })
    }

    /// Tells that steps do not replay a recorded graph, though [`ProfileOptions::recorded`] said so: the steps
    /// that would be timed without one are left out. To call once the recording was refused.
    pub fn without_recording(&mut self) {
        let taken = self.schedule.drain(..self.taken).collect::<Vec<_>>();
        let is_needed = |phase: &Phase| !matches!(phase, Phase::EagerWarmUp | Phase::EagerWall);
        let left = std::mem::take(&mut self.schedule).into_iter().filter(is_needed);
        self.schedule = taken.into_iter().chain(left).collect();
        self.options.recorded = false;
    }

    /// What the next step is for.
    pub fn phase(&self) -> Phase {
        self.schedule.get(self.taken).copied().unwrap_or(Phase::Done)
    }

    /// Whether all steps were taken. Further ones run as they are.
    pub fn is_done(&self) -> bool {
        self.phase() == Phase::Done
    }

    /// The steps that are still to take.
    pub fn steps_left(&self) -> usize {
        self.schedule.len() - self.taken
    }

    /// Takes one training step and returns what it returns. The steps of a round are timed with what the
    /// caller does between them.
    ///
    /// # Errors
    ///
    /// [`ProfileError::Device`], [`ProfileError::Observe`], and [`ProfileError::Replayed`] for a step that was to
    /// be observed and replayed a recorded graph. The step is not taken again.
    pub fn step<T>(&mut self, step: impl FnOnce() -> T) -> Result<T, ProfileError> {
        let phase = self.phase();
        let done = match phase {
            Phase::Done => return Ok(step()),
            Phase::WarmUp | Phase::EagerWarmUp => step(),
            Phase::Wall | Phase::EagerWall => self.time(phase, step)?,
            Phase::Kernels => {
                let replays = graph::replays();
                let (done, blocks) = backend::observe(&self.device, step)?;
                if graph::replays() != replays {
                    return Err(ProfileError::Replayed);
                }
                self.observed.push(blocks);
                done
            }
        };
        self.taken += 1;
        Ok(done)
    }

    fn time<T>(&mut self, phase: Phase, step: impl FnOnce() -> T) -> Result<T, ProfileError> {
        let started = match self.round {
            Some(started) => started,
            None => {
                wait_for(&self.device)?;
                *self.round.insert(Instant::now())
            }
        };
        let done = step();
        let first = self.schedule.iter().position(|other| *other == phase).unwrap_or_default();
        if (self.taken + 1 - first).is_multiple_of(self.options.steps_per_round) {
            wait_for(&self.device)?;
            let mean = started.elapsed().as_secs_f64() * 1e6 / self.options.steps_per_round as f64;
            self.round = None;
            if phase == Phase::Wall { &mut self.wall } else { &mut self.eager_wall }.push(mean);
        }
        Ok(done)
    }

    /// The profile. Where peaks are to be measured, this runs a copy and products of matrices for it, which
    /// takes device memory that Burn keeps for reuse.
    ///
    /// # Errors
    ///
    /// [`ProfileError::Incomplete`] before [`is_done`](Self::is_done), [`ProfileError::NoKernels`] where
    /// observed steps launched none, and what the device says.
    pub fn finish(self) -> Result<StepProfile, ProfileError> {
        if !self.is_done() {
            let (expected, actual) = (self.schedule.len(), self.taken);
            return Err(ProfileError::Incomplete { expected, actual });
        }
        let wall = median(self.wall);
        let device_name = format!("{:?}", self.device);
        if self.observed.is_empty() {
            return Ok(StepProfile::of_wall(device_name, wall));
        }
        if self.observed.iter().flatten().all(|block| block.launches.is_empty()) {
            return Err(ProfileError::NoKernels { steps: self.observed.len() });
        }
        let floor = peaks::launch_floor_us(&self.device)?;
        let peaks = self.options.peaks.resolve(&self.device);
        let eager = self.options.recorded.then(|| median(self.eager_wall));
        let mut profile = collect::summarize(&self.observed, floor, peaks.as_ref());
        profile.device = device_name;
        profile.declined = backend::declined();
        profile.conclude(wall, eager);
        Ok(profile)
    }
}

fn wait_for(device: &Device) -> Result<(), ProfileError> {
    device.sync().map_err(|error| ProfileError::Device { reason: error.to_string() })
}

/// The middle of `values`, or the mean of the two in the middle; 0 of none.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values[..] {
        [] => 0.0,
        _ if values.len() % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests;
