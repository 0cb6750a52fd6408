//! Numbers of the last steps, for which the device does not wait.

use super::{HOPELESS, Trainer, TrainerError};
use crate::graph::PassTensors;
use blackburn_backend::readback::Readback;
use burn::{
    module::{Module, ModuleDisplay},
    tensor::Tensor,
};
use std::{
    fmt,
    time::{Duration, Instant},
};

/// What the steps since the last metrics have come to.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Metrics {
    /// The number of the last of them, counted from 1.
    pub step: usize,
    /// How many they are.
    pub steps: usize,
    /// The mean of their losses.
    pub loss: f32,
    /// The global norm of the last step's gradients before they were clipped. Not finite where a loss scaler left
    /// the step out.
    pub gradient_norm: f32,
    /// The learning rate of the last step.
    pub learning_rate: f64,
    /// The time that they took, with what the program did between them, such as loading batches. What it does
    /// between [`Trainer::metrics`] or [`Trainer::save`] and the next step does not count.
    pub elapsed: Duration,
    /// Of this time, what went into moving numbers between ranks, with the wait for late ones.
    pub moving: Duration,
}

impl Metrics {
    /// The mean time of a step.
    pub fn step_time(&self) -> Duration {
        self.elapsed / u32::try_from(self.steps).unwrap_or(u32::MAX)
    }

    /// What these steps and `later` ones have come to together.
    fn with(self, later: Self) -> Self {
        let steps = self.steps + later.steps;
        let sum = |metrics: Self| f64::from(metrics.loss) * metrics.steps as f64;
        Self {
            steps,
            loss: ((sum(self) + sum(later)) / steps as f64) as f32,
            elapsed: self.elapsed + later.elapsed,
            moving: self.moving + later.moving,
            ..later
        }
    }
}

/// `step 20: loss 0.1234, gradient norm 0.56, learning rate 3.00e-4, 17.20 ms a step`
impl fmt::Display for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "step {}: loss {:.4}, gradient norm {:.3}, learning rate {:.2e}, {:.2} ms a step",
            self.step,
            self.loss,
            self.gradient_norm,
            self.learning_rate,
            1e3 * self.step_time().as_secs_f64()
        )
    }
}

/// Steps, until somebody looks at what they have come to.
#[derive(Debug, Default)]
pub(super) struct Meter {
    /// Losses of the steps that the device was not asked for.
    losses: Vec<Tensor<1>>,
    /// The gradient norm and the learning rate of the last of them.
    last: Option<(Tensor<1>, f64)>,
    /// When the first of them began.
    begun: Option<Moment>,
    /// The steps before them, whose numbers are on their way.
    asked: Option<Asked>,
    /// What was read and not given out.
    read: Option<Metrics>,
    /// Whether a step gives it out.
    is_due: bool,
}

impl Meter {
    /// What a step gives out.
    pub(super) fn take_due(&mut self) -> Option<Metrics> {
        std::mem::take(&mut self.is_due).then(|| self.read.take()).flatten()
    }
}

/// Steps, whose numbers the device was asked for.
#[derive(Debug)]
struct Asked {
    /// The number of the last.
    step: usize,
    learning_rate: f64,
    begun: Moment,
    /// The losses, and the gradient norm of the last.
    numbers: Readback,
}

/// A time, and how long numbers were moved between ranks by then.
#[derive(Clone, Copy, Debug)]
struct Moment {
    time: Instant,
    moving: Duration,
}

impl<M: Module + ModuleDisplay, I: PassTensors, O: PassTensors> Trainer<M, I, O> {
    /// What the steps have come to since the last metrics that this or a [`Step`](super::Step) gave, if there were
    /// any. Waits for the device. For the numbers of every some steps, which the device does not wait for, see
    /// [`with_metrics_every`](super::TrainerConfig::with_metrics_every).
    ///
    /// # Errors
    ///
    /// When the device fails, or training has diverged.
    pub fn metrics(&mut self) -> Result<Option<Metrics>, TrainerError> {
        self.look_now()?;
        self.meter.is_due = false;
        Ok(self.meter.read.take())
    }

