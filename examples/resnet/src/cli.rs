//! The command line.

use crate::{model::Depth, speed::SpeedArgs};
use anyhow::{Result, bail};
use blackburn::train::precision::Precision;
use clap::{Args, Parser, Subcommand, ValueEnum};
use example_program::CadenceOptions;
use std::path::PathBuf;

/// Trains residual networks on folders of images, and tells with them what is on others.
///
/// With no options `resnet train` learns to tell the writing systems of glyphs apart, which it draws itself.
#[derive(Debug, Parser)]
#[command(name = "resnet", version)]
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
    /// Train a network, or continue a run with --resume.
    Train(Box<TrainArgs>),
    /// Measure a trained network on held-out images.
    Eval(Box<EvalArgs>),
    /// Tell what is on images: the five likeliest classes of each.
    Predict(PredictArgs),
    /// Measure how many images a second are read and prepared.
    Data(LoadArgs),
    /// Time training steps on random images.
    Speed(SpeedArgs),
}

/// Images that are part of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dataset {
    /// Glyphs of the DejaVu fonts, by Unicode block, distorted at random.
    Glyphs,
}

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct DataArgs {
    /// Images to learn from: a folder with a folder for each class, with JPEG and PNG files. With folders train
    /// and val in it, classes are below these; otherwise a share of each class is held out.
    #[arg(long, value_name = "DIR", help_heading = "Data")]
    pub(crate) data: Option<PathBuf>,

    /// Images to learn from without --data. Default: glyphs
    #[arg(long, value_enum, conflicts_with = "data", help_heading = "Data")]
    pub(crate) dataset: Option<Dataset>,

    /// Share of each class that is held out, where --data has no folder val. Default: 0.1
    #[arg(long, value_name = "SHARE", help_heading = "Data")]
    pub(crate) validation_share: Option<f64>,

    /// Least share of an image's area that is cut out to learn from. Default: 0.08
    #[arg(long, value_name = "SHARE", help_heading = "Data")]
    pub(crate) min_crop: Option<f32>,

    /// By what share brightness, contrast and saturation are changed at most. Default: 0.2
    #[arg(long, value_name = "SHARE", help_heading = "Data")]
    pub(crate) jitter: Option<f32>,

    /// Do not mirror images.
    #[arg(long, help_heading = "Data")]
    pub(crate) no_flip: bool,

    /// Threads that read and prepare images; not part of the run. Default: one for each core
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub(crate) workers: Option<usize>,
}

