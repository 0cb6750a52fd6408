//! Learning rate by step.

use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// Linear warm-up to a peak, then half a cosine down to a floor.
///
/// A function of the step alone, so that a resumed run needs no state.
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
    /// The rate at the end and ever after.
    pub floor: f64,
    /// Steps of warm-up; step `warmup_steps - 1` runs at the peak.
    pub warmup_steps: usize,
    /// The step at which the floor is reached.
    pub total_steps: usize,
}

impl WarmupCosine {
    /// The rate of a step, counted from 0.
    pub fn at(&self, step: usize) -> f64 {
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f64 / self.warmup_steps as f64;
        }
        if step >= self.total_steps {
            return self.floor;
        }
        let progress =
            (step - self.warmup_steps) as f64 / (self.total_steps - self.warmup_steps) as f64;
        self.floor + 0.5 * (self.peak - self.floor) * (1.0 + (PI * progress).cos())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCHEDULE: WarmupCosine =
        WarmupCosine { peak: 2.0, floor: 0.5, warmup_steps: 4, total_steps: 20 };

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
    }
}
