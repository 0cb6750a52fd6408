//! `cargo xtask mutate`: plants faults in kernels and backend, and tells which of them no test notices.
//!
//! All faults are compiled once, into a copy of the workspace: where one is planted, the copy holds the
//! right code and the wrong one, and the variable `BLACKBURN_MUTANT` chooses when a program runs. Each
//! fault then gets a run of its op's tests. A test that fails, crashes or hangs has noticed it.
//!
//! [`faults`] is the table. The sources themselves hold no trace of this.

mod faults;
mod plant;
mod record;
mod run;

use crate::command::{self, cargo};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use faults::{Fault, Suite};
use run::Trials;
use std::{
    env, fs,
    num::NonZero,
    path::{Path, PathBuf},
    thread,
};

/// Plant faults, one at a time, and report those that no test notices.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// What the tests run on. `cuda` plants the faults of the tensor-core families too, and takes a
    /// machine with an NVIDIA GPU, or `--pack`.
    #[arg(long, default_value = "webgpu")]
    device: Device,
    /// Only the faults of these numbers.
    #[arg(long, value_name = "NUMBER", value_delimiter = ',')]
    only: Vec<usize>,
    /// Only list the faults.
    #[arg(long)]
    list: bool,
    /// Build, and put what runs the faults into target/gpu, for a machine without Rust.
    #[arg(long, conflicts_with = "list")]
    pack: bool,
    /// Build nothing: run this executable, which `--pack` has made.
    #[arg(long, value_name = "FILE", conflicts_with = "pack")]
    executable: Option<PathBuf>,
    /// So many faults at a time [default: a core each].
    #[arg(long, value_name = "N")]
    jobs: Option<NonZero<usize>>,
    /// A test that takes longer hangs: it has noticed the fault.
    #[arg(long, value_name = "SECONDS", default_value_t = 240)]
    test_limit_s: u64,
    /// A fault's tests are stopped after so long. What did not run until then is told.
    #[arg(long, value_name = "SECONDS", default_value_t = 1800)]
    limit_s: u64,
    /// Take it that all tests pass without a fault, and do not run them first.
    #[arg(long)]
    tests_are_well: bool,
    /// Run nothing: append the figure of this table, which a packed run has written, to the results.
    #[arg(long, value_name = "TABLE", conflicts_with_all = ["pack", "list"])]
    record: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Device {
    Webgpu,
    Cuda,
}

