//! `cargo xtask test`: the test suite, on a device of choice.

use crate::command::{self, cargo};
use anyhow::Result;
use clap::ValueEnum;
use std::{num::NonZero, process::Command};

/// Run the tests; kernel tests skip with a reason if their device is missing.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Fail, not skip, if this device is missing. `cuda` runs the integration tests, which are all
    /// that use a GPU, in release and without WebGPU.
    #[arg(long)]
    device: Option<Device>,
    /// Run the integration tests alone, in so many processes at once. The other arguments are theirs
    /// then: a filter, `--log FOLDER`, `--limit-s 540`.
    #[arg(long, value_name = "N")]
    shards: Option<NonZero<usize>>,
    /// Passed on to `cargo test`: `-p CRATE`, a test's name, `-- --nocapture`. Without a package all
    /// of the workspace is tested, or with `cuda` the integration tests.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Device {
    Webgpu,
    Cuda,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    command::run(
        &mut cargo_test(arguments),
        "The output above names the tests; `cargo xtask test NAME -- --nocapture` runs one alone.",
    )
}

fn cargo_test(arguments: &Arguments) -> Command {
    let mut command = cargo();
    command.arg("test");
    let mut own = arguments.arguments.iter().take_while(|argument| *argument != "--");
    let narrowed = arguments.shards.is_some()
        || own.any(|a| a.starts_with("-p") || a.starts_with("--package"));
    if arguments.shards.is_some() {
        command.args(["-p", "blackburn-tests", "--test", "integration"]);
    }
    match arguments.device {
        // Unoptimized, the f64 references take longer than the kernels they judge. The features are
        // those of the other CUDA programs, so that dependencies are built once for all.
        Some(Device::Cuda) => {
            command.env("BLACKBURN_REQUIRE_DEVICE", "cuda").arg("--release");
            if !narrowed {
                command.args(["-p", "blackburn-tests"]);
            }
            command.args(["--no-default-features", "--features", "cuda"]);
        }
        device => {
            if matches!(device, Some(Device::Webgpu)) {
                command.env("BLACKBURN_REQUIRE_DEVICE", "webgpu");
            }
            if !narrowed {
                command.arg("--workspace");
            }
        }
    }
    match arguments.shards {
        None => command.args(&arguments.arguments),
        Some(shards) => command
            .args(["--", "--shards", &shards.to_string()])
            .args(arguments.arguments.iter().filter(|argument| *argument != "--")),
    };
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::shown;

    fn command(device: Option<Device>, arguments: &[&str]) -> String {
        let arguments = arguments.iter().map(ToString::to_string).collect();
        shown(&cargo_test(&Arguments { device, shards: None, arguments }))
    }

    #[test]
    fn in_shards_the_other_arguments_are_the_tests_own() {
        let arguments = ["gelu", "--limit-s", "9"].map(String::from).to_vec();
        let device = Some(Device::Webgpu);
        assert_eq!(
            shown(&cargo_test(&Arguments { device, shards: NonZero::new(2), arguments })),
            "BLACKBURN_REQUIRE_DEVICE=webgpu cargo test -p blackburn-tests --test integration \
             -- --shards 2 gelu --limit-s 9"
        );
    }

    #[test]
    fn by_default_the_whole_workspace_is_tested() {
        assert_eq!(command(None, &[]), "cargo test --workspace");
        let filtered = command(Some(Device::Webgpu), &["softmax", "--", "-p"]);
        assert_eq!(
            filtered,
            "BLACKBURN_REQUIRE_DEVICE=webgpu cargo test --workspace softmax -- -p"
        );
    }

    #[test]
    fn a_package_narrows_the_run() {
        assert_eq!(command(None, &["-p", "xtask"]), "cargo test -p xtask");
    }

    #[test]
    fn cuda_brings_its_feature_and_optimization() {
        assert_eq!(
            command(Some(Device::Cuda), &[]),
            "BLACKBURN_REQUIRE_DEVICE=cuda cargo test --release -p blackburn-tests \
             --no-default-features --features cuda"
        );
    }
}
