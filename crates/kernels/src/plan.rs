//! What is told of the choice of a plan.

use std::fmt;

/// Tells, at level debug, which plan a problem gets and for what reason.
pub(crate) fn tell_plan(
    op: &'static str,
    problem: &impl fmt::Debug,
    plan: &impl fmt::Display,
    reason: fmt::Arguments<'_>,
) {
    tracing::debug!(op, ?problem, %plan, %reason, "planned");
}
