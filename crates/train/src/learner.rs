//! The toolkit inside burn-train's learner (feature `burn-train`).
//!
//! | burn-train's part | what this module puts there |
//! |---|---|
//! | training strategy | [`ToolkitStrategy`]: accumulation by weight, clipping by the global norm, [`LossScaling`] and other hooks, a stop before a diverged model is saved, several ranks |
//! | output of a training step | [`StepReport`] alone, [`Reported`] around burn-train's own outputs, or any type with [`StepOutput`] |
//! | metric | [`GaugeMetric`] around [`Throughput`](crate::throughput::Throughput), [`ModelFlops`](crate::throughput::ModelFlops), [`GradientNorm`], [`LossScale`], [`PoolUse`] and, with the feature `nvml`, [`GpuGauge`] |
//! | metric logger | [`TensorBoardLogger`] |
//! | learning-rate scheduler | [`Schedule::scheduler`](crate::schedule::Schedule::scheduler) of a schedule or a function of the step |
//! | renderer | [`LineRenderer`]: a line for each epoch, where there is no terminal |
//!
//! Checkpointers, early stopping, interruption and the terminal dashboard are burn-train's own and
//! work as with its own strategies. The book's chapter "Training with Burn's learner" shows a
//! whole program; so does `examples/learner`.

mod epoch;
mod gauge;
mod gauges;
mod logger;
mod meetings;
mod renderer;
mod report;
mod scaling;
mod strategy;
mod window;

pub use gauge::{Gauge, GaugeMetric};
#[cfg(feature = "nvml")]
pub use gauges::{GpuGauge, GpuQuantity};
pub use gauges::{GradientNorm, LossScale, PoolQuantity, PoolUse};
pub use logger::TensorBoardLogger;
pub use meetings::rank_folder;
pub use renderer::LineRenderer;
pub use report::{Reported, StepOutput, StepReport};
pub use scaling::LossScaling;
pub use strategy::ToolkitStrategy;
pub use window::{StepHook, Verdict};

#[cfg(test)]
mod tests;
