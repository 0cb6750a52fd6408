//! Each fault's run of its op's tests.

use super::faults::Fault;
use anyhow::{Context, Result, bail};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::Write,
    num::NonZero,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};

/// How faults are tried.
pub(super) struct Trials {
    pub(super) executable: PathBuf,
    pub(super) device: &'static str,
    pub(super) jobs: usize,
    /// For all tests of a fault, and for one.
    pub(super) limits_s: [u64; 2],
    /// Whether the tests need not be run without a fault.
    pub(super) tests_are_well: bool,
}

/// What became of a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) number: usize,
    pub(super) file: String,
    pub(super) what: String,
    /// The test that noticed it, and how.
    pub(super) noticed: Option<String>,
    /// Tests for which there was no time.
    pub(super) not_run: usize,
}

/// How the table names a fault that no test noticed.
pub(super) const SURVIVED: &str = "SURVIVED";

/// A run of tests.
#[derive(Default)]
struct Ran {
    tests: usize,
    /// Those for which there was no time.
    not_run: usize,
    /// Tests that are not well, and what is said of them.
    unwell: Vec<(String, String)>,
}

impl Trials {
    /// Tries `faults`, and writes the table as they come.
    pub(super) fn run(&self, faults: &[&Fault], table: &Path) -> Result<Vec<Outcome>> {
        let filters: BTreeSet<&str> = faults.iter().flat_map(|f| f.tests).copied().collect();
        let mut filters: Vec<&str> = filters.into_iter().collect();
        if self.tests_are_well {
            filters.clear();
        }
        eprintln!("{} faults, after {} runs without any", faults.len(), filters.len());
        let known: BTreeMap<&str, Vec<String>> = self
            .side_by_side(&filters, |filter| {
                let ran = self.tests(filter, 0, &[])?;
                let unwell: Vec<String> = ran.unwell.into_iter().map(|(name, _)| name).collect();
                if !unwell.is_empty() {
                    eprintln!("fail without a fault, and do not count: {}", unwell.join(", "));
                }
                Ok((*filter, unwell))
            })?
            .into_iter()
            .collect();
        if let Some(folder) = table.parent() {
            fs::create_dir_all(folder)?;
        }
        let mut file =
            File::create(table).with_context(|| format!("create {}", table.display()))?;
        writeln!(file, "number\tfile\tfault\tnoticed")?;
        let file = Mutex::new(file);
        self.side_by_side(faults, |fault| {
            let outcome = self.fault(fault, &known)?;
            let Outcome { number, file: of, what, noticed, not_run } = &outcome;
            let told = match (noticed, not_run) {
                (Some(noticed), _) => noticed.clone(),
                (None, 0) => SURVIVED.to_string(),
                (None, not_run) => format!("{SURVIVED}, {not_run} tests not run"),
            };
            let mut file = file.lock().expect("no thread panics with it");
            writeln!(file, "{number}\t{of}\t{what}\t{told}")?;
            println!("{number:4} {of}: {what}: {told}");
            Ok(outcome)
        })
    }

    fn fault(&self, fault: &Fault, known: &BTreeMap<&str, Vec<String>>) -> Result<Outcome> {
        let outcome = |noticed, not_run| Outcome {
            number: fault.number,
            file: fault.file.to_string(),
            what: fault.what.to_string(),
            noticed,
            not_run,
        };
        let mut not_run = 0;
        for filter in fault.tests {
            let began = Instant::now();
            let skipped = known.get(filter).map_or(&[][..], Vec::as_slice);
            let ran = self.tests(filter, fault.number, skipped)?;
            if let Some((name, how)) = ran.unwell.into_iter().next() {
                let seconds = began.elapsed().as_secs_f64();
                return Ok(outcome(Some(format!("{name}: {how} ({seconds:.0} s)")), 0));
            }
            not_run += ran.not_run;
        }
        Ok(outcome(None, not_run))
    }

    /// Runs the tests with `filter` in their names: with a fault up to the first that notices it.
    fn tests(&self, filter: &str, fault: usize, skipped: &[String]) -> Result<Ran> {
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let threads = cores.div_ceil(self.jobs).to_string();
        let mut command = Command::new(&self.executable);
        command
            .args([filter, "--shards", "1"])
            .args(["--limit-s", &self.limits_s[0].to_string()])
            .args(["--test-limit-s", &self.limits_s[1].to_string()])
            .args(skipped.iter().flat_map(|name| ["--skip", name]))
            .env("BLACKBURN_MUTANT", fault.to_string())
            .env("BLACKBURN_REQUIRE_DEVICE", self.device)
            // A kernel with a fault has the name of the one without.
            .env("BLACKBURN_KERNEL_CACHE", "0")
            .envs([("LP_NUM_THREADS", &threads), ("RAYON_NUM_THREADS", &threads)])
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        if fault > 0 {
            command.arg("--fail-fast");
        }
        let output = command.output().with_context(|| "start the tests")?;
        let ran = read(&String::from_utf8_lossy(&output.stdout));
        if ran.tests == 0 {
            bail!("no test has {filter} in its name, or none began: {}", output.status);
        }
        if ran.unwell.is_empty() && ran.not_run == 0 && !output.status.success() {
            bail!("the tests of fault {fault} ended with {}", output.status);
        }
        Ok(ran)
    }

    /// `work` on each of `items`, so many at a time as there are jobs, in the items' order.
    fn side_by_side<I: Sync, O: Send>(
        &self,
        items: &[I],
        work: impl Fn(&I) -> Result<O> + Sync,
    ) -> Result<Vec<O>> {
        let next = AtomicUsize::new(0);
        let done: Mutex<Vec<(usize, Result<O>)>> = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for _ in 0..self.jobs {
                scope.spawn(|| {
                    loop {
                        let at = next.fetch_add(1, Ordering::Relaxed);
                        let Some(item) = items.get(at) else { break };
                        let result = work(item);
                        done.lock().expect("no thread panics with it").push((at, result));
                    }
                });
            }
        });
        let mut done = done.into_inner().expect("no thread panicked with it");
        done.sort_by_key(|(at, _)| *at);
        done.into_iter().map(|(_, result)| result).collect()
    }
}

/// Reads the lines that the tests' executable prints in shards.
fn read(output: &str) -> Ran {
    let mut ran = Ran::default();
    for line in output.lines() {
        let Some((name, told)) =
            line.strip_prefix("test ").and_then(|line| line.split_once(" ... "))
        else {
            continue;
        };
        ran.tests += 1;
        let how = told.rsplit_once(" (").map_or(told, |(how, _)| how);
        if how.starts_with("NOT RUN") {
            ran.not_run += 1;
        } else if !matches!(how, "ok" | "ignored") {
            ran.unwell.push((name.to_string(), how.to_string()));
        }
    }
    ran
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_tests_print_is_understood() {
        let ran = read(
            "running 4 tests in 1 processes\n\
             test gelu::a ... ok (0.1 s)\n\
             test gelu::b ... CRASHED, signal: 6 (SIGABRT) (1.5 s)\n\
             test gelu::c ... ignored (0.0 s)\n\
             test gelu::d ... NOT RUN, the time was up (0.0 s)\n\
             test result: FAILED. 1 passed; 2 failed\n",
        );
        assert_eq!((ran.tests, ran.not_run), (4, 1));
        let crashed = ("gelu::b".to_string(), "CRASHED, signal: 6 (SIGABRT)".to_string());
        assert_eq!(ran.unwell, [crashed]);
    }
}
