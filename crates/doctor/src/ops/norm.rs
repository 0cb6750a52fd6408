//! Layer and RMS normalization.

use crate::{
    buffers::{download, dtype, upload, upload_behind},
    check::{Check, Stop},
    draw::Draw,
    target::Target,
};
use blackburn_kernels::{
    Pass,
    buffer::Buffer,
    layer_norm::{
        LayerNormBlueprint, LayerNormInputs, LayerNormProblem, LayerNormSaved, LayerNormWanted,
        Norm, layer_norm_backward, layer_norm_forward,
    },
};
use blackburn_reference::{
    layer_norm::{Arithmetic, LayerNorm, Norm as ReferenceNorm},
    storage::Storage,
};

/// What is drawn of a normalization.
#[derive(Clone, Copy)]
struct Case {
    rows: usize,
    width: usize,
    storage: Storage,
    parameter: Storage,
    norm: Norm,
    bias: bool,
    residual: bool,
    epsilon: f64,
}

impl Case {
    fn problem(&self) -> LayerNormProblem {
        let Self { norm, rows, width, storage, parameter, bias, residual, .. } = *self;
        let (dtype, parameter) = (dtype(storage), dtype(parameter));
        LayerNormProblem {
            norm,
            rows,
            width,
            dtype,
            parameter,
            bias,
            residual,
            parts: false,
            scaled: true,
            residual_bias: false,
            watched: false,
        }
    }

    fn plan(&self, on: &Target, pass: Pass) -> Result<LayerNormBlueprint, Stop> {
        Ok(LayerNormBlueprint::plan(&self.problem(), pass, &on.client)?)
    }

    fn arithmetic(&self, on: &Target, pass: Pass) -> Result<Arithmetic, Stop> {
        let additions = self.plan(on, pass)?.additions();
        Ok(Arithmetic { rows: self.storage, parameters: self.parameter, additions })
    }
}

pub(super) fn case(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let storage = draw.plan("type", &on.storages);
    let parameter = if draw.planned("wide", 3) { Storage::F32 } else { storage };
    let middle = Case {
        rows: 1,
        width: draw.planned_size("around", 1..=6000),
        storage,
        parameter,
        norm: draw.plan("norm", &[Norm::Layer, Norm::Rms]),
        bias: draw.planned("bias", 2),
        residual: draw.planned("residual", 2),
        epsilon: draw.plan("epsilon", &[1e-5, 1e-6, 1e-3]),
    };
    let plans = |width| {
        let case = Case { width, ..middle };
        [Pass::Forward, Pass::Backward].map(|pass| case.plan(on, pass))
    };
    let width = draw.size_alike("width", middle.width, |width| plans(width) == plans(middle.width));
    let most = if draw.holds("large", 200) { 1 << 19 } else { 1 << 15 };
    let rows = draw.size("rows", 1..=(most / width).max(1));
    let rows = if draw.holds("empty", 100) { 0 } else { rows };
    let case = Case { rows, width, ..middle };
    run(on, draw, check, case)
}

