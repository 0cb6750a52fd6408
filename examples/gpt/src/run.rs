//! A run: its folder, its model and what it has learned so far.

use crate::{
    checkpoint::{self, RunState},
    cli::TrainArgs,
    data::DataSettings,
    loader::{Windows, sequential_batches},
    memory,
    metrics::{self, MetricRecord, MetricsLog},
    model::Gpt,
    plot,
    presets::Preset,
    settings::{AttentionKind, MastersKind, Precision, RunSettings, name},
    store::{TokenStore, TrainTokens},
    tokenizer::Tokenizer,
};
use anyhow::{Context, Result, bail, ensure};
use blackburn::{
    Report,
    distributed::Group,
    train::{
        memory::MemoryEstimate,
        trainer::{Trainer, TrainerConfig},
    },
};
use burn::tensor::{Device, Int, Tensor};
use example_program::{CadenceOptions, agree, lock, or_none};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    sync::Arc,
};

/// Trains on ids of tokens and those that follow them, both `[batch, context]`.
pub(crate) type GptTrainer = Trainer<Gpt, (Tensor<2, Int>, Tensor<2, Int>)>;

/// A run, ready to take its next step.
pub(crate) struct Run {
    pub(crate) folder: PathBuf,
    pub(crate) settings: RunSettings,
    pub(crate) data: DataSettings,
    pub(crate) store: Arc<TokenStore>,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) device: Device,
    pub(crate) trainer: GptTrainer,
    /// What a step takes, as far as it is known.
    memory: MemoryEstimate,
    /// How often it reports, validates and saves, as far as it was told.
    pub(crate) cadence: CadenceOptions,
    /// Beginning of its samples, if it was told one.
    prompt: Option<String>,
    pub(crate) attention: AttentionKind,
    /// Whether logits are made in chunks of rows, with the loss.
    pub(crate) chunked_loss: bool,
    /// Whether passes are to be recorded and replayed.
    pub(crate) graph: bool,
    /// The processes that train this run.
    pub(crate) group: Group,
    // Held by rank 0 until the run ends: two runs must not write to one folder.
    _lock: Option<File>,
}

impl Run {
    /// A fresh run in `folder`.
    pub(crate) fn start(
        args: &TrainArgs,
        folder: PathBuf,
        settings: RunSettings,
        device: &mut Device,
        report: &Report,
        group: &Group,
    ) -> Result<Self> {
        let attention = settings.attention(args.attention, device)?;
        let data = DataSettings::resolve(&args.data)?;
        let cadence = args.cadence();
        agree_on_all(args, &settings, attention, &data, cadence, group)?;
        let config = trainer(args, &settings, cadence, group);
        memory::check(args, &settings, &config, attention, report)?;
        // On a device that does not compute so, nothing old goes.
        settings.policy().check_device(device)?;
        let mut prepared = None;
        let fingerprint: String = group.rank_0_first("the run's folder", || {
            let lock = lock(&folder)?;
            let store = prepare(args, &folder, &settings, &data)?;
            let fingerprint = store.fingerprint().to_owned();
            prepared = Some((lock, store));
            anyhow::Ok(fingerprint)
        })?;
        let (lock, store) = match prepared {
            Some((lock, store)) => (Some(lock), store),
            None => {
                let tokens = folder.join("data");
                (None, Arc::new(data.reopen(&tokens, settings.tokenizer, &fingerprint)?))
            }
        };
        let training = training(device, recomputes(args, &settings, attention));
        let foreseen = memory::foresee(args, &settings, &config, attention, &training)?;
        device.seed(settings.seed);
        let device = training;
        let trainer: GptTrainer = config.init(settings.model.init(&device))?;
        let memory = foreseen.map_or_else(|| trainer.memory(), Ok)?;
        Ok(Self {
            tokenizer: Tokenizer::new(settings.tokenizer),
            cadence,
            prompt: args.prompt.clone(),
            attention,
            chunked_loss: args.chunked_loss,
            graph: replays(args),
            folder,
            settings,
            data,
            store,
            device,
            trainer,
            memory,
            group: group.clone(),
            _lock: lock,
        })
    }

