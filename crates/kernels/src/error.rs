/// Why a kernel was not launched.
///
/// Callers fall back on [`Unsupported`](Self::Unsupported); the other two are faults to report.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The caller's arguments contradict each other or the op's contract.
    #[error("{op}: argument `{argument}`: expected {expected}, got {actual}")]
    InvalidProblem {
        /// The op.
        op: &'static str,
        /// The offending argument.
        argument: &'static str,
        /// What the op needs.
        expected: String,
        /// What came.
        actual: String,
    },
    /// A valid problem that no kernel of this crate serves on this device.
    #[error("{op}: not served here: {reason}")]
    Unsupported {
        /// The op.
        op: &'static str,
        /// What stands in the way.
        reason: String,
    },
    /// The device refused.
    #[error("{op}: the device refused the launch: {reason}")]
    Launch {
        /// The op.
        op: &'static str,
        /// What the runtime said.
        reason: String,
    },
}

impl KernelError {
    pub(crate) fn invalid(
        op: &'static str,
        argument: &'static str,
        expected: impl Into<String>,
        actual: impl ToString,
    ) -> Self {
        let (expected, actual) = (expected.into(), actual.to_string());
        Self::InvalidProblem { op, argument, expected, actual }
    }

    pub(crate) fn unsupported(op: &'static str, reason: impl Into<String>) -> Self {
        Self::Unsupported { op, reason: reason.into() }
    }
}