fn run(on: &Target, draw: &mut Draw, check: &mut Check, case: Case) -> Result<(), Stop> {
    let Case { rows, width, storage, parameter, norm, bias, residual, epsilon } = case;
    let client = &on.client;
    // Beside numbers around 0, some far from it, and some small or large.
    let offset = draw.one_of("offset", &[0.0, 0.0, 0.0, 1.0, -30.0]);
    let deviation = draw.one_of("deviation", &[1.0, 1.0, 0.01, 20.0]);
    let mut x = draw.normal(rows * width, deviation, storage);
    x.iter_mut().for_each(|x| *x = storage.round(*x + offset));
    draw.spoil("x", &mut x);
    let added = residual.then(|| draw.normal(rows * width, 1.0, storage));
    let gamma = draw.normal(width, 1.0, parameter);
    let beta = bias.then(|| draw.normal(width, 1.0, parameter));
    let mut dy = draw.normal(rows * width, 1.0, storage);
    draw.spoil("dy", &mut dy);
    let dsum = residual.then(|| draw.normal(rows * width, 1.0, storage));

    let front = draw.one_of("front", on.offsets());
    let inputs = LayerNormInputs {
        x: upload_behind(client, front, &x, storage),
        residual: added.as_ref().map(|added| upload(client, added, storage)),
        residual_bias: None,
        dropout: None,
        gamma: upload(client, &gamma, parameter),
        beta: beta.as_ref().map(|beta| upload(client, beta, parameter)),
        watched: false,
    };
    if draw.holds("contradiction", 60) {
        return contradictions(on, draw, check, (norm, &inputs));
    }
    let output = layer_norm_forward(client, norm, &inputs, epsilon)?;
    let normalized = output.sum.unwrap_or(inputs.x);
    let saved = LayerNormSaved {
        x: normalized.clone(),
        gamma: inputs.gamma,
        mean: output.mean,
        rstd: output.rstd,
        dropout: None,
    };
    let dy_buffer = upload(client, &dy, storage);
    let dsum_buffer = dsum.as_ref().map(|dsum| upload(client, dsum, storage));
    let wanted = LayerNormWanted { beta: bias, ..LayerNormWanted::default() };
    let gradients =
        layer_norm_backward(client, norm, &saved, &dy_buffer, dsum_buffer.as_ref(), wanted)?;

    let seen = download(client, normalized, storage)?;
    if let Some(added) = &added {
        let sum: Vec<f64> = x.iter().zip(added).map(|(x, added)| x + added).collect();
        // Rounded in f32, and to storage.
        let u = Storage::F32.unit_roundoff() + storage.unit_roundoff();
        let bounds: Vec<f64> = sum.iter().map(|sum| sum.abs() * u + storage.underflow()).collect();
        check.compare("sum", seen.clone(), &sum, &bounds)?;
    }
    let op = LayerNorm {
        norm: match norm {
            Norm::Layer => ReferenceNorm::Layer,
            Norm::Rms => ReferenceNorm::Rms,
        },
        gamma: &gamma,
        beta: beta.as_deref(),
        epsilon,
    };
    // From what the device normalized: the rounding of the sum is counted above.
    let y = download(client, output.y, storage)?;
    let how = case.arithmetic(on, Pass::Forward)?;
    check.compare("y", y, &op.forward(&seen), &op.forward_bounds(&seen, how))?;
    let how = case.arithmetic(on, Pass::Backward)?;
    let expected = op.backward(&seen, &dy, dsum.as_deref());
    let bounds = op.backward_bounds(&seen, &dy, dsum.as_deref(), how);
    let dx = download(client, gradients.dx, storage)?;
    check.compare("dx", dx, &expected.dx, &bounds.dx)?;
    let dgamma = download(client, gradients.dgamma, parameter)?;
    check.compare("dgamma", dgamma, &expected.dgamma, &bounds.dgamma)?;
    match gradients.dbeta {
        Some(dbeta) if bias => {
            let dbeta = download(client, dbeta, parameter)?;
            check.compare("dbeta", dbeta, &expected.dbeta, &bounds.dbeta)
        }
        None if !bias => Ok(()),
        other => Err(format!("dbeta is {other:?}").into()),
    }
}

/// Tensors that do not go together.
fn contradictions(
    on: &Target,
    draw: &mut Draw,
    check: &mut Check,
    (norm, inputs): (Norm, &LayerNormInputs),
) -> Result<(), Stop> {
    let client = &on.client;
    let longer = |buffer: &Buffer| Buffer { elements: buffer.elements + 1, ..buffer.clone() };
    let what = draw.one_of("what", &["x", "residual", "beta", "epsilon"]);
    let (inputs, epsilon) = match what {
        // One element more than rows have: of one column, that is a row.
        "x" if inputs.gamma.elements > 1 => {
            (LayerNormInputs { x: longer(&inputs.x), ..inputs.clone() }, 1e-5)
        }
        "residual" => {
            (LayerNormInputs { residual: Some(longer(&inputs.x)), ..inputs.clone() }, 1e-5)
        }
        "beta" => (LayerNormInputs { beta: Some(longer(&inputs.gamma)), ..inputs.clone() }, 1e-5),
        _ => (inputs.clone(), f64::NAN),
    };
    check.refuses(what, layer_norm_forward(client, norm, &inputs, epsilon))
}
