//! Checkpoints that survive being killed, on disk.
//!
//! A checkpoint is a folder `step-NNNNNNNN` of a few files and a `state.json`, which holds whatever the
//! program wants to find again, and the files' sizes and checksums. It is written under another name,
//! flushed to the disk and then renamed, so that a folder of that name is always whole. Older checkpoints
//! go only after that.
//!
//! ```
//! use blackburn_train::checkpoint::Checkpoints;
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize)]
//! struct Progress { epoch: usize }
//!
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! let checkpoints = Checkpoints::new(folder, "my-program").keep(2);
//! for step in [100, 200, 300] {
//!     let epoch = step / 100;
//!     checkpoints.save(step, &[("weights.bin", b"numbers")], &Progress { epoch })?;
//! }
//! assert_eq!(checkpoints.steps(), [200, 300]);
//!
//! let newest = checkpoints.newest()?;
//! assert_eq!(newest.step(), 300);
//! assert_eq!(newest.state::<Progress>()?.epoch, 3);
//! assert_eq!(newest.file("weights.bin")?, b"numbers");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Trainer::save`](crate::trainer::Trainer::save) writes all that training needs into one.

mod error;
mod folder;

pub use error::CheckpointError;

use folder::{StoredFile, discard, read, store, sync_folder};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    io::{Error as IoError, ErrorKind},
    path::{Path, PathBuf},
};

/// Of the layout of `state.json`. Version 1 was the GPT example's own.
const VERSION: u64 = 2;
const STATE: &str = "state.json";
const PREFIX: &str = "step-";
/// What an interrupted writer leaves behind.
const UNFINISHED: &str = ".writing-";

/// A folder of checkpoints, and how many of them are kept.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    format: String,
    keep: usize,
}

/// The contents of `state.json`.
#[derive(Serialize, Deserialize)]
struct Manifest {
    format: String,
    version: u64,
    step: usize,
    files: BTreeMap<String, StoredFile>,
    state: Value,
}

impl Checkpoints {
    /// Those in `folder`, which need not exist yet, of the program that `format` names: another program's
    /// are refused. The newest three are kept.
    pub fn new(folder: impl Into<PathBuf>, format: impl Into<String>) -> Self {
        Self { folder: folder.into(), format: format.into(), keep: 3 }
    }

    /// Keeps the newest `keep`, at least one.
    #[must_use]
    pub fn keep(mut self, keep: usize) -> Self {
        self.keep = keep.max(1);
        self
    }

    /// Where they are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The steps that have a checkpoint, ascending, sound or not.
    pub fn steps(&self) -> Vec<usize> {
        let Ok(entries) = fs::read_dir(&self.folder) else { return Vec::new() };
        let mut steps: Vec<usize> =
            entries.flatten().filter_map(|entry| step_of(&entry.path())).collect();
        steps.sort_unstable();
        steps
    }

    /// Writes a checkpoint of `step` and drops all but the newest. Returns its folder.
    ///
    /// A sound checkpoint of that step is left as it is: a run that was resumed computes the same again.
    ///
    /// # Errors
    ///
    /// When a file cannot be written, or `state` cannot be turned into JSON. Earlier checkpoints are then
    /// as they were.
    pub fn save(
        &self,
        step: usize,
        files: &[(&str, &[u8])],
        state: &impl Serialize,
    ) -> Result<PathBuf, CheckpointError> {
        let target = self.path_of(step);
        self.write(&target, step, files, state).map_err(|source| CheckpointError::Write {
            path: target.clone(),
            intact: self.steps().last().copied(),
            source,
        })?;
        // Newer ones are damaged, or the run would have continued from there: they do not count.
        let done = self.steps().into_iter().filter(|other| *other <= step);
        for step in done.rev().skip(self.keep) {
            let path = self.path_of(step);
            discard(&self.folder, &path)
                .map_err(|source| CheckpointError::Remove { path, source })?;
        }
        Ok(target)
    }

    fn write(
        &self,
        target: &Path,
        step: usize,
        files: &[(&str, &[u8])],
        state: &impl Serialize,
    ) -> Result<(), IoError> {
        let state = serde_json::to_value(state)?;
        fs::create_dir_all(&self.folder)?;
        if target.exists() {
            if self.open(target).is_ok() {
                return Ok(());
            }
            discard(&self.folder, target)?;
        }
        let folder = tempfile::Builder::new().prefix(UNFINISHED).tempdir_in(&self.folder)?;
        let mut stored = BTreeMap::new();
        for (name, bytes) in files {
            stored.insert(name.to_string(), store(&folder.path().join(name), bytes)?);
        }
        let format = self.format.clone();
        let manifest = Manifest { format, version: VERSION, step, files: stored, state };
        store(&folder.path().join(STATE), &serde_json::to_vec_pretty(&manifest)?)?;
        sync_folder(folder.path())?;
        fs::rename(folder.path(), target)?;
        // Renamed: nothing is left for the guard to remove.
        let _ = folder.keep();
        sync_folder(&self.folder)
    }

