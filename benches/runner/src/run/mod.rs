//! Measures the parts of a plan, each with its peer in turns, and writes rows as soon as a part is done.

mod process;
mod progress;
mod rounds;

use crate::{
    device::Device,
    plan::{CASES, FOLDER, Part, Plan, Step},
    row::Row,
};
use anyhow::{Context, Result, ensure};
use process::{End, Outcome};
use progress::Progress;
use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// Where programs lie.
#[derive(Clone, Debug)]
pub struct Places {
    /// Ours.
    pub programs: PathBuf,
    /// The peers' Python files.
    pub peers: PathBuf,
    /// What runs them.
    pub python: String,
}

/// How a run goes, and what its rows begin and end with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where programs lie.
    pub places: Places,
    /// Where rows and logs go.
    pub folder: PathBuf,
    /// Day of the run.
    pub date: String,
    /// Of this repository.
    pub commit: String,
    /// What is measured on.
    pub device: Device,
    /// How often both sides of a part run.
    pub rounds: usize,
    /// What all may take together.
    pub budget: Option<Duration>,
    /// What a process may take, instead of its part's own limit.
    pub limit: Option<Duration>,
}

/// What came of a run.
#[derive(Debug, Default)]
pub struct Summary {
    /// Rows with a time.
    pub measured: usize,
    /// Rows without one, whose notes say why.
    pub untimed: usize,
    /// What crashed, took too long, or measured nothing.
    pub failed: Vec<String>,
    /// What was not begun.
    pub left_out: Vec<String>,
}

/// Of the folder, what rows are written to.
pub const ROWS: &str = "rows.tsv";

/// Less is left for no process that measures anything.
const LEAST: Duration = Duration::from_secs(1);

/// Measures a plan.
///
/// # Errors
///
/// When the folder holds rows already, or cannot be written to. Programs that fail are told in the summary.
pub fn run(plan: &Plan, settings: &Settings) -> Result<Summary> {
    let rows = settings.folder.join(ROWS);
    ensure!(
        !rows.exists(),
        "{} holds the rows of another run: move it away, or name another folder with --out",
        rows.display()
    );
    let logs = settings.folder.join("logs");
    fs::create_dir_all(&logs).with_context(|| format!("create {}", logs.display()))?;
    let mut run = Run {
        settings,
        logs,
        rows,
        end: settings.budget.map(|budget| Instant::now() + budget),
        peers: match plan.parts.iter().any(|part| part.peer.is_some()) {
            true => peers(&settings.places),
            false => Ok(()),
        },
        progress: Progress::new(plan.parts.len()),
        summary: Summary::default(),
    };
    for reason in &plan.left_out {
        run.leave_out(reason.clone())?;
    }
    if let Err(reason) = &run.peers {
        run.leave_out(format!("all peers: {reason}"))?;
    }
    for part in &plan.parts {
        run.part(part)?;
    }
    run.progress.finish();
    Ok(run.summary)
}

/// Whether Python files can run, or why not.
fn peers(Places { python, peers, .. }: &Places) -> Result<(), String> {
    let output = Command::new(python).args(["-c", "import torch"]).output();
    let reason = match output {
        Ok(output) if output.status.success() && peers.is_dir() => return Ok(()),
        Ok(output) if output.status.success() => format!("{} is no folder", peers.display()),
        Ok(output) => {
            let told = process::last_line(&String::from_utf8_lossy(&output.stderr));
            format!("`{python}` has no PyTorch ({})", told.unwrap_or_default())
        }
        Err(error) => format!("`{python}` does not start ({error})"),
    };
    Err(format!("{reason}; --python names another, --peers the folder of their files"))
}

struct Run<'a> {
    settings: &'a Settings,
    logs: PathBuf,
    rows: PathBuf,
    end: Option<Instant>,
    peers: Result<(), String>,
    progress: Progress,
    summary: Summary,
}

/// One of a part's two sides, and what it measured.
struct Side<'a> {
    who: &'static str,
    step: &'a Step,
    rounds: Vec<Vec<Row>>,
    /// What its last process took.
    took: Duration,
    /// Whether no process of it has failed.
    is_sound: bool,
}

impl Side<'_> {
    fn is_measured(&self) -> bool {
        self.rounds.iter().flatten().any(|row| row.median().is_some())
    }
}

