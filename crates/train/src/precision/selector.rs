//! Which parts of a model a rule of a policy is for.

use super::{PrecisionError, constants::WithConstants, paths::FloatParameter};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Which parameters stay in f32.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Selector {
    /// Of a module and all in it.
    Path(String),
    /// Of every module of that type.
    Type(String),
}

impl Selector {
    pub(super) fn matches(&self, parameter: &FloatParameter) -> bool {
        self.selects(&parameter.path, &parameter.types)
    }

    pub(super) fn matches_module(&self, module: &WithConstants) -> bool {
        self.selects(&module.path, &module.types)
    }

    fn selects(&self, found: &str, types: &[String]) -> bool {
        match self {
            Self::Path(path) => {
                let rest = found.strip_prefix(path.as_str());
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            }
            Self::Type(name) => types.iter().any(|found| found == name),
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "path `{path}`"),
            Self::Type(name) => write!(f, "type `{name}`"),
        }
    }
}

/// The error of a selector that matches none of `parameters`.
pub(super) fn unmatched(selector: &Selector, parameters: &[FloatParameter]) -> PrecisionError {
    let mut known: Vec<&str> = match selector {
        Selector::Path(_) => parameters.iter().map(|p| p.path.as_str()).collect(),
        Selector::Type(_) => {
            parameters.iter().flat_map(|p| p.types.iter().map(String::as_str)).collect()
        }
    };
    known.sort_unstable();
    known.dedup();
    const SHOWN: usize = 12;
    let more = known.len().saturating_sub(SHOWN);
    known.truncate(SHOWN);
    let mut known = known.join(", ");
    if more > 0 {
        known += &format!(" and {more} more");
    }
    PrecisionError::UnmatchedSelector { selector: selector.to_string(), known }
}
