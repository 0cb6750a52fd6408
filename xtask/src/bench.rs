//! `cargo xtask bench`: the criterion benches, one file an op; the sweep over Burn's operations; and the runner, which
//! measures both and whole models beside their peers.

use crate::{
    bench_pack,
    command::{self, cargo},
};
use anyhow::{Result, bail};
use blackburn_bench::plan::{BENCHES, Dtype, Group, Size};
use clap::ValueEnum;
use std::{path::Path, process::Command};

/// What times every operation of Burn, instead of one op of ours: a program of its own.
const SWEEP: &str = "ops";

/// Run the benches of some ops, or of all; or measure beside peers, and write rows of benches/results.
///
/// Criterion benches print what they measure. With an option in front of `--`, or for a group without a bench of its
/// name, a runner measures ours and the peers in turns on an NVIDIA GPU: `target/bench/bench`, which is built and packed
/// first. It writes target/bench-run/rows.tsv.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Ops by their files' names in benches/, `ops` for every operation of Burn, or groups of the runner: `models`,
    /// `matmul`, `attention`, `conv`, `kernels`, `ops` [default: all files; of the runner, all groups].
    what: Vec<String>,
    /// Features of the programs, such as `cuda`; the runner has them built with `cuda`.
    #[arg(long, value_delimiter = ',')]
    features: Vec<String>,
    #[command(flatten)]
    runner: Runner,
    /// Passed on to criterion: a filter, `--save-baseline NAME`. With `ops` to `ops_sweep`, and otherwise to the runner,
    /// which `--help` explains.
    #[arg(last = true)]
    arguments: Vec<String>,
}

/// What only the runner knows.
#[derive(Default, clap::Args)]
#[command(next_help_heading = "Options of the runner")]
struct Runner {
    /// The fewest shapes, and one round.
    #[arg(long)]
    quick: bool,
    /// Sizes of tensors, where a program knows them.
    #[arg(long, value_enum, value_delimiter = ',')]
    sizes: Vec<Size>,
    /// What is computed in, where a program knows it.
    #[arg(long, value_enum, value_delimiter = ',')]
    dtypes: Vec<Dtype>,
    /// How often both sides run; the median counts.
    #[arg(long)]
    rounds: Option<u16>,
    /// Seconds for all.
    #[arg(long, value_name = "SECONDS")]
    budget_s: Option<u64>,
    /// Warn of rows that are 10 % slower than the device's stored ones, and fail at 25 %.
    #[arg(long)]
    compare: bool,
    /// Draw bars beside the peers and a roofline.
    #[arg(long)]
    draw: bool,
}

impl Runner {
    /// As the runner has them.
    fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        for (is_set, name) in
            [(self.quick, "--quick"), (self.compare, "--compare"), (self.draw, "--draw")]
        {
            words.extend(is_set.then(|| name.to_owned()));
        }
        let lists = [("--sizes", named(&self.sizes)), ("--dtypes", named(&self.dtypes))];
        for (name, list) in lists.into_iter().filter(|(_, list)| !list.is_empty()) {
            words.extend([name.to_owned(), list.join(",")]);
        }
        let numbers = [
            ("--rounds", self.rounds.map(|rounds| rounds.to_string())),
            ("--budget-s", self.budget_s.map(|seconds| seconds.to_string())),
        ];
        for (name, number) in numbers {
            words.extend(number.into_iter().flat_map(|number| [name.to_owned(), number]));
        }
        words
    }
}

fn named(values: &[impl ValueEnum]) -> Vec<String> {
    let names = values.iter().filter_map(ValueEnum::to_possible_value);
    names.map(|value| value.get_name().to_owned()).collect()
}

/// What measures.
#[derive(Debug, PartialEq)]
enum Way {
    Criterion,
    Sweep,
    Runner,
}

