//! What a run reports about itself: `metrics.jsonl`, one JSON object a line, and the same numbers
//! as `TensorBoard` events.
//!
//! The JSON lines are the record of the run that plots and reports are made from, each step once.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use blackburn::train::{
    record_log::{self, Record, RecordLog},
    replace,
    scaler::ScalerState,
    tensorboard::EventWriter,
};
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
        /// Milliseconds of a step in which numbers moved between ranks; none without other ranks.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        moving_ms: Option<f64>,
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

impl Record for MetricRecord {
    fn step(&self) -> Option<u64> {
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
    lines: RecordLog<MetricRecord>,
    events: EventWriter,
}

impl MetricsLog {
    /// Opens the log in `dir`, creating both where they do not exist.
    ///
    /// A run that resumes from the checkpoint of `resume_step` will repeat the steps after it:
    /// what the log holds about them is dropped.
    pub(crate) fn open(dir: &Path, resume_step: Option<u64>) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        let lines = RecordLog::open(&dir.join("metrics.jsonl"), resume_step)?;
        let mut events = EventWriter::create(dir.join("tensorboard"))?;
        if let Some(step) = resume_step {
            events.discard_from(step + 1)?;
            events.flush()?;
        }
        Ok(Self { lines, events })
    }

    /// Writes one record, handed to the operating system on return: a process killed after that
    /// does not lose it.
    pub(crate) fn write(&mut self, record: &MetricRecord) -> Result<()> {
        if let MetricRecord::Run(fields) = record {
            ensure!(!fields.contains_key("kind"), "a run record has a field named \"kind\"");
        }
        self.lines.append(record)?;
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
                moving_ms,
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
                if let Some(moving_ms) = moving_ms {
                    events.scalar("train/moving_ms", *step, *moving_ms as f32)?;
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
    Ok(record_log::read_records(path)?)
}

/// Replaces `path` by what `fill` writes to a temporary file beside it. A reader finds the old
/// content or the new, and a failure leaves the old.
pub(crate) fn replace_file(path: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    replace::replace_file(path, fill).with_context(|| format!("writing {}", path.display()))
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
            moving_ms: None,
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
