//! A run's own account of itself: JSON, one object a line.
//!
//! The file survives a killed process, whose torn last line is dropped, and a run that resumes from a
//! checkpoint: the records of steps that will be repeated are dropped, so that each step is there once.
//!
//! ```
//! use blackburn_train::record_log::{Record, RecordLog, read_records};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Debug, PartialEq, Serialize, Deserialize)]
//! struct Loss {
//!     step: u64,
//!     loss: f32,
//! }
//!
//! impl Record for Loss {
//!     fn step(&self) -> Option<u64> {
//!         Some(self.step)
//!     }
//! }
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("metrics.jsonl");
//! let mut log = RecordLog::open(&path, None)?;
//! for step in 1..=3 {
//!     log.append(&Loss { step, loss: 1.0 / step as f32 })?;
//! }
//! // The run was killed, and goes on from the checkpoint of step 2.
//! let log = RecordLog::<Loss>::open(&path, Some(2))?;
//! assert_eq!(read_records::<Loss>(&path)?.len(), 2);
//! # drop(log);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use crate::replace::replace_file;
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    marker::PhantomData,
    path::{Path, PathBuf},
};

/// Why a log cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The operating system refused an operation on the file.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// What was attempted.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason given by the operating system.
        source: io::Error,
    },
    /// A line is not a record, and not because the last one was torn.
    #[error("{}, line {line}: {source}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// A record that JSON cannot express.
    #[error("cannot encode a record: {source}")]
    Encode {
        /// What is wrong with it.
        source: serde_json::Error,
    },
}

/// What a line holds.
pub trait Record: Serialize + DeserializeOwned {
    /// The step reported on; none where the record is about the whole run.
    fn step(&self) -> Option<u64>;
}

/// Appends records to a file.
#[derive(Debug)]
pub struct RecordLog<R> {
    path: PathBuf,
    file: File,
    record: PhantomData<fn(R)>,
}

impl<R: Record> RecordLog<R> {
    /// Opens the log at `path`, and makes it where there is none.
    ///
    /// A run that resumes from the checkpoint of `resume_step` will repeat the steps after it: what the log
    /// holds about them is dropped.
    ///
    /// # Errors
    ///
    /// When the file cannot be read or written, and when a line before the last is damaged: the file is left
    /// as it is then.
    pub fn open(path: &Path, resume_step: Option<u64>) -> Result<Self, RecordError> {
        repair::<R>(path, resume_step)?;
        let file = OpenOptions::new().append(true).create(true).open(path);
        let file = file.map_err(|source| io_error("open", path, source))?;
        Ok(Self { path: path.to_owned(), file, record: PhantomData })
    }

    /// Appends one record, handed to the operating system on return: a process killed after that does not
    /// lose it.
    ///
    /// # Errors
    ///
    /// When JSON cannot express the record, or writing fails.
    pub fn append(&mut self, record: &R) -> Result<(), RecordError> {
        let mut line =
            serde_json::to_string(record).map_err(|source| RecordError::Encode { source })?;
        line.push('\n');
        // One unbuffered write: a line is torn only if the process dies within it.
        let written = self.file.write_all(line.as_bytes());
        written.map_err(|source| io_error("append to", &self.path, source))
    }
}

/// All records of a log. A torn last line is left out with a warning.
///
/// # Errors
///
/// When the file cannot be read, or another line is damaged.
pub fn read_records<R: Record>(path: &Path) -> Result<Vec<R>, RecordError> {
    let bytes = fs::read(path).map_err(|source| io_error("read", path, source))?;
    Ok(parse(path, &bytes)?.into_iter().map(|(_, record)| record).collect())
}

/// Leaves complete lines up to `resume_step`, so that a record can be appended after them.
fn repair<R: Record>(path: &Path, resume_step: Option<u64>) -> Result<(), RecordError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(io_error("read", path, source)),
    };
    let last_step = resume_step.unwrap_or(u64::MAX);
    let mut kept = Vec::with_capacity(bytes.len());
    // The bytes as they were, not a new encoding of what was understood of them.
    for (line, record) in parse::<R>(path, &bytes)? {
        if record.step().is_none_or(|step| step <= last_step) {
            kept.extend(line);
            kept.push(b'\n');
        }
    }
    if kept == bytes {
        return Ok(());
    }
    replace_file(path, |temporary| fs::write(temporary, &kept))
        .map_err(|source| io_error("shorten", path, source))
}

/// The lines without their ends, each with the record it holds.
fn parse<'a, R: Record>(path: &Path, bytes: &'a [u8]) -> Result<Vec<(&'a [u8], R)>, RecordError> {
    let mut records = Vec::new();
    for (index, line) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
        let complete = line.strip_suffix(b"\n");
        match serde_json::from_slice(line) {
            Ok(record) => records.push((complete.unwrap_or(line), record)),
            Err(error) if complete.is_none() => tracing::warn!(
                path = %path.display(), line = index + 1, %error, "ignoring a torn last line"
            ),
            Err(source) => {
                let (path, line) = (path.to_owned(), index + 1);
                return Err(RecordError::Damaged { path, line, source });
            }
        }
    }
    Ok(records)
}

fn io_error(operation: &'static str, path: &Path, source: io::Error) -> RecordError {
    RecordError::Io { operation, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Line {
        step: Option<u64>,
        text: String,
    }

    impl Record for Line {
        fn step(&self) -> Option<u64> {
            self.step
        }
    }

    fn line(step: impl Into<Option<u64>>) -> Line {
        Line { step: step.into(), text: "Es wär\n einmal".into() }
    }

    fn append(path: &Path, resume_step: Option<u64>, records: &[Line]) {
        let mut log = RecordLog::open(path, resume_step).expect("open");
        for record in records {
            log.append(record).expect("append");
        }
    }

    #[test]
    fn resuming_drops_the_steps_that_will_be_repeated_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log.jsonl");
        append(&path, None, &[line(None), line(1), line(2), line(3)]);
        append(&path, Some(2), &[line(None), line(3)]);
        let steps: Vec<_> = read_records::<Line>(&path).expect("records").into_iter().collect();
        assert_eq!(steps, [line(None), line(1), line(2), line(None), line(3)]);
    }

    #[test]
    fn a_line_torn_at_any_byte_is_dropped_and_the_next_record_starts_afresh() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log.jsonl");
        append(&path, None, &[line(1), line(2)]);
        let whole = fs::read(&path).expect("bytes");
        let first = whole.iter().position(|byte| *byte == b'\n').expect("a line end") + 1;
        for end in first..whole.len() {
            fs::write(&path, &whole[..end]).expect("a torn file");
            append(&path, Some(2), &[line(3)]);
            // Only the line end is missing from the longest: nothing of it is lost.
            let expected = match end == whole.len() - 1 {
                true => vec![line(1), line(2), line(3)],
                false => vec![line(1), line(3)],
            };
            assert_eq!(read_records::<Line>(&path).expect("records"), expected, "{end} bytes");
        }
    }

    #[test]
    fn damage_before_the_last_line_is_an_error_that_names_the_line_and_changes_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log.jsonl");
        append(&path, None, &[line(1)]);
        let mut bytes = fs::read(&path).expect("bytes");
        bytes.extend(b"{\"step\":\n");
        fs::write(&path, &bytes).expect("a damaged file");
        let error = read_records::<Line>(&path).expect_err("damage").to_string();
        assert!(error.contains("line 2"), "{error}");
        assert!(RecordLog::<Line>::open(&path, Some(1)).is_err());
        assert_eq!(fs::read(&path).expect("bytes"), bytes);
    }
}
