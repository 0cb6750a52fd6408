//! `cargo xtask stream`: what Burn's fusion makes of a model's steps, seen without a GPU.

use crate::{
    command::{self, cargo},
    gpu, host,
};
use anyhow::{Context, Result, ensure};
use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    io::{BufRead, BufReader},
    process::Stdio,
};

/// List the operations of models that no fusion takes, on a CUDA driver that does nothing.
///
/// Burn runs such an operation by itself, on a kernel of its own. Where it finds no order for what fusions took, it runs a
/// whole stretch so, products and convolutions included. No GPU and no CUDA is needed, but Linux. Steps are few and times
/// mean nothing.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// What `model_sweep` takes, such as `--models unet --modules burn`.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    sweep: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let folder = host::idle_driver()?;
    let mut build = cargo();
    build.args(["build", "--release", "-p", "blackburn-benches", "--no-default-features"]);
    build.args(["--features", "cuda", "--bin", "model_sweep"]);
    let built = gpu::built(&mut build, "bin", "", "The output above says why.")?;
    let (_, sweep) = built.first().context("Cargo has built no model_sweep")?;
    let mut command = command::program(sweep);
    command.args(&arguments.sweep).args(["--rounds", "1"]).env("BURN_FUSION_LOG", "full");
    host::find_driver(&mut command, &folder);
    eprintln!("$ {}", command::shown(&command));
    let mut child = command.stderr(Stdio::piped()).spawn().context("start model_sweep")?;
    let log = child.stderr.take().context("model_sweep's standard error")?;
    let mut found = Found::default();
    // Errors are the last that it says.
    let mut last = VecDeque::new();
    for line in BufReader::new(log).split(b'\n') {
        let line = line.context("read what model_sweep says")?;
        let line = String::from_utf8_lossy(&line).into_owned();
        found.read(&line);
        last.push_back(line);
        if last.len() > LAST_LINES {
            last.pop_front();
        }
    }
    let status = child.wait().context("wait for model_sweep")?;
    let last = Vec::from(last).join("\n");
    ensure!(status.success(), "model_sweep failed ({status}). It ended with:\n{last}");
    println!("{found}");
    Ok(())
}

/// Lines that are shown of a failure.
const LAST_LINES: usize = 8;

/// Operations that launch nothing, or that Blackburn adds and fuses by itself.
const SILENT: [&str; 8] =
    ["Reshape", "SwapDims", "Permute", "Expand", "Drop", "Custom", "Empty", "InitOperationIr"];

/// What the log of Burn's fusion tells.
#[derive(Debug, Default, PartialEq, Eq)]
struct Found {
    /// Stretches without an order.
    unordered: usize,
    /// How often which operations ran by themselves, with what they read and made.
    alone: BTreeMap<String, usize>,
    /// Whether the lines that follow are of operations that run so.
    is_alone: bool,
}

impl Found {
    fn read(&mut self, line: &str) {
        self.unordered += usize::from(line.starts_with("[repair]"));
        // A row of a table: a number, a block if one begins there, an operation, and its tensors.
        let row = line.trim_start();
        let rest = row.trim_start_matches(|digit: char| digit.is_ascii_digit());
        if rest.len() == row.len() {
            self.is_alone = false;
            return;
        }
        let mut operation = rest.trim_start();
        if let Some(block) = operation.strip_prefix('▸') {
            self.is_alone = block.trim_start().starts_with("un-fused");
            operation = block.split_once(')').map_or("", |(_, operation)| operation);
        }
        let words: Vec<_> = operation.split_whitespace().map(without_number).collect();
        let name = words.first().and_then(|name| name.rsplit("::").next()).unwrap_or_default();
        if self.is_alone && !name.is_empty() && !SILENT.contains(&name) {
            *self.alone.entry(words.join(" ")).or_default() += 1;
        }
    }
}

/// A tensor without the number that the log gives it.
fn without_number(word: &str) -> &str {
    match word.split_once(':') {
        Some((name, tensor)) if name.starts_with('t') && !tensor.starts_with(':') => tensor,
        _ => word,
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} stretches that ran unfused for want of an order", self.unordered)?;
        writeln!(f, "Operations by themselves, in all steps: times, what is read, and made last")?;
        let mut all: Vec<_> = self.alone.iter().collect();
        all.sort_by_key(|(_, times)| std::cmp::Reverse(**times));
        all.into_iter().try_for_each(|(operation, times)| writeln!(f, "{times:6}  {operation}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
[repair] falling back to unfused stream order (2 ops)
fusion trace (5 ops, 3 blocks)
idx  block                                op                  inputs                outputs
---  -----------------------------------  ------------------  --------------------  ------------
0    ▸ fused ElementWise (score=2, 2 ops)  NumericFloat::Add  t1:f32[2], t2:f32[2]  t3:f32[2]
1                                          NumericFloat::Mul  t3:f32[2], t3:f32[2]  t4:f32[2]
2    ▸ un-fused (2 ops)                    Float::Tanh        t4:f32[2]             t5:f32[2]
3                                          BaseFloat::Reshape  t5:f32[2]            t6:f32[1,2]
[explorer] explore (lazy): 1 deferred of 1 queued
4    of no table                           Float::Exp         t4:f32[2]             t5:f32[2]
10   ▸ un-fused (1 op)                     Float::Tanh        t7:f32[2]             t8:f32[2]
";

    #[test]
    fn operations_by_themselves_are_counted_without_views() {
        let mut found = Found::default();
        LOG.lines().for_each(|line| found.read(line));
        assert_eq!(found.unordered, 1);
        assert_eq!(found.alone, BTreeMap::from([("Float::Tanh f32[2] f32[2]".into(), 2)]));
        assert!(found.to_string().contains("     2  Float::Tanh f32[2] f32[2]\n"), "{found}");
    }
}
