//! `gpt`: a GPT-2 style language model of standard Burn modules that trains on real text.

mod checkpoint;
mod cli;
mod corpus;
mod data;
mod evaluation;
mod loader;
mod memory;
mod metrics;
mod model;
mod plot;
mod progress;
mod run;
mod settings;
mod store;
mod text;
mod tokenizer;
mod trainer;

use anyhow::{Result, anyhow};
use clap::Parser;
use cli::{Cli, Command, EvalArgs, GenerateArgs};
use std::{
    io::Write,
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| EnvFilter::new("warn,gpt=info,blackburn=info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .without_time()
        .init();
    let cli = Cli::parse();
    // Burn and its runtimes report failures of the device by panicking.
    let result = catch_unwind(AssertUnwindSafe(|| run(&cli)))
        .unwrap_or_else(|panic| Err(describe_panic(panic.as_ref())));
    match result {
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
    let report = blackburn::init_with(config)?;
    let device = blackburn::device()?;
    match &cli.command {
        Command::Train(args) => trainer::train(args, device, &report),
        Command::Generate(args) => generate(args, &device),
        Command::Eval(args) => eval(args, &device),
    }
}

fn generate(args: &GenerateArgs, device: &burn::tensor::Device) -> Result<()> {
    let sampling =
        text::Sampling { temperature: args.temperature, top_k: args.top_k, seed: args.seed };
    sampling.validate()?;
    let found = checkpoint::find(&args.checkpoint)?;
    let settings = &found.state.settings;
    let model = found.model(device)?;
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
        device,
    };
    author.generate(&args.prompt, args.tokens, sampling, &mut emit)?;
    emit("\n");
    Ok(())
}

fn eval(args: &EvalArgs, device: &burn::tensor::Device) -> Result<()> {
    let found = checkpoint::find(&args.checkpoint)?;
    let settings = &found.state.settings;
    let model = found.model(device)?;
    let kept = data_folder(&found.path);
    let store = if args.data.data.is_empty() {
        found.state.data.reopen(&kept, settings.tokenizer, &found.state.fingerprint)?
    } else {
        data::DataSettings::resolve(&args.data)?.open(&kept, settings.tokenizer)?
    };
    let most = if args.batches == 0 { usize::MAX } else { args.batches };
    let (batch, context) = (settings.batch, settings.model.context);
    let tokens = if args.all { store.all() } else { store.validation() };
    let result = evaluation::evaluate(&model, tokens, batch, context, most, device)?;
    println!(
        "step {}: loss {:.4} nats per token, perplexity {:.2}, over {} tokens",
        found.state.step,
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

fn describe_panic(panic: &(dyn std::any::Any + Send)) -> anyhow::Error {
    let message = panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
        .unwrap_or_else(|| "the program failed without a message".into());
    let lower = message.to_lowercase();
    if ["out of memory", "out_of_memory", "bufferalloc", "allocation"]
        .iter()
        .any(|s| lower.contains(s))
    {
        return anyhow!(
            "the device ran out of memory. Checkpoints are intact. Use a smaller --batch with a \
             larger --accumulate, or a smaller --context. The runtime said: {}",
            without_backtraces(&message)
        );
    }
    anyhow!(
        "the device or the program failed: {}. Checkpoints are intact",
        without_backtraces(&message)
    )
}

/// CubeCL's messages carry the places where backtraces would be.
fn without_backtraces(message: &str) -> String {
    let lines: Vec<&str> = message
        .lines()
        .map(str::trim)
        .filter(|line| {
            let lower = line.to_lowercase();
            !line.is_empty() && !lower.contains("backtrace") && !lower.ends_with("at:")
        })
        .collect();
    lines.join("; ")
}
