//! The command line.

use crate::{
    presets::{Family, Preset},
    settings::{AttentionKind, MastersKind, Precision},
    tokenizer::TokenizerKind,
};
use clap::{Args, Parser, Subcommand};
use example_program::CadenceOptions;
use std::path::PathBuf;

/// Trains a GPT-2 style language model on text files, and writes with it.
///
/// With no options it learns to write Rust from the sources in the local cargo registry.
#[derive(Debug, Parser)]
#[command(name = "gpt", version)]
pub(crate) struct Cli {
    /// Where to compute: auto, cuda, cuda:N, vulkan, vulkan:N, webgpu or flex (the CPU).
    /// Without it, the environment variable `BLACKBURN_DEVICE` decides, then auto.
    #[arg(long, global = true, value_name = "DEVICE")]
    pub(crate) device: Option<String>,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a model, or continue a run with --resume.
    Train(Box<TrainArgs>),
    /// Write text with a trained model.
    Generate(GenerateArgs),
    /// Measure a trained model's loss on text.
    Eval(EvalArgs),
    /// Write parameters and batches for another program, to train the same model there.
    Export(Box<ExportArgs>),
    /// Prove Blackburn's kernels on this machine's GPU: each against a reference, in processes apart.
    #[cfg(any(feature = "cuda", feature = "vulkan", feature = "webgpu"))]
    Doctor(blackburn::doctor::Options),
}

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct DataArgs {
    /// Text to learn from: files, and folders to search. Default: the local cargo registry.
    #[arg(long, num_args = 1.., value_name = "PATH")]
    pub(crate) data: Vec<PathBuf>,

    /// Extensions of the files to take from folders, without the dot, separated by commas
    /// ("" takes every file). Default: rs
    #[arg(long, value_name = "EXT", value_delimiter = ',')]
    pub(crate) extensions: Option<Vec<String>>,

    /// How much text to take, in MiB, sampled over all files; 0 takes everything. Default: 64
    #[arg(long, value_name = "MIB")]
    pub(crate) max_data: Option<u64>,

    /// Share of the files held out for validation. Default: 0.05
    #[arg(long, value_name = "SHARE")]
    pub(crate) validation_share: Option<f64>,
}

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) data: DataArgs,

    /// Folder of the run: checkpoints, metrics, curves, samples. Default: runs/gpt-PRESET
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,

    /// Continue the run in --out from its newest sound checkpoint, exactly where it stopped.
    #[arg(long)]
    pub(crate) resume: bool,

    /// Start afresh where --out already holds a run; its files are removed.
    #[arg(long, conflicts_with = "resume")]
    pub(crate) overwrite: bool,

    /// Sizes and optimization; the options below override it. Default: tiny
    #[arg(long, value_enum, help_heading = "Model")]
    pub(crate) preset: Option<Preset>,

    /// What layers are made of: GPT-2's, or Llama's. Default: the preset's
    #[arg(long, value_enum, help_heading = "Model")]
    pub(crate) family: Option<Family>,

    /// What a token is: a byte, or one of GPT-2's 50257. Default: bytes
    #[arg(long, value_enum, help_heading = "Model")]
    pub(crate) tokenizer: Option<TokenizerKind>,

    /// What layers compute in. Parameters, their gradients and the optimizer's state stay in f32,
    /// and f16 scales its losses. Default: bf16 on NVIDIA GPUs that have it, else f32
    #[arg(long, value_enum, help_heading = "Precision and memory")]
    pub(crate) precision: Option<Precision>,

    /// What parameters are stored in: f32, or what layers compute in, rounded by chance when they
    /// are updated. Default: f32
    #[arg(long, value_enum, help_heading = "Precision and memory")]
    pub(crate) masters: Option<MastersKind>,

    /// With f16: leave the losses as they are, to see what scaling them is for.
    #[arg(long, help_heading = "Precision and memory")]
    pub(crate) no_loss_scaling: bool,

    /// Compute cheap activations again in the backward pass instead of keeping them; not part of
    /// the model. Default: without --graph, with flash attention in 16 bits and masters in f32, where it
    /// is faster
    #[arg(
        long,
        help_heading = "Precision and memory",
        value_name = "BOOL",
        num_args = 0..=1,
        default_missing_value = "true"
    )]
    pub(crate) recompute: Option<bool>,

    /// GPUs of this machine to train on, each by a process of its own. Leave it out under torchrun, srun or
    /// mpirun, which start the processes themselves. With --device flex: processes on the CPU. Default: 1
    #[arg(long, value_name = "N")]
    pub(crate) gpus: Option<usize>,

    /// With several GPUs: split the optimizer's state over them, for less memory on each.
    #[arg(long)]
    pub(crate) shard_optimizer: bool,

    /// Record forward and backward pass once, and have the GPU replay them by one command; not part of
    /// the model. Default: true
    #[arg(
        long,
        help_heading = "Precision and memory",
        value_name = "BOOL",
        num_args = 0..=1,
        default_missing_value = "true"
    )]
    pub(crate) graph: Option<bool>,

    /// How attention is computed; not part of the model. Default: flash on GPUs with bf16, in 16 bits and of a Llama,
    /// which has no other; else naive
    #[arg(long, value_enum, help_heading = "Precision and memory")]
    pub(crate) attention: Option<AttentionKind>,

    /// Make the logits in chunks of rows, with the loss and their gradients, and never all at once: less
    /// memory, for reading the head's weight once more for each chunk.
    #[arg(long, help_heading = "Precision and memory")]
    pub(crate) chunked_loss: bool,

    /// Find by a dry run what a step takes of the GPU's memory, and say so before training. It is done by itself where
    /// memory is limited, as by `BLACKBURN_MEMORY_LIMIT=40GiB`.
    #[arg(long, help_heading = "Precision and memory")]
    pub(crate) estimate_memory: bool,

    /// Transformer blocks.
    #[arg(long, help_heading = "Model", value_name = "N")]
    pub(crate) layers: Option<usize>,

    /// Size of the residual stream.
    #[arg(long, help_heading = "Model", value_name = "N")]
    pub(crate) width: Option<usize>,

    /// Attention heads; they divide the width.
    #[arg(long, help_heading = "Model", value_name = "N")]
    pub(crate) heads: Option<usize>,

    /// Heads of keys and values of a Llama, which its attention heads share; they divide those.
    #[arg(long, help_heading = "Model", value_name = "N")]
    pub(crate) kv_heads: Option<usize>,

    /// Tokens that the model sees at once.
    #[arg(long, help_heading = "Model", value_name = "N")]
    pub(crate) context: Option<usize>,

    /// Share of activations dropped in training. Default: 0
    #[arg(long, help_heading = "Model", value_name = "SHARE")]
    pub(crate) dropout: Option<f64>,

    /// Optimizer steps of the whole run.
    #[arg(long, help_heading = "Optimization", value_name = "N")]
    pub(crate) steps: Option<usize>,

    /// Sequences that are computed at once, on each GPU.
    #[arg(long, help_heading = "Optimization", value_name = "N")]
    pub(crate) batch: Option<usize>,

    /// Batches whose gradients make one step. Default: 1
    #[arg(long, help_heading = "Optimization", value_name = "N")]
    pub(crate) accumulate: Option<usize>,

    /// Peak learning rate.
    #[arg(long, help_heading = "Optimization", value_name = "RATE")]
    pub(crate) learning_rate: Option<f64>,

    /// Learning rate at the end. Default: a tenth of the peak
    #[arg(long, help_heading = "Optimization", value_name = "RATE")]
    pub(crate) min_learning_rate: Option<f64>,

    /// Steps of linear warm-up.
    #[arg(long, help_heading = "Optimization", value_name = "N")]
    pub(crate) warmup: Option<usize>,

    /// Weight decay of matrices; biases and norms have none. Default: 0.1
    #[arg(long, help_heading = "Optimization", value_name = "RATE")]
    pub(crate) weight_decay: Option<f32>,

    /// Largest global norm of the gradients. Default: 1
    #[arg(long, help_heading = "Optimization", value_name = "NORM")]
    pub(crate) clip: Option<f64>,

    /// Seed of weights, data order and dropout. Default: 42
    #[arg(long, help_heading = "Optimization", value_name = "N")]
    pub(crate) seed: Option<u64>,

    /// Steps between reports of the loss. Default: 10
    #[arg(long, help_heading = "Reports", value_name = "N")]
    pub(crate) log_every: Option<usize>,

    /// Steps between validations, each with a sample; the last step has one too.
    /// Default: a tenth of the steps
    #[arg(long, help_heading = "Reports", value_name = "N")]
    pub(crate) eval_every: Option<usize>,

    /// Steps between checkpoints; the last step has one too. Default: a tenth of the steps
    #[arg(long, help_heading = "Reports", value_name = "N")]
    pub(crate) checkpoint_every: Option<usize>,

    /// Checkpoints to keep, the newest. Default: 3
    #[arg(long, help_heading = "Reports", value_name = "N")]
    pub(crate) keep: Option<usize>,

    /// Find out where a step's time goes, instead of training: takes steps, prints a table with
    /// recommendations, writes profile.json, profile.png and profile.svg to the run's folder, and ends
    /// without a checkpoint. N is the number of steps whose kernels are timed, and of those in each round
    /// that is timed as a whole. With --resume, from the newest checkpoint. Default of N: 4
    #[arg(
        long,
        help_heading = "Reports",
        value_name = "N",
        num_args = 0..=1,
        default_missing_value = "4"
    )]
    pub(crate) profile: Option<usize>,

    /// Beginning of the samples. Default: "fn "
    #[arg(long, help_heading = "Reports", value_name = "TEXT")]
    pub(crate) prompt: Option<String>,
}

