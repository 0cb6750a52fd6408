//! Checkpoints that survive being killed.
//!
//! A checkpoint is a folder `step-NNNNNNNN` with the parameters and the optimizer's state as Burn
//! records, and `state.json`, which holds the rest and the checksums. It is written under another
//! name, flushed to the disk and then renamed, so that a folder of that name is always whole; older
//! ones go only after that.

use crate::{
    data::DataSettings,
    model::Gpt,
    settings::{MastersKind, RunSettings},
};
use anyhow::{Context, Result, anyhow, bail, ensure};
use blackburn::train::{
    optim::{AdamWGroups, StepGate},
    precision::Masters,
    scaler::{GradScaler, ScalerState},
};
use burn::{
    module::Module,
    optim::ModuleOptimizer,
    store::ModuleRecord,
    tensor::{Bytes, Device},
};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

const FORMAT: &str = "blackburn-gpt";
const VERSION: u32 = 1;
const MODEL: &str = "model.bpk";
const OPTIMIZER: &str = "optimizer.bpk";
const STATE: &str = "state.json";
const PREFIX: &str = "step-";
/// What an interrupted writer leaves behind.
const UNFINISHED: &str = ".writing-";

/// All that a run needs to continue, but for the tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct CheckpointState {
    format: String,
    version: u32,
    /// Optimizer steps done. Data order, schedule and dropout are functions of it and the seed.
    pub(crate) step: usize,
    pub(crate) settings: RunSettings,
    pub(crate) data: DataSettings,
    /// Identifies the tokens that the run learns from.
    pub(crate) fingerprint: String,
    /// What the loss scaler had come to; none before there was one.
    #[serde(default)]
    scaler: Option<ScalerState>,
    model: StoredFile,
    optimizer: StoredFile,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct StoredFile {
    bytes: u64,
    crc32c: u32,
}

/// What [`save`] writes.
pub(crate) struct Snapshot<'a> {
    pub(crate) step: usize,
    pub(crate) settings: &'a RunSettings,
    pub(crate) data: &'a DataSettings,
    pub(crate) fingerprint: &'a str,
    pub(crate) model: &'a Gpt,
    pub(crate) optimizer: &'a ModuleOptimizer,
    pub(crate) scaler: &'a GradScaler,
}

/// A checkpoint whose checksums hold.
pub(crate) struct Checkpoint {
    pub(crate) path: PathBuf,
    pub(crate) state: CheckpointState,
    model: Vec<u8>,
    optimizer: Vec<u8>,
}

/// The folder of a run's checkpoints.
pub(crate) fn folder(run: &Path) -> PathBuf {
    run.join("checkpoints")
}

/// Writes a checkpoint into the run's folder and drops all but the newest `keep`. When it fails,
/// the earlier checkpoints are as they were.
pub(crate) fn save(run: &Path, snapshot: &Snapshot<'_>, keep: usize) -> Result<PathBuf> {
    let checkpoints = folder(run);
    let target = checkpoints.join(format!("{PREFIX}{:08}", snapshot.step));
    write(&checkpoints, &target, snapshot).with_context(|| {
        let kept = match steps(&checkpoints).last() {
            Some(step) => format!("the checkpoint of step {step} is intact"),
            None => "there is none yet".to_string(),
        };
        format!("cannot write the checkpoint {}; {kept}", target.display())
    })?;
    // Newer ones are damaged, or the run would have continued from there: they do not count.
    let done = steps(&checkpoints).into_iter().filter(|step| *step <= snapshot.step);
    for step in done.rev().skip(keep.max(1)) {
        let old = checkpoints.join(format!("{PREFIX}{step:08}"));
        discard(&checkpoints, &old)
            .with_context(|| format!("cannot remove the old checkpoint {}", old.display()))?;
    }
    Ok(target)
}

