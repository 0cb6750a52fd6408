//! What a run in shards tells: a line for each test, what the failed ones printed, and a summary in
//! the form of every Rust test's.

use super::worker::{Finished, Outcome};
use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
    time::{Duration, Instant},
};

/// Names and outcomes so far, and the files that they go to.
pub(crate) struct Report {
    began: Instant,
    tests: Vec<(String, Outcome, Duration)>,
    /// What a test printed that is not well.
    failures: Vec<(String, String)>,
    /// A table of all tests, and all that they printed.
    files: Option<(File, File)>,
}

impl Report {
    pub(crate) fn new(folder: Option<&Path>) -> io::Result<Self> {
        let files = match folder {
            None => None,
            Some(folder) => {
                fs::create_dir_all(folder)?;
                let mut table = File::create(folder.join("tests.tsv"))?;
                writeln!(table, "test\toutcome\tseconds")?;
                Some((table, File::create(folder.join("tests.log"))?))
            }
        };
        Ok(Self { began: Instant::now(), tests: Vec::new(), failures: Vec::new(), files })
    }

    pub(crate) fn add(&mut self, test: Finished) -> io::Result<()> {
        let Finished { name, outcome, duration, output } = test;
        let (seconds, told) = (duration.as_secs_f64(), told(&outcome));
        println!("test {name} ... {told} ({seconds:.1} s)");
        if let Some((table, log)) = &mut self.files {
            writeln!(table, "{name}\t{told}\t{seconds:.2}")?;
            writeln!(log, "==== {name}: {told}, {seconds:.1} s\n{output}")?;
        }
        if outcome.is_unwell() && outcome != Outcome::NotRun {
            self.failures.push((name.clone(), output));
        }
        self.tests.push((name, outcome, duration));
        Ok(())
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.tests.iter().any(|(_, outcome, _)| outcome.is_unwell())
    }

    #[cfg(test)]
    pub(crate) fn outcomes(&self) -> impl Iterator<Item = (&str, &Outcome)> {
        self.tests.iter().map(|(name, outcome, _)| (name.as_str(), outcome))
    }

    /// Prints failures and summary, and returns whether all is well.
    pub(crate) fn conclude(mut self, filtered_out: usize) -> io::Result<bool> {
        for (name, output) in &self.failures {
            println!("\n---- {name} ----\n{}", output.trim());
        }
        self.tests.sort_by_key(|(_, _, duration)| std::cmp::Reverse(*duration));
        println!("\nslowest:");
        for (name, _, duration) in self.tests.iter().take(10) {
            println!("    {:.1} s {name}", duration.as_secs_f64());
        }
        let failed = self.tests.iter().filter(|(_, outcome, _)| outcome.is_unwell());
        let failed: Vec<_> =
            failed.map(|(name, outcome, _)| format!("    {name}: {}", told(outcome))).collect();
        if !failed.is_empty() {
            println!("\nfailures:\n{}", failed.join("\n"));
        }
        let count = |wanted| self.tests.iter().filter(|(_, outcome, _)| *outcome == wanted).count();
        let summary = format!(
            "test result: {}. {} passed; {} failed; {} ignored; 0 measured; {filtered_out} filtered \
             out; finished in {:.2}s",
            if failed.is_empty() { "ok" } else { "FAILED" },
            count(Outcome::Passed),
            failed.len(),
            count(Outcome::Ignored),
            self.began.elapsed().as_secs_f64()
        );
        println!("\n{summary}\n");
        if let Some((_, log)) = &mut self.files {
            writeln!(log, "{summary}")?;
        }
        Ok(failed.is_empty())
    }
}

fn told(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Passed => "ok".into(),
        Outcome::Failed => "FAILED".into(),
        Outcome::Ignored => "ignored".into(),
        Outcome::Crashed(status) => format!("CRASHED, {status}"),
        Outcome::TooLong(time) => format!("STOPPED after {:.0} s", time.as_secs_f64()),
        Outcome::NotRun => "NOT RUN, the time was up".into(),
    }
}
