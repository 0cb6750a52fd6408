//! What a run reports about itself: `metrics.jsonl`, one JSON object a line, and the same numbers
//! as `TensorBoard` events.
//!
//! The JSON lines are the record of the run that plots and reports are made from. They survive a
//! killed process (a torn last line is dropped) and a resumed one (steps that will be repeated
//! are dropped), so that each step is reported once.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use blackburn::train::{scaler::ScalerState, tensorboard::EventWriter};
use serde::{Deserialize, Deserializer, Serialize};

/// The longest part of a prompt that names its samples in `TensorBoard`.
const PROMPT_TAG_CHARS: usize = 64;

/// One line of `metrics.jsonl`. JSON has no NaN or infinity: both are stored as `null` and read
/// back as NaN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum MetricRecord {
    /// How a run was started: configuration, seed, device and whatever else identifies it.
    Run(serde_json::Map<String, serde_json::Value>),
    /// One optimizer step, or the mean over the steps since the last such record.
    Train {
        step: u64,
        #[serde(deserialize_with = "null_as_nan")]
        loss: f32,
        #[serde(deserialize_with = "null_as_nan")]
        learning_rate: f64,
        #[serde(deserialize_with = "null_as_nan")]
        gradient_norm: f32,
        /// Of losses in f16.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        scaler: Option<ScalerState>,
        /// What the device's memory pools have taken; a CPU has none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reserved_bytes: Option<u64>,
        /// What of it tensors hold when the step is over.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        in_use_bytes: Option<u64>,
        #[serde(deserialize_with = "null_as_nan")]
        tokens_per_second: f64,
        tokens: u64,
        #[serde(deserialize_with = "null_as_nan")]
        seconds: f64,
    },
    /// The loss on held-out text.
    Validation {
        step: u64,
        #[serde(deserialize_with = "null_as_nan")]
        loss: f64,
        #[serde(deserialize_with = "null_as_nan")]
        perplexity: f64,
        tokens: u64,
        #[serde(deserialize_with = "null_as_nan")]
        seconds: f64,
    },
    /// Text that the model wrote.
    Sample { step: u64, prompt: String, text: String },
    /// A checkpoint that is complete on disk.
    Checkpoint { step: u64, path: PathBuf },
}

impl MetricRecord {
    /// The step reported on; none where the record is about the whole run.
    pub(crate) fn step(&self) -> Option<u64> {
        match self {
            Self::Run(_) => None,
            Self::Train { step, .. }
            | Self::Validation { step, .. }
            | Self::Sample { step, .. }
            | Self::Checkpoint { step, .. } => Some(*step),
        }
    }
}

fn null_as_nan<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + From<f32>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_else(|| f32::NAN.into()))
}

/// Appends records to `metrics.jsonl` and `tensorboard/` of a run's folder.
pub(crate) struct MetricsLog {
    path: PathBuf,
    file: File,
    events: EventWriter,
}

impl MetricsLog {
    /// Opens the log in `dir`, creating both where they do not exist.
    ///
    /// A run that resumes from the checkpoint of `resume_step` will repeat the steps after it:
    /// what the log holds about them is dropped.
    pub(crate) fn open(dir: &Path, resume_step: Option<u64>) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        let path = dir.join("metrics.jsonl");
        repair(&path, resume_step)?;
        let file = OpenOptions::new()
            .append(true)
            .create(true)
            .open(&path)
            .with_context(|| format!("opening {}", path.display()))?;
        let mut events = EventWriter::create(dir.join("tensorboard"))?;
        if let Some(step) = resume_step {
            events.discard_from(step + 1)?;
            events.flush()?;
        }
        Ok(Self { path, file, events })
    }

    /// Writes one record, handed to the operating system on return: a process killed after that
    /// does not lose it.
    pub(crate) fn write(&mut self, record: &MetricRecord) -> Result<()> {
        if let MetricRecord::Run(fields) = record {
            ensure!(!fields.contains_key("kind"), "a run record has a field named \"kind\"");
        }
        let mut line = serde_json::to_string(record).context("encoding a metric record")?;
        line.push('\n');
        // One unbuffered write: a line is torn only if the process dies within it.
        self.file
            .write_all(line.as_bytes())
            .with_context(|| format!("appending to {}", self.path.display()))?;
        self.write_events(record)
    }

    fn write_events(&mut self, record: &MetricRecord) -> Result<()> {
        let events = &mut self.events;
        match record {
            MetricRecord::Train {
                step,
                loss,
                learning_rate,
                gradient_norm,
                tokens_per_second,
                scaler,
                reserved_bytes,
                in_use_bytes,
                ..
            } => {
                events.scalar("train/loss", *step, *loss)?;
                events.scalar("train/learning_rate", *step, *learning_rate as f32)?;
                events.scalar("train/gradient_norm", *step, *gradient_norm)?;
                events.scalar("train/tokens_per_second", *step, *tokens_per_second as f32)?;
                let memory = [("reserved", reserved_bytes), ("in_use", in_use_bytes)];
                for (name, bytes) in memory {
                    if let Some(bytes) = bytes {
                        let gibibytes = *bytes as f64 / f64::from(1 << 30);
                        events.scalar(&format!("memory/{name}_GiB"), *step, gibibytes as f32)?;
                    }
                }
                if let Some(scaler) = scaler {
                    events.scalar("train/loss_scale", *step, scaler.scale)?;
                    let skipped = scaler.skipped_steps as f32;
                    events.scalar("train/skipped_steps", *step, skipped)?;
                }
            }
            MetricRecord::Validation { step, loss, perplexity, .. } => {
                events.scalar("validation/loss", *step, *loss as f32)?;
                events.scalar("validation/perplexity", *step, *perplexity as f32)?;
            }
            MetricRecord::Sample { step, prompt, text } => {
                events.text(&sample_tag(prompt), *step, &sample_markdown(prompt, text))?;
            }
            MetricRecord::Run(_) | MetricRecord::Checkpoint { .. } => return Ok(()),
        }
        Ok(events.flush()?)
    }
}

