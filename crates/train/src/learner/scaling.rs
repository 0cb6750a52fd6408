//! The loss scaler in burn-train's learner.

use super::window::{StepHook, Verdict};
use crate::{
    optim::StepGate,
    scaler::{GradScaler, ScalerState},
};
use burn::{module::Module, optim::GradientsParams, tensor::Tensor};
use burn_pack::AtomicFile;
use std::{
    fs,
    io::{self, Write},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// A [`GradScaler`] that the model's training step and the strategy share; clones are one scaler.
///
/// The training step starts its backward pass from [`scale`](Self::scale)`(loss)`; the strategy gets
/// a clone as its [hook](super::ToolkitStrategy::with_hook), which unscales the accumulated
/// gradients before they are clipped. An optimizer that reads the [`gate`](Self::gate) leaves
/// overflowed steps out without anyone waiting for the device; for others, call
/// [`waiting`](Self::waiting).
#[derive(Clone, Debug)]
pub struct LossScaling {
    scaler: Arc<Mutex<GradScaler>>,
    folder: Option<PathBuf>,
    waits: bool,
}

impl LossScaling {
    /// Shares a scaler, disabled ones too.
    pub fn new(scaler: GradScaler) -> Self {
        Self { scaler: Arc::new(Mutex::new(scaler)), folder: None, waits: false }
    }

    /// Keeps the scaler's state beside the learner's checkpoints: `scaler-EPOCH.json` in `folder`,
    /// which is made when it is first written to.
    ///
    /// The file is written before the learner's checkpoint of that epoch, and is on the disk before that
    /// begins: a crash in between leaves a file more, and the last checkpoint still has its own.
    pub fn saved_in(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Some(folder.into());
        self
    }

    /// For optimizers that do not read the gate: waits for the device in each step, and refuses
    /// those that overflowed.
    pub fn waiting(mut self) -> Self {
        self.waits = true;
        self
    }

    /// The loss to start the backward pass from; see [`GradScaler::scale`].
    pub fn scale(&self, loss: Tensor<1>) -> Tensor<1> {
        self.scaler().scale(loss)
    }

    /// For [`AdamWGroups::init_gated`](crate::optim::AdamWGroups::init_gated) and
    /// [`SgdGroups::init_gated`](crate::optim::SgdGroups::init_gated).
    pub fn gate(&self) -> StepGate {
        self.scaler().gate().clone()
    }

    /// What the scaler has come to. Waits for the device.
    pub fn state(&self) -> ScalerState {
        self.scaler().state()
    }

    fn scaler(&self) -> MutexGuard<'_, GradScaler> {
        self.scaler.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, epoch: usize) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(format!("scaler-{epoch}.json")))
    }
}

impl<M: Module> StepHook<M> for LossScaling {
    fn before_step(&mut self, gradients: &mut GradientsParams, model: &M) -> Verdict {
        let mut scaler = self.scaler();
        let unscaled = scaler.unscale(gradients, model);
        let overflowed = self.waits && scaler.overflowed();
        // The gate keeps this step's answer.
        if let Err(error) = unscaled.and_then(|()| scaler.update()) {
            tracing::warn!("a step is left out: {error}");
            return Verdict::Skip;
        }
        if overflowed { Verdict::Skip } else { Verdict::Apply }
    }

    fn loss_scale(&self) -> Option<Tensor<1>> {
        let scaler = self.scaler();
        scaler.is_enabled().then(|| scaler.current_scale())
    }

    fn save(&mut self, epoch: usize) -> io::Result<()> {
        let Some(file) = self.file(epoch) else { return Ok(()) };
        if let Some(folder) = &self.folder {
            fs::create_dir_all(folder)?;
        }
        let bytes = serde_json::to_vec(&self.state())?;
        // Under another name, synced with its folder and renamed: a crash leaves the old file or this one.
        let (unfinished, mut writer) = AtomicFile::create(&file).map_err(io::Error::other)?;
        writer.write_all(&bytes)?;
        drop(writer);
        unfinished.commit().map_err(io::Error::other)
    }

    fn load(&mut self, epoch: usize) -> io::Result<()> {
        let Some(file) = self.file(epoch) else { return Ok(()) };
        let named = |kind, reason: String| {
            io::Error::new(kind, format!("the loss scaler's state {}: {reason}", file.display()))
        };
        let bytes = fs::read(&file).map_err(|error| named(error.kind(), error.to_string()))?;
        let invalid = |reason: String| named(io::ErrorKind::InvalidData, reason);
        let state = serde_json::from_slice(&bytes).map_err(|error| invalid(error.to_string()))?;
        self.scaler().restore(state).map_err(|error| invalid(error.to_string()))
    }
}
