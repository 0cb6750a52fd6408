//! A folder of its own for each test, and the program started in it.

use image::{Rgb, RgbImage};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Longer than anything here takes, even on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a run is made of unless a test asks for something else: as little as possible.
const SMALL: [[&str; 2]; 6] = [
    ["--width", "4"],
    ["--size", "32"],
    ["--batch", "4"],
    ["--steps", "6"],
    ["--log-every", "1"],
    ["--workers", "2"],
];

pub(crate) struct Sandbox {
    folder: TempDir,
}

impl Sandbox {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// An image of a single color, but for a line that tells images of a color apart.
    pub(crate) fn image(&self, name: &str, color: [u8; 3], line: u32) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let pixel = |x, _| if x == line { Rgb([255; 3]) } else { Rgb(color) };
        RgbImage::from_fn(48, 40, pixel).save(path).unwrap();
    }

    /// The program with these arguments, on the CPU.
    pub(crate) fn resnet(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_resnet"));
        command
            .args(arguments)
            .current_dir(self.folder.path())
            .env("BLACKBURN_DEVICE", "flex")
            // Vulkan drivers complain on standard error where no desktop session set it.
            .env("XDG_RUNTIME_DIR", self.folder.path())
            .env_remove("RUST_BACKTRACE")
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// A fresh run in the folder `run`: the small one, where `options` name nothing else.
    pub(crate) fn train(&self, run: &str, options: &[&str]) -> Command {
        let mut command = self.resnet(&["train", "--out", run]);
        for pair in SMALL.iter().filter(|pair| !options.contains(&pair[0])) {
            command.args(pair);
        }
        command.args(options);
        command
    }

    /// The run in the folder `run`, continued.
    pub(crate) fn resume(&self, run: &str, options: &[&str]) -> Command {
        let mut command = self.resnet(&["train", "--resume", "--out", run, "--log-every", "1"]);
        command.args(options);
        command
    }
}

/// How the program ended.
pub(crate) struct Finished {
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

fn finish(mut command: Command) -> (Option<i32>, Finished) {
    let output = command.output().unwrap();
    let read = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let finished = Finished { stdout: read(&output.stdout), stderr: read(&output.stderr) };
    (output.status.code(), finished)
}

/// Runs a command that has to succeed.
#[track_caller]
pub(crate) fn succeed(command: Command) -> Finished {
    let (code, finished) = finish(command);
    assert_eq!(code, Some(0), "{}", finished.stderr);
    finished
}

/// Runs a command that has to fail with a message that holds all of `expected`, and no panic.
#[track_caller]
pub(crate) fn fail(command: Command, expected: &[&str]) {
    let shown = format!("{command:?}");
    let (code, Finished { stderr, .. }) = finish(command);
    assert!(matches!(code, Some(1 | 2)), "{shown} ended with {code:?}: {stderr}");
    let message = stderr.lines().rfind(|line| line.starts_with("error:"));
    let message = message.unwrap_or_else(|| panic!("{shown} gave no reason: {stderr}"));
    for part in expected {
        assert!(message.contains(part), "{shown}: no {part:?} in {message:?}");
    }
    assert!(!stderr.contains("panicked at"), "{shown}: {stderr}");
}

/// The program at work. Killed at the latest when dropped.
pub(crate) struct Running(Child);

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    /// SIGKILL, which the program can neither catch nor prepare for.
    pub(crate) fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Waits for `condition`, which the program has to bring about. False when it ended before.
    #[must_use]
    pub(crate) fn wait_until(&mut self, mut condition: impl FnMut() -> bool) -> bool {
        let started = Instant::now();
        loop {
            if condition() {
                return true;
            }
            if self.0.try_wait().unwrap().is_some() {
                return false;
            }
            assert!(started.elapsed() < PATIENCE, "waited in vain");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The records of one kind in a run's `metrics.jsonl`, in the file's order. The last line may be torn.
pub(crate) fn records(run: &Path, kind: &str) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let records = text.lines().filter_map(|line| serde_json::from_str(line).ok());
    records.filter(|record: &serde_json::Value| record["kind"] == kind).collect()
}

/// Steps and losses of such records.
pub(crate) fn losses(run: &Path, kind: &str) -> Vec<(u64, f64)> {
    let loss = |record: &serde_json::Value| {
        (record["step"].as_u64().unwrap(), record["loss"].as_f64().unwrap())
    };
    records(run, kind).iter().map(loss).collect()
}

/// The steps that have a checkpoint, ascending.
pub(crate) fn checkpoints(run: &Path) -> Vec<u64> {
    let Ok(entries) = fs::read_dir(run.join("checkpoints")) else { return Vec::new() };
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut steps: Vec<u64> =
        names.filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect();
    steps.sort_unstable();
    steps
}

/// The tensors of a checkpoint's file, cut into blocks and sorted. The description before them is left out: it
/// holds the identities of the parameters, which Burn draws at random, and their order.
pub(crate) fn tensors(run: &Path, step: u64, file: &str) -> Vec<Vec<u8>> {
    /// Burn's format starts each tensor on a multiple of it.
    const ALIGNMENT: usize = 256;
    let path = run.join("checkpoints").join(format!("step-{step:08}")).join(file);
    let bytes = fs::read(path).unwrap();
    // Four bytes of magic, two of version, then the description's length, then itself.
    let described = u32::from_le_bytes(bytes[6..10].try_into().unwrap()) as usize;
    let start = (10 + described).next_multiple_of(ALIGNMENT);
    let block = |part: &[u8]| {
        let mut block = part.to_vec();
        block.resize(ALIGNMENT, 0);
        block
    };
    let mut blocks: Vec<Vec<u8>> = bytes[start..].chunks(ALIGNMENT).map(block).collect();
    blocks.sort_unstable();
    blocks
}
