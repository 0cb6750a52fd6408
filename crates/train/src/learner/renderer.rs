//! Progress in plain lines, for logs and where there is no terminal.

use std::io::{self, Write};

use burn::train::{
    logger::{EvaluationProgressLogger, TrainingProgressLogger},
    metric::{MetricAttributes, MetricDefinition, MetricEntry, MetricId, NumericEntry},
    renderer::{
        EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
        MetricsRendererTraining,
    },
};

/// Writes a line at the end of each epoch's training and validation, with the metrics of the whole
/// epoch, where burn-train's plain renderer writes one for each item without metrics.
///
/// ```text
/// epoch 2/4 train: Loss 0.2187, Gradient Norm 0.8125, Throughput of samples (samples/s) 20480.1234
/// epoch 2/4 valid: Loss 0.1968
/// ```
#[derive(Debug)]
pub struct LineRenderer<W = io::Stderr> {
    output: W,
    names: Vec<(MetricId, String)>,
    epoch: usize,
    epochs: usize,
    split: String,
    /// The last value of each metric in this split.
    values: Vec<(MetricId, String)>,
}

impl LineRenderer {
    /// Writes to the error output.
    pub fn new() -> Self {
        Self::to(io::stderr())
    }
}

impl Default for LineRenderer {
    fn default() -> Self {
        Self::new()
    }
}

impl<W: Write + Send + Sync> LineRenderer<W> {
    /// Writes to `output`. Errors of writing are ignored: they must not end a training.
    pub fn to(output: W) -> Self {
        Self {
            output,
            names: Vec::new(),
            epoch: 0,
            epochs: 0,
            split: String::new(),
            values: Vec::new(),
        }
    }

    fn note(&mut self, state: MetricState) {
        let (entry, text) = match state {
            MetricState::Generic(entry) => {
                let text = entry.serialized_entry.formatted.clone();
                (entry, text)
            }
            MetricState::Numeric(entry, Some(NumericEntry::Final(value))) => {
                (entry, format!("{value:.4}"))
            }
            // Of one item.
            MetricState::Numeric(..) => return,
        };
        let MetricEntry { metric_id, serialized_entry } = entry;
        if serialized_entry.is_not_available() {
            return;
        }
        self.values.retain(|(id, _)| *id != metric_id);
        self.values.push((metric_id, text));
    }

    fn line(&mut self, what: &str) {
        let named = |(id, value): &(MetricId, String)| {
            let (_, name) = self.names.iter().find(|(known, _)| known == id)?;
            Some(format!("{name} {value}"))
        };
        let values: Vec<_> = self.values.iter().filter_map(named).collect();
        let _ = writeln!(self.output, "{what}: {}", values.join(", "));
        self.values.clear();
    }
}

impl<W: Write + Send + Sync> MetricsRendererTraining for LineRenderer<W> {
    fn update_train(&mut self, state: MetricState) {
        self.note(state);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.note(state);
    }
}

impl<W: Write + Send + Sync> MetricsRendererEvaluation for LineRenderer<W> {
    fn update_test(&mut self, _name: EvaluationName, state: MetricState) {
        self.note(state);
    }
}

impl<W: Write + Send + Sync> TrainingProgressLogger for LineRenderer<W> {
    fn start(&mut self, epochs: usize, first: usize, _items: Option<usize>, label: Option<&str>) {
        (self.epoch, self.epochs) = (first, epochs);
        if let Some(label) = label {
            let _ = writeln!(self.output, "{label}");
        }
    }

    fn update_epoch(&mut self, epoch: usize) {
        self.epoch = epoch + 1;
    }

    fn start_split(&mut self, split: &str, _items: usize) {
        split.clone_into(&mut self.split);
    }

    fn update_split(&mut self, _items: usize) {}

    fn end_split(&mut self) {
        self.line(&format!("epoch {}/{} {}", self.epoch, self.epochs, self.split));
    }

    fn end(&mut self) {}

    fn log_event_training(&mut self, _event: String) {}
}

impl<W: Write + Send + Sync> EvaluationProgressLogger for LineRenderer<W> {
    fn start_global_progress(&mut self, _tests: usize) {}

    fn start_test(&mut self, name: &str, _items: usize) {
        name.clone_into(&mut self.split);
    }

    fn update_test_progress(&mut self, _items: usize) {}

    fn end_test(&mut self) {
        self.line(&format!("test {}", self.split));
    }

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _event: String) {}
}

impl<W: Write + Send + Sync> MetricsRenderer for LineRenderer<W> {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        let unit = match &definition.attributes {
            MetricAttributes::Numeric(numeric) => numeric.unit.clone(),
            MetricAttributes::None => None,
        };
        let name = match unit {
            Some(unit) => format!("{} ({unit})", definition.name),
            None => definition.name.to_string(),
        };
        self.names.push((definition.metric_id, name));
    }
}
