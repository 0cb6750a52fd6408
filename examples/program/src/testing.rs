//! Programs started in a folder of their own, as their users start them, and what they leave there.
//!
//! All of it panics where something is not as it should be: it is for tests.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Longer than anything here takes, even on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// Seconds without a sign of life after which ranks take another for dead.
const RANK_TIMEOUT: u64 = 5;
/// In which all ranks have to end once one has failed.
pub const RANKS_END: Duration = Duration::from_secs(10 * RANK_TIMEOUT);

/// A temporary folder, in which a program runs.
#[derive(Debug)]
pub struct Place(TempDir);

impl Default for Place {
    fn default() -> Self {
        Self(tempfile::tempdir().expect("there are temporary folders"))
    }
}

impl Place {
    /// A path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file, and the folders on its way.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.path(name);
        let parent = path.parent().expect("it is below the folder");
        fs::create_dir_all(parent).expect("folders are made");
        fs::write(path, content).expect("files are written");
    }

    /// Gives a command that starts a program the folder and the environment: the CPU.
    pub fn prepare(&self, command: &mut Command) {
        command
            .current_dir(self.0.path())
            .env("BLACKBURN_DEVICE", "flex")
            // Vulkan drivers complain on standard error where no desktop session set it.
            .env("XDG_RUNTIME_DIR", self.0.path())
            .env_remove("RUST_BACKTRACE")
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
    }

    /// `program` with these arguments, and those pairs of an option and its value in `defaults` whose option is
    /// not in `options`, before `options`.
    pub fn command(
        &self,
        program: &str,
        arguments: &[&str],
        defaults: &[[&str; 2]],
        options: &[&str],
    ) -> Command {
        let mut command = Command::new(program);
        command.args(arguments);
        for pair in defaults.iter().filter(|pair| !options.contains(&pair[0])) {
            command.args(pair);
        }
        command.args(options);
        self.prepare(&mut command);
        command
    }
}

/// How a program ended.
#[derive(Debug)]
pub struct Finished {
    code: Option<i32>,
    /// What it wrote.
    pub stdout: String,
    /// What it said.
    pub stderr: String,
}

/// Runs the command to its end.
pub fn finish(mut command: Command) -> Finished {
    let output = command.output().expect("the program starts");
    let read = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Finished {
        code: output.status.code(),
        stdout: read(&output.stdout),
        stderr: read(&output.stderr),
    }
}

/// Runs a command that has to succeed.
#[track_caller]
pub fn succeed(command: Command) -> Finished {
    let finished = finish(command);
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    finished
}

/// Runs a command that has to fail with a message that holds all of `expected`, and no panic.
#[track_caller]
pub fn fail(command: Command, expected: &[&str]) -> Finished {
    let shown = format!("{command:?}");
    let finished = finish(command);
    let Finished { code, stderr, .. } = &finished;
    assert!(matches!(code, Some(1 | 2)), "{shown} ended with {code:?}: {stderr}");
    let message = stderr.lines().rfind(|line| line.starts_with("error:"));
    let message = message.unwrap_or_else(|| panic!("{shown} gave no reason: {stderr}"));
    for part in expected {
        assert!(message.contains(part), "{shown}: no {part:?} in {message:?}");
    }
    assert!(!stderr.contains("panicked at"), "{shown}: {stderr}");
    finished
}

/// A program at work. Killed at the latest when dropped.
#[derive(Debug)]
pub struct Running(Child);

