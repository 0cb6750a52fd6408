//! Running the tests in several processes, so that they compile and compute side by side.
//!
//! Kernels are compiled one after another within a process, which is most of a GPU run's time. With
//! `--shards N` the executable starts itself N times and hands out tests, one at a time. The processes
//! share CubeCL's kernel cache on disk, which is made for that. A test that crashes or hangs takes its
//! process down and nothing else: it is reported by name, and a new process goes on.

mod queue;
mod report;
mod worker;

use libtest_mimic::{Arguments, Trial};
use queue::Queue;
use report::Report;
pub use worker::work;
use worker::{Finished, Worker};

use clap::Parser;
use std::{
    env, io,
    num::NonZero,
    path::PathBuf,
    process::Command,
    sync::{Mutex, mpsc},
    thread,
    time::{Duration, Instant},
};

/// The options of the test executable: those of every Rust test, and those of shards.
#[derive(Clone, Debug, Default, Parser)]
#[command(help_template = "USAGE: [OPTIONS] [FILTER]\n\n{all-args}", disable_version_flag = true)]
pub struct CommandLine {
    /// Run the tests in so many processes at once.
    #[arg(long, value_name = "N")]
    pub shards: Option<NonZero<usize>>,
    /// With shards, stop after so many seconds and report what did not run.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600, requires = "shards")]
    pub limit_s: u64,
    /// With shards, a test that takes longer than so many seconds hangs, and fails.
    #[arg(long, value_name = "SECONDS", default_value_t = 300, requires = "shards")]
    pub test_limit_s: u64,
    /// With shards, write tests.tsv and tests.log to this folder.
    #[arg(long, value_name = "FOLDER", requires = "shards")]
    pub log: Option<PathBuf>,
    /// With shards, stop at the first test that is not well.
    #[arg(long, requires = "shards")]
    pub fail_fast: bool,
    /// Run the tests that are named on standard input; what a shard is started with.
    #[arg(long, hide = true)]
    pub shard_worker: bool,
    /// The options of every Rust test.
    #[command(flatten)]
    pub tests: Arguments,
}

/// Runs the tests among `trials` that `command_line` selects in as many processes as it says, and
/// returns whether all are well. A test whose name begins with one of `alone` runs when no other does.
///
/// # Errors
///
/// This executable's path is unknown, or the folder of the log cannot be written to.
pub fn run(command_line: &CommandLine, trials: &[Trial], alone: &[&str]) -> io::Result<bool> {
    let shards = command_line.shards.map_or(1, NonZero::get);
    let arguments = &command_line.tests;
    let (selected, filtered_out): (Vec<_>, Vec<_>) =
        trials.iter().partition(|trial| !arguments.is_filtered_out(trial));
    let (last, first): (Vec<_>, Vec<_>) = selected
        .iter()
        .map(|trial| trial.name().to_string())
        .partition(|name| alone.iter().any(|start| name.starts_with(start)));
    let executable = env::current_exe()?;
    let start = move |processes: usize| {
        let mut command = Command::new(&executable);
        command.arg("--shard-worker");
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        for threads in ["RAYON_NUM_THREADS", "LP_NUM_THREADS"] {
            if env::var_os(threads).is_none() {
                command.env(threads, cores.div_ceil(processes).to_string());
            }
        }
        command
    };
    let limits = Limits {
        end: Instant::now() + Duration::from_secs(command_line.limit_s),
        test: Duration::from_secs(command_line.test_limit_s),
        fail_fast: command_line.fail_fast,
    };
    println!("\nrunning {} tests in {shards} processes", selected.len());
    let mut report = Report::new(command_line.log.as_deref())?;
    run_in(shards, Queue::new(first), || start(shards), &limits, &mut report)?;
    if !(limits.fail_fast && report.has_failed()) {
        run_in(1, Queue::new(last), || start(1), &limits, &mut report)?;
    }
    report.conclude(filtered_out.len())
}

/// When to give up.
struct Limits {
    end: Instant,
    test: Duration,
    fail_fast: bool,
}

