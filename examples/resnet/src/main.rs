//! `resnet`: residual networks of standard Burn modules that train on folders of images.

mod cli;
mod data;
mod evaluation;
mod failure;
mod metrics;
mod model;
mod pictures;
mod predict;
mod progress;
mod run;
mod settings;
mod speed;
mod train;
mod training;
mod weights;

use anyhow::Result;
use blackburn::distributed::{self, Group, GroupConfig, Started, World};
use clap::Parser;
use cli::{Cli, Command};
use std::{io::IsTerminal, process::ExitCode};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    // A trainer's report has a line for each of up to two hundred layers.
    let default = match World::is_silent() {
        true => "error",
        false => "warn,resnet=info,blackburn=info,blackburn_train::trainer=warn",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .without_time()
        .init();
    let cli = Cli::parse();
    match failure::catch(|| run(&cli)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<ExitCode> {
    let group = match &cli.command {
        Command::Train(args) => match distributed::start(args.gpus, &GroupConfig::default())? {
            Started::Rank(group) => group,
            Started::Ended(code) => return Ok(ExitCode::from(code)),
        },
        _ => Group::alone(),
    };
    let done = compute(cli, &group);
    if let Err(error) = &done {
        group.fail(&format!("{error:#}"));
    }
    done.map(|()| ExitCode::SUCCESS)
}

fn compute(cli: &Cli, group: &Group) -> Result<()> {
    if let Command::Data(args) = &cli.command {
        return predict::load(args);
    }
    let mut config = blackburn::Config::from_env()?;
    if let Some(device) = &cli.device {
        config.device = device.parse()?;
    }
    let report = blackburn::init_with(config.with_group(group))?;
    let device = blackburn::device()?;
    match &cli.command {
        Command::Train(args) => train::train(args, &device, &report, group),
        Command::Eval(args) => predict::eval(args, &device),
        Command::Predict(args) => predict::predict(args, &device),
        Command::Speed(args) => speed::speed(args, &device),
        Command::Data(_) => unreachable!("it needs no device and was done above"),
    }
}
