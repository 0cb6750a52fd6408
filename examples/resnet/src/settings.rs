//! What a run is: the network, its optimization and its data, resolved from the device and the command line.

use crate::{
    cli::TrainArgs,
    data::{DataSettings, Source},
    model::{Depth, ModelConfig},
    weights::Weights,
};
use anyhow::{Result, bail, ensure};
use blackburn::{
    distributed::StepShape,
    train::{ema::EmaConfig, optim::SgdGroups, precision::Precision, schedule::WarmupCosine},
};
use burn::tensor::Device;
use example_program::{differences, or_none};
use serde::{Deserialize, Serialize};

/// Far above what anybody asks for, and low enough that products of some overflow nothing.
const MOST: usize = 1 << 30;
/// What is left of an image in the last stage is a 32nd.
const LEAST_SIZE: usize = 32;

/// Everything that decides the numbers a run produces. Saved with every checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunSettings {
    pub(crate) model: ModelConfig,
    /// Height and width of images.
    pub(crate) size: usize,
    pub(crate) precision: Precision,
    /// Images that each rank computes at once.
    pub(crate) batch: usize,
    /// Batches of each rank in a step.
    pub(crate) accumulate: usize,
    /// Processes that train together.
    #[serde(default = "one")]
    pub(crate) ranks: usize,
    pub(crate) steps: usize,
    pub(crate) learning_rate: f64,
    pub(crate) warmup: usize,
    pub(crate) momentum: f64,
    pub(crate) weight_decay: f64,
    pub(crate) label_smoothing: f32,
    /// 0 where there is no average.
    pub(crate) ema: f64,
    pub(crate) clip: Option<f64>,
    pub(crate) seed: u64,
}

fn one() -> usize {
    1
}

/// What a run is where the command line says nothing.
struct Defaults {
    depth: Depth,
    width: usize,
    size: usize,
    batch: usize,
    /// Of runs that are not counted in epochs.
    steps: usize,
    /// For 256 images a step.
    learning_rate: f64,
}

impl Defaults {
    /// On CPUs, what learns within minutes on two cores; elsewhere, what GPUs are bought for.
    fn of(is_cpu: bool, data: &DataSettings) -> Self {
        let is_glyphs = *data == DataSettings::Glyphs;
        match is_cpu {
            true => Self {
                depth: Depth::D18,
                width: 16,
                size: if is_glyphs { 48 } else { 64 },
                batch: 32,
                steps: 1000,
                learning_rate: if is_glyphs { 0.4 } else { 0.1 },
            },
            false => Self {
                depth: Depth::D50,
                width: 64,
                size: if is_glyphs { 64 } else { 224 },
                batch: 128,
                steps: 4000,
                learning_rate: 0.1,
            },
        }
    }
}

impl RunSettings {
    /// The settings of a fresh run.
    pub(crate) fn resolve(
        args: &TrainArgs,
        data: &DataSettings,
        source: &dyn Source,
        weights: Option<&Weights>,
        device: &Device,
        is_cpu: bool,
        ranks: usize,
    ) -> Result<Self> {
        let defaults = Defaults::of(is_cpu, data);
        let batch = args.batch.unwrap_or(defaults.batch);
        let accumulate = args.accumulate.unwrap_or(1);
        let images = StepShape { batch, accumulate, ranks }.samples();
        let epochs = match (args.epochs, data) {
            (Some(epochs), _) => Some(epochs),
            (None, DataSettings::Folder { .. }) => Some(90),
            (None, DataSettings::Glyphs) => None,
        };
        ensure!(epochs != Some(0), "--epochs: expected at least 1, got 0");
        let of_epochs = epochs.map(|epochs| {
            let all = source.train_images().saturating_mul(epochs as u64);
            all.div_ceil(images.max(1) as u64).max(1) as usize
        });
        let steps = args.steps.or(of_epochs).unwrap_or(defaults.steps);
        let model = weights.map(Weights::model);
        let settings = Self {
            model: ModelConfig {
                depth: args.depth.or(model.map(|model| model.depth)).unwrap_or(defaults.depth),
                width: args.width.or(model.map(|model| model.width)).unwrap_or(defaults.width),
                classes: source.classes().len(),
            },
            size: args.size.unwrap_or(defaults.size),
            precision: args.precision.unwrap_or_else(|| Precision::fastest(device)),
            batch,
            accumulate,
            ranks,
            steps,
            // In proportion to the images of a step: Goyal et al., arXiv:1706.02677, section 2.1.
            learning_rate: args
                .learning_rate
                .unwrap_or(defaults.learning_rate * images as f64 / 256.0),
            warmup: args.warmup.unwrap_or(steps / 20),
            momentum: args.momentum.unwrap_or(0.9),
            weight_decay: args.weight_decay.unwrap_or(1e-4),
            label_smoothing: args.label_smoothing.unwrap_or(0.1),
            // 20 / steps is the inverse of the last twentieth.
            ema: args.ema.unwrap_or((1.0 - 20.0 / steps.max(1) as f64).clamp(0.0, 0.9999)),
            clip: args.clip,
            seed: args.seed.unwrap_or(42),
        };
        settings.validate()?;
        Ok(settings)
    }

