//! Gradients that have come from other ranks or from a recording.

use blackburn_backend::steps::repeat::Watch;
use blackburn_distributed::Group;

/// Where gradients have come from, and who watches what becomes of them.
pub(crate) struct Origin<'a> {
    /// What makes means of them, 1 where they are means.
    pub(crate) factor: f64,
    /// The ranks that each have some of the gradients, if not all ranks have all.
    pub(crate) apart: Option<&'a Group>,
    /// Who takes note of where they lie.
    pub(crate) watch: Option<&'a Watch>,
}

impl Default for Origin<'_> {
    fn default() -> Self {
        Self { factor: 1.0, apart: None, watch: None }
    }
}