fn write(checkpoints: &Path, target: &Path, snapshot: &Snapshot<'_>) -> Result<()> {
    fs::create_dir_all(checkpoints)?;
    if target.exists() {
        if open(target).is_ok() {
            // A resumed run computes the same again.
            return Ok(());
        }
        discard(checkpoints, target)?;
    }
    let folder = tempfile::Builder::new().prefix(UNFINISHED).tempdir_in(checkpoints)?;
    let model = snapshot.model.clone().into_record().into_bytes()?;
    let model = store(&folder.path().join(MODEL), &model)?;
    let optimizer = snapshot.optimizer.into_bytes()?;
    let optimizer = store(&folder.path().join(OPTIMIZER), &optimizer)?;
    let state = CheckpointState {
        format: FORMAT.into(),
        version: VERSION,
        step: snapshot.step,
        settings: snapshot.settings.clone(),
        data: snapshot.data.clone(),
        fingerprint: snapshot.fingerprint.into(),
        scaler: snapshot.scaler.is_enabled().then(|| snapshot.scaler.state()),
        model,
        optimizer,
    };
    store(&folder.path().join(STATE), &serde_json::to_vec_pretty(&state)?)?;
    sync_folder(folder.path())?;
    fs::rename(folder.path(), target)?;
    // Renamed: nothing is left for the guard to remove.
    let _ = folder.keep();
    sync_folder(checkpoints)?;
    Ok(())
}

fn store(path: &Path, bytes: &[u8]) -> Result<StoredFile> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    Ok(StoredFile { bytes: bytes.len() as u64, crc32c: crc32c::crc32c(bytes) })
}

/// Makes a rename last: on Unix, names are flushed with their folder.
fn sync_folder(folder: &Path) -> Result<()> {
    if cfg!(unix) {
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}

/// Takes a checkpoint out of sight first, so that one half removed is never taken for whole.
fn discard(checkpoints: &Path, path: &Path) -> Result<()> {
    let aside = tempfile::Builder::new().prefix(UNFINISHED).tempdir_in(checkpoints)?;
    fs::rename(path, aside.path().join("old"))?;
    Ok(())
}

/// Removes what interrupted writers left. Only for the one process that holds the run's lock.
pub(crate) fn clean(run: &Path) {
    let Ok(entries) = fs::read_dir(folder(run)) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with(UNFINISHED)
            && let Err(error) = fs::remove_dir_all(entry.path())
        {
            tracing::warn!("cannot remove {}: {error}", entry.path().display());
        }
    }
}

/// The steps that have a checkpoint, ascending.
pub(crate) fn steps(checkpoints: &Path) -> Vec<usize> {
    let Ok(entries) = fs::read_dir(checkpoints) else { return Vec::new() };
    let mut steps: Vec<usize> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.strip_prefix(PREFIX)?.parse().ok())
        .collect();
    steps.sort_unstable();
    steps
}

/// The checkpoint at `path`: one checkpoint's folder, or a run's, of which the newest sound one is
/// taken; damaged ones are passed over with a warning.
pub(crate) fn find(path: &Path) -> Result<Checkpoint> {
    if path.join(STATE).exists() || is_checkpoint_name(path) {
        return open(path).with_context(|| format!("cannot use the checkpoint {}", path.display()));
    }
    let checkpoints = folder(path);
    let steps = steps(&checkpoints);
    ensure!(
        !steps.is_empty(),
        "found no checkpoint in {}: expected a run's folder (with checkpoints/{PREFIX}*) or one \
         checkpoint's folder (with {STATE}). `train` makes one",
        path.display()
    );
    let mut reasons = Vec::new();
    for step in steps.iter().rev() {
        let candidate = checkpoints.join(format!("{PREFIX}{step:08}"));
        match open(&candidate) {
            Ok(checkpoint) => return Ok(checkpoint),
            Err(error) => {
                tracing::warn!("passing over {}: {error:#}", candidate.display());
                reasons.push(format!("{}: {error:#}", candidate.display()));
            }
        }
    }
    bail!(
        "none of the {} checkpoints in {} is sound: {}",
        steps.len(),
        path.display(),
        reasons.join("; ")
    )
}

fn is_checkpoint_name(path: &Path) -> bool {
    path.is_dir() && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX))
}

