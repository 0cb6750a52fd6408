//! Times a case, in a time that is bounded.

use crate::cases::{Inputs, Prepare};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Instant,
};

/// Milliseconds of one call.
#[derive(Clone, Copy)]
pub(crate) struct Times {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl Times {
    fn once(time: f64) -> Self {
        Self { median: time, least: time, most: time }
    }
}

/// A call that takes longer is timed once.
const SLOW_MS: f64 = 200.0;
/// Calls between two waits, long enough that a wait does not count.
const BATCH_MS: f64 = 6.0;
/// All batches of a case together.
const CASE_MS: f64 = 60.0;
const MOST_CALLS: f64 = 150.0;
/// What a first call takes if it is not only compiling.
const ENDLESS_MS: f64 = 4000.0;

/// Draws the inputs of a case and times it. What panics is told as an error.
pub(crate) fn measure(prepare: Prepare, inputs: &Inputs) -> Result<Times, String> {
    let outcome = catch_unwind(AssertUnwindSafe(|| time(prepare, inputs)));
    let outcome = outcome.unwrap_or_else(|panic| {
        let told = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied());
        Err(told.unwrap_or("it panicked").to_owned())
    });
    outcome.map_err(|reason| format!("failed: {reason}"))
}

fn time(prepare: Prepare, inputs: &Inputs) -> Result<Times, String> {
    let mut call = prepare(inputs);
    let wait = || inputs.device.sync().map_err(|error| error.to_string());
    let mut batch = |calls: usize| -> Result<f64, String> {
        wait()?;
        let start = Instant::now();
        for _ in 0..calls {
            call()?;
        }
        wait()?;
        Ok(start.elapsed().as_secs_f64() * 1e3 / calls as f64)
    };
    // Compiles.
    let first = batch(1)?;
    if first > ENDLESS_MS && !inputs.tunes {
        return Ok(Times::once(first));
    }
    let mut once = batch(1)?;
    if once > SLOW_MS {
        return Ok(Times::once(once));
    }
    if once < BATCH_MS {
        once = batch(5)?;
    }
    let calls = (BATCH_MS / once).ceil().clamp(1.0, MOST_CALLS);
    let rounds = (CASE_MS / (calls * once)).clamp(2.0, 5.0) as usize;
    let mut times = (0..rounds).map(|_| batch(calls as usize)).collect::<Result<Vec<_>, _>>()?;
    times.sort_by(f64::total_cmp);
    Ok(Times { median: times[(rounds - 1) / 2], least: times[0], most: times[rounds - 1] })
}