impl Device {
    fn name(self) -> &'static str {
        match self {
            Self::Webgpu => "webgpu",
            Self::Cuda => "cuda",
        }
    }

    /// The suite that this device's figure stands under in the results.
    fn suite(self) -> Suite {
        match self {
            Self::Webgpu => Suite::Lavapipe,
            Self::Cuda => Suite::TensorCores,
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let suite = arguments.device.suite();
    let all = faults::all();
    let chosen: Vec<&Fault> = all
        .iter()
        .filter(|fault| fault.suite == suite)
        .filter(|fault| arguments.only.is_empty() || arguments.only.contains(&fault.number))
        .collect();
    if chosen.is_empty() {
        bail!("no fault of {suite} has one of the numbers {:?}", arguments.only);
    }
    if arguments.list {
        chosen.iter().for_each(|fault| println!("{fault}"));
        return Ok(());
    }
    if let Some(table) = &arguments.record {
        return record::append(suite, &record::read(table)?);
    }
    let built = match &arguments.executable {
        Some(path) => Built { executable: path.clone(), refused: Vec::new() },
        None => build(&all, arguments.device)?,
    };
    if arguments.pack {
        return pack(&built.executable);
    }
    let refused = |fault: &&Fault| built.refused.contains(&fault.number);
    chosen.iter().copied().filter(refused).for_each(|f| eprintln!("does not compile: {f}"));
    let chosen: Vec<_> = chosen.into_iter().filter(|fault| !refused(fault)).collect();
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let trials = Trials {
        executable: fs::canonicalize(&built.executable)
            .with_context(|| format!("find {}", built.executable.display()))?,
        device: arguments.device.name(),
        jobs: arguments.jobs.map_or(cores, NonZero::get),
        limits_s: [arguments.limit_s, arguments.test_limit_s],
        tests_are_well: arguments.tests_are_well,
    };
    let table = PathBuf::from(format!("mutants-{suite}.tsv"));
    let table = match arguments.executable {
        Some(_) => table,
        None => command::target_dir().join("mutants").join(table),
    };
    let outcomes = trials.run(&chosen, &table)?;
    record::summarize(&outcomes);
    println!("{}", table.display());
    if arguments.only.is_empty() && arguments.executable.is_none() {
        record::append(suite, &outcomes)?;
    }
    Ok(())
}

/// The tests with all faults in them.
struct Built {
    executable: PathBuf,
    /// Faults that the compiler refuses, and that are not in it.
    refused: Vec<usize>,
}

/// Copies the workspace, plants the faults and compiles the tests. Faults that do not compile are named
/// and left out.
fn build(faults: &[Fault], device: Device) -> Result<Built> {
    const ROUNDS: usize = 8;

    let folder = command::target_dir().join("mutants").join("source");
    let mut refused: Vec<usize> = Vec::new();
    for _ in 0..ROUNDS {
        let planted: Vec<&Fault> =
            faults.iter().filter(|fault| !refused.contains(&fault.number)).collect();
        let places = plant::plant(&command::root(), &folder, &planted)?;
        match compile(&folder, device)? {
            Ok(executable) => return Ok(Built { executable, refused }),
            Err(messages) => {
                let new = plant::named_in(&messages, &places);
                if new.is_empty() {
                    bail!("{messages}\nthe copy in {} does not compile", folder.display());
                }
                eprintln!("{messages}\nfaults that do not compile: {new:?}");
                refused.extend(new);
            }
        }
    }
    bail!("faults that do not compile were left out {ROUNDS} times, and there are still some")
}

/// The path of the test executable, or the compiler's messages.
fn compile(folder: &Path, device: Device) -> Result<Result<PathBuf, String>> {
    let mut build = cargo();
    // The copy's dependencies are the workspace's, so they are built once for both.
    build.current_dir(folder).env("CARGO_TARGET_DIR", command::target_dir());
    build.args(["test", "--no-run", "--message-format=json-render-diagnostics"]);
    match device {
        // All packages are named so that dependencies get the features that they have in the tests.
        Device::Webgpu => build.args(["--workspace", "--test", "integration"]),
        Device::Cuda => build.args([
            "--release",
            "-p",
            "blackburn-tests",
            "--test",
            "integration",
            "--no-default-features",
            "--features",
            "cuda",
        ]),
    };
    eprintln!("$ {}", command::shown(&build));
    let output = build.output().context("start cargo")?;
    if !output.status.success() {
        return Ok(Err(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let found = crate::gpu::executables(&messages, "test")?;
    match found.into_iter().find(|(name, _)| name == "integration") {
        Some((_, path)) => Ok(Ok(path)),
        None => bail!("cargo built no executable of the integration tests"),
    }
}

/// Puts the tests and this program side by side.
fn pack(executable: &Path) -> Result<()> {
    let folder = command::target_dir().join("gpu");
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    crate::gpu::strip(executable, &folder.join("mutants"))?;
    crate::gpu::strip(&env::current_exe()?, &folder.join("xtask"))?;
    println!(
        "\nCopy {}/mutants and xtask to the machine, and run there:\n\
         ./xtask mutate --device cuda --executable ./mutants --jobs 12 --tests-are-well\n\
         It writes mutants-{}.tsv. Back here, this appends the figure to the results:\n\
         cargo xtask mutate --device cuda --record FILE",
        folder.display(),
        Suite::TensorCores
    );
    Ok(())
}
