//! What a trainer saves, and how it is found again.

use super::{Trainer, TrainerError, together::Stepper};
use crate::{
    checkpoint::{Checkpoint, CheckpointError, Checkpoints},
    ema::{Ema, EmaConfig, EmaRecord},
    graph::PassTensors,
    precision::{Masters, PrecisionPolicy},
    scaler::{GradScaler, ScalerState},
};
use burn::{
    module::{Module, ModuleDisplay},
    store::ModuleRecord,
    tensor::Bytes,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{fmt::Display, path::PathBuf};

const MODEL: &str = "model.bpk";
const OPTIMIZER: &str = "optimizer.bpk";
const AVERAGE: &str = "ema.bpk";

/// All of a trainer but tensors, and what the program adds.
#[derive(Serialize, Deserialize)]
struct State {
    trainer: TrainerState,
    extra: Value,
}

#[derive(Serialize, Deserialize)]
struct TrainerState {
    masters: Masters,
    /// None where losses are not scaled.
    scaler: Option<ScalerState>,
}

impl<M: Module + ModuleDisplay, I: PassTensors, O: PassTensors> Trainer<M, I, O> {
    /// Writes a checkpoint of the model, the optimizer's state, the loss scale, the average and the number of
    /// steps taken, and beside them `extra`: what else the program wants to find again, such as its place in the
    /// data. [`TrainerConfig::resume`](super::TrainerConfig::resume) goes on from there, bit for bit if a
    /// [seed](super::TrainerConfig::with_seed) is set and the device gives the same bits for the same input, which on
    /// Hopper's GPUs attention does with `BLACKBURN_DETERMINISTIC=1`. Waits for the device.
    ///
    /// The model is a record of Burn's in the file `model.bpk`, which the same model loads without Blackburn.
    /// So is the optimizer's state, also where it is split over ranks.
    ///
    /// In a [group](super::TrainerConfig::with_group) all ranks call it, rank 0 writes, and all return its answer. They
    /// check before that all have the same parameters.
    ///
    /// # Errors
    ///
    /// When a file cannot be written, ranks have other parameters than others, or training has diverged since the
    /// last [metrics](super::Metrics): such a checkpoint would be what training resumes from. Earlier checkpoints are then as they were.
    pub fn save<S: Serialize>(
        &mut self,
        checkpoints: &Checkpoints,
        extra: &S,
    ) -> Result<PathBuf, TrainerError> {
        self.look_now()?;
        // What has gone wrong in one rank is not to be kept.
        self.group.same(self.model()?)?;
        let optimizer = self.optimizer.to_bytes()?;
        let path = self
            .group
            .rank_0_first("a checkpoint", || self.write(checkpoints, extra, &optimizer))?;
        if self.group.is_main() {
            self.group.saved(&path);
        }
        Ok(path)
    }

    fn write<S: Serialize>(
        &self,
        checkpoints: &Checkpoints,
        extra: &S,
        optimizer: &[u8],
    ) -> Result<PathBuf, TrainerError> {
        let model = self.model()?;
        let step = self.steps_taken();
        let refused = |error: &dyn Display| CheckpointError::Write {
            path: checkpoints.folder().to_path_buf(),
            intact: checkpoints.steps().last().copied(),
            source: std::io::Error::other(error.to_string()),
        };
        // A record lacks the last update of running statistics, which Burn's norms make when they are next
        // asked for. Going to inference asks, and tells all clones.
        drop(model.valid());
        let bytes = model.clone().into_record().into_bytes().map_err(|error| refused(&error))?;
        let mut files = vec![(MODEL, bytes)];
        if let Some(ema) = &self.ema {
            let record = ema.to_record(model)?;
            files.push((AVERAGE, record.into_bytes().map_err(|error| refused(&error))?));
        }
        let trainer = TrainerState {
            masters: self.policy.masters(),
            scaler: self.scaler.is_enabled().then(|| self.scaler.state()),
        };
        let extra = serde_json::to_value(extra).map_err(|error| refused(&error))?;
        let files: Vec<(&str, &[u8])> = files
            .iter()
            .map(|(name, bytes)| (*name, &**bytes))
            .chain([(OPTIMIZER, optimizer)])
            .collect();
        Ok(checkpoints.save(step, &files, &State { trainer, extra })?)
    }
}

/// What a program saved beside its trainer, as `extra` of [`Trainer::save`].
///
/// # Errors
///
/// When it was something else, or the checkpoint is not a trainer's.
pub fn saved_extra<S: for<'a> Deserialize<'a>>(
    checkpoint: &Checkpoint,
) -> Result<S, CheckpointError> {
    let State { extra, .. } = checkpoint.state()?;
    S::deserialize(extra).map_err(|error| {
        checkpoint.unusable(&format!("what the program saved in state.json: {error}"))
    })
}

/// `model`, with the numbers of the model in a trainer's checkpoint.
///
/// # Errors
///
/// When the checkpoint is not a trainer's, or of another model.
pub fn saved_model<M: Module>(checkpoint: &Checkpoint, model: M) -> Result<M, CheckpointError> {
    Saved::new(checkpoint)?.model(model)
}

/// A trainer's checkpoint.
pub(super) struct Saved<'a> {
    checkpoint: &'a Checkpoint,
    state: TrainerState,
}

