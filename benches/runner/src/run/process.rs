//! One program in a process of its own, with a time limit.

use anyhow::{Context, Result};
use std::{
    fs::{self, File},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

/// How it came to its end.
#[derive(Debug, PartialEq)]
pub(super) enum End {
    Done,
    /// Why not.
    Failed(String),
    /// The seconds that it had.
    TimedOut(u64),
}

/// What it left.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) stdout: String,
    pub(super) end: End,
    pub(super) took: Duration,
}

/// Pause between two looks at a process.
const LOOK: Duration = Duration::from_millis(20);

/// Runs `command` until its end, or until `limit`. Its output goes to `log` with the extensions `out` and `err`, so that
/// what it printed before a crash is kept.
pub(super) fn run(command: &mut Command, limit: Duration, log: &Path) -> Result<Outcome> {
    let [out, err] = ["out", "err"].map(|extension| log.with_added_extension(extension));
    let file =
        |path: &Path| File::create(path).with_context(|| format!("write {}", path.display()));
    // Compilers that a program starts are of its group, and end with it.
    command.stdin(Stdio::null()).stdout(file(&out)?).stderr(file(&err)?).process_group(0);
    let start = Instant::now();
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            let program = command.get_program().to_string_lossy();
            let end = End::Failed(format!("`{program}` does not start: {error}"));
            return Ok(Outcome { stdout: String::new(), end, took: start.elapsed() });
        }
    };
    let status = wait(&mut child, start + limit)?;
    let took = start.elapsed();
    // What another program's encoding spoils does not spoil the rest.
    let text = |path: &Path| {
        let bytes = fs::read(path).with_context(|| format!("read {}", path.display()))?;
        anyhow::Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let end = match status {
        None => End::TimedOut(limit.as_secs()),
        Some(status) if status.success() => End::Done,
        Some(status) => End::Failed(told(status, &text(&err)?)),
    };
    Ok(Outcome { stdout: text(&out)?, end, took })
}

/// The status, or nothing if the process had to be ended.
fn wait(child: &mut Child, end: Instant) -> Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait().context("wait for a program")? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            let group = -(child.id() as i32);
            // SAFETY: kill takes no memory. The group is that of a child that was not waited for yet, so that no other
            // process can have its number.
            unsafe { libc::kill(group, libc::SIGKILL) };
            child.wait().context("wait for a program that was ended")?;
            return Ok(None);
        }
        thread::sleep(LOOK);
    }
}

/// `exit code 3: the last line that it wrote`.
fn told(status: ExitStatus, stderr: &str) -> String {
    let how = match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    };
    match last_line(stderr) {
        Some(line) => format!("{how}: {line}"),
        None => how,
    }
}

/// The last line that says something, of at most so many letters as a note takes.
pub(super) fn last_line(text: &str) -> Option<String> {
    const LETTERS: usize = 200;
    let line = text.lines().map(str::trim).rfind(|line| !line.is_empty())?;
    Some(line.chars().take(LETTERS).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Outcome {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("resnet50.1");
        run(Command::new("sh").args(["-c", script]), limit, &log).unwrap()
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_a_program_says_at_its_end_is_the_reason() {
        let outcome =
            shell("echo row; echo first >&2; echo 'no memory' >&2; echo >&2; exit 3", LONG);
        assert_eq!(outcome.stdout, "row\n");
        assert_eq!(outcome.end, End::Failed("exit code 3: no memory".into()));
        assert_eq!(shell("kill -SEGV $$", LONG).end, End::Failed("signal 11".into()));
        assert_eq!(shell("true", LONG).end, End::Done);
    }

    #[test]
    fn a_program_that_takes_too_long_is_ended_with_what_it_started() {
        let folder = tempfile::tempdir().unwrap();
        let note = folder.path().join("child");
        let script = format!("sleep 300 & echo $! > {}; echo row; sleep 300", note.display());
        let outcome = shell(&script, Duration::from_secs(5));
        assert_eq!((outcome.end, outcome.stdout.as_str()), (End::TimedOut(5), "row\n"));
        let child = fs::read_to_string(note).unwrap();
        let state = Path::new("/proc").join(child.trim()).join("stat");
        // Gone, or dead and not asked for by anybody.
        let is_over = || fs::read_to_string(&state).map_or(true, |stat| stat.contains(") Z "));
        let end = Instant::now() + LONG;
        while !is_over() {
            assert!(Instant::now() < end, "a process that the program started goes on");
            thread::sleep(LOOK);
        }
    }

    #[test]
    fn a_program_that_does_not_start_has_failed() {
        let folder = tempfile::tempdir().unwrap();
        let outcome = run(&mut Command::new("/nowhere/gpt"), LONG, &folder.path().join("x"));
        let End::Failed(why) = outcome.unwrap().end else { panic!("it cannot start") };
        assert!(why.starts_with("`/nowhere/gpt` does not start: No such file"), "{why}");
    }
}
