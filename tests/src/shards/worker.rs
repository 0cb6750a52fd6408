//! A process that runs tests, and the thread that talks to it.

use super::Limits;
use libtest_mimic::{Arguments, ColorSetting, Trial};
use std::{
    io::{self, BufRead, BufReader, PipeReader, Write},
    os::unix::process::CommandExt,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

/// Begins the line that tells a test's outcome. No test prints it.
const MARK: char = '\x1e';

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
        println!("\n{MARK}{outcome}");
        let _ = io::stdout().flush();
    }
}

/// A process at work. Dropped, it is ended.
pub(crate) struct Worker {
    process: Child,
    names: ChildStdin,
    lines: Receiver<String>,
}

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

    fn start(mut command: Command) -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(writer.try_clone()?)
            .stderr(writer)
            // A group of its own, so that what a test started ends with it.
            .process_group(0)
            .spawn()?;
        // The command holds the writing ends; with them open, the end of the process goes unseen.
        drop(command);
        let names = process.stdin.take().expect("it was asked for");
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || read(reader, &sender));
        Ok(Self { process, names, lines })
    }

    fn test(&mut self, name: &str, output: &mut String, limits: &Limits) -> Outcome {
        let began = Instant::now();
        if writeln!(self.names, "{name}").and_then(|()| self.names.flush()).is_err() {
            return self.crashed();
        }
        let end = limits.end.min(began + limits.test);
        loop {
            let line = self.lines.recv_timeout(end.saturating_duration_since(Instant::now()));
            match line.as_ref().map(|line| line.trim_end().strip_prefix(MARK)) {
                Ok(Some("passed")) => return Outcome::Passed,
                Ok(Some("ignored")) => return Outcome::Ignored,
                Ok(Some(_)) => return Outcome::Failed,
                Ok(None) => output.push_str(line.as_deref().unwrap_or_default()),
                // Cut off by the end of the whole run, it has not shown what it is.
                Err(RecvTimeoutError::Timeout) if end == limits.end => return Outcome::NotRun,
                Err(RecvTimeoutError::Timeout) => return Outcome::TooLong(began.elapsed()),
                Err(RecvTimeoutError::Disconnected) => return self.crashed(),
            }
        }
    }

    fn crashed(&mut self) -> Outcome {
        // It may take a moment to end after its output did.
        for _ in 0..50 {
            match self.process.try_wait() {
                Ok(None) => thread::sleep(Duration::from_millis(100)),
                Ok(Some(status)) => return Outcome::Crashed(status.to_string()),
                Err(error) => return Outcome::Crashed(error.to_string()),
            }
        }
        Outcome::Crashed("it talks no more".into())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Ok(group) = i32::try_from(self.process.id()) {
            // SAFETY: a plain system call. The process was not waited for unless it ended, and then
            // what it may have left in its group is to end as well.
            unsafe { libc::kill(-group, libc::SIGKILL) };
        }
        let _ = self.process.wait();
    }
}

fn read(reader: PipeReader, lines: &mpsc::Sender<String>) {
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    while let Ok(1..) = reader.read_until(b'\n', &mut line) {
        if lines.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
            return;
        }
        line.clear();
    }
}