impl TrainArgs {
    /// How often the run is to report, validate and save.
    pub(crate) fn cadence(&self) -> CadenceOptions {
        CadenceOptions {
            log_every: self.log_every,
            eval_every: self.eval_every,
            checkpoint_every: self.checkpoint_every,
            keep: self.keep,
        }
    }
}

/// With no --resume it prepares a run as `train` would, which `train --resume` goes on with.
#[derive(Clone, Debug, Args)]
pub(crate) struct ExportArgs {
    /// Folder to write to: model.safetensors, with PyTorch's names and layouts, batches.safetensors and
    /// run.json.
    #[arg(long, value_name = "DIR")]
    pub(crate) to: PathBuf,

    /// Steps whose batches are written.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) batches: usize,

    #[command(flatten)]
    pub(crate) run: TrainArgs,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct GenerateArgs {
    /// A run's folder (its newest sound checkpoint is taken) or one checkpoint's folder.
    #[arg(long, value_name = "DIR", default_value = "runs/gpt-tiny")]
    pub(crate) checkpoint: PathBuf,

    /// Beginning of the text.
    #[arg(long, value_name = "TEXT", default_value = "fn ")]
    pub(crate) prompt: String,

    /// Tokens to write.
    #[arg(long, value_name = "N", default_value_t = 300)]
    pub(crate) tokens: usize,

    /// Boldness: 0 always takes the likeliest token, 1 draws from the model's own distribution.
    #[arg(long, value_name = "T", default_value_t = 0.8)]
    pub(crate) temperature: f64,

    /// Draw among this many of the likeliest tokens; 0 draws among all.
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub(crate) top_k: usize,

    /// Seed of the drawing.
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub(crate) seed: u64,

    /// How attention is computed; not part of the model.
    #[arg(long, value_enum, default_value_t = AttentionKind::Flash)]
    pub(crate) attention: AttentionKind,

    /// Record the work of a token once and replay it, where the device can. Default: true
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) graph: Option<bool>,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct EvalArgs {
    /// A run's folder (its newest sound checkpoint is taken) or one checkpoint's folder.
    #[arg(long, value_name = "DIR", default_value = "runs/gpt-tiny")]
    pub(crate) checkpoint: PathBuf,

    #[command(flatten)]
    pub(crate) data: DataArgs,

    /// Measure on the text as a whole instead of its held-out files.
    #[arg(long)]
    pub(crate) all: bool,

    /// Batches to measure at most, spread evenly; 0 measures everything.
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub(crate) batches: usize,

    /// How attention is computed; not part of the model. Default: flash on GPUs with bf16, in 16 bits and of a Llama,
    /// which has no other; else naive
    #[arg(long, value_enum)]
    pub(crate) attention: Option<AttentionKind>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