    /// The newest sound checkpoint. Damaged ones are passed over with a warning.
    ///
    /// # Errors
    ///
    /// When there is none, or none that is sound: says why of each.
    pub fn newest(&self) -> Result<Checkpoint, CheckpointError> {
        let mut reasons = Vec::new();
        for step in self.steps().into_iter().rev() {
            match self.open(&self.path_of(step)) {
                Ok(checkpoint) => return Ok(checkpoint),
                Err(error) => {
                    tracing::warn!("passing over a checkpoint: {error}");
                    reasons.push(error.to_string());
                }
            }
        }
        let folder = self.folder.clone();
        match reasons.is_empty() {
            true => Err(CheckpointError::None { folder }),
            false => Err(CheckpointError::NoneSound { folder, reasons }),
        }
    }

    /// The checkpoint in the folder `path`, after its checksums were compared.
    ///
    /// # Errors
    ///
    /// When a file cannot be read or is damaged, and when another program or version wrote it.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Checkpoint, CheckpointError> {
        let path = path.as_ref();
        self.parse(path).map_err(|reason| CheckpointError::Unusable { path: path.into(), reason })
    }

    fn parse(&self, path: &Path) -> Result<Checkpoint, String> {
        let text = fs::read_to_string(path.join(STATE))
            .map_err(|error| format!("{STATE} cannot be read: {error}"))?;
        let damaged = |error: serde_json::Error| format!("{STATE} is damaged: {error}");
        let header: Value = serde_json::from_str(&text).map_err(damaged)?;
        let format = header.get("format").and_then(Value::as_str).unwrap_or("nothing");
        if format != self.format {
            return Err(format!(
                "this is not a checkpoint of this program: {STATE} names the format {format}, \
                 expected {}",
                self.format
            ));
        }
        let version = header.get("version").and_then(Value::as_u64);
        if version != Some(VERSION) {
            let found = version.map_or("none".into(), |version| version.to_string());
            return Err(format!(
                "the checkpoint has version {found}, and this program reads version {VERSION}"
            ));
        }
        let Manifest { step, files, state, .. } =
            serde_json::from_value(header).map_err(damaged)?;
        if let Some(named) = step_of(path).filter(|named| *named != step) {
            return Err(format!(
                "{STATE} is damaged: it speaks of step {step}, its folder of step {named}"
            ));
        }
        let files = files
            .into_iter()
            .map(|(name, stored)| Ok((name.clone(), read(path, &name, &stored)?)))
            .collect::<Result<_, String>>()?;
        Ok(Checkpoint { path: path.into(), step, state, files })
    }

    /// Removes what interrupted writers left. Only for a process that nobody else saves beside.
    ///
    /// # Errors
    ///
    /// When something cannot be removed.
    pub fn clean(&self) -> Result<(), CheckpointError> {
        let Ok(entries) = fs::read_dir(&self.folder) else { return Ok(()) };
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                let path = entry.path();
                fs::remove_dir_all(&path)
                    .map_err(|source| CheckpointError::Remove { path, source })?;
            }
        }
        Ok(())
    }

    fn path_of(&self, step: usize) -> PathBuf {
        self.folder.join(format!("{PREFIX}{step:08}"))
    }
}

/// Whether `path` is a checkpoint's own folder, sound or not, rather than a folder of checkpoints.
pub fn is_checkpoint(path: impl AsRef<Path>) -> bool {
    let path = path.as_ref();
    path.join(STATE).exists() || (path.is_dir() && step_of(path).is_some())
}

/// The step that a checkpoint's folder is named after.
fn step_of(path: &Path) -> Option<usize> {
    path.file_name()?.to_str()?.strip_prefix(PREFIX)?.parse().ok()
}

/// A checkpoint whose checksums hold, read into memory.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    path: PathBuf,
    step: usize,
    state: Value,
    files: BTreeMap<String, Vec<u8>>,
}

impl Checkpoint {
    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The step that it is of.
    pub fn step(&self) -> usize {
        self.step
    }

    /// What was saved as its state.
    ///
    /// # Errors
    ///
    /// When something else was saved.
    pub fn state<S: DeserializeOwned>(&self) -> Result<S, CheckpointError> {
        S::deserialize(&self.state).map_err(|error| self.unusable(&format!("{STATE}: {error}")))
    }

    /// Whether it holds a file of that name.
    pub fn has(&self, name: &str) -> bool {
        self.files.contains_key(name)
    }

    /// The contents of a file.
    ///
    /// # Errors
    ///
    /// When there is none of that name.
    pub fn file(&self, name: &str) -> Result<&[u8], CheckpointError> {
        match self.files.get(name) {
            Some(bytes) => Ok(bytes),
            None => Err(self.unusable(&format!("there is no {name} in it"))),
        }
    }

    /// An error that names this checkpoint.
    pub(crate) fn unusable(&self, reason: &dyn std::fmt::Display) -> CheckpointError {
        CheckpointError::Unusable { path: self.path.clone(), reason: reason.to_string() }
    }
}

impl From<CheckpointError> for IoError {
    fn from(error: CheckpointError) -> Self {
        let kind = match &error {
            CheckpointError::Write { source, .. } | CheckpointError::Remove { source, .. } => {
                source.kind()
            }
            CheckpointError::None { .. } => ErrorKind::NotFound,
            CheckpointError::NoneSound { .. } | CheckpointError::Unusable { .. } => {
                ErrorKind::InvalidData
            }
        };
        Self::new(kind, error)
    }
}

#[cfg(test)]
mod tests;
