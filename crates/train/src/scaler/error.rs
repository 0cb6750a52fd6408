//! What a scaler cannot do.

use blackburn_distributed::DistributedError;

/// What a scaler cannot do, and why.
#[derive(Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScalerError {
    /// A setting that makes no sense.
    #[error("GradScaler: {setting}: expected {expected}, got {found}")]
    InvalidSetting {
        /// Its name.
        setting: &'static str,
        /// What it may be.
        expected: String,
        /// What was given.
        found: String,
    },
    /// A state that no scaler of these settings can be in.
    #[error(
        "GradScaler::restore: {field}: expected {expected}, got {found}; the state is of other \
         settings or damaged, and the scaler was left as it was"
    )]
    ForeignState {
        /// Which of the state's numbers.
        field: &'static str,
        /// What it may be.
        expected: String,
        /// What came.
        found: String,
    },
    /// Gradients would be divided by the scale twice.
    #[error(
        "GradScaler::unscale: gradients of this step were unscaled already; call update() first"
    )]
    AlreadyUnscaled,
    /// There is nothing to learn from about the scale.
    #[error("GradScaler::update: no gradients were unscaled since the last update")]
    NothingUnscaled,
    /// No parameter has a gradient.
    #[error(
        "GradScaler::unscale: argument `gradients`: expected at least one of the module's, got none"
    )]
    NoGradients,
    /// Another rank has failed.
    #[error(transparent)]
    Ranks(#[from] DistributedError),
}
