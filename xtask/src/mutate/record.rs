//! The figure, and the file that keeps it.

use super::{
    faults::Suite,
    run::{Outcome, SURVIVED},
};
use crate::command;
use anyhow::{Context, Result, bail};
use std::{fs, io::Write, path::Path, process::Command};

const RESULTS: &str = "benches/results/mutations.tsv";
const HEADER: &str = "date\tcommit\tsuite\tplanted\tnoticed\tnote";

/// Prints the survivors and the share of the faults that was noticed.
pub(super) fn summarize(outcomes: &[Outcome]) {
    let survivors: Vec<&Outcome> = outcomes.iter().filter(|o| o.noticed.is_none()).collect();
    println!("\nsurvivors:");
    for Outcome { number, file, what, not_run, .. } in &survivors {
        println!("{number:4} {file}: {what} ({not_run} tests not run)");
    }
    let noticed = outcomes.len() - survivors.len();
    let share = 100.0 * noticed as f64 / outcomes.len().max(1) as f64;
    println!("\n{noticed} of {} faults noticed, {share:.1} %", outcomes.len());
}

/// Appends the row of these outcomes to the results.
pub(super) fn append(suite: Suite, outcomes: &[Outcome]) -> Result<()> {
    let path = command::root().join(RESULTS);
    let there = fs::read_to_string(&path).unwrap_or_default();
    let mut text = if there.is_empty() { format!("{HEADER}\n") } else { String::new() };
    let commit = command::commit()?;
    let date = Command::new("date").arg("+%F").output().context("start date")?;
    let date = String::from_utf8_lossy(&date.stdout).trim().to_string();
    text.push_str(&row(&date, &commit, &suite.to_string(), outcomes));
    let mut file = fs::OpenOptions::new().create(true).append(true).open(&path)?;
    file.write_all(text.as_bytes()).with_context(|| format!("write {RESULTS}"))?;
    println!("{RESULTS}: {}", text.lines().last().unwrap_or_default());
    Ok(())
}

fn row(date: &str, commit: &str, suite: &str, outcomes: &[Outcome]) -> String {
    let survivors = outcomes.iter().filter(|outcome| outcome.noticed.is_none());
    let survivors: Vec<String> =
        survivors.map(|Outcome { file, what, .. }| format!("{file}: {what}")).collect();
    let note = match survivors.is_empty() {
        true => "-".to_string(),
        false => format!("survived: {}", survivors.join("; ")),
    };
    let (planted, noticed) = (outcomes.len(), outcomes.len() - survivors.len());
    format!("{date}\t{commit}\t{suite}\t{planted}\t{noticed}\t{note}\n")
}

/// The table that a run has written.
pub(super) fn read(table: &Path) -> Result<Vec<Outcome>> {
    let text = fs::read_to_string(table).with_context(|| format!("read {}", table.display()))?;
    let outcome = |line: &str| {
        let [number, file, what, told] = line.split('\t').collect::<Vec<_>>()[..] else {
            bail!("{}: four columns expected: {line}", table.display());
        };
        Ok(Outcome {
            number: number.parse().with_context(|| format!("{}: {line}", table.display()))?,
            file: file.to_string(),
            what: what.to_string(),
            noticed: (!told.starts_with(SURVIVED)).then(|| told.to_string()),
            not_run: 0,
        })
    };
    text.lines().skip(1).map(outcome).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_names_the_survivors() {
        let outcome = |number, noticed: Option<&str>| Outcome {
            number,
            file: "a.rs".into(),
            what: "skipped tail".into(),
            noticed: noticed.map(String::from),
            not_run: 0,
        };
        let outcomes = [outcome(1, Some("gelu::x: FAILED")), outcome(2, None)];
        assert_eq!(
            row("2026-01-31", "1234567", "lavapipe", &outcomes),
            "2026-01-31\t1234567\tlavapipe\t2\t1\tsurvived: a.rs: skipped tail\n"
        );
        assert!(row("d", "c", "s", &outcomes[..1]).ends_with("\t1\t1\t-\n"));
    }
}
