//! What a training step tells the strategy, and the strategy the metrics.

use burn::{
    tensor::{ExecutionError, FloatDType, Tensor},
    train::{
        ClassificationOutput, ItemLazy, MultiLabelClassificationOutput, SequenceOutput,
        metric::{
            AccuracyInput, Adaptor, CerInput, ConfusionStatsInput, HammingScoreInput, LossInput,
            PerplexityInput, TopKAccuracyInput, WerInput,
        },
    },
};

/// A micro-batch's size and loss, from the model's step; and what became of the optimizer step
/// that it completed, from [`ToolkitStrategy`](super::ToolkitStrategy).
///
/// It is an output of a training step by itself, where metrics need no more than the loss.
/// Tensors are f32, have one element and take no part in differentiation; nothing waits for them.
#[derive(Clone, Debug)]
pub struct StepReport {
    /// Samples or tokens that the mean loss is over: the micro-batch's weight, and what throughput
    /// counts.
    pub items: usize,
    /// The mean loss, unscaled.
    pub loss: Tensor<1>,
    /// Global norm of the gradients before clipping, for the micro-batch that completed a step.
    pub gradient_norm: Option<Tensor<1>>,
    /// The loss scale, for the micro-batch that completed a step, if there is one.
    pub loss_scale: Option<Tensor<1>>,
}

impl StepReport {
    /// A report of the mean `loss` over `items`. Give the loss before it is scaled.
    ///
    /// # Panics
    ///
    /// When `loss` has other than one element.
    pub fn new(loss: &Tensor<1>, items: usize) -> Self {
        let [elements] = loss.dims();
        assert!(
            elements == 1,
            "StepReport::new: argument `loss`: expected one element, got {elements}"
        );
        let loss = loss.clone().without_autodiff().cast(FloatDType::F32);
        Self { items, loss, gradient_norm: None, loss_scale: None }
    }
}

/// An output of a training step that carries a [`StepReport`].
///
/// Implement it, and burn-train's `Adaptor<StepReport>`, for an output type of your own. Metrics
/// of this crate read the report through the latter.
pub trait StepOutput: Adaptor<StepReport> {
    /// The report, for the strategy to complete.
    fn report_mut(&mut self) -> &mut StepReport;
}

impl StepOutput for StepReport {
    fn report_mut(&mut self) -> &mut StepReport {
        self
    }
}

impl Adaptor<StepReport> for StepReport {
    fn adapt(&self) -> StepReport {
        self.clone()
    }
}

/// burn-train's loss metric weighs a loss by its elements: one for each item makes an epoch's value
/// the mean over its items, however unequal the micro-batches are.
impl Adaptor<LossInput> for StepReport {
    fn adapt(&self) -> LossInput {
        LossInput::new(self.loss.clone().expand([self.items.max(1)]))
    }
}

impl ItemLazy for StepReport {
    fn sync(self) -> Result<Self, ExecutionError> {
        // Hands the work over; the metrics' thread waits for the values, not the training.
        self.loss.device().flush()?;
        Ok(self)
    }
}

/// An output of burn-train's with a report: metrics of both read it.
///
/// `T` is `ClassificationOutput`, `MultiLabelClassificationOutput`, `RegressionOutput` or
/// `SequenceOutput`, all of whose adaptors are passed on. For a metric of your own, implement
/// [`StepOutput`] on a type of your own.
#[derive(Clone, Debug)]
pub struct Reported<T> {
    /// What burn-train's metrics read.
    pub output: T,
    /// What this crate's metrics read.
    pub report: StepReport,
}

impl<T> Reported<T> {
    /// Adds a report of the mean `loss` over `items` to `output`.
    ///
    /// # Panics
    ///
    /// When `loss` has other than one element.
    pub fn new(output: T, loss: &Tensor<1>, items: usize) -> Self {
        Self { output, report: StepReport::new(loss, items) }
    }
}

impl<T> StepOutput for Reported<T> {
    fn report_mut(&mut self) -> &mut StepReport {
        &mut self.report
    }
}

impl<T> Adaptor<StepReport> for Reported<T> {
    fn adapt(&self) -> StepReport {
        self.report.clone()
    }
}

impl<T> Adaptor<LossInput> for Reported<T> {
    fn adapt(&self) -> LossInput {
        self.report.adapt()
    }
}

/// Every other adaptor of burn-train's outputs.
macro_rules! pass_on {
    ($($output:ident: $($input:ident),+;)+) => {$($(
        impl Adaptor<$input> for Reported<$output> {
            fn adapt(&self) -> $input {
                self.output.adapt()
            }
        }
    )+)+};
}

pass_on! {
    ClassificationOutput: AccuracyInput, ConfusionStatsInput, PerplexityInput, TopKAccuracyInput;
    MultiLabelClassificationOutput: ConfusionStatsInput, HammingScoreInput;
    SequenceOutput: AccuracyInput, CerInput, PerplexityInput, TopKAccuracyInput, WerInput;
}

impl<T: ItemLazy> ItemLazy for Reported<T> {
    fn sync(self) -> Result<Self, ExecutionError> {
        Ok(Self { output: self.output.sync()?, report: self.report })
    }
}
