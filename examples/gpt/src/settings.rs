//! What a run is: sizes, optimization and data, resolved from presets and the command line.

use crate::{
    cli::TrainArgs,
    model::ModelConfig,
    presets::{Family, Preset},
    tokenizer::{Tokenizer, TokenizerKind},
};
use anyhow::{Result, bail};
use blackburn::{
    distributed::StepShape,
    train::{
        self,
        optim::AdamWGroups,
        precision::{Masters, PrecisionPolicy, Recipe},
        schedule::WarmupCosine,
        trainer::TrainerConfig,
    },
};
use burn::tensor::Device;
use clap::ValueEnum;
use example_program::differences;
use serde::{Deserialize, Serialize};

/// What layers compute in; the loss is computed in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Precision {
    /// Single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// Half precision, with loss scaling.
    F16,
    /// bfloat16, and products of all linear layers but the head in 8 bits. GPUs only.
    Fp8,
    /// The same with a scale for each 32 numbers: MXFP8. Slower than bf16 on other GPUs than Blackwell.
    Mxfp8,
}

impl Precision {
    /// What `device` trains fastest in without loss scaling and without 8 bits.
    fn fastest(device: &Device) -> Self {
        match train::precision::Precision::fastest(device) {
            train::precision::Precision::Bf16 => Self::Bf16,
            _ => Self::F32,
        }
    }
}

/// What parameters are stored in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum MastersKind {
    /// Single precision: master weights.
    #[default]
    F32,
    /// The type that layers compute in.
    None,
}

/// How attention is computed. The model is the same, and so are its checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum AttentionKind {
    /// As Burn has it: all weights are kept for the backward pass, and each generated token costs a
    /// whole forward pass.
    Naive,
    /// In memory that grows with the context and not with its square, with a cache for generation.
    /// Norms, embeddings and loss are Blackburn's too.
    Flash,
    /// The same attention; all else is `burn::nn`'s modules, called as they are.
    FlashOnly,
}

/// Everything that decides the numbers a run produces. Saved with every checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunSettings {
    pub(crate) preset: Preset,
    pub(crate) tokenizer: TokenizerKind,
    pub(crate) precision: Precision,
    #[serde(default)]
    pub(crate) masters: MastersKind,
    /// Whether losses in f16 are scaled.
    #[serde(default = "yes")]
    pub(crate) loss_scaling: bool,
    pub(crate) model: ModelConfig,
    pub(crate) steps: usize,
    /// Sequences that each rank computes at once.
    pub(crate) batch: usize,
    /// Batches of each rank in a step.
    pub(crate) accumulate: usize,
    /// Processes that train together.
    #[serde(default = "one")]
    pub(crate) ranks: usize,
    pub(crate) learning_rate: f64,
    pub(crate) min_learning_rate: f64,
    pub(crate) warmup: usize,
    pub(crate) weight_decay: f32,
    pub(crate) clip: f64,
    pub(crate) seed: u64,
}

fn one() -> usize {
    1
}

impl RunSettings {
    /// The settings of a fresh run: the preset's and the device's, where the command line names no other.
    pub(crate) fn resolve(args: &TrainArgs, ranks: usize, device: &Device) -> Result<Self> {
        let preset = args.preset.unwrap_or(Preset::Tiny);
        let defaults = preset.defaults();
        let family = args.family.unwrap_or(defaults.family);
        let heads = args.heads.unwrap_or(defaults.heads);
        let tokenizer = args.tokenizer.unwrap_or(TokenizerKind::Bytes);
        let learning_rate = args.learning_rate.unwrap_or(defaults.learning_rate);
        let steps = args.steps.unwrap_or(defaults.steps);
        let settings = Self {
            preset,
            tokenizer,
            precision: args.precision.unwrap_or_else(|| Precision::fastest(device)),
            masters: args.masters.unwrap_or_default(),
            loss_scaling: !args.no_loss_scaling,
            model: ModelConfig {
                family,
                layers: args.layers.unwrap_or(defaults.layers),
                width: args.width.unwrap_or(defaults.width),
                heads,
                kv_heads: args.kv_heads.unwrap_or(match family {
                    Family::Gpt2 => heads,
                    Family::Llama => defaults.kv_heads,
                }),
                context: args.context.unwrap_or(defaults.context),
                vocabulary: Tokenizer::new(tokenizer).vocab_size(),
                dropout: args.dropout.unwrap_or(0.0),
            },
            steps,
            batch: args.batch.unwrap_or(defaults.batch),
            accumulate: args.accumulate.unwrap_or(1),
            ranks,
            learning_rate,
            min_learning_rate: args.min_learning_rate.unwrap_or(learning_rate / 10.0),
            warmup: args.warmup.unwrap_or(defaults.warmup).min(steps / 2),
            weight_decay: args.weight_decay.unwrap_or(0.1),
            clip: args.clip.unwrap_or(1.0),
            seed: args.seed.unwrap_or(42),
        };
        settings.validate()?;
        Ok(settings)
    }

