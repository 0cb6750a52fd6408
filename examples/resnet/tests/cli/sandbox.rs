//! A folder of its own for each test, and the program started in it.

use example_program::testing::{Place, checkpoint, tensor_blocks};
pub(crate) use example_program::testing::{
    Running, checkpoints, fail, fail_on_ranks, losses, records, succeed,
};
use image::{Rgb, RgbImage};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// What a run is made of unless a test asks for something else: as little as possible.
const SMALL: [[&str; 2]; 6] = [
    ["--width", "4"],
    ["--size", "32"],
    ["--batch", "4"],
    ["--steps", "6"],
    ["--log-every", "1"],
    ["--workers", "2"],
];

#[derive(Default)]
pub(crate) struct Sandbox(Place);

impl Sandbox {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        self.0.write(name, content);
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
        self.0.command(env!("CARGO_BIN_EXE_resnet"), arguments, &[], &[])
    }

    /// A fresh run in the folder `run`: the small one, where `options` name nothing else.
    pub(crate) fn train(&self, run: &str, options: &[&str]) -> Command {
        let arguments = ["train", "--out", run];
        self.0.command(env!("CARGO_BIN_EXE_resnet"), &arguments, &SMALL, options)
    }

    /// The run in the folder `run`, continued.
    pub(crate) fn resume(&self, run: &str, options: &[&str]) -> Command {
        let arguments = ["train", "--resume", "--out", run];
        self.0.command(env!("CARGO_BIN_EXE_resnet"), &arguments, &[], options)
    }
}

/// The tensors of a checkpoint's file: see [`tensor_blocks`].
pub(crate) fn tensors(run: &Path, step: u64, file: &str) -> Vec<Vec<u8>> {
    tensor_blocks(&checkpoint(run, step).join(file))
}
