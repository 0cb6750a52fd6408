//! Learning rate by step.
//!
//! A schedule here is a function of the step alone. A hand-written loop calls `at`, and a resumed run needs no
//! state. [`Scheduler`] counts the steps for Burn's `Learner`. `burn::lr_scheduler` has further schedules
//! (constant, step, exponential, cosine, Noam, and compositions of them). Rates that follow a metric are in
//! [`plateau`](crate::plateau).

use burn::lr_scheduler::{LrScheduler, LrSchedulerRecord};
use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// Options of a schedule that contradict themselves.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{schedule}: option `{option}`: expected {expected}, got {actual}")]
pub struct ScheduleError {
    /// The schedule.
    pub schedule: &'static str,
    /// Its option.
    pub option: &'static str,
    /// What the option must be.
    pub expected: String,
    /// What it is.
    pub actual: String,
}

/// A learning rate that depends on nothing but the step.
pub trait Schedule: Clone + Send + Sync + 'static {
    /// Returns the rate of a step, counted from 0.
    fn at(&self, step: usize) -> f64;

    /// # Errors
    ///
    /// If options contradict themselves: names the first that does.
    fn validate(&self) -> Result<(), ScheduleError>;

    /// Turns the schedule into one for Burn's `Learner`, at step 0.
    ///
    /// # Errors
    ///
    /// Those of [`validate`](Self::validate).
    fn scheduler(&self) -> Result<Scheduler<Self>, ScheduleError> {
        self.validate()?;
        Ok(Scheduler { schedule: self.clone(), step: 0 })
    }
}

/// Linear warm-up to a peak, then half a cosine down to a floor.
///
/// It is a function of the step alone, so a resumed run needs no state.
///
/// ```
/// use blackburn_train::schedule::WarmupCosine;
///
/// let schedule = WarmupCosine { peak: 1e-3, floor: 1e-4, warmup_steps: 10, total_steps: 110 };
/// assert_eq!(schedule.at(9), 1e-3);
/// assert!((schedule.at(60) - 5.5e-4).abs() < 1e-12);
/// assert_eq!(schedule.at(500), 1e-4);
/// ```
///
/// Source of the cosine: Loshchilov and Hutter, "SGDR", arXiv:1608.03983, equation 5, one period.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WarmupCosine {
    /// The rate after warm-up.
    pub peak: f64,
    /// The rate from the end on.
    pub floor: f64,
    /// Steps of warm-up; step `warmup_steps - 1` runs at the peak.
    pub warmup_steps: usize,
    /// The step at which the floor is reached.
    pub total_steps: usize,
}

/// Linear warm-up to a peak, then a straight line down to a floor.
///
/// ```
/// use blackburn_train::schedule::WarmupLinear;
///
/// let schedule = WarmupLinear { peak: 1e-3, floor: 0.0, warmup_steps: 10, total_steps: 110 };
/// assert_eq!(schedule.at(9), 1e-3);
/// assert!((schedule.at(60) - 5e-4).abs() < 1e-12);
/// assert_eq!(schedule.at(500), 0.0);
/// ```
///
/// BERT was trained like this, down to 0: Devlin et al., arXiv:1810.04805, appendix A.2.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WarmupLinear {
    /// The rate after warm-up.
    pub peak: f64,
    /// The rate from the end on.
    pub floor: f64,
    /// Steps of warm-up; step `warmup_steps - 1` runs at the peak.
    pub warmup_steps: usize,
    /// The step at which the floor is reached.
    pub total_steps: usize,
}

impl WarmupCosine {
    /// Returns the rate of a step, counted from 0.
    pub fn at(&self, step: usize) -> f64 {
        self.span().at(step, |progress| 0.5 * (1.0 + (PI * progress).cos()))
    }

    fn span(&self) -> Span {
        let Self { peak, floor, warmup_steps, total_steps } = *self;
        Span { peak, floor, warmup_steps, total_steps }
    }
}

impl WarmupLinear {
    /// Returns the rate of a step, counted from 0.
    pub fn at(&self, step: usize) -> f64 {
        self.span().at(step, |progress| 1.0 - progress)
    }

    fn span(&self) -> Span {
        let Self { peak, floor, warmup_steps, total_steps } = *self;
        Span { peak, floor, warmup_steps, total_steps }
    }
}