impl DataArgs {
    /// Refuses options about the images of --data where that is missing.
    pub(crate) fn check_without_folder(&self) -> Result<()> {
        let given = [
            ("--validation-share", self.validation_share.is_some()),
            ("--jitter", self.jitter.is_some()),
            ("--min-crop", self.min_crop.is_some()),
            ("--no-flip", self.no_flip),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((option, _)) => bail!(
                "{option}: it is about the images of --data DIR, which is missing; glyphs have a \
                 validation set and distortions of their own"
            ),
            None => Ok(()),
        }
    }
}

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) data: DataArgs,

    /// Folder of the run: checkpoints, metrics, pictures. Default: runs/resnet
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,

    /// Continue the run in --out from its newest sound checkpoint, exactly where it stopped.
    #[arg(long)]
    pub(crate) resume: bool,

    /// Start afresh where --out already holds a run; its files are removed.
    #[arg(long, conflicts_with = "resume")]
    pub(crate) overwrite: bool,

    /// Layers of the network: 18, 34, 50 or 101. Default: what --weights has, or 18 on the CPU, 50 elsewhere
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub(crate) depth: Option<Depth>,

    /// Channels of the first stage; torchvision's networks have 64. Default: what --weights has, or 16 on the
    /// CPU, 64 elsewhere
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub(crate) width: Option<usize>,

    /// Height and width of images, in pixels. Default: 224 with --data (64 on the CPU); of glyphs 48 on the CPU,
    /// 64 elsewhere
    #[arg(long, value_name = "PIXELS", help_heading = "Model")]
    pub(crate) size: Option<usize>,

    /// Begin with the parameters in a .safetensors file with torchvision's names.
    #[arg(long, value_name = "FILE", conflicts_with = "resume", help_heading = "Model")]
    pub(crate) weights: Option<PathBuf>,

    /// With --weights: leave out the file's last layer, which tells other classes apart, and begin a new one.
    #[arg(long, requires = "weights", help_heading = "Model")]
    pub(crate) new_head: bool,

    /// What is computed in: f32, tf32, bf16 or f16. Parameters, their gradients and the optimizer's state stay in
    /// f32, and f16 scales its losses. Default: bf16 on GPUs that compute in it, f32 elsewhere
    #[arg(long, value_name = "TYPE", help_heading = "Optimization")]
    pub(crate) precision: Option<Precision>,

    /// Images that are computed at once. Default: 32 on the CPU, 128 elsewhere
    #[arg(long, value_name = "N", help_heading = "Optimization")]
    pub(crate) batch: Option<usize>,

    /// Batches whose gradients make one step. Default: 1
    #[arg(long, value_name = "N", help_heading = "Optimization")]
    pub(crate) accumulate: Option<usize>,

    /// Optimizer steps of the whole run. Default: by --epochs; of glyphs 1000 on the CPU, 4000 elsewhere
    #[arg(long, value_name = "N", conflicts_with = "epochs", help_heading = "Optimization")]
    pub(crate) steps: Option<usize>,

    /// Times that the images are gone through. Default with --data: 90
    #[arg(long, value_name = "N", help_heading = "Optimization")]
    pub(crate) epochs: Option<usize>,

    /// Peak learning rate. Default: 0.1 for 256 images a step and in proportion; of glyphs on the CPU 0.05
    #[arg(long, value_name = "RATE", help_heading = "Optimization")]
    pub(crate) learning_rate: Option<f64>,

    /// Steps of linear warm-up, before the rate falls to 0 by a cosine. Default: a twentieth of the steps
    #[arg(long, value_name = "N", help_heading = "Optimization")]
    pub(crate) warmup: Option<usize>,

    /// What is kept of the velocity in each step. Default: 0.9
    #[arg(long, value_name = "SHARE", help_heading = "Optimization")]
    pub(crate) momentum: Option<f64>,

    /// Weight decay of convolutions and of the last layer's matrix; norms and biases have none. Default: 1e-4
    #[arg(long, value_name = "RATE", help_heading = "Optimization")]
    pub(crate) weight_decay: Option<f64>,

    /// What of a target is shared out among all classes. Default: 0.1
    #[arg(long, value_name = "SHARE", help_heading = "Optimization")]
    pub(crate) label_smoothing: Option<f32>,

    /// Decay of the moving average of the weights, which validation and `predict` take; 0 keeps none.
    /// Default: an average over the last twentieth of the run
    #[arg(long, value_name = "DECAY", help_heading = "Optimization")]
    pub(crate) ema: Option<f64>,

    /// Largest global norm of the gradients. Default: none
    #[arg(long, value_name = "NORM", help_heading = "Optimization")]
    pub(crate) clip: Option<f64>,

    /// GPUs of this machine to train on, each by a process of its own. Leave it out under torchrun, srun or
    /// mpirun, which start the processes themselves. With --device flex: processes on the CPU. Default: 1
    #[arg(long, value_name = "N")]
    pub(crate) gpus: Option<usize>,

    /// Seed of weights, order and augmentation. Default: 42
    #[arg(long, value_name = "N", help_heading = "Optimization")]
    pub(crate) seed: Option<u64>,

    /// Steps between reports of the loss. Default: 10
    #[arg(long, value_name = "N", help_heading = "Reports")]
    pub(crate) log_every: Option<usize>,

    /// Steps between validations; the last step has one too. Default: a fifth of the steps
    #[arg(long, value_name = "N", help_heading = "Reports")]
    pub(crate) eval_every: Option<usize>,

    /// Steps between checkpoints; the last step has one too. Default: a fifth of the steps
    #[arg(long, value_name = "N", help_heading = "Reports")]
    pub(crate) checkpoint_every: Option<usize>,

    /// Checkpoints to keep, the newest. Default: 3
    #[arg(long, value_name = "N", help_heading = "Reports")]
    pub(crate) keep: Option<usize>,
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

/// A trained network.
#[derive(Clone, Debug, Args)]
pub(crate) struct NetworkArgs {
    /// A run's folder (its newest sound checkpoint is taken) or one checkpoint's folder.
    #[arg(long, value_name = "DIR", default_value = "runs/resnet")]
    pub(crate) checkpoint: PathBuf,

    /// Parameters in a .safetensors file with torchvision's names, instead of a checkpoint.
    #[arg(long, value_name = "FILE", conflicts_with = "checkpoint")]
    pub(crate) weights: Option<PathBuf>,

    /// Height and width of images, in pixels. Default: the run's; with --weights 224
    #[arg(long, value_name = "PIXELS")]
    pub(crate) size: Option<usize>,

    /// Take the weights as they were trained, not their moving average.
    #[arg(long)]
    pub(crate) raw: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) network: NetworkArgs,

    #[command(flatten)]
    pub(crate) data: DataArgs,

    /// Images that are computed at once.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) batch: usize,

    /// Folder to draw samples.png, confusion.png and confusion.svg in.
    #[arg(long, value_name = "DIR")]
    pub(crate) pictures: Option<PathBuf>,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct PredictArgs {
    #[command(flatten)]
    pub(crate) network: NetworkArgs,

    /// Names of the classes, a line each, for --weights.
    #[arg(long, value_name = "FILE", requires = "weights")]
    pub(crate) classes: Option<PathBuf>,

    /// JPEG or PNG files.
    #[arg(value_name = "IMAGE", required = true)]
    pub(crate) images: Vec<PathBuf>,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct LoadArgs {
    #[command(flatten)]
    pub(crate) data: DataArgs,

    /// Height and width of images, in pixels.
    #[arg(long, value_name = "PIXELS", default_value_t = 224)]
    pub(crate) size: usize,

    /// Images of a batch.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) batch: usize,

    /// How long to measure.
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    pub(crate) seconds: f64,
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
