//! The runner of benchmarks in a folder, with all that it needs where there is neither Cargo nor git: the programs that
//! it starts, the peers, stored results, text for GPT-2, and the commit that all of it is of.

use crate::{
    command::{self, cargo, git},
    gpu,
};
use anyhow::{Context, Result};
use blackburn_bench::plan::{Group, bench_program};
use std::{collections::BTreeSet, fs, path::Path};

/// Of the executables, what the group of whole models needs besides.
const GPT: &str = "gpt";
const EXAMPLES: [&str; 2] = [GPT, "resnet"];

/// What has to be built.
#[derive(Debug, Default, PartialEq)]
struct Needed {
    /// Packages of examples.
    examples: Vec<String>,
    /// Programs of `benches/src/bin`.
    sweeps: Vec<String>,
    /// Files of `benches/benches`.
    benches: Vec<String>,
}

impl Needed {
    fn of(groups: &[Group], benches: &[String]) -> Self {
        let programs = groups.iter().flat_map(|group| group.programs());
        let programs: BTreeSet<String> =
            programs.chain(benches.iter().map(|name| bench_program(name))).collect();
        let mut needed = Self::default();
        for program in programs {
            if let Some(bench) = program.strip_prefix(gpu::BENCH) {
                needed.benches.push(bench.to_owned());
            } else if EXAMPLES.contains(&program.as_str()) {
                needed.examples.push(program);
            } else {
                needed.sweeps.push(program);
            }
        }
        needed
    }
}

/// Builds and copies everything that some groups and benches need.
pub(crate) fn pack(
    folder: &Path,
    groups: &[Group],
    benches: &[String],
    features: &str,
) -> Result<()> {
    let advice = "A CUDA build needs only the crate registry; see the compiler's message above.";
    let needed = Needed::of(groups, benches);
    let mut build = cargo();
    build.args(["build", "--release", "-p", "blackburn-bench"]);
    let mut binaries = gpu::built(&mut build, "bin", "", advice)?;
    for package in &needed.examples {
        let mut build = cargo();
        build.args(["build", "--release", "--features", features, "-p", package]);
        binaries.extend(gpu::built(&mut build, "bin", "", advice)?);
    }
    for (names, verb, option, kind, prefix) in [
        (&needed.sweeps, ["build", "--release"], "--bin", "bin", ""),
        (&needed.benches, ["bench", "--no-run"], "--bench", "bench", gpu::BENCH),
    ] {
        if names.is_empty() {
            continue;
        }
        let mut build = cargo();
        build.args(verb).args(["-p", "blackburn-benches", "--features", features]);
        for name in names {
            build.args([option, name]);
        }
        binaries.extend(gpu::built(&mut build, kind, prefix, advice)?);
    }
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    for (name, executable) in &binaries {
        gpu::strip(executable, &folder.join(name))?;
    }
    let root = command::root();
    copy_all(&root.join("benches/peers"), "py", &folder.join("peers"))?;
    copy_all(&root.join("benches/results"), "tsv", &folder.join("results"))?;
    if needed.examples.iter().any(|name| name == GPT) {
        text(&folder.join("text"))?;
    }
    fs::write(folder.join("commit"), command::commit()? + "\n").context("write the commit")
}

/// Files with an extension, into a folder that holds no others then.
fn copy_all(from: &Path, extension: &str, to: &Path) -> Result<()> {
    emptied(to)?;
    for entry in fs::read_dir(from).with_context(|| format!("read {}", from.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default();
        if path.extension().is_some_and(|found| found == extension) {
            fs::copy(&path, to.join(name)).with_context(|| format!("copy {}", path.display()))?;
        }
    }
    Ok(())
}

/// What GPT-2 learns: the project's own sources.
fn text(to: &Path) -> Result<()> {
    emptied(to)?;
    let root = command::root();
    for file in git(&["ls-files", "*.rs"])?.lines() {
        let path = root.join(file);
        // Listed, and removed since.
        if path.is_file() {
            let name = file.replace('/', "-");
            fs::copy(&path, to.join(name)).with_context(|| format!("copy {}", path.display()))?;
        }
    }
    Ok(())
}

fn emptied(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("empty {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use blackburn_bench::plan::BENCHES;
    use clap::ValueEnum;

    /// The names of files in a folder of the workspace, without extensions.
    fn files(folder: &str) -> BTreeSet<String> {
        let entries = fs::read_dir(command::root().join(folder)).unwrap();
        let stem = |path: std::path::PathBuf| path.file_stem().unwrap().to_string_lossy().into();
        entries.map(|entry| stem(entry.unwrap().path())).collect()
    }

    #[test]
    fn programs_are_built_where_they_are() {
        let needed = Needed::of(&[Group::Models, Group::Ops], &["softmax".into()]);
        assert_eq!(needed.examples, ["gpt", "resnet"]);
        assert_eq!(needed.sweeps, ["model_sweep", "ops_sweep"]);
        assert_eq!(needed.benches, ["softmax"]);
    }

    #[test]
    fn every_program_and_bench_of_the_plan_is_there_and_every_bench_is_in_the_plan() {
        let needed = Needed::of(Group::value_variants(), &[]);
        let sweeps = files("benches/src/bin");
        assert!(needed.sweeps.iter().all(|name| sweeps.contains(name)), "{:?}", needed.sweeps);
        let planned: BTreeSet<String> = BENCHES.map(|(name, _)| name.to_owned()).into();
        assert_eq!(planned, files("benches/benches"));
    }

    #[test]
    fn a_folder_holds_nothing_of_an_earlier_package() {
        let folder = std::env::temp_dir().join(format!("bench-pack-{}", std::process::id()));
        let (from, to) = (folder.join("from"), folder.join("to"));
        for path in [from.join("new.py"), from.join("new.txt"), to.join("old.py")] {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        copy_all(&from, "py", &to).unwrap();
        let left = fs::read_dir(&to).unwrap().map(|entry| entry.unwrap().file_name());
        let left: Vec<_> = left.collect();
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(left, ["new.py"]);
    }
}