impl Running {
    /// Starts it.
    pub fn start(mut command: Command) -> Self {
        let command = command.stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().expect("the program starts"))
    }

    /// SIGKILL, which the program can neither catch nor prepare for.
    pub fn kill(mut self) {
        self.0.kill().expect("it is this one's child");
        self.0.wait().expect("it has ended");
    }

    /// Waits for `condition`, which the program has to bring about. False when it ended before.
    #[must_use]
    pub fn wait_until(&mut self, mut condition: impl FnMut() -> bool) -> bool {
        let started = Instant::now();
        loop {
            if condition() {
                return true;
            }
            if self.0.try_wait().expect("it is this one's child").is_some() {
                return false;
            }
            assert!(started.elapsed() < PATIENCE, "waited in vain");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A port that nobody listens on.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("there are free ports");
    listener.local_addr().expect("it listens").port()
}

/// Starts the command as one of two ranks, as a launcher does.
pub fn start_rank(mut command: Command, rank: usize, port: u16) -> Child {
    command
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", "2")
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env("BLACKBURN_DISTRIBUTED_TIMEOUT", RANK_TIMEOUT.to_string());
    command.spawn().expect("the program starts")
}

/// What a rank says that has to end by itself, with an error.
pub fn end_rank(mut rank: Child, name: &str) -> String {
    let since = Instant::now();
    while rank.try_wait().expect("it is this one's child").is_none() {
        if since.elapsed() > RANKS_END {
            rank.kill().expect("it is this one's child");
            panic!("{name} hangs");
        }
        thread::sleep(Duration::from_millis(20));
    }
    let Output { status, stderr, .. } = rank.wait_with_output().expect("it has ended");
    let said = String::from_utf8_lossy(&stderr).into_owned();
    assert!(!status.success(), "{name} ended as if nothing were wrong: {said}");
    assert!(!said.contains("panicked at"), "{name}: {said}");
    said
}

/// Runs two ranks that each have to fail with one message, which holds `expected`.
pub fn fail_on_ranks(commands: [Command; 2], expected: &str) {
    let port = free_port();
    let mut rank = 0..;
    let ranks = commands.map(|command| {
        let rank = rank.next().expect("numbers do not end");
        (rank, start_rank(command, rank, port))
    });
    for (rank, process) in ranks {
        let said = end_rank(process, &format!("rank {rank}"));
        let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error:")).collect();
        assert_eq!(errors.len(), 1, "rank {rank}: {said}");
        assert!(errors[0].contains(expected), "rank {rank}: no {expected:?} in {said}");
    }
}

/// The records of one kind in a run's `metrics.jsonl`, in the file's order. The last line may be torn.
pub fn records(run: &Path, kind: &str) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let records = text.lines().filter_map(|line| serde_json::from_str(line).ok());
    records.filter(|record: &serde_json::Value| record["kind"] == kind).collect()
}

/// Steps and losses of such records.
pub fn losses(run: &Path, kind: &str) -> Vec<(u64, f64)> {
    let loss = |record: &serde_json::Value| {
        let step = record["step"].as_u64().expect("records have steps");
        (step, record["loss"].as_f64().expect("records of this kind have losses"))
    };
    records(run, kind).iter().map(loss).collect()
}

/// The folder of one checkpoint of a run.
pub fn checkpoint(run: &Path, step: u64) -> PathBuf {
    run.join("checkpoints").join(format!("step-{step:08}"))
}

/// Names of what lies beside a run's checkpoints, and of themselves.
pub fn checkpoint_names(run: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(run.join("checkpoints")) else { return Vec::new() };
    let name = |entry: std::io::Result<fs::DirEntry>| {
        entry.expect("it can be read").file_name().to_string_lossy().into_owned()
    };
    entries.map(name).collect()
}

/// The steps that have a checkpoint, ascending.
pub fn checkpoints(run: &Path) -> Vec<u64> {
    let names = checkpoint_names(run);
    let step = |name: &String| name.strip_prefix("step-")?.parse().ok();
    let mut steps: Vec<u64> = names.iter().filter_map(step).collect();
    steps.sort_unstable();
    steps
}

/// The tensors of a file in Burn's format, cut into blocks and sorted. The description before them is left out: it
/// holds the identities of the parameters, which Burn draws at random, and their order.
pub fn tensor_blocks(path: &Path) -> Vec<Vec<u8>> {
    /// Burn's format starts each tensor on a multiple of it.
    const ALIGNMENT: usize = 256;
    let bytes = fs::read(path).expect("the file is there");
    // Four bytes of magic, two of version, then the description's length, then itself.
    let length: [u8; 4] = bytes[6..10].try_into().expect("four bytes");
    let start = (10 + u32::from_le_bytes(length) as usize).next_multiple_of(ALIGNMENT);
    let block = |part: &[u8]| {
        let mut block = part.to_vec();
        block.resize(ALIGNMENT, 0);
        block
    };
    let mut blocks: Vec<Vec<u8>> = bytes[start..].chunks(ALIGNMENT).map(block).collect();
    blocks.sort_unstable();
    blocks
}
