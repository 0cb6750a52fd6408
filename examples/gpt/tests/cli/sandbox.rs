//! A folder with text to learn from, and the program started in it.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Longer than anything here takes, even on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a run is made of unless a test asks for something else: as little as possible.
const SMALL: [[&str; 2]; 11] = [
    ["--data", "text"],
    ["--extensions", "txt"],
    ["--validation-share", "0.3"],
    ["--layers", "1"],
    ["--width", "16"],
    ["--heads", "2"],
    ["--context", "16"],
    ["--batch", "2"],
    ["--log-every", "1"],
    ["--prompt", "the "],
    ["--steps", "6"],
];

/// A temporary folder with a corpus in `text`; the program runs in it.
pub(crate) struct Sandbox {
    folder: TempDir,
}

impl Sandbox {
    pub(crate) fn new() -> Self {
        let place = Self { folder: tempfile::tempdir().unwrap() };
        for number in 0..6 {
            place.write(&format!("text/part-{number}.txt"), text(number, 40_000));
        }
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// The program with these arguments, on the CPU.
    pub(crate) fn gpt(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpt"));
        command.args(arguments);
        self.prepare(&mut command);
        command
    }

    /// Gives any command that starts the program the folder and the environment.
    pub(crate) fn prepare(&self, command: &mut Command) {
        command
            .current_dir(self.folder.path())
            .env("BLACKBURN_DEVICE", "flex")
            // Vulkan drivers complain on standard error where no desktop session set it.
            .env("XDG_RUNTIME_DIR", self.folder.path())
            .env_remove("RUST_BACKTRACE")
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
    }

    /// A fresh run in the folder `run`: the small one, where `options` name nothing else.
    pub(crate) fn train(&self, run: &str, options: &[&str]) -> Command {
        self.begin("train", run, options)
    }

    /// The parameters and batches of such a run, in the folder `to`.
    pub(crate) fn export(&self, run: &str, to: &str, options: &[&str]) -> Command {
        let mut command = self.begin("export", run, options);
        command.args(["--to", to]);
        command
    }

    fn begin(&self, subcommand: &str, run: &str, options: &[&str]) -> Command {
        let mut command = self.gpt(&[subcommand, "--out", run]);
        for pair in SMALL.iter().filter(|pair| !options.contains(&pair[0])) {
            command.args(pair);
        }
        command.args(options);
        command
    }

    /// The run in the folder `run`, continued.
    pub(crate) fn resume(&self, run: &str, options: &[&str]) -> Command {
        let mut command = self.gpt(&["train", "--resume", "--out", run, "--log-every", "1"]);
        command.args(options);
        command
    }
}

/// Words in an order that only the number decides.
pub(crate) fn text(number: u64, bytes: usize) -> String {
    const WORDS: [&str; 16] = [
        "the",
        "of",
        "a",
        "learn",
        "Blackburn",
        "tensor",
        "kernel",
        "(x)",
        "fn main()",
        "it's",
        "0.125",
        "and",
        "then;",
        "if",
        "where",
        "-> Result",
    ];
    let mut state = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut text = String::new();
    while text.len() < bytes {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let word = WORDS[(state >> 60) as usize];
        let end = if (state >> 40) & 7 == 0 { '\n' } else { ' ' };
        write!(text, "{word}{end}").unwrap();
    }
    text
}

/// How the program ended.
pub(crate) struct Finished {
    code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs the command to its end.
pub(crate) fn finish(mut command: Command) -> Finished {
    let output = command.output().unwrap();
    let read = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Finished {
        code: output.status.code(),
        stdout: read(&output.stdout),
        stderr: read(&output.stderr),
    }
}

/// Runs a command that has to succeed.
#[track_caller]
pub(crate) fn succeed(command: Command) -> Finished {
    let finished = finish(command);
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    finished
}

/// Runs a command that has to fail with a message that holds all of `expected`, and no panic.
#[track_caller]
pub(crate) fn fail(command: Command, expected: &[&str]) -> Finished {
    let shown = format!("{command:?}");
    let finished = finish(command);
    let stderr = &finished.stderr;
    assert!(
        matches!(finished.code, Some(1 | 2)),
        "{shown} ended with {:?}: {stderr}",
        finished.code
    );
    let message = stderr.lines().find(|line| line.starts_with("error:"));
    let message = message.unwrap_or_else(|| panic!("{shown} gave no reason: {stderr}"));
    for part in expected {
        assert!(message.contains(part), "{shown}: no {part:?} in {message:?}");
    }
    assert!(!stderr.contains("panicked at"), "{shown}: {stderr}");
    finished
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

/// The records of one kind in a run's `metrics.jsonl`: step and loss, in the file's order. The last
/// line may be torn.
pub(crate) fn losses(run: &Path, kind: &str) -> Vec<(u64, f64)> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let records = text.lines().filter_map(|line| serde_json::from_str(line).ok());
    records
        .filter(|record: &serde_json::Value| record["kind"] == kind)
        .map(|record| (record["step"].as_u64().unwrap(), record["loss"].as_f64().unwrap()))
        .collect()
}
