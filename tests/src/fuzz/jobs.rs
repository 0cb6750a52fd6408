//! Running the cases in several processes: kernels are compiled one after another within each.

use super::run::{Part, Summary};
use std::{
    env,
    num::NonZero,
    process::{Child, Command, Stdio},
    thread,
};

/// What a process starts the line with that tells what its cases came to.
const MARK: &str = "summary of a job:";

/// Stands in the name of a part: `--job 3/16`.
const SEPARATOR: char = '/';

/// The part that such a word names.
///
/// # Errors
///
/// What is wrong with the word.
pub(super) fn part(word: &str) -> Result<Part, String> {
    let parsed = word.split_once(SEPARATOR).and_then(|(job, of)| {
        let part = Part { job: job.parse().ok()?, of: of.parse().ok()? };
        (part.job < part.of).then_some(part)
    });
    parsed.ok_or_else(|| format!("`{word}` is no part: expected such as 0/16, from 0/16 to 15/16"))
}

/// Tells the process that started this one what its cases came to.
///
/// # Errors
///
/// A summary that cannot be written down.
pub(super) fn report(summary: &Summary) -> Result<(), String> {
    let summary = serde_json::to_string(summary).map_err(|error| error.to_string())?;
    println!("{MARK}{summary}");
    Ok(())
}

/// Runs the cases of an operation in so many processes, with these options each, and joins what they came to.
///
/// # Errors
///
/// A process that cannot be started, or that ends without a word; the others run to their end.
pub(super) fn run(op: &str, jobs: NonZero<u64>, options: &[String]) -> Result<Summary, String> {
    let executable = env::current_exe().map_err(|error| error.to_string())?;
    join(jobs, |job| {
        let mut command = Command::new(&executable);
        command.args(["--fuzz", op]).args(options);
        command.arg("--job").arg(format!("{job}{SEPARATOR}{jobs}"));
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let threads = cores.div_ceil(jobs.get() as usize).to_string();
        command.args(["--threads", &threads]);
        // Those of a software device.
        if env::var_os("LP_NUM_THREADS").is_none() {
            command.env("LP_NUM_THREADS", &threads);
        }
        command
    })
}

fn join(jobs: NonZero<u64>, command: impl Fn(u64) -> Command) -> Result<Summary, String> {
    let start = |job| command(job).stdout(Stdio::piped()).spawn();
    let children: Vec<_> = (0..jobs.get()).map(start).collect();
    // All of them write at once: each needs a reader.
    let ends: Vec<Result<Summary, String>> = thread::scope(|scope| {
        let readers: Vec<_> =
            children.into_iter().map(|child| scope.spawn(move || summary_of(child))).collect();
        let join = |reader: thread::ScopedJoinHandle<'_, Result<Summary, String>>| {
            reader.join().unwrap_or_else(|_| Err("its reader panicked".into()))
        };
        readers.into_iter().map(join).collect()
    });
    let mut all = Summary::default();
    for (job, end) in ends.into_iter().enumerate() {
        all.join(end.map_err(|error| format!("job {job}{SEPARATOR}{jobs}: {error}"))?);
    }
    Ok(all)
}

fn summary_of(child: std::io::Result<Child>) -> Result<Summary, String> {
    let output = child.and_then(Child::wait_with_output).map_err(|error| error.to_string())?;
    let told = String::from_utf8_lossy(&output.stdout);
    let summary = told.lines().find_map(|line| line.strip_prefix(MARK));
    let summary =
        summary.ok_or_else(|| format!("{}, and no word of its cases: {told}", output.status))?;
    serde_json::from_str(summary).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn parts_are_read_as_they_are_written() {
        assert_eq!(part("3/16"), Ok(Part { job: 3, of: 16 }));
        for wrong in ["16/16", "1", "a/2", "1/0"] {
            assert!(part(wrong).unwrap_err().contains(&format!("`{wrong}`")));
        }
    }

    #[test]
    fn what_processes_came_to_is_joined() {
        let summary = Summary { cases: 5, compared: 7, ..Summary::default() };
        let line = format!("{MARK}{}", serde_json::to_string(&summary).unwrap());
        let jobs = NonZero::new(3).unwrap();
        let all = join(jobs, |_| shell(&format!("echo more; echo '{line}'; exit 1"))).unwrap();
        assert_eq!((all.cases, all.compared), (15, 21));
    }

    #[test]
    fn a_process_that_crashes_is_named() {
        let jobs = NonZero::new(2).unwrap();
        let error = join(jobs, |_| shell("echo about to; kill -9 $$")).unwrap_err();
        assert!(error.contains("job 0/2") && error.contains("about to"), "{error}");
        let error = join(jobs, |_| Command::new("/nowhere/at/all")).unwrap_err();
        assert!(error.contains("job 0/2"), "{error}");
    }
}
