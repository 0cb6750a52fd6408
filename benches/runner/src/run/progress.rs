//! What is running, how long, and how much there is: a bar on a terminal, and a line for each process everywhere.

use indicatif::{ProgressBar, ProgressStyle};
use std::time::Duration;

pub(super) struct Progress(ProgressBar);

impl Progress {
    pub(super) fn new(parts: usize) -> Self {
        let bar = ProgressBar::new(parts as u64);
        let template = "{bar:30} {pos}/{len} parts, {elapsed} in all; {msg}";
        // A template that is a constant is right, or every run shows that it is not.
        bar.set_style(
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        bar.enable_steady_tick(Duration::from_millis(250));
        Self(bar)
    }

    /// A part begins; the one before is done.
    pub(super) fn begin(&mut self, part: &str) {
        if !self.0.message().is_empty() {
            self.0.inc(1);
        }
        self.tell(part);
    }

    pub(super) fn tell(&mut self, what: &str) {
        self.0.set_message(what.to_owned());
    }

    /// A line that stays.
    pub(super) fn print(&self, line: &str) {
        self.0.suspend(|| eprintln!("{line}"));
    }

    pub(super) fn finish(&self) {
        self.0.finish_and_clear();
    }
}