    /// A resumed run's settings: the checkpoint's, with what may change taken from the command line. What would
    /// make it another run is refused.
    pub(crate) fn resume(&self, args: &TrainArgs, ranks: usize) -> Result<Self> {
        let data = &args.data;
        let of_data = [
            ("--data", data.data.is_some()),
            ("--dataset", data.dataset.is_some()),
            ("--validation-share", data.validation_share.is_some()),
            ("--min-crop", data.min_crop.is_some()),
            ("--jitter", data.jitter.is_some()),
            ("--no-flip", data.no_flip),
            ("--epochs", args.epochs.is_some()),
        ];
        if let Some((option, _)) = of_data.iter().find(|(_, given)| *given) {
            bail!(
                "{option}: a resumed run goes on with the images it began with, and is lengthened by \
                 --steps. Leave the option out, or start afresh in another folder with --out"
            );
        }
        fn text<T: ToString>(value: Option<T>) -> Option<String> {
            value.map(|value| value.to_string())
        }
        let fixed = [
            ("--depth", text(args.depth)),
            ("--width", text(args.width)),
            ("--size", text(args.size)),
            ("--precision", text(args.precision)),
            ("--batch", text(args.batch)),
            ("--accumulate", text(args.accumulate)),
            ("--ema", text(args.ema)),
            ("--seed", text(args.seed)),
        ];
        let differences = differences(&fixed, &self.options());
        ensure!(
            differences.is_empty(),
            "--resume continues a run, and these options make it another one: {}. Leave them out, or \
             start afresh in another folder with --out",
            differences.join(", ")
        );
        let StepShape { batch, accumulate, ranks } = self.step_shape().on_ranks(ranks)?;
        let settings = Self {
            batch,
            accumulate,
            ranks,
            steps: args.steps.unwrap_or(self.steps),
            learning_rate: args.learning_rate.unwrap_or(self.learning_rate),
            warmup: args.warmup.unwrap_or(self.warmup),
            momentum: args.momentum.unwrap_or(self.momentum),
            weight_decay: args.weight_decay.unwrap_or(self.weight_decay),
            label_smoothing: args.label_smoothing.unwrap_or(self.label_smoothing),
            clip: args.clip.or(self.clip),
            ..self.clone()
        };
        settings.validate()?;
        Ok(settings)
    }

    /// By the options that set them, for ranks to compare.
    pub(crate) fn options(&self) -> Vec<(&'static str, String)> {
        let Self {
            model: ModelConfig { depth, width, classes: _ },
            size,
            precision,
            batch,
            accumulate,
            ranks: _,
            steps,
            learning_rate,
            warmup,
            momentum,
            weight_decay,
            label_smoothing,
            ema,
            clip,
            seed,
        } = self;
        vec![
            ("--depth", depth.to_string()),
            ("--width", width.to_string()),
            ("--size", size.to_string()),
            ("--precision", precision.to_string()),
            ("--batch", batch.to_string()),
            ("--accumulate", accumulate.to_string()),
            ("--steps", steps.to_string()),
            ("--learning-rate", learning_rate.to_string()),
            ("--warmup", warmup.to_string()),
            ("--momentum", momentum.to_string()),
            ("--weight-decay", weight_decay.to_string()),
            ("--label-smoothing", label_smoothing.to_string()),
            ("--ema", ema.to_string()),
            ("--clip", or_none(*clip)),
            ("--seed", seed.to_string()),
        ]
    }

    /// How the optimizer treats matrices and vectors.
    pub(crate) fn groups(&self) -> SgdGroups {
        let Self { momentum, weight_decay, .. } = *self;
        SgdGroups { momentum, weight_decay, ..SgdGroups::default() }
    }

    /// The learning rate by step.
    pub(crate) fn schedule(&self) -> WarmupCosine {
        WarmupCosine {
            peak: self.learning_rate,
            floor: 0.0,
            warmup_steps: self.warmup,
            total_steps: self.steps,
        }
    }

    /// How weights are averaged, if they are.
    pub(crate) fn ema(&self) -> Option<EmaConfig> {
        (self.ema > 0.0).then_some(EmaConfig { decay: self.ema, warmup: true })
    }

    /// Images that one optimizer step learns from.
    pub(crate) fn images_per_step(&self) -> usize {
        self.step_shape().samples()
    }

    /// What a step is of.
    pub(crate) fn step_shape(&self) -> StepShape {
        StepShape { batch: self.batch, accumulate: self.accumulate, ranks: self.ranks }
    }

