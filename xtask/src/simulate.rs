//! `cargo xtask simulate`: our launchers on simulated GPUs.

use crate::{
    command::{self, cargo},
    sass::Toolkit,
};
use anyhow::Result;
use std::{num::NonZero, path::PathBuf, process::Command};

/// Run launchers on simulated GPUs: their PTX is interpreted, and races, deadlocks and accesses that nobody
/// allowed are reported.
///
/// No GPU is needed. NVRTC comes from `PyPI` (about 140 MB with the other compilers, once), or from the folder
/// that `CUDA_WHEELS` or `CUDA_PATH` names.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Also the cases that take longer.
    #[arg(long)]
    all: bool,
    /// Schedules to run each launch under: copies and products land at once, as late as possible, and at
    /// random.
    #[arg(long, value_name = "N", default_value = "3")]
    schedules: NonZero<u64>,
    /// Plant faults in the PTX instead, each at up to N places of a kernel, and tell which of them nobody
    /// noticed. Every launch of the kernel by any case may notice it.
    #[arg(long, value_name = "N")]
    mutations: Option<NonZero<u64>>,
    /// Write each launch there, with the memory before and after it, to be compared with a GPU.
    #[arg(long, value_name = "DIR")]
    dump: Option<PathBuf>,
    /// Only cases whose name contains this.
    filter: Option<String>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let toolkit = Toolkit::locate()?;
    let mut command = simulated(arguments);
    command::run(
        command.env("CUDA_WHEELS", &toolkit.root),
        "The output above names the cases; `cargo xtask simulate NAME` runs one alone.",
    )
}

fn simulated(arguments: &Arguments) -> Command {
    let mut command = cargo();
    command
        // The build of `cargo test --workspace`, which has the recorder.
        .args(["test", "--workspace", "--test", "simulated", "--"])
        .args(&arguments.filter)
        .env("BLACKBURN_REQUIRE_SIMULATOR", "1")
        .env("BLACKBURN_SIMULATE_SCHEDULES", arguments.schedules.to_string());
    if arguments.all {
        command.env("BLACKBURN_SIMULATE_ALL", "1");
    }
    if let Some(places) = arguments.mutations {
        command.env("BLACKBURN_SIMULATE_MUTATIONS", places.to_string());
    }
    if let Some(folder) = &arguments.dump {
        command.env("BLACKBURN_SIMULATE_DUMP", command::root().join(folder));
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::shown;

    #[test]
    fn cases_are_a_test_target_of_the_kernels() {
        let arguments = Arguments {
            all: true,
            schedules: NonZero::new(7).unwrap(),
            mutations: None,
            dump: None,
            filter: Some("matmul".into()),
        };
        let command = simulated(&arguments);
        assert_eq!(
            shown(&command),
            "BLACKBURN_REQUIRE_SIMULATOR=1 BLACKBURN_SIMULATE_ALL=1 BLACKBURN_SIMULATE_SCHEDULES=7 cargo \
             test --workspace --test simulated -- matmul"
        );
    }
}
