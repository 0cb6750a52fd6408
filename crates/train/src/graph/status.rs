//! How passes run, and how far a replay has come.

use super::{DeviceError, GradientGraph, NoRecording, PassTensors, Stage, State};
use blackburn_backend::graph::{self, Progress};
use burn::{
    module::{Module, ModuleDisplay},
    tensor::Device,
};

/// How passes run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GraphStatus {
    /// They run, until it is known whether they can be recorded.
    WarmUp,
    /// They are replayed.
    Recorded,
    /// They run, for good.
    Unrecorded {
        /// Why.
        reason: String,
    },
}

impl<M: Module + ModuleDisplay, I: PassTensors, O: PassTensors> GradientGraph<M, I, O> {
    /// Counts on the device, behind every `every` elements of gradients, how far a replay has come: see
    /// [`progress`](Self::progress).
    #[must_use]
    pub fn with_milestones(mut self, every: usize) -> Self {
        self.milestones = Some(every);
        self
    }

    /// Which gradients of the recording are there before a replay is over, if there is a recording
    /// [with milestones](Self::with_milestones).
    pub fn progress(&self) -> Option<&Progress> {
        match &self.stage {
            Stage::Recorded(recording) => recording.progress(),
            _ => None,
        }
    }

    /// Whether passes are replayed.
    pub fn is_recorded(&self) -> bool {
        matches!(self.stage, Stage::Recorded(_))
    }

    /// How passes run on `device`, and why they are not replayed where they are not.
    pub fn status(&self, device: &Device) -> GraphStatus {
        match &self.stage {
            Stage::Refused { reason } => GraphStatus::Unrecorded { reason: reason.clone() },
            _ if !graph::is_supported(device) => {
                let device = format!("{:?}", device.clone().without_autodiff());
                let reason = DeviceError::Unsupported { device }.to_string();
                GraphStatus::Unrecorded { reason }
            }
            Stage::WarmUp { .. } => GraphStatus::WarmUp,
            Stage::Recorded(_) => GraphStatus::Recorded,
        }
    }

    /// Has passes run from here on, with a warning.
    pub(super) fn refuse(&mut self, reason: &NoRecording) {
        tracing::warn!("GradientGraph: steps run without a graph: {reason}");
        self.set_refused(reason.to_string());
    }

    /// The same without the warning.
    pub(super) fn set_refused(&mut self, reason: String) {
        self.stage = Stage::Refused { reason };
        self.outline = None;
        self.state = State::default();
    }
}
