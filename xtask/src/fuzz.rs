//! `cargo xtask fuzz`: random shapes of an operation against the f64 reference.

use crate::command::{self, cargo, root};
use anyhow::Result;
use clap::ValueEnum;
use std::process::Command;

/// Draw random shapes, layouts, types and options of an operation, and compare what the device computes with the
/// f64 reference. A case that fails is told with its seed and index, and made smaller.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The operation, or `all`; `cargo xtask fuzz all -- --help` names them.
    op: String,
    /// How many cases to draw of each operation.
    #[arg(long, default_value_t = 1000)]
    cases: u64,
    /// What cases are drawn from: the same seed draws the same cases. By default another one each time.
    #[arg(long)]
    seed: Option<u64>,
    /// The device: `cuda` builds in release, which takes long the first time.
    #[arg(long, value_enum, default_value_t = Device::Webgpu)]
    device: Device,
    /// Append what came out to benches/results/fuzz.tsv, whether it failed or not.
    #[arg(long)]
    record: bool,
    /// More options of the program: `--case K` runs one case alone, `--plant` shows that faults are found.
    #[arg(last = true)]
    more: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Device {
    Webgpu,
    Cuda,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let commit = match arguments.record {
        true => Some(command::commit()?),
        false => None,
    };
    command::run(
        &mut fuzz(arguments, commit.as_deref()),
        "The output above has the cases that are wrong, and how to run each again.",
    )
}

/// The integration tests' executable, which draws shapes when it is told to.
fn fuzz(arguments: &Arguments, commit: Option<&str>) -> Command {
    let mut command = cargo();
    command.arg("test");
    let device = match arguments.device {
        Device::Webgpu => "webgpu",
        Device::Cuda => {
            command.args(["--release", "--features", "blackburn-tests/cuda"]);
            "cuda"
        }
    };
    command.args(["-p", "blackburn-tests", "--test", "integration", "--"]);
    command.args(["--fuzz", &arguments.op, "--device", device]);
    command.args(["--cases", &arguments.cases.to_string()]);
    if let Some(seed) = arguments.seed {
        command.args(["--seed", &seed.to_string()]);
    }
    if let Some(commit) = commit {
        command.arg("--record").arg(root().join("benches/results/fuzz.tsv"));
        command.args(["--commit", commit]);
    }
    command.args(&arguments.more);
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::shown;

    fn arguments(device: Device) -> Arguments {
        let more = vec!["--case".into(), "5".into()];
        Arguments { op: "matmul".into(), cases: 100, seed: Some(7), device, record: false, more }
    }

    #[test]
    fn the_tests_executable_draws_the_shapes() {
        assert_eq!(
            shown(&fuzz(&arguments(Device::Webgpu), None)),
            "cargo test -p blackburn-tests --test integration -- --fuzz matmul --device webgpu \
             --cases 100 --seed 7 --case 5"
        );
    }

    #[test]
    fn cuda_brings_its_feature_and_optimization() {
        let shown = shown(&fuzz(&arguments(Device::Cuda), None));
        assert!(shown.starts_with("cargo test --release --features blackburn-tests/cuda -p"));
    }

    #[test]
    fn a_record_has_its_commit() {
        let recorded =
            fuzz(&Arguments { more: Vec::new(), ..arguments(Device::Webgpu) }, Some("abc1234"));
        let shown = shown(&recorded);
        assert!(shown.ends_with("--record benches/results/fuzz.tsv --commit abc1234"), "{shown}");
    }
}