/// A tag for each prompt: of several texts with one tag and step, `TensorBoard` shows the last.
fn sample_tag(prompt: &str) -> String {
    let words: Vec<_> = prompt.split_whitespace().collect();
    let name: String = words.join(" ").chars().take(PROMPT_TAG_CHARS).collect();
    format!("samples/{}", if name.is_empty() { "(no prompt)" } else { &name })
}

/// An indented block, in which Markdown changes nothing and line breaks stay.
fn sample_markdown(prompt: &str, text: &str) -> String {
    let mut markdown = String::from("Prompt:\n\n");
    for line in prompt.lines() {
        let _ = writeln!(markdown, "    {line}");
    }
    markdown.push_str("\nSample:\n\n");
    for line in text.lines() {
        let _ = writeln!(markdown, "    {line}");
    }
    markdown
}

/// All records of a `metrics.jsonl`. A torn last line is left out with a warning; any other
/// damage is an error.
pub(crate) fn read_records(path: &Path) -> Result<Vec<MetricRecord>> {
    let bytes = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    Ok(parse(path, &bytes)?.into_iter().map(|(_, record)| record).collect())
}

/// Leaves complete lines up to `resume_step`, so that a record can be appended after them.
fn repair(path: &Path, resume_step: Option<u64>) -> Result<()> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("reading {}", path.display())),
    };
    let last_step = resume_step.unwrap_or(u64::MAX);
    let mut kept = Vec::with_capacity(bytes.len());
    // The bytes as they were, not a new encoding of what was understood of them.
    for (line, record) in parse(path, &bytes)? {
        if record.step().is_none_or(|step| step <= last_step) {
            kept.extend(line);
            kept.push(b'\n');
        }
    }
    if kept == bytes {
        return Ok(());
    }
    replace_file(path, |temporary| Ok(fs::write(temporary, &kept)?))
}

/// The lines without their ends, each with the record it holds.
fn parse<'a>(path: &Path, bytes: &'a [u8]) -> Result<Vec<(&'a [u8], MetricRecord)>> {
    let mut records = Vec::new();
    for (index, line) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
        let complete = line.strip_suffix(b"\n");
        match serde_json::from_slice(line) {
            Ok(record) => records.push((complete.unwrap_or(line), record)),
            Err(error) if complete.is_none() => tracing::warn!(
                path = %path.display(), line = index + 1, %error, "ignoring a torn last line"
            ),
            Err(error) => {
                return Err(error)
                    .with_context(|| format!("{}, line {}", path.display(), index + 1));
            }
        }
    }
    Ok(records)
}

