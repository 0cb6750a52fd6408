//! burn-train's metrics as event files for TensorBoard.

use std::collections::HashMap;
use std::path::Path;

use burn::train::{
    logger::MetricLogger,
    metric::{
        MetricDefinition, MetricId, NumericEntry,
        store::{EpochSummary, MetricsUpdate, Split},
    },
};

use crate::tensorboard::{EventError, EventWriter};

/// Writes the numeric metrics of a training where TensorBoard finds them.
///
/// | tag | value | step |
/// |---|---|---|
/// | `train/<metric>` | of each processed item | iterations since the training began |
/// | `epoch/<split>/<metric>` | of the whole epoch, as the metric computes it | the epoch |
///
/// Validation is written by epoch only. Metrics without a number, and numeric ones at items where
/// they have none, are left out.
///
/// The logger answers checkpointing and early stopping by itself. Registering a logger takes the
/// place of burn-train's files: for those too, register burn-train's `FileMetricLogger` beside it,
/// and before it where the training resumes, since only files know the earlier epochs.
///
/// burn-train's loggers cannot return errors. The first one is written to the error output, and
/// the event file ends there; the training goes on.
#[derive(Debug)]
pub struct TensorBoardLogger {
    /// None after an error.
    events: Option<EventWriter>,
    names: HashMap<MetricId, String>,
    /// Values of each metric, split and epoch, for burn-train to ask for.
    values: HashMap<(String, Split, usize), Vec<NumericEntry>>,
    iteration: u64,
}

impl TensorBoardLogger {
    /// Creates `folder` if needed, and an event file in it.
    ///
    /// # Errors
    ///
    /// [`EventError::Io`] if the folder or the file cannot be created.
    pub fn create(folder: impl AsRef<Path>) -> Result<Self, EventError> {
        let events = Some(EventWriter::create(folder)?);
        Ok(Self { events, names: HashMap::new(), values: HashMap::new(), iteration: 0 })
    }

    /// For a training that resumes after `iterations` processed items: goes on counting there, and
    /// has TensorBoard forget what earlier files of the folder hold beyond. Epochs are shorter
    /// than iterations, so their values stay.
    ///
    /// # Errors
    ///
    /// [`EventError`] if the event file cannot be created or written.
    pub fn resume(folder: impl AsRef<Path>, iterations: u64) -> Result<Self, EventError> {
        let mut logger = Self::create(folder)?;
        if let Some(events) = &mut logger.events {
            events.discard_from(iterations + 1)?;
        }
        logger.iteration = iterations;
        Ok(logger)
    }

    fn write(&mut self, write: impl FnOnce(&mut EventWriter) -> Result<(), EventError>) {
        let Some(events) = &mut self.events else { return };
        if let Err(error) = write(events) {
            eprintln!("TensorBoard's event file ends here: {error}");
            self.events = None;
        }
    }
}

impl MetricLogger for TensorBoardLogger {
    fn log(&mut self, update: MetricsUpdate, epoch: usize, split: &Split) {
        let is_final = |entry: &NumericEntry| matches!(entry, NumericEntry::Final(_));
        let of_epoch = update
            .entries_numeric
            .iter()
            .any(|metric| metric.numeric_entry.as_ref().is_some_and(is_final));
        if *split == Split::Train && !of_epoch {
            self.iteration += 1;
        }
        for metric in update.entries_numeric {
            let (Some(value), Some(name)) =
                (metric.numeric_entry, self.names.get(&metric.entry.metric_id))
            else {
                continue;
            };
            if metric.entry.serialized_entry.is_not_available() {
                continue;
            }
            let name = name.clone();
            let tag_and_step = match (of_epoch, split) {
                (true, _) => Some((format!("epoch/{split}/{name}"), epoch as u64)),
                (false, Split::Train) => Some((format!("train/{name}"), self.iteration)),
                (false, _) => None,
            };
            if let Some((tag, step)) = tag_and_step {
                let value = value.current() as f32;
                self.write(|events| events.scalar(&tag, step, value));
            }
            let values = self.values.entry((name, split.clone(), epoch)).or_default();
            if of_epoch {
                // It stands for all the epoch's values from here on.
                values.clear();
            }
            values.push(value);
        }
        if of_epoch {
            self.write(EventWriter::flush);
        }
    }

    fn read_numeric(
        &mut self,
        name: &str,
        epoch: usize,
        split: &Split,
    ) -> Result<Vec<NumericEntry>, String> {
        let key = (name.to_owned(), split.clone(), epoch);
        Ok(self.values.get(&key).cloned().unwrap_or_default())
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name.to_string());
    }

    fn log_epoch_summary(&mut self, _summary: EpochSummary) {
        self.write(EventWriter::flush);
    }
}
