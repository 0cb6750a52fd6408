//! Burn's modules that make tensors of their own in f32, which no policy reaches.

use crate::path::ModulePath;
use blackburn_backend::drop_in;
use burn::module::{Module, ModuleVisitor};

/// Types, and what runs them in any type. Tables, noise and initial states are tensors of the device's default type,
/// made in `forward` or held in fields that no mapper sees. `blackburn::nn` has modules of the same names without the
/// fault, which announce themselves as [`drop_in::CONTAINER`] says.
const KNOWN: [(&str, &str); 9] = [
    ("RotaryEncoding", "blackburn::nn::positions::rotary"),
    ("PositionalEncoding", "blackburn::nn::positions::sinusoidal"),
    ("GaussianNoise", "blackburn::nn::noise::gaussian_noise"),
    ("Lstm", "blackburn::nn::recurrent::lstm"),
    ("BiLstm", "blackburn::nn::recurrent::bi_lstm"),
    ("Gru", "blackburn::nn::recurrent::gru"),
    ("BiGru", "blackburn::nn::recurrent::bi_gru"),
    ("Rnn", "blackburn::nn::recurrent::rnn"),
    ("BiRnn", "blackburn::nn::recurrent::bi_rnn"),
];

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
    /// Paths of modules that run Burn's in any type.
    drop_ins: Vec<String>,
    found: Vec<WithConstants>,
}

impl Finder {
    /// Notes a module at this place, unless another takes care of it or was told with it.
    fn note(&mut self, container: &str) {
        let Some((_, instead)) = KNOWN.iter().find(|(known, _)| *known == container) else {
            return;
        };
        // A module says what it is with each of its fields.
        let path = self.path.name();
        let told = self.found.iter().map(|found| &found.path);
        if self.drop_ins.iter().chain(told).any(|outer| is_within(&path, outer)) {
            return;
        }
        let types = self.types.iter().cloned().chain([container.to_string()]).collect();
        self.found.push(WithConstants { path, types, instead });
    }
}

/// Whether `path` is that of a module or of what is in it.
fn is_within(path: &str, outer: &str) -> bool {
    let rest = path.strip_prefix(outer);
    rest.is_some_and(|rest| outer.is_empty() || rest.is_empty() || rest.starts_with('.'))
}

impl ModuleVisitor for Finder {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if container_type == drop_in::CONTAINER {
            self.drop_ins.push(self.path.name());
        }
        let container = container_type.split_once(':').map_or("", |(_, container)| container);
        self.note(container);
        self.types.push(container.to_string());
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
        self.types.pop();
    }
}
