//! `cargo xtask gpu`: package binaries for a GPU machine that has CUDA but no Rust.

use crate::{
    bench_pack,
    command::{self, cargo},
};
use anyhow::{Context, Result, bail};
use blackburn_bench::plan::Group;
use clap::ValueEnum;
use serde::Deserialize;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Build CUDA binaries, strip them and put them into target/gpu, ready to copy.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The examples to package.
    #[arg(long = "package", short, value_delimiter = ',', default_value = "gpt")]
    packages: Vec<String>,
    /// Package the integration tests too, as `test-NAME`; `--shards N` runs them in N processes.
    #[arg(long)]
    tests: bool,
    /// Package the benches too, as `bench-NAME`.
    #[arg(long)]
    benches: bool,
    /// Package `bench` and all that it starts and compares with, alone: programs, peers, stored results. Names of its
    /// groups package only what those need.
    #[arg(long, value_name = "GROUPS", num_args = 0.., value_delimiter = ',')]
    bench_runner: Option<Vec<Group>>,
}

/// In front of a bench's name.
pub(crate) const BENCH: &str = "bench-";

/// One line of Cargo's `--message-format=json`, as far as it matters here.
#[derive(Deserialize)]
struct Message {
    reason: String,
    executable: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if let Some(groups) = &arguments.bench_runner {
        return pack_runner(groups);
    }
    let advice = "A CUDA build needs only the crate registry; see the compiler's message above.";
    let mut binaries = Vec::new();
    for package in &arguments.packages {
        let mut build = cargo();
        build.args(["build", "--release", "--features", "cuda", "-p", package]);
        binaries.extend(built(&mut build, "bin", "", advice)?);
    }
    if arguments.tests {
        let mut build = cargo();
        build.args(["test", "--release", "--no-run", "-p", "blackburn-tests"]);
        // Without WebGPU, the default, tests share every dependency with the other programs.
        build.args(["--no-default-features", "--features", "cuda"]);
        binaries.extend(built(&mut build, "test", "test-", advice)?);
    }
    if arguments.benches {
        let mut build = cargo();
        build.args(["bench", "--no-run", "-p", "blackburn-benches", "--features", "cuda"]);
        binaries.extend(built(&mut build, "bench", BENCH, advice)?);
    }
    if binaries.is_empty() {
        bail!("nothing to package: {} have no binary target", arguments.packages.join(", "));
    }
    let folder = command::target_dir().join("gpu");
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    for (name, executable) in &binaries {
        strip(executable, &folder.join(name))?;
    }
    explain(&folder, &binaries);
    Ok(())
}

/// The runner of benchmarks, in the same folder.
fn pack_runner(groups: &[Group]) -> Result<()> {
    let folder = command::target_dir().join("gpu");
    let groups = if groups.is_empty() { Group::value_variants() } else { groups };
    bench_pack::pack(&folder, groups, &[], "cuda")?;
    println!(
        "\nCopy {} to the machine: scp -r {}/* HOST:\n\
         Run there: CUDA_PATH=/usr/local/cuda ./bench run --quick --compare\n\
         PyTorch's side needs a python3 with PyTorch: --python names another. ./bench run --help says more.",
        folder.display(),
        folder.display()
    );
    Ok(())
}

/// Builds, and returns the executables of targets of `kind` by the name they get.
pub(crate) fn built(
    build: &mut Command,
    kind: &str,
    prefix: &str,
    advice: &str,
) -> Result<Vec<(String, PathBuf)>> {
    build.arg("--message-format=json-render-diagnostics");
    let messages = command::stdout_of(build, advice)?;
    let found = executables(&messages, kind)?;
    Ok(found.into_iter().map(|(name, path)| (format!("{prefix}{name}"), path)).collect())
}

pub(crate) fn executables(messages: &str, kind: &str) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    // Other programs that the build starts may print to the same stream.
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Message = serde_json::from_str(line).context("Cargo's JSON messages")?;
        if message.reason != "compiler-artifact" {
            continue;
        }
        if let (Some(path), Some(target)) = (message.executable, message.target)
            && target.kind.iter().any(|k| k == kind)
            // A binary target's unit tests are of kind `bin` as well.
            && (kind != "bin" || message.profile.is_some_and(|profile| !profile.test))
        {
            found.push((target.name, path));
        }
    }
    Ok(found)
}

/// Copies without symbols, which are most of an executable that carries Burn.
pub(crate) fn strip(from: &Path, to: &Path) -> Result<()> {
    let available =
        Command::new("strip").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if available.is_ok_and(|status| status.success()) {
        return command::run(
            command::program("strip").arg("-o").arg(to).arg(from),
            "`strip` (binutils) refused the executable; is it of this machine's kind?",
        );
    }
    eprintln!("`strip` is not installed: {} keeps its symbols", to.display());
    fs::copy(from, to).with_context(|| format!("copy {}", from.display()))?;
    Ok(())
}

fn explain(folder: &Path, binaries: &[(String, PathBuf)]) {
    println!("\nIn {}:", folder.display());
    for (name, _) in binaries {
        let bytes = fs::metadata(folder.join(name)).map_or(0, |metadata| metadata.len());
        println!("  {name} ({:.1} MB)", bytes as f64 / 1e6);
    }
    println!(
        "\nCopy them: scp {}/* HOST:\n\
         Run there: CUDA_PATH=/usr/local/cuda ./{} --help\n\
         The machine needs an NVIDIA driver and, while a program runs, the CUDA toolkit's headers \
         and NVRTC (12.8 or later, or 13): CUDA_PATH names its folder, and LD_LIBRARY_PATH must \
         hold its lib64 if the system does not list it.",
        folder.display(),
        binaries[0].0
    );
    for (name, _) in binaries.iter().filter(|(name, _)| name.starts_with("test-")) {
        println!(
            "All tests, in as many processes as the machine has cores to spare: \
             BLACKBURN_REQUIRE_DEVICE=cuda ./{name} --shards 14 --limit-s 540 --log logs"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGES: &str = r#"
{"reason":"build-script-executed","package_id":"x","linked_libs":[]}
{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"gpt"},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","target":{"kind":["bin"],"name":"gpt"},"profile":{"test":false},"executable":"/t/release/gpt"}
{"reason":"compiler-artifact","target":{"kind":["bin"],"name":"gpt"},"profile":{"test":true},"executable":"/t/release/deps/gpt-1"}
{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"tests"},"profile":{"test":true},"executable":"/t/release/deps/tests-2"}
{"reason":"compiler-artifact","target":{"kind":["test"],"name":"suite"},"profile":{"test":true},"executable":"/t/release/deps/suite-3"}
a line that is not JSON
{"reason":"build-finished","success":true}
"#;

    #[test]
    fn only_the_binary_itself_is_packaged_and_not_its_unit_tests() {
        let found = executables(MESSAGES, "bin").unwrap();
        assert_eq!(found, [("gpt".to_owned(), PathBuf::from("/t/release/gpt"))]);
    }

    #[test]
    fn integration_tests_are_found_and_library_tests_are_not() {
        let found = executables(MESSAGES, "test").unwrap();
        assert_eq!(found, [("suite".to_owned(), PathBuf::from("/t/release/deps/suite-3"))]);
    }

    #[test]
    fn output_that_is_no_message_of_cargo_is_an_error() {
        assert!(executables("{\"reason\":1}", "bin").is_err());
    }
}
