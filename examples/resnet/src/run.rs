//! A run: its folder, its data and what it has learned so far.

use crate::{
    cli::TrainArgs,
    data::{DataSettings, Source, loader::Shape},
    metrics::LOG,
    settings::RunSettings,
    training::Training,
    weights::Weights,
};
use anyhow::{Context, Result, bail, ensure};
use blackburn::{
    Report,
    distributed::Group,
    train::{
        checkpoint::{Checkpoint, Checkpoints, is_checkpoint},
        trainer::saved_extra,
    },
};
use burn::tensor::Device;
use example_program::{CadenceOptions, agree, lock, or_none};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    num::NonZero,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

/// Folders and files of a run, besides its log.
const RESULTS: [&str; 7] = [
    "checkpoints",
    "tensorboard",
    "curves.svg",
    "curves.png",
    "confusion.svg",
    "confusion.png",
    "samples.png",
];

/// What a checkpoint holds besides tensors. The position in the data follows from the step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RunState {
    pub(crate) settings: RunSettings,
    pub(crate) data: DataSettings,
    /// Names of the classes, for whoever has the checkpoint and not the data.
    pub(crate) classes: Vec<String>,
    pub(crate) fingerprint: String,
    /// How often the run reports, validates and saves, as far as it was told.
    #[serde(default)]
    pub(crate) cadence: CadenceOptions,
}

/// A run, ready to take its next step.
pub(crate) struct Run {
    pub(crate) folder: PathBuf,
    pub(crate) settings: RunSettings,
    pub(crate) data: DataSettings,
    pub(crate) source: Arc<dyn Source>,
    pub(crate) device: Device,
    pub(crate) training: Training,
    pub(crate) workers: usize,
    /// How often it reports, validates and saves, as far as it was told.
    pub(crate) cadence: CadenceOptions,
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
        device: &Device,
        report: &Report,
        group: &Group,
    ) -> Result<Self> {
        let data = DataSettings::resolve(&args.data)?;
        let workers = workers(args.data.workers)?;
        let weights = args.weights.as_deref().map(Weights::open).transpose()?;
        let source = data.open()?;
        let is_cpu = report.runtime == "flex";
        let settings = RunSettings::resolve(
            args,
            &data,
            source.as_ref(),
            weights.as_ref(),
            device,
            is_cpu,
            group.size(),
        )?;
        let cadence = args.cadence();
        agree_on_all(&settings, &data, cadence, group)?;
        group.agree("the images", &source.fingerprint())?;
        let mut kept = None;
        group.rank_0_first("the run's folder", || {
            kept = Some(lock(&folder)?);
            if args.overwrite { anyhow::Ok(()) } else { refuse_results(&folder) }
        })?;
        // All that can fail comes before what was there goes.
        let weights = weights.as_ref().map(|weights| (weights, args.new_head));
        let training = Training::new(&settings, weights, cadence, device, group)?;
        if group.is_main() {
            remove_results(&folder)?;
        }
        let (device, group) = (device.clone(), group.clone());
        Ok(Self {
            folder,
            settings,
            data,
            source,
            device,
            training,
            workers,
            cadence,
            group,
            _lock: kept,
        })
    }

    /// The run in `folder`, from its newest sound checkpoint.
    pub(crate) fn resume(
        args: &TrainArgs,
        folder: PathBuf,
        device: &Device,
        group: &Group,
    ) -> Result<Self> {
        let workers = workers(args.data.workers)?;
        ensure!(
            folder.is_dir(),
            "--resume: found no run in {}: `train` without --resume begins one",
            folder.display()
        );
        let checkpoints = checkpoints(&folder);
        let mut kept = None;
        let path: PathBuf = group.rank_0_first("the run's folder", || {
            kept = Some(lock(&folder)?);
            checkpoints.clean()?;
            anyhow::Ok(checkpoints.newest()?.path().to_path_buf())
        })?;
        let found = checkpoints.open(&path)?;
        let state: RunState = saved_extra(&found)?;
        let settings = state.settings.resume(args, group.size())?;
        let cadence = args.cadence().or(state.cadence);
        agree_on_all(&settings, &state.data, cadence, group)?;
        let source = state.data.reopen(&state.fingerprint)?;
        let training = Training::load(&settings, &found, cadence, device, group)?;
        tracing::info!("continuing from {}", found.path().display());
        Ok(Self {
            folder,
            settings,
            data: state.data,
            source,
            device: device.clone(),
            training,
            workers,
            cadence,
            group: group.clone(),
            _lock: kept,
        })
    }

    /// Steps taken.
    pub(crate) fn step(&self) -> usize {
        self.training.trainer.steps_taken()
    }

    /// Writes a checkpoint of the current step.
    pub(crate) fn save(&mut self, keep: usize) -> Result<PathBuf> {
        let state = RunState {
            settings: self.settings.clone(),
            data: self.data.clone(),
            classes: self.source.classes().to_vec(),
            fingerprint: self.source.fingerprint(),
            cadence: self.cadence,
        };
        Ok(self.training.trainer.save(&checkpoints(&self.folder).keep(keep), &state)?)
    }

    /// How batches are made.
    pub(crate) fn shape(&self) -> Shape {
        let RunSettings { batch, size, .. } = self.settings;
        Shape { batch, size, workers: self.workers }
    }
}

