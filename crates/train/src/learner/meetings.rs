//! Where the ranks of a group agree on what comes next.

use super::epoch::failure;
use blackburn_distributed::Group;
use burn::train::{Interrupter, TrainingError};
use std::{cell::Cell, io, path::PathBuf};

/// What all ranks do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// A step: at least one of them has gradients.
    Step,
    /// No rank has any left.
    Done,
    /// One of them stops, and so do all.
    Stop,
}

/// The meetings of one training.
pub(super) struct Meetings<'a> {
    pub(super) group: &'a Group,
    /// Whether all know that training ends.
    is_over: Cell<bool>,
}

impl<'a> Meetings<'a> {
    pub(super) fn new(group: &'a Group) -> Self {
        Self { group, is_over: Cell::new(false) }
    }

    /// Tells the others whether this rank has gradients for a step, and whether it is to stop.
    pub(super) fn meet(
        &self,
        has_gradients: bool,
        interrupter: &Interrupter,
    ) -> Result<Next, TrainingError> {
        let stops = interrupter.should_stop();
        if self.group.size() == 1 {
            return Ok(match (has_gradients, stops) {
                // Alone, a stop is looked for after the step.
                (true, _) => Next::Step,
                (false, true) => Next::Stop,
                (false, false) => Next::Done,
            });
        }
        if self.is_over.get() {
            return Ok(Next::Stop);
        }
        let all = self
            .group
            .gather("a step of the learner", &(has_gradients, stops))
            .map_err(|error| failure(error.to_string()))?;
        if let Some(rank) = all.iter().position(|(_, stops)| *stops) {
            self.is_over.set(true);
            if !stops {
                interrupter.stop(Some(&format!("rank {rank} stops")));
            }
            return Ok(Next::Stop);
        }
        Ok(if all.iter().any(|(has, _)| *has) { Next::Step } else { Next::Done })
    }
}

/// The folder for `SupervisedTraining` on this rank: `folder` itself on rank 0, which saves, and one below it for
/// the logs of each other rank. There, on Unix, `checkpoint` leads to rank 0's, so that all ranks resume from it.
///
/// # Errors
///
/// When the folder cannot be made.
pub fn rank_folder(group: &Group, folder: impl Into<PathBuf>) -> io::Result<PathBuf> {
    let folder = folder.into();
    if group.is_main() {
        return Ok(folder);
    }
    let own = folder.join(format!("rank-{}", group.rank()));
    std::fs::create_dir_all(&own)?;
    #[cfg(unix)]
    {
        std::fs::create_dir_all(folder.join("checkpoint"))?;
        let link = own.join("checkpoint");
        if link.symlink_metadata().is_err() {
            std::os::unix::fs::symlink("../checkpoint", link)?;
        }
    }
    Ok(own)
}
