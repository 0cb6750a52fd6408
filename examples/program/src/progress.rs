//! What a training run shows while it works.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// A bar on a terminal, lines elsewhere.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    total: usize,
    unit: &'static str,
}

impl Progress {
    /// Starts at step `done` of `total`. Speed is counted in `unit`s.
    pub fn new(done: usize, total: usize, unit: &'static str) -> Self {
        const LOOK: &str =
            "{bar:28.cyan/blue} {pos}/{len} {msg} [{elapsed_precise}, ETA {eta_precise}]";
        let bar = std::io::stderr().is_terminal().then(|| {
            let target = ProgressDrawTarget::stderr_with_hz(5);
            let style = ProgressStyle::with_template(LOOK);
            let bar = ProgressBar::with_draw_target(Some(total as u64), target)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
                .with_position(done as u64);
            // The time left is that of the steps still to do, not of those done before a resume.
            bar.reset_eta();
            bar
        });
        Self { bar, total, unit }
    }

    /// Step `done` is done.
    pub fn advance(&self, done: usize) {
        if let Some(bar) = &self.bar {
            bar.set_position(done as u64);
        }
    }

    /// The loss and the speed, as known by now.
    pub fn report(&self, done: usize, loss: f32, units_per_second: f64, seconds_left: f64) {
        let known = format!("loss {loss:.4}, {units_per_second:.0} {}/s", self.unit);
        match &self.bar {
            Some(bar) => bar.set_message(known),
            None => eprintln!("step {done}/{}: {known}, {seconds_left:.0} s left", self.total),
        }
    }

    /// Something to keep in sight.
    pub fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => eprintln!("{text}"),
        }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
