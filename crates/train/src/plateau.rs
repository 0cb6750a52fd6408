//! A learning rate that falls when a metric no longer improves.

use crate::schedule::ScheduleError;
use burn::lr_scheduler::{LrScheduler, LrSchedulerRecord};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Which way a metric improves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Lower is better: losses.
    #[default]
    Min,
    /// Higher is better: accuracies.
    Max,
}

/// How much better than the best a metric must be to count as improved.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Threshold {
    /// By this share of the best. Use it for metrics that are never negative: a share of a negative best points the
    /// wrong way, so a slightly worse value would count as improved.
    Relative(f64),
    /// By this amount.
    Absolute(f64),
}

/// Options of [`ReduceOnPlateau`]. The defaults are `PyTorch`'s.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlateauConfig {
    /// Which way the metric improves.
    pub mode: Mode,
    /// The factor of a reduction; above 0, below 1.
    pub factor: f64,
    /// Observations without improvement that do nothing yet; the next one reduces the rate.
    pub patience: u32,
    /// What counts as an improvement.
    pub threshold: Threshold,
    /// Observations after a reduction during which nothing counts against the metric.
    pub cooldown: u32,
    /// The smallest rate.
    pub floor: f64,
    /// The largest reduction that is too small to be made.
    pub epsilon: f64,
}

impl Default for PlateauConfig {
    fn default() -> Self {
        Self {
            mode: Mode::Min,
            factor: 0.1,
            patience: 10,
            threshold: Threshold::Relative(1e-4),
            cooldown: 0,
            floor: 0.0,
            epsilon: 1e-8,
        }
    }
}

impl PlateauConfig {
    /// Creates a schedule that starts at `rate`.
    ///
    /// # Errors
    ///
    /// If `rate` is not positive, or an option contradicts itself.
    pub fn init(&self, rate: f64) -> Result<ReduceOnPlateau, ScheduleError> {
        let refuse = |option, expected: &str, actual: f64| {
            Err(ScheduleError {
                schedule: SCHEDULE,
                option,
                expected: expected.into(),
                actual: actual.to_string(),
            })
        };
        let (Threshold::Relative(threshold) | Threshold::Absolute(threshold)) = self.threshold;
        if !(self.factor > 0.0 && self.factor < 1.0) {
            return refuse("factor", "a number above 0 and below 1", self.factor);
        }
        if !(threshold.is_finite() && threshold >= 0.0) {
            return refuse("threshold", "a number of at least 0", threshold);
        }
        if !(self.floor.is_finite() && self.floor >= 0.0) {
            return refuse("floor", "a number of at least 0", self.floor);
        }
        if !(self.epsilon.is_finite() && self.epsilon >= 0.0) {
            return refuse("epsilon", "a number of at least 0", self.epsilon);
        }
        if !(rate.is_finite() && rate > 0.0 && rate >= self.floor) {
            let expected = format!("a positive number of at least the floor, {}", self.floor);
            return refuse("rate", &expected, rate);
        }
        let state = PlateauState { rate, best: None, bad: 0, cooldown: 0 };
        Ok(ReduceOnPlateau { config: *self, state })
    }
}

const SCHEDULE: &str = "ReduceOnPlateau";

/// The state of a [`ReduceOnPlateau`]. Save it with the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlateauState {
    /// The rate at present.
    pub rate: f64,
    /// The best metric, `None` before the first that counts.
    pub best: Option<f64>,
    /// Observations without improvement, in a row.
    pub bad: u32,
    /// Observations that are left of the cooldown.
    pub cooldown: u32,
}

/// The outcome of an observation.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct Observed {
    /// The rate from now on.
    pub rate: f64,
    /// The metric was better than the best before, by the threshold at least.
    pub improved: bool,
    /// The rate was reduced.
    pub reduced: bool,
    /// The metric was NaN, which counts as no improvement.
    pub nan: bool,
}