impl Arguments {
    fn way(&self) -> Result<Way> {
        let is_bench = |name: &str| BENCHES.iter().any(|(bench, _)| *bench == name);
        let is_group = |name: &str| Group::from_str(name, false).is_ok();
        if let Some(unknown) = self.what.iter().find(|name| !is_bench(name) && !is_group(name)) {
            bail!(
                "`{unknown}` is neither a file of benches/benches ({}) nor a group ({})",
                BENCHES.map(|(bench, _)| bench).join(", "),
                named(Group::value_variants()).join(", ")
            );
        }
        let is_alone = self.what == [SWEEP];
        Ok(if !self.runner.words().is_empty() {
            Way::Runner
        } else if is_alone {
            Way::Sweep
        } else if self.what.iter().all(|name| is_bench(name)) {
            Way::Criterion
        } else {
            Way::Runner
        })
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    match arguments.way()? {
        Way::Sweep => {
            let advice = "The table above says which operations failed, and why.";
            command::run(&mut cargo_sweep(arguments), advice)
        }
        Way::Criterion => command::run(
            &mut cargo_bench(arguments),
            "A bench verifies a kernel before it times it: the output above says which step failed.",
        ),
        Way::Runner => {
            let folder = command::target_dir().join("bench");
            let (groups, benches) = chosen(&arguments.what);
            let features = match arguments.features.is_empty() {
                true => "cuda".to_owned(),
                false => arguments.features.join(","),
            };
            bench_pack::pack(&folder, &groups, &benches, &features)?;
            command::run(
                &mut runner(arguments, &folder),
                "It failed, measured only in part, or became too slow: the lines above say which.",
            )
        }
    }
}

/// Groups, and benches that are no groups; all groups for nothing.
fn chosen(what: &[String]) -> (Vec<Group>, Vec<String>) {
    let (mut groups, mut benches) = (Vec::new(), Vec::new());
    for name in what {
        match Group::from_str(name, false) {
            Ok(group) => groups.push(group),
            Err(_) => benches.push(name.clone()),
        }
    }
    if what.is_empty() {
        groups = Group::value_variants().to_vec();
    }
    (groups, benches)
}

fn runner(arguments: &Arguments, folder: &Path) -> Command {
    let mut command = command::program(folder.join("bench"));
    command.arg("run").args(&arguments.what).args(arguments.runner.words());
    let names_folder = arguments.arguments.iter().any(|word| word.starts_with("--out"));
    if !names_folder {
        command.arg("--out").arg(command::target_dir().join("bench-run"));
    }
    command.args(&arguments.arguments);
    command
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
    for name in &arguments.what {
        command.args(["--bench", name]);
    }
    if arguments.what.is_empty() {
        command.args(["--bench", "*"]);
    }
    if !arguments.arguments.is_empty() {
        command.arg("--").args(&arguments.arguments);
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::shown;

    fn arguments(what: &[&str], features: &[&str], arguments: &[&str]) -> Arguments {
        let [what, features, arguments] = [what, features, arguments]
            .map(|words| words.iter().map(|word| (*word).to_owned()).collect());
        Arguments { what, features, runner: Runner::default(), arguments }
    }

    #[test]
    fn an_op_a_feature_and_options_reach_cargo() {
        let arguments = arguments(&["matmul"], &["cuda"], &["--save-baseline", "main"]);
        assert_eq!(arguments.way().unwrap(), Way::Criterion);
        assert_eq!(
            shown(&cargo_bench(&arguments)),
            "cargo bench -p blackburn-benches --features cuda --bench matmul -- --save-baseline main"
        );
    }

    #[test]
    fn every_operation_is_a_program_of_its_own() {
        let arguments = arguments(&["ops"], &["cuda"], &["--sizes", "small"]);
        assert_eq!(arguments.way().unwrap(), Way::Sweep);
        assert_eq!(
            shown(&cargo_sweep(&arguments)),
            "cargo run --release -p blackburn-benches --bin ops_sweep --features cuda -- --sizes small"
        );
    }

    #[test]
    fn without_an_op_every_bench_runs_and_no_other_target() {
        let arguments = arguments(&[], &[], &[]);
        assert_eq!(arguments.way().unwrap(), Way::Criterion);
        assert_eq!(shown(&cargo_bench(&arguments)), "cargo bench -p blackburn-benches --bench '*'");
    }

    #[test]
    fn groups_and_options_are_the_runners() {
        for group in ["models", "conv", "attention", "kernels"] {
            assert_eq!(arguments(&[group], &[], &[]).way().unwrap(), Way::Runner, "{group}");
        }
        assert_eq!(arguments(&["ops", "gelu"], &[], &[]).way().unwrap(), Way::Runner);
        let quick = Arguments {
            runner: Runner {
                quick: true,
                sizes: vec![Size::Small, Size::Large],
                dtypes: vec![Dtype::Bf16],
                rounds: Some(2),
                compare: true,
                ..Runner::default()
            },
            ..arguments(&["ops", "softmax"], &[], &["--text", "words.txt"])
        };
        assert_eq!(quick.way().unwrap(), Way::Runner);
        assert_eq!(
            shown(&runner(&quick, Path::new("/x"))),
            "/x/bench run ops softmax --quick --compare --sizes small,large --dtypes bf16 --rounds 2 --out \
             target/bench-run --text words.txt"
        );
        assert_eq!(chosen(&quick.what), (vec![Group::Ops], vec!["softmax".to_owned()]));
        assert_eq!(chosen(&[]).0.len(), Group::value_variants().len());
    }

    #[test]
    fn an_unknown_name_is_refused_with_those_that_there_are() {
        let error = arguments(&["sofmax"], &[], &[]).way().unwrap_err().to_string();
        assert!(error.starts_with("`sofmax` is neither a file of benches/benches (layer_norm, "));
        assert!(error.ends_with("nor a group (models, matmul, attention, conv, kernels, ops)"));
    }
}
