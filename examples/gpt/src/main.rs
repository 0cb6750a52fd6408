//! `gpt`: a GPT-2 style language model of standard Burn modules that trains on real text.

mod bars;
mod checkpoint;
mod cli;
mod corpus;
mod data;
mod evaluation;
mod export;
mod llama;
mod loader;
mod memory;
mod metrics;
mod model;
mod picture;
mod plot;
mod presets;
mod profile;
mod run;
mod settings;
mod store;
mod text;
mod tokenizer;
mod trainer;

use anyhow::Result;
use blackburn::distributed::Group;
use clap::Parser;
use cli::{Cli, Command, EvalArgs, GenerateArgs};
use std::{io::Write, process::ExitCode};

fn main() -> ExitCode {
    #[cfg(any(feature = "cuda", feature = "vulkan", feature = "webgpu"))]
    blackburn::doctor::work_if_asked();
    example_program::log("warn,gpt=info,blackburn=info");
    let cli = Cli::parse();
    const SMALLER: &str = "a smaller --batch with a larger --accumulate, or a smaller --context";
    example_program::ended(example_program::catch(SMALLER, || run(&cli)))
}

fn run(cli: &Cli) -> Result<ExitCode> {
    match &cli.command {
        Command::Train(args) => example_program::on_ranks(args.gpus, |group| {
            let (device, report) = set_up(cli, group)?;
            trainer::train(args, device, &report, group)
        }),
        #[cfg(any(feature = "cuda", feature = "vulkan", feature = "webgpu"))]
        Command::Doctor(options) => Ok(blackburn::doctor::run(cli.device.as_deref(), options)),
        // One process does the others, whoever has started it.
        Command::Generate(args) => generate(args, &alone(cli)?.0).map(|()| ExitCode::SUCCESS),
        Command::Eval(args) => eval(args, &alone(cli)?.0).map(|()| ExitCode::SUCCESS),
        Command::Export(args) => {
            let (device, report) = alone(cli)?;
            export::export(args, device, &report).map(|()| ExitCode::SUCCESS)
        }
    }
}

fn alone(cli: &Cli) -> Result<(burn::tensor::Device, blackburn::Report)> {
    set_up(cli, &Group::alone())
}

fn set_up(cli: &Cli, group: &Group) -> Result<(burn::tensor::Device, blackburn::Report)> {
    let mut config = blackburn::Config::from_env()?;
    if let Some(device) = &cli.device {
        config.device = device.parse()?;
    }
    let report = blackburn::init_with(config.with_group(group))?;
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
        attention: settings.attention(Some(args.attention), device)?,
        graph: args.graph.unwrap_or(true),
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
    let kind = settings.attention(args.attention, device)?;
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