/// Multiplies the learning rate by a factor if a metric has not improved for some observations, such as epochs.
///
/// It does what `PyTorch`'s `torch.optim.lr_scheduler.ReduceLROnPlateau` does.
///
/// ```
/// use blackburn_train::plateau::PlateauConfig;
///
/// let mut schedule = PlateauConfig { factor: 0.5, patience: 1, ..Default::default() }.init(0.1)?;
/// assert!(schedule.observe(2.0).improved);
/// assert!(!schedule.observe(2.0).reduced);
/// assert!(schedule.observe(2.5).reduced);
/// assert_eq!(schedule.rate(), 0.05);
/// # Ok::<(), blackburn_train::schedule::ScheduleError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ReduceOnPlateau {
    config: PlateauConfig,
    state: PlateauState,
}

impl ReduceOnPlateau {
    /// The rate at present.
    pub fn rate(&self) -> f64 {
        self.state.rate
    }

    /// Observes the metric. NaN counts as no improvement; the answer says so, and a warning is logged.
    pub fn observe(&mut self, metric: f64) -> Observed {
        let PlateauConfig { factor, patience, cooldown, floor, epsilon, .. } = self.config;
        let improved = self.improves(metric);
        let state = &mut self.state;
        if metric.is_nan() {
            tracing::warn!(rate = state.rate, "the metric is NaN: taken as no improvement");
        }
        if improved {
            state.best = Some(metric);
            state.bad = 0;
        } else {
            state.bad = state.bad.saturating_add(1);
        }
        if state.cooldown > 0 {
            state.cooldown -= 1;
            state.bad = 0;
        }
        let mut reduced = false;
        if state.bad > patience {
            let next = (state.rate * factor).max(floor);
            if state.rate - next > epsilon {
                tracing::info!(from = state.rate, to = next, best = ?state.best, "rate reduced");
                state.rate = next;
                reduced = true;
            }
            // A rate that cannot fall any more starts the wait afresh all the same.
            state.cooldown = cooldown;
            state.bad = 0;
        }
        Observed { rate: state.rate, improved, reduced, nan: metric.is_nan() }
    }

    fn improves(&self, metric: f64) -> bool {
        let worst = match self.config.mode {
            Mode::Min => f64::INFINITY,
            Mode::Max => f64::NEG_INFINITY,
        };
        let best = self.state.best.unwrap_or(worst);
        match (self.config.mode, self.config.threshold) {
            (Mode::Min, Threshold::Relative(share)) => metric < best * (1.0 - share),
            (Mode::Min, Threshold::Absolute(amount)) => metric < best - amount,
            (Mode::Max, Threshold::Relative(share)) => metric > best * (1.0 + share),
            (Mode::Max, Threshold::Absolute(amount)) => metric > best + amount,
        }
    }

    /// Returns the state to save.
    pub fn state(&self) -> PlateauState {
        self.state
    }

    /// Continues from a saved state.
    ///
    /// # Errors
    ///
    /// If this schedule cannot have the state's rate, or its best is NaN. Nothing is changed then.
    pub fn restore(&mut self, state: PlateauState) -> Result<(), ScheduleError> {
        let refuse = |option, expected: String, actual: f64| {
            Err(ScheduleError { schedule: SCHEDULE, option, expected, actual: actual.to_string() })
        };
        let floor = self.config.floor;
        if !(state.rate.is_finite() && state.rate > 0.0 && state.rate >= floor) {
            let expected = format!("a positive number of at least the floor, {floor}");
            return refuse("state.rate", expected, state.rate);
        }
        if state.best.is_some_and(f64::is_nan) {
            return refuse("state.best", "a number".into(), f64::NAN);
        }
        self.state = state;
        Ok(())
    }

    /// Turns the schedule into one for Burn's `Learner`. The learner asks for rates and tells no metric, so observe
    /// through a clone of the [`PlateauScheduler`].
    pub fn scheduler(self) -> PlateauScheduler {
        PlateauScheduler { shared: Arc::new(Mutex::new(self)) }
    }
}

/// A [`ReduceOnPlateau`] that Burn's `Learner` and your code share: the learner takes the rate at every step, and
/// you observe the metric. Clones share one state.
///
/// ```
/// use blackburn_train::plateau::PlateauConfig;
/// use burn::lr_scheduler::LrScheduler;
///
/// let config = PlateauConfig { factor: 0.5, patience: 0, ..Default::default() };
/// let plateau = config.init(0.1)?.scheduler();
/// let mut in_learner = plateau.clone();
/// assert_eq!(in_learner.step(), 0.1);
/// for validation_loss in [2.0, 2.1] {
///     let _ = plateau.observe(validation_loss);
/// }
/// assert_eq!(in_learner.step(), 0.05);
/// # Ok::<(), blackburn_train::schedule::ScheduleError>(())
/// ```
#[derive(Clone, Debug)]
pub struct PlateauScheduler {
    shared: Arc<Mutex<ReduceOnPlateau>>,
}