    /// A resumed run's settings: the checkpoint's, with what may change taken from the command
    /// line. What would make it another run is refused.
    pub(crate) fn resume(&self, args: &TrainArgs, ranks: usize) -> Result<Self> {
        let text = |value: Option<usize>| value.map(|v| v.to_string());
        let fixed = [
            ("--preset", args.preset.map(name)),
            ("--tokenizer", args.tokenizer.map(|t| t.name().into())),
            ("--precision", args.precision.map(name)),
            ("--masters", args.masters.map(name)),
            ("--no-loss-scaling", args.no_loss_scaling.then(|| "true".into())),
            ("--family", args.family.map(name)),
            ("--layers", text(args.layers)),
            ("--width", text(args.width)),
            ("--heads", text(args.heads)),
            ("--kv-heads", text(args.kv_heads)),
            ("--context", text(args.context)),
            ("--dropout", args.dropout.map(|v| v.to_string())),
            ("--batch", text(args.batch)),
            ("--accumulate", text(args.accumulate)),
            ("--seed", args.seed.map(|v| v.to_string())),
        ];
        let differences = differences(&fixed, &self.options());
        let data = &args.data;
        let given = [
            ("--data", !data.data.is_empty()),
            ("--extensions", data.extensions.is_some()),
            ("--max-data", data.max_data.is_some()),
            ("--validation-share", data.validation_share.is_some()),
        ];
        if let Some((option, _)) = given.iter().find(|(_, given)| *given) {
            bail!(
                "{option}: a resumed run goes on with the text it began with. Leave the option \
                 out, or start afresh in another folder with --out"
            );
        }
        if !differences.is_empty() {
            bail!(
                "--resume continues a run, and these options make it another one: {}. Leave them \
                 out, or start afresh in another folder with --out",
                differences.join(", ")
            );
        }
        let StepShape { batch, accumulate, ranks } = self.step_shape().on_ranks(ranks)?;
        let mut settings = Self { batch, accumulate, ranks, ..self.clone() };
        settings.steps = args.steps.unwrap_or(self.steps);
        settings.learning_rate = args.learning_rate.unwrap_or(self.learning_rate);
        settings.min_learning_rate = args.min_learning_rate.unwrap_or(self.min_learning_rate);
        settings.warmup = args.warmup.unwrap_or(self.warmup);
        settings.weight_decay = args.weight_decay.unwrap_or(self.weight_decay);
        settings.clip = args.clip.unwrap_or(self.clip);
        settings.validate()?;
        Ok(settings)
    }

    /// By the options that set them, for ranks to compare.
    pub(crate) fn options(&self) -> Vec<(&'static str, String)> {
        let Self {
            preset,
            tokenizer,
            precision,
            masters,
            loss_scaling,
            model:
                ModelConfig { family, layers, width, heads, kv_heads, context, vocabulary: _, dropout },
            steps,
            batch,
            accumulate,
            ranks: _,
            learning_rate,
            min_learning_rate,
            warmup,
            weight_decay,
            clip,
            seed,
        } = self;
        vec![
            ("--preset", name(*preset)),
            ("--tokenizer", tokenizer.name().into()),
            ("--precision", name(*precision)),
            ("--masters", name(*masters)),
            ("--no-loss-scaling", (!loss_scaling).to_string()),
            ("--family", name(*family)),
            ("--layers", layers.to_string()),
            ("--width", width.to_string()),
            ("--heads", heads.to_string()),
            ("--kv-heads", kv_heads.to_string()),
            ("--context", context.to_string()),
            ("--dropout", dropout.to_string()),
            ("--steps", steps.to_string()),
            ("--batch", batch.to_string()),
            ("--accumulate", accumulate.to_string()),
            ("--learning-rate", learning_rate.to_string()),
            ("--min-learning-rate", min_learning_rate.to_string()),
            ("--warmup", warmup.to_string()),
            ("--weight-decay", weight_decay.to_string()),
            ("--clip", clip.to_string()),
            ("--seed", seed.to_string()),
        ]
    }

    /// How attention is computed: what was asked for, or what is fastest. Flash attention runs on tensor cores, but in
    /// f32 only where there is bf16, too. Elsewhere naive attention's products are faster in f32.
    ///
    /// # Errors
    ///
    /// If the model has it in no such way.
    pub(crate) fn attention(
        &self,
        asked: Option<AttentionKind>,
        device: &Device,
    ) -> Result<AttentionKind> {
        if self.model.family == Family::Llama {
            return match asked.unwrap_or(AttentionKind::Flash) {
                AttentionKind::Flash => Ok(AttentionKind::Flash),
                other => bail!(
                    "--attention: expected flash, which is all that a model of --family llama has, got {}",
                    name(other)
                ),
            };
        }
        let has_tensor_cores = || Precision::fastest(device) == Precision::Bf16;
        Ok(asked.unwrap_or(match self.precision {
            Precision::F32 if !has_tensor_cores() => AttentionKind::Naive,
            _ => AttentionKind::Flash,
        }))
    }

