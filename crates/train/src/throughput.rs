//! Items per second, and the share of the device's arithmetic that the model uses.
//!
//! ```
//! use blackburn_train::throughput::{Arithmetic, ModelFlops, Throughput, peak_flops};
//!
//! let mut tokens = Throughput::new("tokens");
//! tokens.record(8 * 1024); // after each step
//!
//! // 163 million parameters, 12 layers, 1024 tokens, width 768: see `ModelFlops`.
//! let flops_per_token = 6.0 * 163e6 + 12.0 * 12.0 * 1024.0 * 768.0;
//! let peak = peak_flops("NVIDIA H200", Arithmetic::Bf16).expect("a listed device");
//! let mut utilization = ModelFlops::new("tokens", flops_per_token, peak)?;
//! utilization.record(8 * 1024);
//! # Ok::<(), blackburn_train::throughput::FlopsError>(())
//! ```

mod peak;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

pub use peak::{Arithmetic, peak_bandwidth, peak_flops};

/// Steps that a momentary rate looks back on.
const RECENT: usize = 20;

/// Counts items (tokens, images) per second.
///
/// A rate needs two points in time. The first record only starts the clock, and its items are not
/// counted, since nothing says when they began.
#[derive(Clone, Debug)]
pub struct Throughput {
    unit: String,
    /// Moments, and the items counted until then.
    marks: VecDeque<(Instant, u64)>,
    start: Option<Instant>,
}

impl Throughput {
    /// Counts `unit`: a plural, such as `tokens` or `images`.
    pub fn new(unit: impl Into<String>) -> Self {
        Self { unit: unit.into(), marks: VecDeque::with_capacity(RECENT + 1), start: None }
    }

    /// What is counted.
    pub fn unit(&self) -> &str {
        &self.unit
    }

    /// Tells of `items` finished now, and gives the rate of the last 20 records. `None` at the
    /// first record.
    pub fn record(&mut self, items: usize) -> Option<f64> {
        self.record_at(items, Instant::now())
    }

    /// [`record`](Self::record), with the time given. Times that do not advance give no rate.
    pub fn record_at(&mut self, items: usize, now: Instant) -> Option<f64> {
        let counted = match self.marks.back() {
            Some((_, before)) => before + items as u64,
            None => 0,
        };
        self.start.get_or_insert(now);
        if self.marks.len() > RECENT {
            self.marks.pop_front();
        }
        self.marks.push_back((now, counted));
        self.rate()
    }

    /// Items per second over the last 20 records.
    pub fn rate(&self) -> Option<f64> {
        let ((from, before), (to, after)) = (self.marks.front()?, self.marks.back()?);
        per_second(after - before, to.saturating_duration_since(*from))
    }

    /// Items per second since the first record.
    pub fn average(&self) -> Option<f64> {
        let (to, counted) = self.marks.back()?;
        per_second(*counted, to.saturating_duration_since(self.start?))
    }

    /// Starts afresh: call it after a pause that is not to be counted, such as a validation.
    pub fn reset(&mut self) {
        self.marks.clear();
        self.start = None;
    }
}

fn per_second(items: u64, time: Duration) -> Option<f64> {
    (!time.is_zero()).then(|| items as f64 / time.as_secs_f64())
}

/// Why a utilization cannot be computed.
#[derive(Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FlopsError {
    /// A count of operations that is none.
    #[error("ModelFlops::new: argument `{argument}`: expected a positive number, got {actual}")]
    NotPositive {
        /// Name of the argument.
        argument: &'static str,
        /// What was given.
        actual: f64,
    },
}

/// Model FLOPs utilization: the arithmetic that the model needs per second, as a share of what the
/// device could do.
///
/// Recomputed activations do not count: they are the implementation's, not the model's. For a
/// decoder of N parameters, L layers, width D and sequences of T tokens, training needs
/// `6 N + 12 L D T` operations per token.
///
/// Source: Chowdhery et al., arXiv:2204.02311, appendix B.
#[derive(Clone, Debug)]
pub struct ModelFlops {
    throughput: Throughput,
    flops_per_item: f64,
    peak_flops: f64,
}

