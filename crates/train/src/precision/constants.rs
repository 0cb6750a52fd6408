//! Burn's modules that make tensors of their own in f32, which no policy reaches.

use crate::path::ModulePath;
use burn::module::{Module, ModuleVisitor};

/// Types, and what runs them in any type. Tables and initial states are tensors of the device's default type,
/// made in `forward` or held in fields that no mapper sees.
const KNOWN: [(&str, &str); 8] = [
    ("RotaryEncoding", "blackburn::nn::positions::rotary"),
    ("PositionalEncoding", "blackburn::nn::positions::sinusoidal"),
    ("Lstm", "blackburn::nn::recurrent::lstm"),
    ("BiLstm", "blackburn::nn::recurrent::bi_lstm"),
    ("Gru", "blackburn::nn::recurrent::gru"),
    ("BiGru", "blackburn::nn::recurrent::bi_gru"),
    ("Rnn", "blackburn::nn::recurrent::rnn"),
    ("BiRnn", "blackburn::nn::recurrent::bi_rnn"),
];

/// In whose own code rotary positions are read right: Burn's has none.
const OWN_ATTENTION: &str = "MultiHeadAttention";

/// A module of such a type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WithConstants {
    pub(super) path: String,
    /// Its own and those of the modules around it, outermost first.
    pub(super) types: Vec<String>,
    /// The function in the place of its `forward`.
    pub(super) instead: &'static str,
}

impl WithConstants {
    /// Its own type.
    pub(super) fn name(&self) -> &str {
        self.types.last().map_or("", String::as_str)
    }
}

/// Modules that fail where their input is not f32, unless they are called through the functions that
/// [`WithConstants::instead`] names. Those in others are told with the outermost.
pub(super) fn modules_with_constants<M: Module>(module: &M) -> Vec<WithConstants> {
    let mut finder = Finder::default();
    module.visit(&mut finder);
    finder.found
}

#[derive(Default)]
struct Finder {
    path: ModulePath,
    types: Vec<String>,
    found: Vec<WithConstants>,
}

impl ModuleVisitor for Finder {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if let Some((_, container)) = container_type.split_once(':') {
            // A module says what it is with each of its fields.
            let path = self.path.name();
            let is_inside = |found: &WithConstants| {
                path == found.path || path.starts_with(&format!("{}.", found.path))
            };
            let known = KNOWN.iter().find(|(known, _)| *known == container);
            let is_read_right = self.types.last().is_some_and(|within| within == OWN_ATTENTION);
            if let Some((_, instead)) = known
                && !is_read_right
                && !self.found.iter().any(is_inside)
            {
                let types = self.types.iter().cloned().chain([container.to_string()]).collect();
                self.found.push(WithConstants { path, types, instead });
            }
            self.types.push(container.to_string());
        } else {
            self.types.push(String::new());
        }
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
        self.types.pop();
    }
}
