//! A run's checkpoints: its trainer's, with what the run is about beside it.

use crate::{
    data::DataSettings,
    model::Gpt,
    settings::{MastersKind, RunSettings},
};
use anyhow::{Context, Result, anyhow};
use blackburn::train::{
    checkpoint::{Checkpoint, CheckpointError, Checkpoints, is_checkpoint},
    precision::Masters,
    trainer::{saved_extra, saved_model},
};
use burn::tensor::Device;
use example_program::CadenceOptions;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Of the second kind, which has models of two families.
const FORMAT: &str = "blackburn-gpt-2";

/// What a run is about. Data order, schedule and dropout are functions of it and the step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunState {
    pub(crate) settings: RunSettings,
    pub(crate) data: DataSettings,
    /// Identifies the tokens that the run learns from.
    pub(crate) fingerprint: String,
    /// How often it reports, validates and saves, as far as it was told.
    #[serde(default)]
    pub(crate) cadence: CadenceOptions,
    /// Beginning of its samples, if it was told one.
    #[serde(default)]
    pub(crate) prompt: Option<String>,
}

/// A checkpoint whose checksums hold.
pub(crate) struct RunCheckpoint {
    pub(crate) state: RunState,
    pub(crate) trainer: Checkpoint,
}

/// The checkpoints of a run.
pub(crate) fn of_run(run: &Path) -> Checkpoints {
    Checkpoints::new(run.join("checkpoints"), FORMAT)
}

/// The checkpoint at `path`: one checkpoint's folder, or a run's, of which the newest sound one is
/// taken; damaged ones are passed over with a warning.
pub(crate) fn find(path: &Path) -> Result<RunCheckpoint> {
    let checkpoints = of_run(path);
    let trainer = match is_checkpoint(path) {
        true => checkpoints.open(path)?,
        false => checkpoints.newest().map_err(|error| explained(path, error))?,
    };
    Ok(RunCheckpoint { state: saved_extra(&trainer)?, trainer })
}

/// In the words of this program, for which a run's folder is what there is.
fn explained(run: &Path, error: CheckpointError) -> anyhow::Error {
    match error {
        CheckpointError::None { .. } => anyhow!(
            "found no checkpoint in {}: expected a run's folder (with checkpoints/step-*) or one \
             checkpoint's folder (with state.json). `train` makes one",
            run.display()
        ),
        CheckpointError::NoneSound { reasons, .. } => anyhow!(
            "none of the {} checkpoints in {} is sound: {}",
            reasons.len(),
            run.display(),
            reasons.join("; ")
        ),
        other => other.into(),
    }
}

impl RunCheckpoint {
    /// Its folder.
    pub(crate) fn path(&self) -> PathBuf {
        self.trainer.path().to_path_buf()
    }

    /// The model to read from alone, on `device`: stored in what it computes in, so that nothing is cast at
    /// each token.
    pub(crate) fn model_to_read(&self, device: &Device) -> Result<Gpt> {
        let settings = &self.state.settings;
        let policy = settings.policy();
        let fresh = settings.model.init(device);
        if settings.masters == MastersKind::None {
            return Ok(saved_model(&self.trainer, policy.apply(fresh)?)?);
        }
        let model = saved_model(&self.trainer, fresh)?;
        policy.with_masters(Masters::None).apply(model).context("cannot read the model")
    }
}
