//! What a trainer uses, and what it cannot.

use crate::{graph::GraphStatus, path::ModulePath, precision::PrecisionReport};
use blackburn_backend::{drop_in, fp8_linear::Tally};
use burn::module::{Module, ModuleVisitor};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

/// Burn's modules that automatic differentiation keeps from most of what Blackburn's kernels could do, the
/// functions that run them with all of it, and what those gain.
const DROP_INS: [(&str, &str, &str); 9] = [
    ("TransformerEncoder", "flash::transformer_encoder", "flash attention and fused norms"),
    (
        "MultiHeadAttention",
        "flash::multi_head_attention",
        "flash attention: no matrix of weights is kept",
    ),
    ("LayerNorm", "norm::layer_norm", "one kernel forward and one backward"),
    ("RmsNorm", "norm::rms_norm", "one kernel forward and one backward"),
    ("GroupNorm", "norm::group_norm", "nothing but the input is kept"),
    ("InstanceNorm", "norm::instance_norm", "nothing but the input is kept"),
    ("SwiGlu", "swiglu::forward", "one kernel forward and one backward"),
    ("RotaryEncoding", "positions::rotary", "one kernel forward and one backward"),
    ("Lstm", "recurrent::lstm", "runs in 16 bits"),
];

/// How a model trains: [`Trainer::report`](super::Trainer::report) makes it, and a trainer logs it once, when it
/// knows whether passes are recorded.
#[derive(Clone, Debug, Serialize)]
pub struct TrainerReport {
    /// The device.
    pub device: String,
    /// What each layer is stored and computed in.
    pub precision: PrecisionReport,
    /// The optimizer.
    pub optimizer: String,
    /// Whether passes are recorded: `None` while that is not known, and why not where they are not.
    pub recorded: Option<Result<(), String>>,
    /// Operations of one step that ran on Blackburn's kernels, by provider, as it was before passes were
    /// recorded. Empty where there is no GPU.
    pub served: BTreeMap<&'static str, u64>,
    /// Matrix products of one step on Blackburn's kernels, and how much of them ran in 8 bits, as it was before passes
    /// were recorded. Nothing where there is no GPU.
    pub products: Tally,
    /// Why kernels left operations to Burn.
    pub declined: Vec<String>,
    /// Modules of the model for which Blackburn has a function that trains faster.
    pub drop_ins: Vec<DropIn>,
}

/// A type of Burn's modules, and the function that runs it on more of Blackburn's kernels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DropIn {
    /// The module's type.
    pub module: &'static str,
    /// How many of them the model has.
    pub count: usize,
    /// The function, a path below `blackburn::nn`.
    pub function: &'static str,
    /// What it gains.
    pub gain: &'static str,
}

/// The modules of `model` that a function could run faster.
pub(super) fn drop_ins<M: Module>(model: &M) -> Vec<DropIn> {
    let mut census = Census::default();
    model.visit(&mut census);
    let found = |&(module, function, gain): &(&'static str, &'static str, &'static str)| {
        let count = census.paths.get(module)?.len();
        Some(DropIn { module, count, function, gain })
    };
    DROP_INS.iter().filter_map(found).collect()
}

/// Layers that are of one type and computed alike.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Kind<'a> {
    layer: &'a str,
    stored: &'a str,
    computed: &'a str,
    note: Option<&'a str>,
}

impl TrainerReport {
    /// How many layers there are of each kind, and the numbers they hold.
    fn kinds(&self) -> BTreeMap<Kind<'_>, (usize, usize)> {
        let mut kinds = BTreeMap::new();
        for row in &self.precision.layers {
            let kind = Kind {
                layer: &row.layer,
                stored: &row.stored,
                computed: &row.computed,
                note: row.note.as_deref(),
            };
            let (count, parameters) = kinds.entry(kind).or_default();
            *count += 1;
            *parameters += row.parameters;
        }
        kinds
    }

    pub(super) fn recorded(status: GraphStatus) -> Option<Result<(), String>> {
        match status {
            GraphStatus::WarmUp => None,
            GraphStatus::Recorded => Some(Ok(())),
            GraphStatus::Unrecorded { reason } => Some(Err(reason)),
        }
    }
}

impl fmt::Display for TrainerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "how the model trains on {}, in {}:", self.device, self.precision.precision)?;
        for (Kind { layer, stored, computed, note }, (count, parameters)) in self.kinds() {
            let note = note.map(|note| format!(", {note}")).unwrap_or_default();
            writeln!(
                f,
                "layers: {count} x {layer} ({parameters} parameters), stored in {stored}, computed in \
                 {computed}{note}"
            )?;
        }
        writeln!(f, "optimizer: {}", self.optimizer)?;
        match &self.recorded {
            None => writeln!(f, "passes: not known yet whether they can be recorded")?,
            Some(Ok(())) => writeln!(f, "passes: recorded, and replayed by one command")?,
            Some(Err(reason)) => writeln!(f, "passes: one by one, since {reason}")?,
        }
        if !self.served.is_empty() {
            let served: Vec<_> =
                self.served.iter().map(|(name, count)| format!("{name} {count}")).collect();
            writeln!(f, "operations of a step on Blackburn's kernels: {}", served.join(", "))?;
        }
        if self.precision.precision.recipe().is_some() && self.products != Tally::default() {
            writeln!(f, "products of a step: {}", self.products)?;
        }
        for reason in &self.declined {
            writeln!(f, "left to Burn: {reason}")?;
        }
        for DropIn { module, count, function, gain } in &self.drop_ins {
            writeln!(
                f,
                "could be faster: {count} x {module}, of blackburn::nn or called through \
                 blackburn::nn::{function} ({gain}), unless the model does so already"
            )?;
        }
        Ok(())
    }
}

/// Where modules of each type are.
#[derive(Default)]
struct Census {
    path: ModulePath,
    /// Paths of modules that are Blackburn's already.
    drop_ins: BTreeSet<String>,
    paths: BTreeMap<String, BTreeSet<String>>,
}

impl ModuleVisitor for Census {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        let path = self.path.name();
        if container_type == drop_in::CONTAINER {
            self.drop_ins.insert(path);
        } else if let Some((_, container)) = container_type.split_once(':')
            && !self.drop_ins.contains(&path)
        {
            // A module says what it is with each of its fields.
            self.paths.entry(container.into()).or_default().insert(path);
        }
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }
}
