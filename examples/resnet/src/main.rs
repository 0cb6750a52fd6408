//! `resnet`: residual networks of standard Burn modules, and how fast they train.

mod model;
mod speed;

use anyhow::Result;
use clap::{Parser, Subcommand};
use speed::SpeedArgs;
use std::{io::IsTerminal, process::ExitCode};
use tracing_subscriber::EnvFilter;

/// Residual networks of standard Burn modules, and how fast they train.
#[derive(Debug, Parser)]
#[command(name = "resnet", version)]
struct Cli {
    /// Where to compute: auto, cuda, cuda:N, vulkan, vulkan:N, webgpu or flex (the CPU).
    /// Without it, the environment variable `BLACKBURN_DEVICE` decides, then auto.
    #[arg(long, global = true, value_name = "DEVICE")]
    device: Option<String>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Time training steps on random images.
    Speed(SpeedArgs),
}

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| EnvFilter::new("warn,resnet=info,blackburn=info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .without_time()
        .init();
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<()> {
    let mut config = blackburn::Config::from_env()?;
    if let Some(device) = &cli.device {
        config.device = device.parse()?;
    }
    blackburn::init_with(config)?;
    let device = blackburn::device()?;
    match &cli.command {
        Command::Speed(args) => speed::speed(args, &device),
    }
}
