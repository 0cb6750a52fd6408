//! A folder with text to learn from, and the program started in it.

use example_program::testing::Place;
pub(crate) use example_program::testing::{Running, fail, finish, losses, records, succeed};
use std::{fmt::Write as _, path::PathBuf, process::Command};

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
pub(crate) struct Sandbox(Place);

impl Sandbox {
    pub(crate) fn new() -> Self {
        let place = Self(Place::default());
        for number in 0..6 {
            place.write(&format!("text/part-{number}.txt"), text(number, 40_000));
        }
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        self.0.write(name, content);
    }

    /// Gives any command that starts the program the folder and the environment.
    pub(crate) fn prepare(&self, command: &mut Command) {
        self.0.prepare(command);
    }

    /// The program with these arguments, on the CPU.
    pub(crate) fn gpt(&self, arguments: &[&str]) -> Command {
        self.0.command(env!("CARGO_BIN_EXE_gpt"), arguments, &[], &[])
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
        let arguments = [subcommand, "--out", run];
        self.0.command(env!("CARGO_BIN_EXE_gpt"), &arguments, &SMALL, options)
    }

    /// The run in the folder `run`, continued.
    pub(crate) fn resume(&self, run: &str, options: &[&str]) -> Command {
        let mut command = self.gpt(&["train", "--resume", "--out", run]);
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
