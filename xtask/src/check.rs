//! `cargo xtask check`: everything that can be said without running a test, cheapest first.

use crate::{
    chart,
    command::{self, cargo, program},
    figures, house_rules, tools,
};
use anyhow::{Context, Result};
use std::time::Instant;

/// Format, spelling, house rules, figures, clippy and documentation, cheapest first.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only what needs no compilation: format, spelling, house rules and figures.
    #[arg(long)]
    fast: bool,
}

type Step = (&'static str, fn() -> Result<()>);

const FAST: [Step; 4] = [
    ("format", format),
    ("spelling", spelling),
    ("house rules", rules),
    ("figures of README and book", measured),
];
const COMPILED: [Step; 3] = [
    ("clippy, all features", clippy_all_features),
    ("clippy, default features", clippy_default_features),
    ("documentation", documentation),
];

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let compiled = if arguments.fast { &[][..] } else { &COMPILED };
    for (name, step) in FAST.iter().chain(compiled) {
        let start = Instant::now();
        step().with_context(|| format!("check: {name}"))?;
        eprintln!("{name}: ok ({:.1} s)", start.elapsed().as_secs_f32());
    }
    Ok(())
}

fn format() -> Result<()> {
    let advice = "`cargo fmt --all` mends it.";
    command::run(cargo().args(["fmt", "--all", "--check"]), advice)?;
    // Not a member of the workspace, so `cargo fmt --all` does not promise to visit it.
    let stand_in = "crates/cubecl-llvm/src/lib.rs";
    command::run(
        program("rustfmt").args(["--check", "--edition", "2024", stand_in]),
        &format!("`rustfmt --edition 2024 {stand_in}` mends it."),
    )
}

fn spelling() -> Result<()> {
    command::run(
        &mut program(tools::typos()?),
        "Correct the words, or list a legitimate name in typos.toml.",
    )
}

fn rules() -> Result<()> {
    house_rules::check(&command::root())
}

/// README and book say what `benches/results` has, in numbers and in charts.
fn measured() -> Result<()> {
    figures::check(&command::root())?;
    chart::check(&command::root())
}

fn clippy_all_features() -> Result<()> {
    clippy(&["--workspace", "--all-targets", "--all-features"])
}

/// The build of somebody without a GPU, where code behind GPU features may leave something unused.
fn clippy_default_features() -> Result<()> {
    clippy(&["-p", "blackburn", "-p", "gpt"])
}

fn clippy(selection: &[&str]) -> Result<()> {
    command::run(
        cargo().arg("clippy").args(selection).args(["--", "-D", "warnings"]),
        "Mend the code, or allow a lint where it stands with a reason.",
    )
}

fn documentation() -> Result<()> {
    command::run(
        cargo()
            .args(["doc", "--workspace", "--no-deps", "--all-features"])
            .env("RUSTDOCFLAGS", "-D warnings"),
        "Mend the documentation comments that rustdoc names.",
    )
}