    /// What a step is of.
    pub(crate) fn step_shape(&self) -> StepShape {
        StepShape { batch: self.batch, accumulate: self.accumulate, ranks: self.ranks }
    }

    /// Which types the model computes in and is stored in.
    pub(crate) fn policy(&self) -> PrecisionPolicy {
        PrecisionPolicy::new(match self.precision {
            Precision::F32 => train::precision::Precision::F32,
            Precision::Bf16 => train::precision::Precision::Bf16,
            Precision::F16 => train::precision::Precision::F16,
            Precision::Fp8 => train::precision::Precision::Fp8(Recipe::hybrid()),
            Precision::Mxfp8 => train::precision::Precision::Fp8(Recipe::mxfp8()),
        })
        .without_fp8("head")
        .with_masters(match self.masters {
            MastersKind::F32 => Masters::F32,
            MastersKind::None => Masters::None,
        })
    }

    /// How the optimizer treats matrices, vectors and rounding.
    pub(crate) fn groups(&self) -> AdamWGroups {
        AdamWGroups {
            weight_decay: self.weight_decay,
            stochastic_rounding: self.masters == MastersKind::None,
            ..AdamWGroups::default()
        }
    }

    /// How the model is trained.
    pub(crate) fn trainer(&self) -> TrainerConfig {
        let trainer = TrainerConfig::new(self.schedule())
            .with_policy(self.policy())
            .with_optimizer(self.groups())
            .with_max_norm(self.clip)
            .with_seed(self.seed);
        if self.loss_scaling { trainer } else { trainer.without_loss_scaling() }
    }

    /// The learning rate by step.
    pub(crate) fn schedule(&self) -> WarmupCosine {
        WarmupCosine {
            peak: self.learning_rate,
            floor: self.min_learning_rate,
            warmup_steps: self.warmup,
            total_steps: self.steps,
        }
    }

    /// Tokens that one optimizer step learns from.
    pub(crate) fn tokens_per_step(&self) -> usize {
        self.step_shape().samples().saturating_mul(self.model.context)
    }

    fn validate(&self) -> Result<()> {
        let model = &self.model;
        let positive = [
            ("--layers", model.layers),
            ("--width", model.width),
            ("--heads", model.heads),
            ("--kv-heads", model.kv_heads),
            ("--context", model.context),
            ("--steps", self.steps),
            ("--batch", self.batch),
            ("--accumulate", self.accumulate),
        ];
        if let Some((option, _)) = positive.iter().find(|(_, value)| *value == 0) {
            bail!("{option}: expected at least 1, got 0");
        }
        // Far above any model there is, and low enough that no product of two of them overflows.
        const MOST: usize = 1 << 30;
        if let Some((option, value)) = positive.iter().find(|(_, value)| *value > MOST) {
            bail!("{option}: expected at most {MOST}, got {value}");
        }
        if !model.width.is_multiple_of(model.heads) {
            bail!("--heads: expected a divisor of --width ({}), got {}", model.width, model.heads);
        }
        let head = model.width / model.heads;
        match model.family {
            Family::Gpt2 if model.kv_heads != model.heads => bail!(
                "--kv-heads: expected --heads ({}), since GPT-2's heads share nothing, got {}. --family llama shares",
                model.heads,
                model.kv_heads
            ),
            Family::Llama if !model.heads.is_multiple_of(model.kv_heads) => bail!(
                "--kv-heads: expected a divisor of --heads ({}), got {}",
                model.heads,
                model.kv_heads
            ),
            Family::Llama if !head.is_multiple_of(2) => bail!(
                "--heads: a Llama turns pairs, so --width ({}) over it has to be even, got {head}",
                model.width
            ),
            _ => {}
        }
        if !(0.0..1.0).contains(&model.dropout) {
            bail!("--dropout: expected a number from 0 to below 1, got {}", model.dropout);
        }
        if !self.loss_scaling && self.precision != Precision::F16 {
            bail!("--no-loss-scaling: only losses in f16 are scaled, and --precision is not f16");
        }
        let rates = [("--learning-rate", self.learning_rate), ("--clip", self.clip)];
        if let Some((option, value)) = rates.iter().find(|(_, v)| !(v.is_finite() && *v > 0.0)) {
            bail!("{option}: expected a positive number, got {value}");
        }
        if !(0.0..=self.learning_rate).contains(&self.min_learning_rate) {
            bail!(
                "--min-learning-rate: expected a number from 0 to --learning-rate ({}), got {}",
                self.learning_rate,
                self.min_learning_rate
            );
        }
        if !(self.weight_decay.is_finite() && self.weight_decay >= 0.0) {
            bail!("--weight-decay: expected a number of at least 0, got {}", self.weight_decay);
        }
        Ok(())
    }
}

fn yes() -> bool {
    true
}

/// How the command line spells a choice.
pub(crate) fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map(|v| v.get_name().to_string()).unwrap_or_default()
}
