//! `resnet`: residual networks of standard Burn modules that train on folders of images.

mod cli;
mod data;
mod evaluation;
mod metrics;
mod model;
mod pictures;
mod predict;
mod run;
mod settings;
mod speed;
mod train;
mod training;
mod weights;

use anyhow::Result;
use blackburn::distributed::Group;
use clap::Parser;
use cli::{Cli, Command};
use std::process::ExitCode;

fn main() -> ExitCode {
    // A trainer's report has a line for each of up to two hundred layers.
    example_program::log("warn,resnet=info,blackburn=info,blackburn_train::trainer=warn");
    let cli = Cli::parse();
    const SMALLER: &str = "a smaller --batch with a larger --accumulate, or a smaller --size";
    example_program::ended(example_program::catch(SMALLER, || run(&cli)))
}

fn run(cli: &Cli) -> Result<ExitCode> {
    let gpus = match &cli.command {
        Command::Train(args) => args.gpus,
        // One process does it, whoever has started it.
        _ => return compute(cli, &Group::alone()).map(|()| ExitCode::SUCCESS),
    };
    example_program::on_ranks(gpus, |group| compute(cli, group))
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