/// Checks that all ranks are about to do the same.
fn agree_on_all(
    settings: &RunSettings,
    data: &DataSettings,
    cadence: CadenceOptions,
    group: &Group,
) -> Result<()> {
    let mut options = settings.options();
    options.extend(data.options());
    // All ranks look at losses and save together.
    options.push(("--log-every", cadence.log_every().to_string()));
    options.push(("--checkpoint-every", or_none(cadence.checkpoint_every)));
    agree(group, &options)
}

/// Where a run keeps its checkpoints.
pub(crate) fn checkpoints(run: &Path) -> Checkpoints {
    Checkpoints::new(run.join("checkpoints"), "blackburn-resnet")
}

/// The checkpoint that a command names: one checkpoint's folder, or a run's, of which the newest sound one is
/// taken.
pub(crate) fn find(path: &Path) -> Result<(Checkpoint, RunState)> {
    let found = match is_checkpoint(path) {
        true => checkpoints(path).open(path),
        false => checkpoints(path).newest(),
    };
    let found = found.with_context(|| {
        format!(
            "--checkpoint: expected a run's folder (with checkpoints/step-*) or one checkpoint's \
             folder, got {}",
            path.display()
        )
    })?;
    let state = saved_extra(&found)?;
    Ok((found, state))
}

/// Threads that make images.
pub(crate) fn workers(asked: Option<usize>) -> Result<usize> {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let workers = asked.unwrap_or(cores);
    ensure!((1..=1024).contains(&workers), "--workers: expected from 1 to 1024, got {workers}");
    Ok(workers)
}

/// Refuses a folder with a run's checkpoints, and one with results of another program.
fn refuse_results(folder: &Path) -> Result<()> {
    ensure!(
        checkpoints(folder).steps().is_empty(),
        "{} already holds a run: continue it with --resume, start another with --out DIR, or replace \
         it with --overwrite",
        folder.display()
    );
    let is_run = folder.join(LOG).exists();
    let found = RESULTS.into_iter().find(|name| folder.join(name).exists());
    match found.filter(|_| !is_run) {
        Some(name) => bail!(
            "{} exists and is not from a run of this program: choose another folder with --out, or \
             let it be replaced with --overwrite",
            folder.join(name).display()
        ),
        None => Ok(()),
    }
}

/// Removes what an earlier run left in `folder`.
fn remove_results(folder: &Path) -> Result<()> {
    for name in RESULTS.into_iter().chain([LOG]) {
        let path = folder.join(name);
        let removed = match path.is_dir() {
            true => fs::remove_dir_all(&path),
            false if path.exists() => fs::remove_file(&path),
            false => Ok(()),
        };
        removed.with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(())
}