impl ModelFlops {
    /// `flops_per_item`: floating-point operations of one item's forward and backward pass;
    /// `peak_flops`: operations per second that the device can do, of all devices together where
    /// several share the work. [`peak_flops`] knows some.
    ///
    /// # Errors
    ///
    /// [`FlopsError::NotPositive`] unless both are positive and finite.
    pub fn new(
        unit: impl Into<String>,
        flops_per_item: f64,
        peak_flops: f64,
    ) -> Result<Self, FlopsError> {
        for (argument, actual) in [("flops_per_item", flops_per_item), ("peak_flops", peak_flops)] {
            if !(actual.is_finite() && actual > 0.0) {
                return Err(FlopsError::NotPositive { argument, actual });
            }
        }
        Ok(Self { throughput: Throughput::new(unit), flops_per_item, peak_flops })
    }

    /// Tells of `items` finished now, and gives the utilization of the last 20 records in percent.
    pub fn record(&mut self, items: usize) -> Option<f64> {
        self.record_at(items, Instant::now())
    }

    /// [`record`](Self::record), with the time given.
    pub fn record_at(&mut self, items: usize, now: Instant) -> Option<f64> {
        self.throughput.record_at(items, now).map(|rate| self.percent(rate))
    }

    /// Utilization since the first record, in percent.
    pub fn average(&self) -> Option<f64> {
        self.throughput.average().map(|rate| self.percent(rate))
    }

    /// Starts afresh, as [`Throughput::reset`] does.
    pub fn reset(&mut self) {
        self.throughput.reset();
    }

    fn percent(&self, rate: f64) -> f64 {
        100.0 * rate * self.flops_per_item / self.peak_flops
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(throughput: &mut Throughput, steps: &[(usize, u64)]) -> Option<f64> {
        let start = Instant::now();
        let at = |millis: &u64| start + Duration::from_millis(*millis);
        steps.iter().map(|(items, millis)| throughput.record_at(*items, at(millis))).last()?
    }

    #[test]
    fn the_first_record_starts_the_clock_and_is_not_counted() {
        let mut tokens = Throughput::new("tokens");
        assert_eq!(tokens.average(), None);
        assert_eq!(record(&mut tokens, &[(1000, 0)]), None);
        tokens.reset();
        assert_eq!(record(&mut tokens, &[(1000, 0), (30, 500), (70, 1000)]), Some(100.0));
        assert_eq!(tokens.average(), Some(100.0));
    }

    #[test]
    fn the_rate_forgets_what_the_average_keeps() {
        let mut tokens = Throughput::new("tokens");
        // A slow first step (kernels are compiled), and 20 steps of 100 ms.
        let mut steps = vec![(10, 0), (10, 10_000)];
        steps.extend((1..=20).map(|step| (10, 10_000 + 100 * step)));
        assert_eq!(record(&mut tokens, &steps), Some(100.0));
        assert_eq!(tokens.average(), Some(210.0 / 12.0));
    }

    #[test]
    fn time_that_stands_still_gives_no_rate() {
        assert_eq!(record(&mut Throughput::new("tokens"), &[(10, 0), (10, 0)]), None);
    }

    #[test]
    fn a_reset_leaves_a_pause_out() {
        let mut tokens = Throughput::new("tokens");
        record(&mut tokens, &[(10, 0), (10, 100)]);
        tokens.reset();
        assert_eq!((tokens.rate(), tokens.average()), (None, None));
    }

    #[test]
    fn utilization_is_the_share_of_the_peak_in_percent() {
        let mut flops = ModelFlops::new("tokens", 1e9, 4e12).expect("valid arguments");
        let start = Instant::now();
        assert_eq!(flops.record_at(1000, start), None);
        // 1000 tokens/s at 1 GFLOP each are 1 of 4 TFLOP/s.
        assert_eq!(flops.record_at(1000, start + Duration::from_secs(1)), Some(25.0));
        assert_eq!(flops.average(), Some(25.0));
        flops.reset();
        assert_eq!(flops.average(), None);
    }

    #[test]
    fn operations_that_are_none_are_refused_by_name() {
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let error = ModelFlops::new("tokens", bad, 1.0).expect_err("refused").to_string();
            assert!(error.contains("`flops_per_item`"), "{error}");
            let error = ModelFlops::new("tokens", 1.0, bad).expect_err("refused").to_string();
            assert!(error.contains("`peak_flops`"), "{error}");
        }
    }
}
