//! As `progress`, in a build without a GPU backend: there are no recordings.

use super::{GraphError, Identity, unsupported};
use burn::tensor::Device;
use std::{collections::HashSet, convert::Infallible};

/// Puts milestones into what is recorded. None can be made here.
#[derive(Debug)]
pub struct Milestones(Infallible);

impl Milestones {
    /// None.
    ///
    /// # Errors
    ///
    /// [`GraphError::Unsupported`].
    pub fn new(
        device: &Device,
        _shapes: HashSet<Vec<usize>>,
        _every: usize,
    ) -> Result<Self, GraphError> {
        Err(unsupported(device))
    }

    /// Begins.
    pub fn begin(&self) {
        match self.0 {}
    }

    /// Ends.
    pub fn end(self) -> Progress {
        match self.0 {}
    }
}

/// How far replays of a recording have come. There are none here.
#[derive(Debug)]
pub struct Progress(Infallible);

impl Progress {
    /// The milestone behind a tensor.
    pub fn milestone(&self, _tensor: Identity) -> Option<u32> {
        match self.0 {}
    }

    /// What the counter has reached past `milestone`.
    pub fn count_at(&self, _milestone: u32) -> u32 {
        match self.0 {}
    }

    /// What the counter has counted.
    ///
    /// # Errors
    ///
    /// None.
    pub fn count(&self) -> Result<u32, GraphError> {
        match self.0 {}
    }

    /// To be said behind each replay of the recording.
    pub fn replayed(&self) {
        match self.0 {}
    }
}
