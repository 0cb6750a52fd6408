//! Functions of the step as learning-rate schedulers.

use burn::{
    lr_scheduler::{LrScheduler, LrSchedulerRecord},
    optim::LearningRate,
};

/// A learning-rate scheduler of burn-train's learner from a function of the step, which counts
/// from zero.
///
/// ```
/// use blackburn_train::{learner::StepSchedule, schedule::WarmupCosine};
/// use burn::lr_scheduler::LrScheduler;
///
/// let rates = WarmupCosine { peak: 1.0, floor: 0.1, warmup_steps: 2, total_steps: 10 };
/// let mut schedule = StepSchedule::new(move |step| rates.at(step));
/// assert_eq!(schedule.step(), 0.5);
/// assert_eq!(schedule.step(), 1.0);
/// ```
#[derive(Clone, Debug)]
pub struct StepSchedule<F> {
    rate: F,
    step: usize,
}

impl<F: Fn(usize) -> LearningRate> StepSchedule<F> {
    /// The rate of optimizer step `n` is `rate(n)`.
    pub fn new(rate: F) -> Self {
        Self { rate, step: 0 }
    }
}

impl<F> LrScheduler for StepSchedule<F>
where
    F: Fn(usize) -> LearningRate + Clone + Send + Sync + 'static,
{
    fn step(&mut self) -> LearningRate {
        let rate = (self.rate)(self.step);
        self.step += 1;
        rate
    }

    fn to_record(&self) -> LrSchedulerRecord {
        LrSchedulerRecord::new().with_scalar("step", self.step as u64)
    }

    /// A record of another scheduler leaves the step as it is: Burn's interface has no error here.
    fn load_record(&mut self, record: LrSchedulerRecord) {
        if let Some(step) = record.scalar::<u64>("step") {
            self.step = step as usize;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loaded_schedule_goes_on_where_it_was_saved() {
        let schedule = || StepSchedule::new(|step| step as f64);
        let mut first = schedule();
        for _ in 0..5 {
            first.step();
        }
        let mut second = schedule();
        second.load_record(first.to_record());
        assert_eq!(second.step(), 5.0);
        second.load_record(LrSchedulerRecord::new());
        assert_eq!(second.step(), 6.0);
    }
}