    /// The run in `folder`, from its newest sound checkpoint.
    pub(crate) fn resume(
        args: &TrainArgs,
        folder: PathBuf,
        device: &mut Device,
        report: &Report,
        group: &Group,
    ) -> Result<Self> {
        let mut prepared = None;
        let path: PathBuf = group.rank_0_first("the run's folder", || {
            let lock = lock(&folder)?;
            if let Err(error) = checkpoint::of_run(&folder).clean() {
                tracing::warn!("{error}");
            }
            let found = checkpoint::find(&folder)?;
            let path = found.path();
            prepared = Some((lock, found));
            anyhow::Ok(path)
        })?;
        let (lock, found) = match prepared {
            Some((lock, found)) => (Some(lock), found),
            None => (None, checkpoint::find(&path)?),
        };
        let settings = found.state.settings.resume(args, group.size())?;
        let attention = settings.attention(args.attention, device)?;
        let data = found.state.data.clone();
        let cadence = args.cadence().or(found.state.cadence);
        agree_on_all(args, &settings, attention, &data, cadence, group)?;
        let config = trainer(args, &settings, cadence, group);
        memory::check(args, &settings, &config, attention, report)?;
        let store = Arc::new(data.reopen(
            &folder.join("data"),
            settings.tokenizer,
            &found.state.fingerprint,
        )?);
        let device = training(device, recomputes(args, &settings, attention));
        let foreseen = memory::foresee(args, &settings, &config, attention, &device)?;
        let model = settings.model.init(&device);
        let trainer: GptTrainer = config.resume(model, &found.trainer)?;
        let memory = foreseen.map_or_else(|| trainer.memory(), Ok)?;
        tracing::info!("continuing from {}", found.path().display());
        Ok(Self {
            tokenizer: Tokenizer::new(settings.tokenizer),
            cadence,
            prompt: args.prompt.clone().or(found.state.prompt),
            attention,
            chunked_loss: args.chunked_loss,
            graph: replays(args),
            folder,
            settings,
            data,
            store,
            device,
            trainer,
            memory,
            group: group.clone(),
            _lock: lock,
        })
    }

    /// How many steps the run has taken.
    pub(crate) fn step(&self) -> usize {
        self.trainer.steps_taken()
    }

    /// Beginning of its samples.
    pub(crate) fn prompt(&self) -> &str {
        self.prompt.as_deref().unwrap_or("fn ")
    }

    /// The model as it is now.
    pub(crate) fn model(&self) -> Result<&Gpt> {
        Ok(self.trainer.model()?)
    }

    /// Writes a checkpoint of the current step.
    pub(crate) fn save(&mut self, keep: usize) -> Result<PathBuf> {
        let state = RunState {
            settings: self.settings.clone(),
            data: self.data.clone(),
            fingerprint: self.store.fingerprint().into(),
            cadence: self.cadence,
            prompt: self.prompt.clone(),
        };
        Ok(self.trainer.save(&checkpoint::of_run(&self.folder).keep(keep), &state)?)
    }

    /// Says what is about to be trained, to the reader and to the log.
    pub(crate) fn introduce(&self, log: &mut MetricsLog, report: &Report) -> Result<()> {
        let settings = &self.settings;
        eprintln!(
            "training {:.1} million parameters in {} on {}{} ({}), {} tokens a step, seed {}; run folder {}",
            settings.model.parameters() as f64 / 1e6,
            name(settings.precision),
            match self.group.size() {
                1 => String::new(),
                ranks => format!("{ranks} devices, this one "),
            },
            report.device,
            report.device_name,
            settings.tokens_per_step(),
            settings.seed,
            self.folder.display()
        );
        eprintln!("memory: {}", self.memory.line());
        let fields = serde_json::json!({
            "settings": settings,
            "attention": format!("{:?}", self.attention).to_lowercase(),
            "data": self.data,
            "fingerprint": self.store.fingerprint(),
            "device": report,
            "parameters": settings.model.parameters(),
            "memory": self.memory,
            "starts_at_step": self.step(),
        });
        match fields {
            serde_json::Value::Object(fields) => log.write(&MetricRecord::Run(fields)),
            _ => Ok(()),
        }
    }

    /// Draws the curve of the finished run.
    pub(crate) fn conclude(&self) -> Result<()> {
        let records = metrics::read_records(&self.folder.join("metrics.jsonl"))?;
        let (svg, png) = (self.folder.join("loss.svg"), self.folder.join("loss.png"));
        let title = format!("{} ({})", self.folder.display(), self.tokenizer.kind().name());
        plot::render_loss_curve(&records, &title, &svg, &png)?;
        eprintln!("loss curve: {} and {}", png.display(), svg.display());
        eprintln!(
            "write with it: {} generate --checkpoint {} --prompt \"fn main\"",
            std::env::args().next().unwrap_or_else(|| "gpt".into()),
            self.folder.display()
        );
        Ok(())
    }
}

