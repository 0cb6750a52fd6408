//! `cargo xtask host`: what CUDA's runtime does on the host, where there is no GPU.

use crate::{
    command::{self, cargo, program},
    gpu,
};
use anyhow::{Context, Result};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Names by which programs look for the driver and the compiler.
const NAMES: [&str; 6] = [
    "libcuda.so",
    "libcuda.so.1",
    "libnvrtc.so",
    "libnvrtc.so.11",
    "libnvrtc.so.12",
    "libnvrtc.so.13",
];

/// Run tests on a CUDA driver that does nothing: models are trained on zeros, and errors of the host come out.
///
/// No GPU and no CUDA is needed, but Linux. What kernels compute is not looked at: lavapipe, simulated GPUs and real
/// ones are for that.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only tests whose name contains this. Tests that compare numbers fail, but for those of small models.
    #[arg(default_value = "small_models")]
    filter: String,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let folder = idle_driver()?;
    // The build of `cargo test --workspace`, in the same environment: `CUDA_PATH` would have most of it built anew.
    let mut build = cargo();
    build.args(["test", "--workspace", "--test", "integration", "--no-run"]);
    let built = gpu::built(&mut build, "test", "", "The output above says why.")?;
    let (_, tests) = built.first().context("Cargo has built no integration tests")?;
    command::run(
        &mut idle_tests(tests, arguments, &folder),
        "The output above names the tests; `cargo xtask host NAME` runs one alone.",
    )
}

/// Builds the driver, and returns the folder where programs find it.
pub(crate) fn idle_driver() -> Result<PathBuf> {
    let mut build = cargo();
    build.args(["build", "-p", "blackburn-idle-driver"]);
    command::run(&mut build, "The output above says why.")?;
    installed(&command::target_dir())
}

/// Has `command` find the driver in `folder`.
pub(crate) fn find_driver(command: &mut Command, folder: &Path) {
    command
        .env("CUDA_PATH", folder)
        // Kernels that nobody compiled are kept apart from real ones.
        .env("CUBECL_ENVIRONMENT", "idle")
        .env("LD_LIBRARY_PATH", folder);
}

/// The folder where the library is found by the names of the driver and the compiler.
fn installed(target: &Path) -> Result<PathBuf> {
    let folder = target.join("idle-driver");
    // CubeCL asks for the headers' folder, and no kernel is compiled that includes any.
    fs::create_dir_all(folder.join("include"))
        .with_context(|| format!("create {}", folder.display()))?;
    let library = target.join("debug/libidle_driver.so");
    for name in NAMES {
        fs::copy(&library, folder.join(name))
            .with_context(|| format!("copy {} as {name}", library.display()))?;
    }
    Ok(folder)
}

fn idle_tests(tests: &Path, arguments: &Arguments, folder: &Path) -> Command {
    let mut command = program(tests);
    command
        .arg(&arguments.filter)
        .current_dir(command::root().join("tests"))
        .env("BLACKBURN_REQUIRE_DEVICE", "idle");
    find_driver(&mut command, folder);
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::shown;

    #[test]
    fn tests_find_the_idle_driver_and_keep_its_kernels_apart() {
        let arguments = Arguments { filter: "small_models".into() };
        let command = idle_tests(Path::new("integration"), &arguments, Path::new("idle"));
        assert_eq!(
            shown(&command),
            "BLACKBURN_REQUIRE_DEVICE=idle CUBECL_ENVIRONMENT=idle CUDA_PATH=idle LD_LIBRARY_PATH=idle integration \
             small_models"
        );
    }
}
