//! `cargo xtask bench`: the criterion benches, one file an op, and the sweep over Burn's operations.

use crate::command::{self, cargo};
use anyhow::Result;
use std::process::Command;

/// What times every operation of Burn, instead of one op of ours: a program of its own.
const SWEEP: &str = "ops";

/// Run the benches of one op, or of all.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The op, by its file's name in benches/, or `ops` for every operation of Burn [default: all files].
    op: Option<String>,
    /// Features of blackburn-benches, such as `cuda`.
    #[arg(long, value_delimiter = ',')]
    features: Vec<String>,
    /// Passed on to criterion: a filter, `--save-baseline NAME`. With `ops` to `ops_sweep`, which `--help` explains.
    #[arg(last = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if arguments.op.as_deref() == Some(SWEEP) {
        let advice = "The table above says which operations failed, and why.";
        return command::run(&mut cargo_sweep(arguments), advice);
    }
    command::run(
        &mut cargo_bench(arguments),
        "A bench verifies a kernel before it times it: the output above says which step failed.",
    )
}

fn cargo_sweep(arguments: &Arguments) -> Command {
    let mut command = cargo();
    command.args(["run", "--release", "-p", "blackburn-benches", "--bin", "ops_sweep"]);
    add_features(&mut command, arguments);
    if !arguments.arguments.is_empty() {
        command.arg("--").args(&arguments.arguments);
    }
    command
}

fn add_features(command: &mut Command, arguments: &Arguments) {
    if !arguments.features.is_empty() {
        command.args(["--features", &arguments.features.join(",")]);
    }
}

fn cargo_bench(arguments: &Arguments) -> Command {
    let mut command = cargo();
    command.args(["bench", "-p", "blackburn-benches"]);
    add_features(&mut command, arguments);
    // Without an op, every bench target; `*` leaves out the library's own harness, which refuses
    // criterion's options.
    command.args(["--bench", arguments.op.as_deref().unwrap_or("*")]);
    if !arguments.arguments.is_empty() {
        command.arg("--").args(&arguments.arguments);
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::shown;

    #[test]
    fn an_op_a_feature_and_options_reach_cargo() {
        let arguments = Arguments {
            op: Some("matmul".into()),
            features: vec!["cuda".into()],
            arguments: vec!["--save-baseline".into(), "main".into()],
        };
        assert_eq!(
            shown(&cargo_bench(&arguments)),
            "cargo bench -p blackburn-benches --features cuda --bench matmul -- --save-baseline main"
        );
    }

    #[test]
    fn every_operation_is_a_program_of_its_own() {
        let arguments = Arguments {
            op: Some("ops".into()),
            features: vec!["cuda".into()],
            arguments: vec!["--sizes".into(), "small".into()],
        };
        assert_eq!(
            shown(&cargo_sweep(&arguments)),
            "cargo run --release -p blackburn-benches --bin ops_sweep --features cuda -- --sizes small"
        );
    }

    #[test]
    fn without_an_op_every_bench_runs_and_no_other_target() {
        let arguments = Arguments { op: None, features: vec![], arguments: vec![] };
        assert_eq!(shown(&cargo_bench(&arguments)), "cargo bench -p blackburn-benches --bench '*'");
    }
}