/// Makes the folder ready for a fresh run, and the text that it learns from.
fn prepare(
    args: &TrainArgs,
    folder: &Path,
    settings: &RunSettings,
    data: &DataSettings,
) -> Result<Arc<TokenStore>> {
    if !args.overwrite {
        refuse_foreign_results(folder)?;
    }
    if !checkpoint::of_run(folder).steps().is_empty() {
        ensure!(
            args.overwrite,
            "{} already holds a run: continue it with --resume, start another with --out DIR, \
             or replace it with --overwrite",
            folder.display()
        );
    }
    let store = Arc::new(data.open(&folder.join("data"), settings.tokenizer)?);
    // Before anything old goes: a fresh run that cannot begin must not cost the one before it.
    check_windows(&store, settings)?;
    remove_results(folder)?;
    Ok(store)
}

/// Whether there is text enough for a window on either side.
fn check_windows(store: &Arc<TokenStore>, settings: &RunSettings) -> Result<()> {
    let (context, batch) = (settings.model.context, settings.batch);
    Windows::new(TrainTokens(store.clone()), context, settings.seed)
        .context("the text to learn from is too short")?;
    sequential_batches(store.validation(), batch, context, 1)
        .map(drop)
        .context("the text held out for validation is too short")
}

/// Whether cheap activations are computed again: what was asked for, or what was measured to be
/// faster, which is where the GPU waits for the host.
fn recomputes(args: &TrainArgs, settings: &RunSettings, attention: AttentionKind) -> bool {
    args.recompute.unwrap_or(
        !replays(args)
            && settings.precision != Precision::F32
            && settings.masters == MastersKind::F32
            && attention != AttentionKind::Naive,
    )
}

/// How the run is trained.
fn trainer(
    args: &TrainArgs,
    settings: &RunSettings,
    cadence: CadenceOptions,
    group: &Group,
) -> TrainerConfig {
    let trainer = settings.trainer().with_group(group).with_metrics_every(cadence.log_every());
    let trainer = if args.shard_optimizer { trainer.with_sharded_optimizer() } else { trainer };
    if replays(args) { trainer } else { trainer.without_recording() }
}

/// Whether passes are to be recorded: what was asked for, or wherever they can be.
fn replays(args: &TrainArgs) -> bool {
    args.graph.unwrap_or(true)
}

/// The device, which differentiates.
fn training(device: &Device, recompute: bool) -> Device {
    let device = device.clone().autodiff();
    if recompute { device.gradient_checkpointing() } else { device }
}

/// Checks that all ranks are about to do the same.
fn agree_on_all(
    args: &TrainArgs,
    settings: &RunSettings,
    attention: AttentionKind,
    data: &DataSettings,
    cadence: CadenceOptions,
    group: &Group,
) -> Result<()> {
    let mut options = settings.options();
    options.extend(data.options());
    options.extend([
        ("--attention", format!("{attention:?}").to_lowercase()),
        ("--chunked-loss", args.chunked_loss.to_string()),
        ("--recompute", recomputes(args, settings, attention).to_string()),
        ("--graph", replays(args).to_string()),
        ("--shard-optimizer", args.shard_optimizer.to_string()),
        // All ranks look at losses and save together.
        ("--log-every", cadence.log_every().to_string()),
        ("--checkpoint-every", or_none(cadence.checkpoint_every)),
    ]);
    agree(group, &options)
}

/// The folder of a run that was not given one.
pub(crate) fn default_folder(args: &TrainArgs) -> PathBuf {
    let preset = args.preset.unwrap_or(Preset::Tiny);
    PathBuf::from(format!("runs/gpt-{}", name(preset)))
}

/// Refuses a folder with results that are not a run's of this program: they would be replaced.
fn refuse_foreign_results(folder: &Path) -> Result<()> {
    let is_run =
        folder.join("metrics.jsonl").exists() || !checkpoint::of_run(folder).steps().is_empty();
    let found = ["checkpoints", "tensorboard", "loss.svg", "loss.png"]
        .into_iter()
        .find(|name| folder.join(name).exists());
    match found {
        Some(name) if !is_run => bail!(
            "{} exists and is not from a run of this program: choose another folder with --out, \
             or let it be replaced with --overwrite",
            folder.join(name).display()
        ),
        _ => Ok(()),
    }
}

/// Removes what an earlier run left in `folder`, but for the tokens, which are kept by content.
fn remove_results(folder: &Path) -> Result<()> {
    for name in ["checkpoints", "tensorboard"] {
        let path = folder.join(name);
        if path.exists() {
            fs::remove_dir_all(&path)
                .with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    let profile = ["profile.json", "profile.svg", "profile.png"];
    for name in ["metrics.jsonl", "loss.svg", "loss.png"].into_iter().chain(profile) {
        let path = folder.join(name);
        if path.exists() {
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}
