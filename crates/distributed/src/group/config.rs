//! How a group is formed.

use crate::{error::DistributedError, world::World};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What gradients are while they move between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Wire {
    /// What they are: those in 16 bits take half the time, and their sums are rounded to 16 bits.
    #[default]
    AsTheyAre,
    /// In f32.
    F32,
    /// In bf16, rounded before and after the sum. The mean is in f32 where the gradients were.
    Bf16,
}

/// How a [`Group`](super::Group) is formed.
///
/// # A process that is ended
///
/// Once a rank has failed, each call of the group returns the failure. A process in which none does within three seconds
/// is ended with the exit code 1, since it may wait for the lost rank for good. One whose program has been told has ten
/// times as long to end by itself.
///
/// **Over NCCL every process is ended five seconds after the failure, whether its program has handled the error or not**:
/// kernels that wait for the lost rank would keep CUDA, and with it the process, from coming to an end. Do at once what
/// has to be done after an error, and do not go on with the process.
///
/// With [`without_ending_the_process`](Self::without_ending_the_process) no process is ended.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    pub(super) world: Option<World>,
    timeout: Option<Duration>,
    pub(super) start: Duration,
    pub(super) patience: Duration,
    pub(super) wire: Wire,
    pub(super) ends_process: bool,
}

impl Default for GroupConfig {
    /// What the launcher says, 30 s without a sign of life, two minutes to start, half an hour for a rank that
    /// is alive and late.
    fn default() -> Self {
        Self {
            world: None,
            timeout: None,
            start: Duration::from_secs(120),
            patience: Duration::from_secs(30 * 60),
            wire: Wire::default(),
            ends_process: true,
        }
    }
}

/// Seconds without a sign of life, if the program does not say.
const TIMEOUT_VARIABLE: &str = "BLACKBURN_DISTRIBUTED_TIMEOUT";
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

impl GroupConfig {
    /// Joins this world, whatever the environment says.
    #[must_use]
    pub fn with_world(mut self, world: World) -> Self {
        self.world = Some(world);
        self
    }

    /// Takes a rank for dead that has given no sign of life for so long. Without this it is the number of
    /// seconds in `BLACKBURN_DISTRIBUTED_TIMEOUT`, or 30.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Waits so long for all ranks to start.
    #[must_use]
    pub fn with_start_timeout(mut self, start: Duration) -> Self {
        self.start = start;
        self
    }

    /// Waits so long for a rank that is alive, and has not come to where the others are: a validation that one
    /// rank makes alone has to end by then.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// What gradients are while they move.
    #[must_use]
    pub fn with_wire(mut self, wire: Wire) -> Self {
        self.wire = wire;
        self
    }

    /// Lets a process live that does not react to a failure of another rank. It may then hang for good.
    #[must_use]
    pub fn without_ending_the_process(mut self) -> Self {
        self.ends_process = false;
        self
    }

    #[cfg(test)]
    pub(crate) fn ending_the_process(mut self) -> Self {
        self.ends_process = true;
        self
    }

    /// How long a rank may be silent.
    ///
    /// # Errors
    ///
    /// When the variable is no positive number.
    pub fn timeout(&self) -> Result<Duration, DistributedError> {
        if let Some(timeout) = self.timeout {
            return Ok(timeout);
        }
        let Ok(text) = std::env::var(TIMEOUT_VARIABLE) else { return Ok(DEFAULT_TIMEOUT) };
        let seconds = text.parse::<f64>().ok().filter(|seconds| *seconds > 0.0);
        seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).ok_or_else(|| {
            DistributedError::Environment {
                variable: TIMEOUT_VARIABLE.into(),
                expected: "a positive number of seconds",
                actual: text,
            }
        })
    }
}