impl<'a> Saved<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint) -> Result<Self, CheckpointError> {
        let State { trainer, .. } = checkpoint.state()?;
        Ok(Self { checkpoint, state: trainer })
    }

    /// The number of steps taken, if the checkpoint is of a trainer with these options.
    pub(super) fn check(
        &self,
        policy: &PrecisionPolicy,
        scales: bool,
        averages: bool,
    ) -> Result<usize, CheckpointError> {
        let refused = |what: &str, is: bool, was: bool| {
            let of = |has: bool| if has { "with" } else { "without" };
            let reason =
                format!("it was saved {} {what}, and training goes on {} it", of(was), of(is));
            Err(self.checkpoint.unusable(&reason))
        };
        let was = self.state.scaler.is_some();
        if was != scales {
            return refused("loss scaling", scales, was);
        }
        let was = self.checkpoint.has(AVERAGE);
        if was != averages {
            return refused("an average of the weights", averages, was);
        }
        let (was, is) = (self.state.masters, policy.masters());
        if was != is {
            let reason =
                format!("it was saved with the masters {was:?}, and the policy has {is:?}");
            return Err(self.checkpoint.unusable(&reason));
        }
        Ok(self.checkpoint.step())
    }

    fn bytes(&self, name: &str) -> Result<Bytes, CheckpointError> {
        Ok(Bytes::from_bytes_vec(self.checkpoint.file(name)?.to_vec()))
    }

    fn unfit(&self, name: &str, error: &dyn Display) -> CheckpointError {
        self.checkpoint.unusable(&format!("{name} does not fit this model: {error}"))
    }

    pub(super) fn model<M: Module>(&self, model: M) -> Result<M, CheckpointError> {
        let record = ModuleRecord::from_bytes(self.bytes(MODEL)?)
            .map_err(|error| self.unfit(MODEL, &error))?;
        model.try_load_record(record).map_err(|error| self.unfit(MODEL, &error))
    }

    pub(super) fn optimizer(&self, optimizer: Stepper) -> Result<Stepper, CheckpointError> {
        optimizer.with_state(self.bytes(OPTIMIZER)?).map_err(|error| self.unfit(OPTIMIZER, &error))
    }

    pub(super) fn restore_scaler(&self, scaler: &mut GradScaler) -> Result<(), TrainerError> {
        match self.state.scaler {
            Some(state) => Ok(scaler.restore(state)?),
            None => Ok(()),
        }
    }

    pub(super) fn ema<M: Module>(&self, config: EmaConfig, model: &M) -> Result<Ema, TrainerError> {
        let record = EmaRecord::from_bytes(self.bytes(AVERAGE)?)
            .map_err(|error| self.unfit(AVERAGE, &error))?;
        Ok(config.restore(record, model)?)
    }
}
