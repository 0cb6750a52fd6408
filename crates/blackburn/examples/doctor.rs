//! Proves the kernels on the GPU at hand: `cargo run --release -p blackburn --example doctor --features cuda,doctor`.

use blackburn::doctor;
use clap::Parser;
use std::process::ExitCode;

/// Runs every kernel on this machine's GPU, on small problems, against a reference in double precision: each family
/// of instructions, operation and type, forward and backward.
///
/// Groups of cases run in processes apart, so that one that hangs or crashes is found and the rest goes on. At the end
/// it prints a table to paste into a report, and keeps the verdicts: programs then use on this GPU what was found
/// right. It succeeds if everything that the GPU has is right.
#[derive(Parser)]
#[command(version)]
struct CommandLine {
    /// The device: auto, cuda, cuda:N, vulkan, vulkan:N or webgpu. Without it, `BLACKBURN_DEVICE` decides, then auto.
    #[arg(long)]
    device: Option<String>,

    #[command(flatten)]
    options: doctor::Options,
}

fn main() -> ExitCode {
    doctor::work_if_asked();
    let CommandLine { device, options } = CommandLine::parse();
    doctor::run(device.as_deref(), &options)
}
