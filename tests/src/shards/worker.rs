//! A process that runs tests, and the thread that talks to it.

use super::Limits;
use blackburn_doctor::process::{Heard, Process, answer};
use libtest_mimic::{Arguments, ColorSetting, Trial};
use std::{
    io::{self, BufRead},
    process::Command,
    time::{Duration, Instant},
};

/// How a test ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    Failed,
    Ignored,
    /// The process ended, with this status.
    Crashed(String),
    /// The test did not end within this time.
    TooLong(Duration),
    /// The whole run's time was up, before it began or before it ended.
    NotRun,
}

impl Outcome {
    /// Whether a run with such a test has failed.
    pub(crate) fn is_unwell(&self) -> bool {
        !matches!(self, Self::Passed | Self::Ignored)
    }
}

/// A test with its outcome.
pub(crate) struct Finished {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
    pub(crate) duration: Duration,
    /// What the process printed meanwhile.
    pub(crate) output: String,
}

impl Finished {
    pub(crate) fn not_run(name: String) -> Self {
        let (outcome, duration) = (Outcome::NotRun, Duration::ZERO);
        Self { name, outcome, duration, output: String::new() }
    }
}

/// Runs the tests among `trials` that standard input names, one a line, until it ends.
pub fn work(trials: Vec<Trial>) {
    let arguments = Arguments {
        test_threads: Some(1),
        color: Some(ColorSetting::Never),
        ..Arguments::default()
    };
    let mut trials: Vec<Option<Trial>> = trials.into_iter().map(Some).collect();
    for name in io::stdin().lock().lines().map_while(Result::ok) {
        let named = |trial: &&mut Option<Trial>| trial.as_ref().is_some_and(|t| t.name() == name);
        let trial = trials.iter_mut().find(named).and_then(Option::take);
        let conclusion = libtest_mimic::run(&arguments, trial.into_iter().collect());
        let outcome = match (conclusion.num_passed, conclusion.num_ignored) {
            (1, 0) => "passed",
            (0, 1) => "ignored",
            _ => "failed",
        };
        answer(outcome);
    }
}

/// A process at work. Dropped, it is ended.
pub(crate) struct Worker(Process);

impl Worker {
    /// Runs test `name` in `worker`, which is started when it is not there and gone when it died.
    pub(crate) fn run(
        worker: &mut Option<Self>,
        start: impl Fn() -> Command,
        name: String,
        limits: &Limits,
    ) -> Finished {
        let began = Instant::now();
        let mut output = String::new();
        let running = match worker.take() {
            Some(running) => Ok(running),
            None => Self::start(start()),
        };
        let outcome = match running {
            Err(error) => Outcome::Crashed(format!("it did not start: {error}")),
            Ok(mut running) => {
                let outcome = running.test(&name, &mut output, limits);
                if matches!(outcome, Outcome::Passed | Outcome::Failed | Outcome::Ignored) {
                    *worker = Some(running);
                }
                outcome
            }
        };
        Finished { name, outcome, duration: began.elapsed(), output }
    }

    fn start(command: Command) -> io::Result<Self> {
        Process::start(command).map(Self)
    }

    fn test(&mut self, name: &str, output: &mut String, limits: &Limits) -> Outcome {
        let began = Instant::now();
        if self.0.ask(name).is_err() {
            return Outcome::Crashed(self.0.status());
        }
        let end = limits.end.min(began + limits.test);
        loop {
            match self.0.hear(end) {
                Heard::Answer(outcome) => {
                    return match outcome.as_str() {
                        "passed" => Outcome::Passed,
                        "ignored" => Outcome::Ignored,
                        _ => Outcome::Failed,
                    };
                }
                Heard::Printed(line) => output.push_str(&line),
                // Cut off by the end of the whole run, it has not shown what it is.
                Heard::Silence if end == limits.end => return Outcome::NotRun,
                Heard::Silence => return Outcome::TooLong(began.elapsed()),
                Heard::End(status) => return Outcome::Crashed(status),
            }
        }
    }
}
