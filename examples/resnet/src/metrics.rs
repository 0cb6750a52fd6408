//! What a run reports about itself: `metrics.jsonl`, one JSON object a line, and the same numbers as
//! `TensorBoard` events.

use anyhow::{Context, Result};
use blackburn::train::{
    record_log::{Record, RecordLog},
    scaler::ScalerState,
    tensorboard::EventWriter,
};
use serde::{Deserialize, Deserializer, Serialize};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The name of the log in a run's folder.
pub(crate) const LOG: &str = "metrics.jsonl";

/// One line of `metrics.jsonl`. JSON has no NaN or infinity: both are stored as `null` and read back as NaN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum MetricRecord {
    /// How a run was started, or continued.
    Run(serde_json::Map<String, serde_json::Value>),
    /// The mean over the steps since the last such record.
    Train {
        step: u64,
        /// With label smoothing.
        #[serde(deserialize_with = "null_as_nan")]
        loss: f32,
        learning_rate: f64,
        /// Of the last step.
        #[serde(deserialize_with = "null_as_nan")]
        gradient_norm: f32,
        /// Of losses in f16.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        scaler: Option<ScalerState>,
        /// What the device's memory pools have taken; a CPU has none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reserved_bytes: Option<u64>,
        images_per_second: f64,
        /// Share of the time that the loop has waited for images.
        waited_share: f64,
        /// Images that could not be used, since the program started.
        skipped_images: u64,
        images: u64,
        seconds: f64,
    },
    /// How well images are told apart that are held out.
    Validation {
        step: u64,
        /// Without label smoothing.
        #[serde(deserialize_with = "null_as_nan")]
        loss: f64,
        /// Share of images whose class was found likeliest.
        top1: f64,
        /// Share of images whose class was among the five likeliest.
        top5: f64,
        images: u64,
        /// Whether of the weights' moving average.
        averaged: bool,
        seconds: f64,
    },
    /// A checkpoint that is complete on disk.
    Checkpoint { step: u64, path: PathBuf },
}

impl Record for MetricRecord {
    fn step(&self) -> Option<u64> {
        match self {
            Self::Run(_) => None,
            Self::Train { step, .. }
            | Self::Validation { step, .. }
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
    /// Opens the log in `folder`. A run that resumes from the checkpoint of `resume_step` will repeat the steps
    /// after it: what the log holds about them is dropped.
    pub(crate) fn open(folder: &Path, resume_step: Option<u64>) -> Result<Self> {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        let lines = RecordLog::open(&folder.join(LOG), resume_step)?;
        let mut events = EventWriter::create(folder.join("tensorboard"))?;
        if let Some(step) = resume_step {
            events.discard_from(step + 1)?;
            events.flush()?;
        }
        Ok(Self { lines, events })
    }

    /// Writes one record, handed to the operating system on return.
    pub(crate) fn write(&mut self, record: &MetricRecord) -> Result<()> {
        self.lines.append(record)?;
        let (step, scalars) = match record {
            MetricRecord::Train {
                step,
                loss,
                learning_rate,
                gradient_norm,
                scaler,
                reserved_bytes,
                images_per_second,
                waited_share,
                skipped_images,
                ..
            } => {
                let mut scalars = vec![
                    ("train/loss", *loss),
                    ("train/learning_rate", *learning_rate as f32),
                    ("train/gradient_norm", *gradient_norm),
                    ("train/images_per_second", *images_per_second as f32),
                    ("data/waited_share", *waited_share as f32),
                    ("data/skipped_images", *skipped_images as f32),
                ];
                if let Some(scaler) = scaler {
                    scalars.push(("train/loss_scale", scaler.scale));
                    scalars.push(("train/skipped_steps", scaler.skipped_steps as f32));
                }
                if let Some(bytes) = reserved_bytes {
                    let gibibytes = *bytes as f64 / f64::from(1 << 30);
                    scalars.push(("memory/reserved_GiB", gibibytes as f32));
                }
                (*step, scalars)
            }
            MetricRecord::Validation { step, loss, top1, top5, .. } => {
                let scalars = vec![
                    ("validation/loss", *loss as f32),
                    ("validation/top1", *top1 as f32),
                    ("validation/top5", *top5 as f32),
                ];
                (*step, scalars)
            }
            MetricRecord::Run(_) | MetricRecord::Checkpoint { .. } => return Ok(()),
        };
        for (tag, value) in scalars {
            self.events.scalar(tag, step, value)?;
        }
        Ok(self.events.flush()?)
    }

    /// Shows a PNG in `TensorBoard`.
    pub(crate) fn image(&mut self, tag: &str, step: u64, size: [u32; 2], png: &[u8]) -> Result<()> {
        self.events.image(tag, step, size, png)?;
        Ok(self.events.flush()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blackburn::train::record_log::read_records;

    #[test]
    fn records_come_back_and_losses_that_are_no_numbers_are_nan() {
        let folder = tempfile::tempdir().expect("a folder");
        let train = MetricRecord::Train {
            step: 1,
            loss: f32::INFINITY,
            learning_rate: 0.1,
            gradient_norm: 2.0,
            scaler: None,
            reserved_bytes: Some(1 << 30),
            images_per_second: 100.0,
            waited_share: 0.25,
            skipped_images: 3,
            images: 32,
            seconds: 1.0,
        };
        let validation = MetricRecord::Validation {
            step: 1,
            loss: 2.0,
            top1: 0.5,
            top5: 0.75,
            images: 16,
            averaged: true,
            seconds: 1.0,
        };
        let mut log = MetricsLog::open(folder.path(), None).expect("a log");
        log.write(&train).expect("written");
        log.write(&validation).expect("written");
        log.image("validation/samples", 1, [2, 1], b"PNG").expect("written");
        let records: Vec<MetricRecord> = read_records(&folder.path().join(LOG)).expect("records");
        assert!(matches!(records[0], MetricRecord::Train { loss, step: 1, .. } if loss.is_nan()));
        assert_eq!(records[1], validation);
        let files: Vec<_> = fs::read_dir(folder.path().join("tensorboard"))
            .expect("events")
            .map(|entry| fs::read(entry.expect("a file").path()).expect("bytes"))
            .collect();
        let text = String::from_utf8_lossy(&files[0]);
        for tag in ["train/loss", "memory/reserved_GiB", "validation/top5", "validation/samples"] {
            assert!(text.contains(tag), "{tag}");
        }
    }
}
