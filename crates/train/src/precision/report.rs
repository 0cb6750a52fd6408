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
    /// Numbers in the weights of linear layers.
    pub linear_weights: usize,
    /// Those among them that are multiplied in 8 bits.
    pub fp8_weights: usize,
}

impl PrecisionReport {
    pub(super) fn new(
        precision: Precision,
        masters: Masters,
        parameters: Vec<FloatParameter>,
        computation: impl Fn(&FloatParameter) -> Option<Computation>,
    ) -> Self {
        let dtype: DType = precision.dtype().into();
        let mut report = Self {
            precision,
            masters,
            layers: Vec::new(),
            stored_bytes: 0,
            cast_bytes: 0,
            linear_weights: 0,
            fp8_weights: 0,
        };
        // The layer whose weight was so last: its bias follows.
        let mut multiplied_in_8_bits = None;
        for parameter in &parameters {
            let computation = computation(parameter);
            let computed = if computation.is_none() { DType::F32 } else { dtype };
            let is_in_place = masters == Masters::None || is_running_statistic(parameter);
            let stored = if is_in_place { computed } else { DType::F32 };
            report.stored_bytes += parameter.elements * stored.size();
            if stored != computed {
                report.cast_bytes += parameter.elements * computed.size();
            }
            let is_in_8_bits = matches!(computation, Some(Computation::Fp8(_)));
            if parameter.is_weight_of_linear() {
                report.linear_weights += parameter.elements;
                report.fp8_weights += if is_in_8_bits { parameter.elements } else { 0 };
            }
            if is_in_8_bits {
                multiplied_in_8_bits = Some(parameter.layer());
            }
            let is_left_out = precision.recipe().is_some()
                && parameter.layer_type() == "Linear"
                && multiplied_in_8_bits != Some(parameter.layer());
            let computed = if is_in_8_bits { precision.to_string() } else { name(computed) };
            let note = match is_left_out {
                true => Some(format!("products in {computed}: left out by the policy")),
                false => note(parameter, &computed),
            };
            report.add(parameter, name(stored), computed, note);
        }
        report
    }

    /// The share of linear layers' arithmetic that the policy has in 8 bits, from 0 to 1; `None` without linear
    /// layers. Each of their weights takes part in as many products as any other, if each layer sees as many rows.
    ///
    /// What ran so is counted by `blackburn::fp8::Tally`.
    pub fn fp8_share(&self) -> Option<f64> {
        (self.linear_weights > 0).then(|| self.fp8_weights as f64 / self.linear_weights as f64)
    }

    fn add(
        &mut self,
        parameter: &FloatParameter,
        stored: String,
        computed: String,
        note: Option<String>,
    ) {
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
        )?;
        match self.fp8_share().filter(|_| self.precision.recipe().is_some()) {
            Some(share) => {
                write!(f, "; {:.1} % of linear layers' arithmetic in 8 bits", 100.0 * share)
            }
            None => Ok(()),
        }
    }
}

fn shown(path: &str) -> &str {
    if path.is_empty() { "." } else { path }
}
