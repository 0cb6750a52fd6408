//! What runs in which type.

use super::{
    Masters, Precision,
    cast::{Computation, is_running_statistic},
    paths::FloatParameter,
};
use burn::tensor::{DType, FloatDType};
use serde::Serialize;
use std::fmt;

/// One layer's parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerPrecision {
    /// Path of the layer; empty for parameters of the outermost module.
    pub path: String,
    /// Its type, `Linear`.
    pub layer: String,
    /// How many numbers it has.
    pub parameters: usize,
    /// What they are stored in.
    pub stored: String,
    /// What the layer reads.
    pub computed: String,
    /// What else there is to know.
    pub note: Option<String>,
}

/// What a model stores and computes in: print it, or take it apart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PrecisionReport {
    /// What was asked for.
    pub precision: Precision,
    /// What is stored of a parameter.
    pub masters: Masters,
    /// In the order of the model.
    pub layers: Vec<LayerPrecision>,
    /// Of all parameters as stored.
    pub stored_bytes: usize,
    /// Of the copies that a step makes of them, all at once alive at the end of a forward pass.
    pub cast_bytes: usize,
}

impl PrecisionReport {
    pub(super) fn new(
        precision: Precision,
        masters: Masters,
        parameters: Vec<FloatParameter>,
        computation: impl Fn(&FloatParameter) -> Option<Computation>,
    ) -> Self {
        let dtype: DType = precision.dtype().into();
        let mut report =
            Self { precision, masters, layers: Vec::new(), stored_bytes: 0, cast_bytes: 0 };
        for parameter in &parameters {
            let computation = computation(parameter);
            let computed = if computation.is_none() { DType::F32 } else { dtype };
            let is_in_place = masters == Masters::None || is_running_statistic(parameter);
            let stored = if is_in_place { computed } else { DType::F32 };
            report.stored_bytes += parameter.elements * stored.size();
            if stored != computed {
                report.cast_bytes += parameter.elements * computed.size();
            }
            let computed = match computation {
                Some(Computation::Fp8(_)) => precision.to_string(),
                _ => name(computed),
            };
            report.add(parameter, name(stored), computed);
        }
        report
    }

    fn add(&mut self, parameter: &FloatParameter, stored: String, computed: String) {
        let note = note(parameter, &computed);
        let row = LayerPrecision {
            path: parameter.layer().to_string(),
            layer: parameter.layer_type().to_string(),
            parameters: parameter.elements,
            stored,
            computed,
            note,
        };
        let same = |last: &&mut LayerPrecision| {
            let (mut a, mut b) = ((*last).clone(), row.clone());
            (a.parameters, b.parameters) = (0, 0);
            a == b
        };
        match self.layers.last_mut().filter(same) {
            Some(last) => last.parameters += row.parameters,
            None => self.layers.push(row),
        }
    }
}

fn name(dtype: DType) -> String {
    let float: FloatDType = dtype.into();
    format!("{float:?}").to_lowercase()
}

/// What happens inside of Burn 0.22's layers.
fn note(parameter: &FloatParameter, computed: &str) -> Option<String> {
    if is_running_statistic(parameter) {
        return (computed != "f32").then(|| "running statistics, stored as computed".to_string());
    }
    let layer = parameter.layer_type();
    let is_norm = layer.ends_with("Norm");
    let note = match computed {
        "f16" if is_norm && layer != "BatchNorm" => "computed in f32 inside",
        "bf16" if is_norm => "sums in f32, rounded in between",
        _ if computed.starts_with("fp8") => "products in 8 bits, results in bf16",
        _ => return None,
    };
    Some(note.to_string())
}

impl fmt::Display for PrecisionReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.layers.iter().fold([5, 4], |[path, layer], row| {
            [path.max(shown(&row.path).len()), layer.max(row.layer.len())]
        });
        let [path, layer] = widths;
        writeln!(
            f,
            "{:<path$}  {:<layer$}  {:>11}  {:<6}  {:<8}  note",
            "layer", "type", "parameters", "stored", "computed"
        )?;
        for row in &self.layers {
            let line = format!(
                "{:<path$}  {:<layer$}  {:>11}  {:<6}  {:<8}  {}",
                shown(&row.path),
                row.layer,
                row.parameters,
                row.stored,
                row.computed,
                row.note.as_deref().unwrap_or("")
            );
            writeln!(f, "{}", line.trim_end())?;
        }
        let mebibytes = |bytes: usize| bytes as f64 / (1 << 20) as f64;
        write!(
            f,
            "precision {}: {:.1} MiB of parameters stored, {:.1} MiB of copies in a step",
            self.precision,
            mebibytes(self.stored_bytes),
            mebibytes(self.cast_bytes)
        )
    }
}

fn shown(path: &str) -> &str {
    if path.is_empty() { "." } else { path }
}