/// Any function of the step.
impl<F> Schedule for F
where
    F: Fn(usize) -> f64 + Clone + Send + Sync + 'static,
{
    fn at(&self, step: usize) -> f64 {
        self(step)
    }

    fn validate(&self) -> Result<(), ScheduleError> {
        Ok(())
    }
}

impl Schedule for WarmupCosine {
    fn at(&self, step: usize) -> f64 {
        Self::at(self, step)
    }

    fn validate(&self) -> Result<(), ScheduleError> {
        self.span().validate("WarmupCosine")
    }
}

impl Schedule for WarmupLinear {
    fn at(&self, step: usize) -> f64 {
        Self::at(self, step)
    }

    fn validate(&self) -> Result<(), ScheduleError> {
        self.span().validate("WarmupLinear")
    }
}

/// The same rate in every step.
impl Schedule for f64 {
    fn at(&self, _step: usize) -> f64 {
        *self
    }

    fn validate(&self) -> Result<(), ScheduleError> {
        match self.is_finite() && *self > 0.0 {
            true => Ok(()),
            false => Err(ScheduleError {
                schedule: "constant",
                option: "learning rate",
                expected: "a positive number".into(),
                actual: self.to_string(),
            }),
        }
    }
}

/// What the schedules with a warm-up share.
struct Span {
    peak: f64,
    floor: f64,
    warmup_steps: usize,
    total_steps: usize,
}

impl Span {
    /// `share` falls from 1 to 0 while its argument, the progress of the decay, goes from 0 to 1.
    fn at(&self, step: usize, share: impl Fn(f64) -> f64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f64 / self.warmup_steps as f64;
        }
        if step >= self.total_steps {
            return self.floor;
        }
        let progress =
            (step - self.warmup_steps) as f64 / (self.total_steps - self.warmup_steps) as f64;
        self.floor + (self.peak - self.floor) * share(progress)
    }

    fn validate(&self, schedule: &'static str) -> Result<(), ScheduleError> {
        let refuse = |option, expected: String, actual: String| {
            Err(ScheduleError { schedule, option, expected, actual })
        };
        if !(self.peak.is_finite() && self.peak > 0.0) {
            return refuse("peak", "a positive number".into(), self.peak.to_string());
        }
        if !(0.0..=self.peak).contains(&self.floor) {
            let expected = format!("a number from 0 to the peak, {}", self.peak);
            return refuse("floor", expected, self.floor.to_string());
        }
        if self.total_steps == 0 {
            return refuse("total_steps", "at least 1".into(), "0".into());
        }
        if self.warmup_steps > self.total_steps {
            let expected = format!("at most the total steps, {}", self.total_steps);
            return refuse("warmup_steps", expected, self.warmup_steps.to_string());
        }
        Ok(())
    }
}

/// A [`Schedule`] that counts its steps: what Burn's `Learner` takes.
///
/// ```
/// use blackburn_train::schedule::{Schedule, WarmupLinear};
/// use burn::lr_scheduler::{LrScheduler, module_lr_scheduler::ModuleLrScheduler};
///
/// let schedule = WarmupLinear { peak: 1e-3, floor: 0.0, warmup_steps: 10, total_steps: 110 };
/// let mut scheduler = schedule.scheduler()?;
/// assert_eq!(scheduler.step(), schedule.at(0));
/// assert_eq!(scheduler.step(), schedule.at(1));
/// // `Learner::new` converts likewise.
/// let for_learner: ModuleLrScheduler = scheduler.into();
/// # let _ = for_learner;
/// # Ok::<(), blackburn_train::schedule::ScheduleError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Scheduler<S> {
    schedule: S,
    step: usize,
}

const STEP: &str = "step";

impl<S: Schedule> LrScheduler for Scheduler<S> {
    fn step(&mut self) -> f64 {
        let rate = self.schedule.at(self.step);
        self.step += 1;
        rate
    }

    fn to_record(&self) -> LrSchedulerRecord {
        LrSchedulerRecord::new().with_scalar(STEP, self.step)
    }