impl PlateauScheduler {
    /// See [`ReduceOnPlateau::observe`].
    pub fn observe(&self, metric: f64) -> Observed {
        self.lock().observe(metric)
    }

    /// A panic elsewhere leaves a state that is whole: it is written last, and field by field.
    fn lock(&self) -> MutexGuard<'_, ReduceOnPlateau> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LrScheduler for PlateauScheduler {
    /// The rate at present: only [`observe`](PlateauScheduler::observe) changes it.
    fn step(&mut self) -> f64 {
        self.lock().rate()
    }

    fn to_record(&self) -> LrSchedulerRecord {
        let PlateauState { rate, best, bad, cooldown } = self.lock().state();
        let record = LrSchedulerRecord::new()
            .with_scalar("rate", rate)
            .with_scalar("bad", bad)
            .with_scalar("cooldown", cooldown);
        match best {
            Some(best) => record.with_scalar("best", best),
            None => record,
        }
    }

    /// # Panics
    ///
    /// When another kind of scheduler wrote the record, or [`ReduceOnPlateau::restore`] refuses it.
    fn load_record(&mut self, record: LrSchedulerRecord) {
        let state = (|| {
            Some(PlateauState {
                rate: record.scalar("rate")?,
                best: record.scalar("best"),
                bad: record.scalar("bad")?,
                cooldown: record.scalar("cooldown")?,
            })
        })();
        let Some(state) = state else {
            panic!(
                "PlateauScheduler::load_record: argument `record`: expected `rate`, `bad` and \
                 `cooldown`, which the record of another kind of scheduler does not have; got \
                 {record:?}"
            );
        };
        if let Err(error) = self.lock().restore(state) {
            panic!("PlateauScheduler::load_record: argument `record`: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(config: PlateauConfig, metrics: &[f64]) -> Vec<f64> {
        let mut schedule = config.init(1.0).expect("the options are sound");
        metrics.iter().map(|metric| schedule.observe(*metric).rate).collect()
    }

    /// Halves, so that expected rates are exact.
    const CONFIG: PlateauConfig = PlateauConfig {
        mode: Mode::Min,
        factor: 0.5,
        patience: 2,
        threshold: Threshold::Absolute(0.0),
        cooldown: 0,
        floor: 0.0,
        epsilon: 1e-8,
    };

    #[test]
    fn the_observation_after_the_patience_reduces_the_rate() {
        let found = rates(CONFIG, &[5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]);
        assert_eq!(found, [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25]);
    }

    #[test]
    fn an_improvement_starts_the_wait_afresh() {
        let found = rates(CONFIG, &[5.0, 5.0, 5.0, 4.0, 4.0, 4.0, 4.0]);
        assert_eq!(found, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5]);
    }

    #[test]
    fn during_a_cooldown_nothing_counts_against_the_metric() {
        let config = PlateauConfig { patience: 0, cooldown: 2, ..CONFIG };
        let found = rates(config, &[5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]);
        assert_eq!(found, [1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]);
    }

    #[test]
    fn the_rate_stops_at_the_floor_and_before_steps_too_small_to_matter() {
        let metrics = [5.0; 5];
        let config = PlateauConfig { patience: 0, floor: 0.4, ..CONFIG };
        assert_eq!(rates(config, &metrics), [1.0, 0.5, 0.4, 0.4, 0.4]);
        let config = PlateauConfig { patience: 0, epsilon: 0.3, ..CONFIG };
        assert_eq!(rates(config, &metrics), [1.0, 0.5, 0.5, 0.5, 0.5]);
    }

    #[test]
    fn thresholds_are_strict_and_measured_from_the_best() {
        let improves = |mode, threshold, metric| {
            let config = PlateauConfig { mode, threshold, ..CONFIG };
            let mut schedule = config.init(1.0).expect("the options are sound");
            assert!(schedule.observe(8.0).improved, "the first metric improves on none");
            schedule.observe(metric).improved
        };
        let quarter = Threshold::Relative(0.25);
        let one = Threshold::Absolute(1.0);
        for (mode, threshold, enough, too_little) in [
            (Mode::Min, quarter, 5.99, 6.0),
            (Mode::Min, one, 6.99, 7.0),
            (Mode::Max, quarter, 10.01, 10.0),
            (Mode::Max, one, 9.01, 9.0),
        ] {
            assert!(improves(mode, threshold, enough), "{mode:?} {threshold:?} {enough}");
            assert!(!improves(mode, threshold, too_little), "{mode:?} {threshold:?} {too_little}");
        }
    }

    #[test]
    fn nan_is_no_improvement_and_is_told() {
        let mut schedule = PlateauConfig { patience: 1, ..CONFIG }.init(1.0).expect("sound");
        let first = schedule.observe(f64::NAN);
        assert_eq!(first, Observed { rate: 1.0, improved: false, reduced: false, nan: true });
        assert!(schedule.observe(3.0).improved, "NaN never becomes the best");
        let _ = schedule.observe(f64::NAN);
        let third = schedule.observe(f64::NAN);
        assert_eq!(third, Observed { rate: 0.5, improved: false, reduced: true, nan: true });
        assert_eq!(schedule.state().best, Some(3.0));
    }

    #[test]
    fn a_restored_schedule_continues_where_the_saved_one_stopped() {
        let metrics = [5.0, 4.0, 4.5, 4.5, 4.5, 4.5, 3.0, 3.5];
        let config = PlateauConfig { patience: 1, cooldown: 1, ..CONFIG };
        for stop in 0..metrics.len() {
            let mut straight = config.init(1.0).expect("the options are sound");
            metrics[..stop].iter().for_each(|metric| _ = straight.observe(*metric));
            let json = serde_json::to_string(&straight.state()).expect("the state serializes");
            let mut restored = config.init(1.0).expect("the options are sound");
            restored.restore(serde_json::from_str(&json).expect("it loads")).expect("it is sound");
            let record = straight.clone().scheduler().to_record();
            let mut in_learner = config.init(1.0).expect("the options are sound").scheduler();
            in_learner.load_record(record);
            for metric in &metrics[stop..] {
                let expected = straight.observe(*metric);
                assert_eq!(restored.observe(*metric), expected);
                assert_eq!(in_learner.observe(*metric), expected);
                assert_eq!(in_learner.step(), expected.rate);
            }
        }
    }

    #[test]
    fn absurd_options_and_states_are_refused_by_name() {
        for (config, rate, expected) in [
            (PlateauConfig { factor: 1.0, ..CONFIG }, 1.0, "option `factor`"),
            (PlateauConfig { factor: 0.0, ..CONFIG }, 1.0, "option `factor`"),
            (PlateauConfig { factor: f64::NAN, ..CONFIG }, 1.0, "option `factor`"),
            (PlateauConfig { threshold: Threshold::Absolute(-1.0), ..CONFIG }, 1.0, "`threshold`"),
            (PlateauConfig { floor: -1.0, ..CONFIG }, 1.0, "option `floor`"),
            (PlateauConfig { epsilon: f64::NAN, ..CONFIG }, 1.0, "option `epsilon`"),
            (PlateauConfig { floor: 2.0, ..CONFIG }, 1.0, "at least the floor, 2, got 1"),
            (CONFIG, 0.0, "option `rate`"),
        ] {
            let message = config.init(rate).expect_err(expected).to_string();
            assert!(message.contains(expected), "{message}");
        }
        let mut schedule = CONFIG.init(1.0).expect("the options are sound");
        let before = schedule.clone();
        for state in [
            PlateauState { rate: f64::NAN, ..before.state() },
            PlateauState { best: Some(f64::NAN), ..before.state() },
        ] {
            assert!(schedule.restore(state).is_err());
        }
        assert_eq!(schedule, before);
    }

    #[test]
    #[should_panic(expected = "expected `rate`, `bad` and `cooldown`")]
    fn the_record_of_another_scheduler_is_refused() {
        let mut scheduler = CONFIG.init(1.0).expect("the options are sound").scheduler();
        scheduler.load_record(LrSchedulerRecord::new().with_scalar("step", 3usize));
    }
}