/// Runs the tests of `queue` in `shards` processes that `start` makes.
fn run_in(
    shards: usize,
    queue: Queue,
    start: impl Fn() -> Command + Sync,
    limits: &Limits,
    report: &mut Report,
) -> io::Result<()> {
    let queue = Mutex::new(queue);
    thread::scope(|scope| {
        let (sender, finished) = mpsc::channel::<Finished>();
        for _ in 0..shards {
            let (sender, queue, start) = (sender.clone(), &queue, &start);
            scope.spawn(move || {
                let mut worker = None;
                let mut group = None;
                loop {
                    let next = queue.lock().expect("no thread panics with it").next(&mut group);
                    let Some(name) = next else { break };
                    let test = match Instant::now() < limits.end {
                        true => Worker::run(&mut worker, start, name, limits),
                        false => Finished::not_run(name),
                    };
                    if sender.send(test).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        finished.iter().try_for_each(|test| {
            report.add(test)?;
            if limits.fail_fast && report.has_failed() {
                queue.lock().expect("no thread panics with it").clear();
            }
            Ok(())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::{report::Report, worker::Outcome, *};

    /// A worker in shell: what a test does follows from its name.
    const SHELL: &str = r#"
        while read -r name; do
            echo "this is $name"
            case $name in
                *crashes) kill -9 $$ ;;
                *hangs) sleep 60 ;;
                *fails) outcome=failed ;;
                *ignored) outcome=ignored ;;
                *) outcome=passed ;;
            esac
            printf '\n\036%s\n' "$outcome"
        done"#;

    fn outcomes(names: &[&str], end: Duration) -> Vec<(String, Outcome)> {
        let start = || {
            let mut shell = Command::new("sh");
            shell.args(["-c", SHELL]);
            shell
        };
        let limits = Limits {
            end: Instant::now() + end,
            test: Duration::from_millis(500),
            fail_fast: false,
        };
        let mut report = Report::new(None).unwrap();
        let queue = Queue::new(names.iter().map(ToString::to_string).collect());
        run_in(2, queue, start, &limits, &mut report).unwrap();
        let mut tests: Vec<_> =
            report.outcomes().map(|(n, o)| (n.to_string(), o.clone())).collect();
        tests.sort_by(|a, b| a.0.cmp(&b.0));
        tests
    }

    #[test]
    fn a_crash_and_a_hang_are_reported_by_name_and_the_rest_runs() {
        let names =
            ["a::crashes", "a::fails", "a::hangs", "a::ignored", "a::passes", "b::one", "b::two"];
        let found = outcomes(&names, Duration::from_secs(60));
        assert_eq!(found.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), names);
        let found: Vec<Outcome> = found.into_iter().map(|(_, outcome)| outcome).collect();
        assert!(
            matches!(&found[0], Outcome::Crashed(how) if how.contains("signal: 9")),
            "{found:?}"
        );
        assert_eq!(found[1], Outcome::Failed);
        assert!(matches!(found[2], Outcome::TooLong(_)), "{found:?}");
        assert_eq!(found[3], Outcome::Ignored);
        assert!(found[4..].iter().all(|outcome| *outcome == Outcome::Passed), "{found:?}");
    }

    #[test]
    fn what_the_limit_left_out_is_reported_too() {
        let found = outcomes(&["a::one", "b::two"], Duration::ZERO);
        assert!(found.iter().all(|(_, outcome)| *outcome == Outcome::NotRun), "{found:?}");
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn options_of_shards_stand_beside_those_of_every_test() {
        let line = ["integration", "--shards", "3", "--limit-s", "9", "--exact", "gelu::x"];
        let line = CommandLine::try_parse_from(line).unwrap();
        assert_eq!((line.shards, line.limit_s), (NonZero::new(3), 9));
        assert!(line.tests.exact);
        assert_eq!(line.tests.filter.as_deref(), Some("gelu::x"));
        assert!(CommandLine::try_parse_from(["integration", "--shards", "0"]).is_err());
    }
}