    fn validate(&self) -> Result<()> {
        let positive = [
            ("--width", self.model.width),
            ("--steps", self.steps),
            ("--batch", self.batch),
            ("--accumulate", self.accumulate),
        ];
        for (option, value) in positive {
            ensure!(value > 0, "{option}: expected at least 1, got 0");
            ensure!(value <= MOST, "{option}: expected at most {MOST}, got {value}");
        }
        check_size(self.size)?;
        ensure!(
            self.batch > 1 || self.size > LEAST_SIZE,
            "--batch: a norm needs two numbers of a channel, and the last stage sees one image of {} \
             pixels as one: expected at least 2, got 1",
            self.size
        );
        ensure!(
            !matches!(self.precision, Precision::Fp8(_)),
            "--precision: expected f32, tf32, bf16 or f16, got {}: there are no convolutions in 8 bits",
            self.precision
        );
        let shares = [
            ("--momentum", self.momentum),
            ("--label-smoothing", self.label_smoothing.into()),
            ("--ema", self.ema),
        ];
        for (option, value) in shares {
            ensure!(
                (0.0..1.0).contains(&value),
                "{option}: expected a number from 0 to below 1, got {value}"
            );
        }
        let positive = [("--learning-rate", Some(self.learning_rate)), ("--clip", self.clip)];
        for (option, value) in positive {
            ensure!(
                value.is_none_or(|value| value.is_finite() && value > 0.0),
                "{option}: expected a positive number, got {}",
                value.unwrap_or_default()
            );
        }
        ensure!(
            self.weight_decay.is_finite() && self.weight_decay >= 0.0,
            "--weight-decay: expected a number of at least 0, got {}",
            self.weight_decay
        );
        ensure!(
            self.warmup < self.steps || self.warmup == 0,
            "--warmup: expected less than --steps ({}), got {}",
            self.steps,
            self.warmup
        );
        Ok(())
    }
}

/// Refuses images that are too small for the network, or for memory too large.
pub(crate) fn check_size(size: usize) -> Result<()> {
    ensure!(
        (LEAST_SIZE..=4096).contains(&size),
        "--size: expected from {LEAST_SIZE}, which the last stage sees as one pixel, to 4096, got {size}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::glyphs::Glyphs;

    fn resolve(args: &TrainArgs, is_cpu: bool) -> Result<RunSettings> {
        let glyphs = Glyphs::new()?;
        let device = Device::flex();
        RunSettings::resolve(args, &DataSettings::Glyphs, &glyphs, None, &device, is_cpu, 1)
    }

    #[test]
    fn defaults_follow_the_device_and_the_command_line_goes_before_them() {
        let on_cpu = resolve(&TrainArgs::default(), true).expect("settings");
        let elsewhere = resolve(&TrainArgs::default(), false).expect("settings");
        assert_eq!((on_cpu.model.depth, on_cpu.model.width), (Depth::D18, 16));
        assert_eq!((elsewhere.model.depth, elsewhere.model.width), (Depth::D50, 64));
        assert_eq!(on_cpu.model.classes, 16);
        let args = TrainArgs { epochs: Some(3), batch: Some(100), ..TrainArgs::default() };
        // 16 classes of 256 drawings.
        assert_eq!(resolve(&args, true).expect("settings").steps, 123);
        let none = TrainArgs { ema: Some(0.0), ..TrainArgs::default() };
        assert!(resolve(&none, true).expect("settings").ema().is_none());
    }

    #[test]
    fn settings_that_make_no_sense_are_refused_by_name() {
        let args = TrainArgs::default;
        let cases = [
            (TrainArgs { batch: Some(0), ..args() }, "--batch"),
            (TrainArgs { batch: Some(1), size: Some(32), ..args() }, "--batch"),
            (TrainArgs { steps: Some(0), ..args() }, "--steps"),
            (TrainArgs { epochs: Some(0), ..args() }, "--epochs"),
            (TrainArgs { size: Some(31), ..args() }, "--size"),
            (TrainArgs { momentum: Some(1.0), ..args() }, "--momentum"),
            (TrainArgs { ema: Some(-0.1), ..args() }, "--ema"),
            (TrainArgs { label_smoothing: Some(f32::NAN), ..args() }, "--label-smoothing"),
            (TrainArgs { learning_rate: Some(0.0), ..args() }, "--learning-rate"),
            (TrainArgs { clip: Some(f64::INFINITY), ..args() }, "--clip"),
            (TrainArgs { weight_decay: Some(-1.0), ..args() }, "--weight-decay"),
            (TrainArgs { warmup: Some(1000), ..args() }, "--warmup"),
            (TrainArgs { precision: "fp8".parse().ok(), ..args() }, "--precision"),
        ];
        for (args, option) in cases {
            let error = resolve(&args, true).expect_err(option).to_string();
            assert!(error.starts_with(option), "{error}");
        }
    }

    #[test]
    fn a_resumed_run_may_change_its_rates_and_not_its_model() {
        let saved = resolve(&TrainArgs::default(), true).expect("settings");
        let args = TrainArgs { steps: Some(500), clip: Some(2.0), ..TrainArgs::default() };
        let resumed = saved.resume(&args, 1).expect("settings");
        assert_eq!((resumed.steps, resumed.clip), (500, Some(2.0)));
        let args = TrainArgs { width: Some(8), size: Some(64), ..TrainArgs::default() };
        let error = saved.resume(&args, 1).expect_err("refused").to_string();
        assert!(error.contains("--width 8 (the checkpoint has 16), --size 64"), "{error}");
        let args = TrainArgs { epochs: Some(5), ..TrainArgs::default() };
        assert!(saved.resume(&args, 1).expect_err("refused").to_string().starts_with("--epochs"));
    }
}
