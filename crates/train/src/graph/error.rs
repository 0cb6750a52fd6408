//! Why a pass is not replayed.

use blackburn_backend::graph as device;

/// Why there are no results.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// The device did not take a command.
    #[error("recorded pass: {0}")]
    Device(#[from] device::GraphError),
    /// The check of a replay found that the pass itself gives other results now. Steps since the check
    /// before were computed with values of the past. Passes run without the recording from here on.
    #[error(
        "GradientGraph: {results} of a replay differ from those of the pass itself by {share} of their \
         norm. The pass depends on a value that has changed since it was recorded, and up to {steps} steps \
         before this one used the old value. Hand everything that changes from call to call (a loss scale, \
         a coefficient, a mask) to `run` as a tensor in `inputs`, and go back to a checkpoint from before"
    )]
    Stale {
        /// Gradients or outputs.
        results: &'static str,
        /// How far they are apart, as a share of their norm.
        share: f32,
        /// Replays since the last one that was checked.
        steps: u64,
    },
}

/// Why there is no recording.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoRecording {
    #[error(transparent)]
    Device(#[from] device::GraphError),
    #[error("the pass panicked while it was recorded; it may have asked for a value on the host")]
    Panicked,
    #[error("gradients were not finite")]
    NotFinite,
    #[error(
        "{results} of a replay differ from those of a pass that ran by {share} of their norm, so the pass \
         depends on more than parameters and inputs; dropout does, and so does a number that the closure \
         captures and that changes"
    )]
    Unfaithful { results: &'static str, share: f32 },
    #[error("the pass changes {what} of the model; a replay would leave it as it is")]
    Moves { what: String },
    #[error("the model differed from call to call, {times} times, the last time in {what}")]
    Restless { what: String, times: u32 },
}

impl NoRecording {
    pub(super) fn failed(step: &'static str, error: &impl ToString) -> Self {
        device::GraphError::Refused { step, reason: error.to_string() }.into()
    }

    /// Bytes that the device held too few, if that is why.
    pub(super) fn missing_bytes(&self) -> usize {
        match self {
            Self::Device(error) => error.missing_bytes().unwrap_or_default(),
            _ => 0,
        }
    }

    /// Whether another attempt may go better.
    pub(super) fn may_pass(&self) -> bool {
        matches!(self, Self::Device(_) | Self::NotFinite)
    }
}