impl Run<'_> {
    /// Both sides of a part, so many rounds in turns.
    fn part(&mut self, part: &Part) -> Result<()> {
        self.progress.begin(&part.name);
        let program = self.settings.places.programs.join(&part.ours.program);
        if !program.is_file() {
            return self.leave_out(format!(
                "{}: there is no {}; `cargo xtask gpu --bench-runner` packs it, --programs names its folder",
                part.name,
                program.display()
            ));
        }
        if self.left().is_some_and(|left| left < LEAST) {
            return self.leave_out(format!("{}: the budget is spent", part.name));
        }
        let side = |who, step| Side {
            who,
            step,
            rounds: Vec::new(),
            took: Duration::ZERO,
            is_sound: true,
        };
        let mut sides = vec![side("blackburn", &part.ours)];
        let cases = self.logs.join(format!("{}.cases", file_name(&part.name)));
        if let Some(peer) = &part.peer
            && self.peers.is_ok()
        {
            let file = self.settings.places.peers.join(&peer.program);
            if !file.is_file() {
                let reason = format!("{}, the peer: there is no {}", part.name, file.display());
                self.leave_out(reason)?;
            } else if self.lists(part, &program, &cases)? {
                sides.push(side("peer", peer));
            }
        }
        self.rounds(part, &mut sides, &cases)?;
        for side in sides {
            let rows = rounds::merged(side.rounds);
            self.write(part, rows)?;
        }
        Ok(())
    }

    /// As many rounds as there is time for. What failed would fail again, after as long; ours ends the peer's with it.
    fn rounds(&mut self, part: &Part, sides: &mut [Side<'_>], cases: &Path) -> Result<()> {
        let rounds = self.settings.rounds;
        for round in 1..=rounds {
            // What cannot end in time is not begun again: the rounds so far count.
            let next: Duration =
                sides.iter().filter(|side| side.is_sound).map(|side| side.took).sum();
            if round > 1 && self.left().is_some_and(|left| left < next + LEAST) {
                let from = format!("{}, rounds {round} to {rounds}", part.name);
                return self.leave_out(format!("{from}: the budget has no time for them"));
            }
            for place in 0..sides.len() {
                let is_ours_measured = sides[0].is_measured();
                let side = &mut sides[place];
                if place > 0 && !is_ours_measured {
                    return self.leave_out(format!("{}, the peer: ours has no times", part.name));
                }
                if self.left().is_some_and(|left| left < LEAST) {
                    let reason = format!("{}, {}: the budget is spent", part.name, side.who);
                    return self.leave_out(reason);
                }
                if side.is_sound {
                    self.round(part, side, round, cases)?;
                }
            }
            if !sides[0].is_sound {
                return Ok(());
            }
        }
        Ok(())
    }

    /// One process of a side.
    fn round(
        &mut self,
        part: &Part,
        side: &mut Side<'_>,
        round: usize,
        cases: &Path,
    ) -> Result<()> {
        let what =
            format!("{}, {}, round {round} of {}", part.name, side.who, self.settings.rounds);
        self.progress.tell(&what);
        let name = file_name(&format!("{} {} {round}", part.name, side.who));
        let folder = self.logs.join(&name);
        fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
        let mut command = self.command(side, &folder, cases);
        let outcome = process::run(&mut command, self.limit(part), &self.logs.join(&name))?;
        let Outcome { stdout, end, took } = outcome;
        let (mut rows, mut reason) = match side.step.format.read(&stdout, &folder) {
            Ok(read) if read.strays > 0 => {
                let lines = format!("{} lines of its output are no rows", read.strays);
                (read.rows, Some(lines))
            }
            Ok(read) => (read.rows, None),
            Err(error) => (Vec::new(), Some(format!("{error:#}"))),
        };
        if rows.iter().all(|row| row.median().is_none()) && reason.is_none() {
            let stderr = fs::read_to_string(self.logs.join(format!("{name}.err")));
            let told = process::last_line(&stderr.unwrap_or_default());
            reason = Some(format!("it measured nothing: {}", told.unwrap_or_default()));
        }
        // How it ended says more than what was missing then.
        let mut is_budget = false;
        match end {
            End::Done => {}
            End::Failed(why) => reason = Some(why),
            End::TimedOut(seconds) => {
                is_budget = self.left().is_some_and(|left| left.is_zero());
                reason = Some(match is_budget {
                    true => format!("the budget ended it after {seconds} s"),
                    false => format!("it had not ended after {seconds} s"),
                });
            }
        }
        let shown = format!("{what}: {} rows in {:.1} s", rows.len(), took.as_secs_f64());
        match reason {
            Some(reason) => {
                self.progress.print(&format!("{shown}; failed: {reason}"));
                self.comment(&format!("{what}: failed: {reason}"))?;
                let told = format!("{what}: {reason}");
                let summary = &mut self.summary;
                if is_budget { &mut summary.left_out } else { &mut summary.failed }.push(told);
                side.is_sound = false;
            }
            None => self.progress.print(&shown),
        }
        if let Some(dtype) = part.dtype {
            rows.iter_mut().for_each(|row| row.dtype = dtype.to_owned());
        }
        side.took = took;
        side.rounds.push(rows);
        // Checkpoints are large, and only the metrics were of interest.
        let kept = folder.join("metrics.jsonl");
        if kept.is_file() {
            fs::rename(&kept, self.logs.join(format!("{name}.metrics.jsonl")))?;
        }
        fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))
    }

    fn command(&self, side: &Side<'_>, folder: &Path, cases: &Path) -> Command {
        let Places { programs, peers, python } = &self.settings.places;
        let mut command = match side.step.program.ends_with(".py") {
            true => {
                let mut command = Command::new(python);
                command.arg(peers.join(&side.step.program));
                command
            }
            false => Command::new(programs.join(&side.step.program)),
        };
        for argument in &side.step.arguments {
            match argument.as_str() {
                FOLDER => command.arg(folder),
                CASES => command.arg(cases),
                other => command.arg(other),
            };
        }
        command.env("CRITERION_HOME", folder);
        command
    }

    /// Has ours list the cases of its peer, where it reads them; whether the peer can run.
    fn lists(&mut self, part: &Part, program: &Path, cases: &Path) -> Result<bool> {
        let Some(arguments) = &part.list else { return Ok(true) };
        let log = self.logs.join(format!("{}.list", file_name(&part.name)));
        let mut command = Command::new(program);
        let outcome = process::run(command.args(arguments), self.limit(part), &log)?;
        if outcome.end == End::Done && !outcome.stdout.trim().is_empty() {
            fs::write(cases, outcome.stdout)
                .with_context(|| format!("write {}", cases.display()))?;
            return Ok(true);
        }
        let reason = format!("{}, the peer: no list of its cases: {:?}", part.name, outcome.end);
        self.progress.print(&reason);
        self.comment(&reason)?;
        self.summary.failed.push(reason);
        Ok(false)
    }

    /// What a process may take.
    fn limit(&self, part: &Part) -> Duration {
        let limit = self.settings.limit.unwrap_or(Duration::from_secs(part.limit_s));
        self.left().map_or(limit, |left| left.min(limit))
    }

    /// Of the budget.
    fn left(&self) -> Option<Duration> {
        self.end.map(|end| end.saturating_duration_since(Instant::now()))
    }

    fn leave_out(&mut self, reason: String) -> Result<()> {
        self.progress.print(&format!("left out: {reason}"));
        self.comment(&format!("left out: {reason}"))?;
        self.summary.left_out.push(reason);
        Ok(())
    }

    fn write(&mut self, part: &Part, rows: Vec<Row>) -> Result<()> {
        let Settings { date, commit, device, .. } = self.settings;
        let mut text = String::new();
        for mut row in rows {
            (row.date, row.commit) = (date.clone(), commit.clone());
            row.add_note(&device.note());
            let count = match row.median() {
                Some(_) => &mut self.summary.measured,
                None => &mut self.summary.untimed,
            };
            *count += 1;
            text += &row.line();
            text.push('\n');
        }
        self.append(&text).with_context(|| part.name.clone())
    }

    fn comment(&mut self, text: &str) -> Result<()> {
        self.append(&format!("# {}\n", text.replace('\n', " ")))
    }

    fn append(&self, text: &str) -> Result<()> {
        let mut file = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.rows)
            .with_context(|| format!("write {}", self.rows.display()))?;
        file.write_all(text.as_bytes()).with_context(|| format!("write {}", self.rows.display()))
    }
}

fn file_name(name: &str) -> String {
    name.replace([' ', '/'], "-")
}