    /// Reads the numbers of the last steps. Waits for the device, so that the next step begins an interval.
    pub(super) fn look_now(&mut self) -> Result<(), TrainerError> {
        // A step still gives them out.
        self.meter.is_due |= self.meter.asked.is_some();
        self.look()?;
        self.ask();
        self.look()?;
        self.meter.begun = None;
        Ok(())
    }

    /// Takes the time of a step that begins, if it is the first.
    pub(super) fn begin_to_count(&mut self) {
        if self.meter.begun.is_none() {
            self.meter.begun = Some(self.moment());
        }
    }

    /// Counts a step that was taken, and asks for the numbers where they are due. Gives whether they are.
    pub(super) fn count(
        &mut self,
        mean_loss: &Tensor<1>,
        gradient_norm: &Tensor<1>,
        learning_rate: f64,
    ) -> Result<bool, TrainerError> {
        self.meter.losses.push(mean_loss.clone());
        self.meter.last = Some((gradient_norm.clone(), learning_rate));
        // Those that were asked for in front of this step: the device has it to do meanwhile.
        self.meter.is_due |= self.meter.asked.is_some();
        self.look()?;
        let is_due = self.steps_taken.is_multiple_of(self.config.metrics_every);
        if is_due {
            self.ask();
            if self.meter.asked.as_ref().is_some_and(|asked| asked.numbers.is_here()) {
                self.meter.is_due = true;
                self.look()?;
            }
        }
        Ok(is_due)
    }

    /// Asks the device for the numbers of the last steps.
    fn ask(&mut self) {
        let Meter { losses, last, begun, asked, .. } = &mut self.meter;
        if let (Some((norm, learning_rate)), Some(begun)) = (last.take(), begun.take()) {
            let mut numbers = std::mem::take(losses);
            numbers.push(norm);
            let numbers = Readback::of(Tensor::cat(numbers, 0));
            *asked = Some(Asked { step: self.steps_taken, learning_rate, begun, numbers });
        }
    }

    /// Waits for the numbers that were asked for, if any were.
    fn look(&mut self) -> Result<(), TrainerError> {
        let Some(Asked { step, learning_rate, begun, numbers }) = self.meter.asked.take() else {
            return Ok(());
        };
        let numbers = numbers.wait()?;
        // The device has done those steps, and does the next.
        let now = self.moment();
        self.meter.begun = Some(now);
        let Some((&gradient_norm, losses)) = numbers.split_last() else { return Ok(()) };
        let steps = losses.len();
        let wrong = losses.iter().position(|loss| !loss.is_finite());
        let wrong = wrong.map(|index| ("loss", step + 1 + index - steps, losses[index]));
        // A scaler leaves such a step out.
        let is_wrong = !gradient_norm.is_finite() && !self.scaler.is_enabled();
        let wrong = wrong.or(is_wrong.then_some(("gradient norm", step, gradient_norm)));
        if let Some((what, step, value)) = wrong {
            // Where a rank has failed, numbers of this one may be unfinished.
            self.group.at_step(self.steps_taken)?;
            return Err(TrainerError::Diverged { what, step, value });
        }
        if self.scaler.is_enabled() {
            let state = self.scaler.state();
            if state.skipped_in_a_row >= HOPELESS {
                let (skipped, scale) = (state.skipped_in_a_row, state.scale);
                return Err(TrainerError::Hopeless { skipped, scale });
            }
        }
        let sum: f64 = losses.iter().copied().map(f64::from).sum();
        let metrics = Metrics {
            step,
            steps,
            loss: (sum / steps as f64) as f32,
            gradient_norm,
            learning_rate,
            elapsed: now.time - begun.time,
            moving: now.moving.saturating_sub(begun.moving),
        };
        let read = &mut self.meter.read;
        *read = Some(read.map_or(metrics, |earlier| earlier.with(metrics)));
        Ok(())
    }

    fn moment(&self) -> Moment {
        Moment { time: Instant::now(), moving: self.group.time_moving().all }
    }
}

#[cfg(test)]
mod tests;
