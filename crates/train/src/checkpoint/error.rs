//! Why there is no checkpoint.

use std::{io, path::PathBuf};

/// What went wrong with a checkpoint. Those that were there before still are.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// It could not be written.
    #[error("cannot write the checkpoint {}; {}: {source}", path.display(), left(*intact))]
    Write {
        /// The folder that it was to have.
        path: PathBuf,
        /// The newest step that has one.
        intact: Option<usize>,
        /// What the operating system said.
        source: io::Error,
    },
    /// An old one, or what is left of an unfinished one, could not be removed.
    #[error("cannot remove the old checkpoint {}: {source}", path.display())]
    Remove {
        /// Its folder.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// Nothing was saved there.
    #[error(
        "found no checkpoint in {}: expected a folder that holds some (step-*), or one checkpoint's own \
         folder, with state.json",
        folder.display()
    )]
    None {
        /// Where they were looked for.
        folder: PathBuf,
    },
    /// There are some, all of them damaged.
    #[error("none of the {} checkpoints in {} is sound: {}", reasons.len(), folder.display(), reasons.join("; "))]
    NoneSound {
        /// Where they are.
        folder: PathBuf,
        /// Why, of each, the newest first.
        reasons: Vec<String>,
    },
    /// It is damaged, of another program, or does not hold what was asked for.
    #[error("cannot use the checkpoint {}: {reason}", path.display())]
    Unusable {
        /// Its folder.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

fn left(intact: Option<usize>) -> String {
    match intact {
        Some(step) => format!("the checkpoint of step {step} is intact"),
        None => "there is none yet".into(),
    }
}
