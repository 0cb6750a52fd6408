//! A folder as `cargo xtask gpu --bench-runner` packs it, of shell scripts.

use std::{
    env,
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Runs a peer's file as a shell script, and has PyTorch.
const PYTHON: &str = r#"[ "$1" = -c ] && exit 0; exec sh "$@""#;

/// Held while a file is written and while a process is started: a process that another test starts would hold the file
/// open for writing for a moment, and what is open for writing cannot be executed.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) struct Sandbox(tempfile::TempDir);

/// What a run of the program came to.
pub(crate) struct Outcome {
    pub(crate) code: i32,
    /// Standard output and standard error.
    pub(crate) told: String,
}

impl Sandbox {
    /// With a GPU and PyTorch, and without programs.
    pub(crate) fn new() -> Self {
        let sandbox = Self(tempfile::tempdir().unwrap());
        for folder in ["path", "peers", "results"] {
            fs::create_dir(sandbox.path().join(folder)).unwrap();
        }
        sandbox.script("path/nvidia-smi", "echo 'NVIDIA H100 80GB HBM3, 580.1'");
        sandbox.script("python", PYTHON);
        sandbox.write("commit", "abc1234\n");
        sandbox
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        let _alone = alone();
        fs::write(self.path().join(name), text).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path().join(name)).unwrap_or_default()
    }

    /// A program. It runs in the sandbox's folder.
    pub(crate) fn script(&self, name: &str, body: &str) {
        let text = format!("#!/bin/sh\n{body}\n");
        self.write(name, &text);
        let path = self.path().join(name);
        fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }

    /// A program that notes that it ran, and prints a row.
    pub(crate) fn program(&self, name: &str, row: &str) {
        self.script(name, &format!("echo {name} >> order\nprintf '%b' '{row}'"));
    }

    /// Runs `bench` with the words of `line`.
    pub(crate) fn bench(&self, line: &str) -> Outcome {
        self.bench_in(line, &format!("{}/path", self.path().display()))
    }

    /// The same with only `folder` in front of the system's programs.
    pub(crate) fn bench_in(&self, line: &str, folder: &str) -> Outcome {
        // Beside its own executable it would find nothing of the sandbox.
        let program = self.path().join("bench");
        let alone = alone();
        if !program.exists() {
            fs::copy(env!("CARGO_BIN_EXE_bench"), &program).unwrap();
        }
        let child = Command::new(program)
            .current_dir(self.path())
            .env("PATH", format!("{folder}:/usr/bin:/bin"))
            .env_remove("CUDA_VISIBLE_DEVICES")
            .args(line.split_whitespace())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(alone);
        let output = child.wait_with_output().unwrap();
        let told = [output.stdout, output.stderr].concat();
        Outcome { code: output.status.code().unwrap_or(-1), told: String::from_utf8(told).unwrap() }
    }

    /// Rows that a run wrote, with `|` between fields, and its comments.
    pub(crate) fn rows(&self) -> Vec<String> {
        self.read("bench-run/rows.tsv").lines().map(|line| line.replace('\t', "|")).collect()
    }
}

/// A row for `printf`, of an operation and a time.
pub(crate) fn row(op: &str, subject: &str, median: &str) -> String {
    let fields = ["-", "-", op, "forward", "bf16", "8x8", subject, median, median, median];
    format!("{}\\t10\\tGB/s\\tstub; \\n", fields.join("\\t"))
}
