//! `gpt`: a GPT-2 style language model of standard Burn modules that trains on real text.

mod bars;
mod checkpoint;
mod cli;
mod corpus;
mod data;
mod evaluation;
mod export;
mod failure;
mod loader;
mod memory;
mod metrics;
mod model;
mod picture;
mod plot;
mod profile;
mod progress;
mod run;
mod settings;
mod store;
mod text;
mod tokenizer;
mod trainer;

use anyhow::Result;
use clap::Parser;
use cli::{Cli, Command, EvalArgs, GenerateArgs};
use std::{
    io::{IsTerminal, Write},
    process::ExitCode,
};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    #[cfg(any(feature = "cuda", feature = "vulkan", feature = "webgpu"))]
    blackburn::doctor::work_if_asked();
    let filter = EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| EnvFilter::new("warn,gpt=info,blackburn=info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .without_time()
        .init();
    let cli = Cli::parse();
    let result = failure::catch(|| run(&cli));
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(cli: &Cli) -> Result<ExitCode> {
    match &cli.command {
        Command::Train(args) => {
            let (device, report) = set_up(cli)?;
            trainer::train(args, device, &report)?;
        }
        Command::Generate(args) => generate(args, &set_up(cli)?.0)?,
        Command::Eval(args) => eval(args, &set_up(cli)?.0)?,
        Command::Export(args) => {
            let (device, report) = set_up(cli)?;
            export::export(args, device, &report)?;
        }
        #[cfg(any(feature = "cuda", feature = "vulkan", feature = "webgpu"))]
        Command::Doctor(options) => {
            return Ok(blackburn::doctor::run(cli.device.as_deref(), options));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn set_up(cli: &Cli) -> Result<(burn::tensor::Device, blackburn::Report)> {
    let mut config = blackburn::Config::from_env()?;
    if let Some(device) = &cli.device {
        config.device = device.parse()?;
    }
    let report = blackburn::init_with(config)?;
    Ok((blackburn::device()?, report))
}

fn generate(args: &GenerateArgs, device: &burn::tensor::Device) -> Result<()> {
    let sampling =
        text::Sampling { temperature: args.temperature, top_k: args.top_k, seed: args.seed };
    sampling.validate()?;
    let found = checkpoint::find(&args.checkpoint)?;
    let settings = &found.state.settings;
    let model = found.model_to_read(device)?;
    let tokenizer = tokenizer::Tokenizer::new(settings.tokenizer);
    let mut out = std::io::stdout().lock();
    // A reader that has seen enough (`| head`) is no failure, and neither is it a reason to go on.
    let mut emit = |piece: &str| write!(out, "{piece}").and_then(|()| out.flush()).is_ok();
    if !emit(&args.prompt) {
        return Ok(());
    }
    let author = text::Author {
        model: &model,
        tokenizer: &tokenizer,
        context: settings.model.context,
        attention: args.attention,
        device,
    };
    let writing = author.generate(&args.prompt, args.tokens, sampling, &mut emit)?;
    emit("\n");
    eprintln!("{writing}");
    Ok(())
}

fn eval(args: &EvalArgs, device: &burn::tensor::Device) -> Result<()> {
    let found = checkpoint::find(&args.checkpoint)?;
    let settings = &found.state.settings;
    let model = found.model_to_read(device)?;
    let kept = data_folder(&found.path());
    let others = args.data.extensions.is_some() || args.data.max_data.is_some();
    anyhow::ensure!(
        !args.data.data.is_empty() || !others,
        "--extensions and --max-data choose among --data, which is missing"
    );
    let store = if args.data.data.is_empty() {
        found.state.data.reopen(&kept, settings.tokenizer, &found.state.fingerprint)?
    } else {
        data::DataSettings::resolve(&args.data)?.open(&kept, settings.tokenizer)?
    };
    let most = if args.batches == 0 { usize::MAX } else { args.batches };
    let (batch, context) = (settings.batch, settings.model.context);
    let tokens = if args.all { store.all() } else { store.validation() };
    let kind = settings::AttentionKind::or_fastest(args.attention, settings.precision);
    let attention = model::Attention::new(kind, context, device);
    let how = model::Computation { attention, chunked_loss: false };
    let result = evaluation::evaluate(&model, tokens, batch, context, most, &how, device)?;
    println!(
        "step {}: loss {:.4} nats per token, perplexity {:.2}, over {} tokens",
        found.trainer.step(),
        result.loss,
        result.perplexity(),
        result.tokens
    );
    Ok(())
}

/// The tokens kept with a run, seen from one of its checkpoints.
fn data_folder(checkpoint: &std::path::Path) -> std::path::PathBuf {
    let run = checkpoint.parent().and_then(std::path::Path::parent);
    run.unwrap_or(checkpoint).join("data")
}
