//! Gradients that have come from other ranks.

use blackburn_distributed::Group;

/// Where gradients have come from.
pub(crate) struct Origin<'a> {
    /// What makes means of them, 1 where they are means.
    pub(crate) factor: f64,
    /// The ranks that each have some of the gradients, if not all ranks have all.
    pub(crate) apart: Option<&'a Group>,
}

impl Default for Origin<'_> {
    fn default() -> Self {
        Self { factor: 1.0, apart: None }
    }
}