/// Replaces `path` by what `fill` writes to a temporary file beside it. A reader finds the old
/// content or the new, and a failure leaves the old.
pub(crate) fn replace_file(path: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let replace = || -> Result<()> {
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // Image encoders choose the format by the extension.
        let extension = path.extension().unwrap_or_default().to_string_lossy();
        let suffix = format!(".{extension}");
        let mut builder = tempfile::Builder::new();
        builder.prefix(".new-").suffix(&suffix);
        // Temporary files are private; this one becomes an ordinary file, under the umask.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let temporary = builder.tempfile_in(dir)?.into_temp_path();
        fill(&temporary)?;
        OpenOptions::new().write(true).open(&temporary)?.sync_all()?;
        Ok(temporary.persist(path)?)
    };
    replace().with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn train(step: u64, loss: f32) -> MetricRecord {
        MetricRecord::Train {
            step,
            loss,
            learning_rate: 3e-4,
            gradient_norm: 1.5,
            scaler: None,
            reserved_bytes: None,
            in_use_bytes: None,
            tokens_per_second: 1.25e5,
            tokens: step * 4096,
            seconds: step as f64 * 0.5,
        }
    }

    fn sample(step: u64) -> MetricRecord {
        MetricRecord::Sample { step, prompt: "Es wär".into(), text: "einmal\n ein König.".into() }
    }

    fn run() -> MetricRecord {
        let fields = serde_json::json!({"seed": 42, "device": "cpu", "config": {"layers": 2}});
        MetricRecord::Run(fields.as_object().expect("an object").clone())
    }

    fn write(dir: &Path, resume_step: Option<u64>, records: &[MetricRecord]) {
        let mut log = MetricsLog::open(dir, resume_step).expect("open");
        for record in records {
            log.write(record).expect("write");
        }
    }

    fn read(dir: &Path) -> Vec<MetricRecord> {
        read_records(&dir.join("metrics.jsonl")).expect("readable records")
    }

    #[test]
    fn every_kind_of_record_round_trips_as_one_tagged_line() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let validation = MetricRecord::Validation {
            step: 2,
            loss: 3.25,
            perplexity: 25.8,
            tokens: 100,
            seconds: 2.0,
        };
        let checkpoint = MetricRecord::Checkpoint { step: 2, path: "checkpoints/2".into() };
        let records = [run(), train(1, 10.8), validation, sample(2), checkpoint];
        write(dir.path(), None, &records);
        assert_eq!(read(dir.path()), records);
        let text = fs::read_to_string(dir.path().join("metrics.jsonl")).expect("text");
        let kinds: Vec<String> = text
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"))
            .map(|object| object["kind"].as_str().expect("a kind").to_owned())
            .collect();
        assert_eq!(kinds, ["run", "train", "validation", "sample", "checkpoint"]);
    }

    #[test]
    fn resuming_drops_the_steps_that_will_be_repeated_and_nothing_else() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        write(dir.path(), None, &[run(), train(1, 9.0), train(2, 8.0), sample(2), train(3, 7.0)]);
        write(dir.path(), Some(2), &[run(), train(3, 6.5)]);
        let expected = [run(), train(1, 9.0), train(2, 8.0), sample(2), run(), train(3, 6.5)];
        assert_eq!(read(dir.path()), expected);
        write(dir.path(), None, &[train(4, 6.0)]);
        assert_eq!(read(dir.path()).len(), expected.len() + 1);
    }

    #[test]
    fn a_line_torn_at_any_byte_is_dropped_and_the_next_record_starts_afresh() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let path = dir.path().join("metrics.jsonl");
        write(dir.path(), None, &[train(1, 9.0), sample(2)]);
        let whole = fs::read(&path).expect("bytes");
        let first = whole.iter().position(|byte| *byte == b'\n').expect("a line end") + 1;
        for end in first..whole.len() {
            fs::write(&path, &whole[..end]).expect("a torn file");
            write(dir.path(), Some(2), &[train(3, 7.0)]);
            // Only the line end is missing from the longest: nothing of it is lost.
            let expected = match end == whole.len() - 1 {
                true => vec![train(1, 9.0), sample(2), train(3, 7.0)],
                false => vec![train(1, 9.0), train(3, 7.0)],
            };
            assert_eq!(read(dir.path()), expected, "torn after {end} bytes");
        }
    }

    #[test]
    fn damage_before_the_last_line_is_an_error_that_names_the_line() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let path = dir.path().join("metrics.jsonl");
        write(dir.path(), None, &[train(1, 9.0)]);
        let mut bytes = fs::read(&path).expect("bytes");
        bytes.extend(b"{\"kind\":\"train\",\"step\":\n");
        fs::write(&path, &bytes).expect("a damaged file");
        let error = format!("{:#}", read_records(&path).expect_err("damage"));
        assert!(error.contains("line 2"), "{error}");
        assert!(MetricsLog::open(dir.path(), Some(1)).is_err());
        assert_eq!(fs::read(&path).expect("bytes"), bytes);
    }

    #[test]
    fn a_loss_that_is_not_finite_is_kept_as_nan() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        write(dir.path(), None, &[train(1, f32::NAN), train(2, f32::INFINITY)]);
        for record in read(dir.path()) {
            assert!(matches!(record, MetricRecord::Train { loss, .. } if loss.is_nan()));
        }
    }

    #[test]
    fn each_opening_adds_an_event_file_with_the_tags_of_its_records() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        write(dir.path(), None, &[train(1, 9.0)]);
        write(dir.path(), Some(1), &[sample(2)]);
        let mut files: Vec<_> = fs::read_dir(dir.path().join("tensorboard"))
            .expect("event files")
            .map(|entry| entry.expect("an entry").path())
            .collect();
        files.sort();
        let contents: Vec<_> = files
            .iter()
            .map(|file| String::from_utf8_lossy(&fs::read(file).expect("events")).into_owned())
            .collect();
        assert_eq!(contents.len(), 2);
        assert!(contents[0].contains("train/loss") && contents[0].contains("train/gradient_norm"));
        assert!(contents[1].contains("samples/Es wär") && !contents[1].contains("train/loss"));
    }
}