fn open(path: &Path) -> Result<Checkpoint> {
    let text = fs::read_to_string(path.join(STATE))
        .map_err(|error| anyhow!("{STATE} cannot be read: {error}"))?;
    let header: serde_json::Value =
        serde_json::from_str(&text).map_err(|error| anyhow!("{STATE} is damaged: {error}"))?;
    let format = header.get("format").and_then(|value| value.as_str());
    ensure!(
        format == Some(FORMAT),
        "this is not a checkpoint of this program: {STATE} names the format {}, expected {FORMAT}",
        format.unwrap_or("nothing")
    );
    let version = header.get("version").and_then(serde_json::Value::as_u64);
    ensure!(
        version == Some(VERSION.into()),
        "the checkpoint has version {}, and this program reads version {VERSION}",
        version.map_or("none".into(), |v| v.to_string())
    );
    let state: CheckpointState =
        serde_json::from_value(header).map_err(|error| anyhow!("{STATE} is damaged: {error}"))?;
    let named = path.file_name().and_then(|name| name.to_str()?.strip_prefix(PREFIX)?.parse().ok());
    if let Some(step) = named.filter(|step: &usize| *step != state.step) {
        bail!("{STATE} is damaged: it speaks of step {}, its folder of step {step}", state.step);
    }
    let model = read(&path.join(MODEL), &state.model)?;
    let optimizer = read(&path.join(OPTIMIZER), &state.optimizer)?;
    Ok(Checkpoint { path: path.to_path_buf(), state, model, optimizer })
}

fn read(path: &Path, expected: &StoredFile) -> Result<Vec<u8>> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let bytes = fs::read(path).map_err(|error| anyhow!("{name} cannot be read: {error}"))?;
    ensure!(
        bytes.len() as u64 == expected.bytes,
        "{name} is damaged: expected {} bytes, got {}",
        expected.bytes,
        bytes.len()
    );
    let crc32c = crc32c::crc32c(&bytes);
    ensure!(
        crc32c == expected.crc32c,
        "{name} is damaged: expected checksum {:08x}, got {crc32c:08x}",
        expected.crc32c
    );
    Ok(bytes)
}

impl Checkpoint {
    /// The model, on `device`, stored as it was and computing in the run's precision.
    pub(crate) fn model(&self, device: &Device) -> Result<Gpt> {
        let settings = &self.state.settings;
        let model = settings.policy().apply(settings.model.init(device))?;
        self.load(model)
    }

    /// The same to read from alone: stored in what it computes in, so that nothing is cast at each
    /// token.
    pub(crate) fn model_to_read(&self, device: &Device) -> Result<Gpt> {
        let settings = &self.state.settings;
        if settings.masters == MastersKind::None {
            return self.model(device);
        }
        let model = self.load(settings.model.init(device))?;
        Ok(settings.policy().with_masters(Masters::None).apply(model)?)
    }

    fn load(&self, model: Gpt) -> Result<Gpt> {
        let record = ModuleRecord::from_bytes(Bytes::from_bytes_vec(self.model.clone()))
            .with_context(|| format!("{MODEL} is no record of Burn's"))?;
        model
            .try_load_record(record)
            .with_context(|| format!("{MODEL} does not fit the sizes in {STATE}"))
    }

    /// The run's loss scaler, where it was.
    pub(crate) fn scaler(&self, device: &Device) -> Result<GradScaler> {
        let mut scaler = self.state.settings.scaler(device)?;
        if let Some(state) = self.state.scaler {
            scaler.restore(state).with_context(|| format!("{STATE} is damaged"))?;
        }
        Ok(scaler)
    }

    /// The optimizer of `model`, with its state.
    pub(crate) fn optimizer(
        &self,
        groups: &AdamWGroups,
        model: &Gpt,
        device: &Device,
        gate: &StepGate,
    ) -> Result<ModuleOptimizer> {
        groups
            .init_gated(model, device, gate)
            .from_bytes(Bytes::from_bytes_vec(self.optimizer.clone()))
            .with_context(|| format!("{OPTIMIZER} is no record of Burn's"))
    }
}
