//! Values read now and then, as metrics of burn-train.

use std::sync::Arc;

use burn::{
    tensor::TensorReadError,
    train::metric::{
        Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes,
        NumericEntry, SerializedEntry, format_float,
    },
};

/// Something that gives a number for each processed item, or none.
///
/// [`GaugeMetric`] makes a metric of it.
pub trait Gauge: Clone + Send + Sync {
    /// What it reads: [`StepReport`](super::StepReport), or `()` if it needs nothing of the item.
    type Input;

    /// The metric's name, unless [`GaugeMetric::named`] gives another.
    fn name(&self) -> String;

    /// The unit, if there is one.
    fn unit(&self) -> Option<String>;

    /// Whether a larger value is better.
    fn higher_is_better(&self) -> bool;

    /// The value at this item. `None` where there is none: loggers leave the item out.
    ///
    /// # Errors
    ///
    /// When a tensor cannot be read.
    fn measure(&mut self, input: &Self::Input) -> Result<Option<f64>, TensorReadError>;

    /// The value of the whole epoch, given the mean of its measured values.
    fn of_epoch(&self, mean: Option<f64>) -> Option<f64> {
        mean
    }

    /// A new epoch begins, maybe after a pause.
    fn reset(&mut self) {}
}

/// A [`Gauge`] as a metric: register it with `metric_train_numeric`.
#[derive(Clone, Debug)]
pub struct GaugeMetric<G> {
    gauge: G,
    name: MetricName,
    current: Option<f64>,
    sum: f64,
    count: usize,
}

impl<G: Gauge> GaugeMetric<G> {
    /// A metric of what `gauge` reads.
    pub fn new(gauge: G) -> Self {
        Self { name: Arc::new(gauge.name()), gauge, current: None, sum: 0.0, count: 0 }
    }

    /// The metric under another name: names are unique in a training, and there may be two GPUs to
    /// watch.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = Arc::new(name.into());
        self
    }

    fn epoch(&self) -> Option<f64> {
        self.gauge.of_epoch((self.count > 0).then(|| self.sum / self.count as f64))
    }

    fn entry(&self, value: Option<NumericEntry>) -> SerializedEntry {
        let unit = self.gauge.unit();
        let Some(value) = value else { return SerializedEntry::not_available(unit.as_deref()) };
        let unit = unit.map(|unit| format!(" {unit}")).unwrap_or_default();
        let number = |value: Option<f64>| match value {
            Some(value) => format!("{}{unit}", format_float(value, 3)),
            None => format!("{}{unit}", SerializedEntry::NOT_AVAILABLE),
        };
        let formatted = format!("epoch {} - batch {}", number(self.epoch()), number(self.current));
        SerializedEntry::new(formatted, value.serialize())
    }
}

impl<G: Gauge> Metric for GaugeMetric<G> {
    type Input = G::Input;

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes {
            unit: self.gauge.unit(),
            higher_is_better: self.gauge.higher_is_better(),
        }
        .into()
    }

    fn update(
        &mut self,
        item: &Self::Input,
        _metadata: &MetricMetadata,
    ) -> Result<SerializedEntry, TensorReadError> {
        self.current = self.gauge.measure(item)?;
        if let Some(value) = self.current {
            self.sum += value;
            self.count += 1;
        }
        Ok(self.entry(self.value()))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(self.entry(self.epoch().map(NumericEntry::Final)))
    }

    fn clear(&mut self) {
        self.gauge.reset();
        (self.current, self.sum, self.count) = (None, 0.0, 0);
    }
}

impl<G: Gauge> Numeric for GaugeMetric<G> {
    fn value(&self) -> Option<NumericEntry> {
        self.current.map(NumericEntry::Value)
    }

    fn running_value(&self) -> Option<NumericEntry> {
        self.epoch().map(NumericEntry::Value)
    }

    /// NaN where the epoch had no value: burn-train asks for a number.
    fn final_value(&self) -> NumericEntry {
        NumericEntry::Final(self.epoch().unwrap_or(f64::NAN))
    }
}