    /// # Panics
    ///
    /// When another kind of scheduler wrote the record: the warm-up would silently start again.
    fn load_record(&mut self, record: LrSchedulerRecord) {
        self.step = record.scalar(STEP).unwrap_or_else(|| {
            panic!(
                "Scheduler::load_record: argument `record`: expected the count `{STEP}`, which the \
                 record of another kind of scheduler does not have; got {record:?}"
            )
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCHEDULE: WarmupCosine =
        WarmupCosine { peak: 2.0, floor: 0.5, warmup_steps: 4, total_steps: 20 };
    const LINEAR: WarmupLinear =
        WarmupLinear { peak: 2.0, floor: 0.5, warmup_steps: 4, total_steps: 10 };

    #[test]
    fn warm_up_rises_in_equal_steps_from_above_zero() {
        let rates: Vec<f64> = (0..4).map(|step| SCHEDULE.at(step)).collect();
        assert_eq!(rates, [0.5, 1.0, 1.5, 2.0]);
    }

    #[test]
    fn the_rate_falls_from_peak_to_floor() {
        let rates: Vec<f64> = (4..=20).map(|step| SCHEDULE.at(step)).collect();
        assert_eq!(rates[0], 2.0);
        assert!(rates.windows(2).all(|pair| pair[1] < pair[0]));
        assert_eq!(rates[16], 0.5);
    }

    #[test]
    fn a_schedule_may_be_all_warm_up_or_none() {
        let all = WarmupCosine { warmup_steps: 20, ..SCHEDULE };
        assert_eq!((all.at(19), all.at(20)), (2.0, 0.5));
        let none = WarmupCosine { warmup_steps: 0, ..SCHEDULE };
        assert_eq!(none.at(0), 2.0);
        assert!(all.validate().is_ok() && none.validate().is_ok());
    }

    #[test]
    fn the_linear_schedule_is_two_straight_lines() {
        let rates: Vec<f64> = (0..12).map(|step| LINEAR.at(step)).collect();
        let expected = [0.5, 1.0, 1.5, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5, 0.5];
        assert_eq!(rates, expected);
    }

    #[test]
    fn a_scheduler_follows_its_schedule_and_continues_from_its_record() {
        let mut scheduler = LINEAR.scheduler().expect("the options are sound");
        let first: Vec<f64> = (0..5).map(|_| scheduler.step()).collect();
        assert_eq!(first, (0..5).map(|step| LINEAR.at(step)).collect::<Vec<_>>());
        let bytes = scheduler.to_record().into_bytes().expect("the record serializes");
        let record = LrSchedulerRecord::from_bytes(bytes).expect("the record loads");
        let mut resumed = LINEAR.scheduler().expect("the options are sound");
        resumed.load_record(record);
        assert_eq!(resumed.step(), LINEAR.at(5));
    }

    #[test]
    #[should_panic(expected = "expected the count `step`")]
    fn the_record_of_another_scheduler_is_refused() {
        let mut scheduler = LINEAR.scheduler().expect("the options are sound");
        scheduler.load_record(LrSchedulerRecord::new().with_scalar("remaining_iters", 3usize));
    }

    #[test]
    fn absurd_options_are_refused_by_name() {
        let cases = [
            (WarmupLinear { peak: 0.0, ..LINEAR }, "option `peak`: expected a positive number"),
            (WarmupLinear { peak: f64::NAN, ..LINEAR }, "option `peak`"),
            (WarmupLinear { floor: 3.0, ..LINEAR }, "option `floor`: expected a number from 0 to"),
            (WarmupLinear { floor: f64::NAN, ..LINEAR }, "option `floor`"),
            (WarmupLinear { total_steps: 0, ..LINEAR }, "option `total_steps`"),
            (WarmupLinear { warmup_steps: 11, ..LINEAR }, "at most the total steps, 10, got 11"),
        ];
        for (schedule, expected) in cases {
            let message = schedule.scheduler().expect_err(expected).to_string();
            assert!(message.starts_with("WarmupLinear: "), "{message}");
            assert!(message.contains(expected), "{message}");
        }
        let cosine = WarmupCosine { total_steps: 0, ..SCHEDULE };
        let message = cosine.validate().expect_err("zero steps").to_string();
        assert!(message.starts_with("WarmupCosine: option `total_steps`"), "{message}");
    }
}
