//! Batch normalization of channels, with what follows it, and its gradients.

use crate::{
    buffers::{download, dtype, upload},
    check::{Check, Stop},
    draw::Draw,
    memory::Layout,
    target::Target,
};
use blackburn_kernels::batch_norm::{
    BatchNormBlueprint, BatchNormGradients, BatchNormInputs, BatchNormPass, BatchNormProblem,
    BatchNormSaved, Statistics, batch_norm_apply, batch_norm_backward, batch_norm_statistics,
};
use blackburn_reference::{
    batch_norm::{Arithmetic, BatchNorm, Saved, Statistics as Moments, Sums},
    storage::Storage,
};

const EPSILON: f64 = 1e-5;
const F32: Storage = Storage::F32;

pub(super) fn case(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let client = &on.client;
    let storage = draw.plan("type", &on.storages);
    let parameter = if draw.planned("wide", 3) { F32 } else { storage };
    let adds = draw.planned("residual", 2);
    let relu = draw.planned("relu", 2);
    let step = if draw.planned("aligned", 2) { 8 } else { 1 };
    let channels = draw.multiple("channels", 1..=1000, step);
    let most = if draw.holds("large", 200) { 1 << 19 } else { 1 << 14 };
    let rows = draw.size("rows", 1..=(most / channels).max(1));
    let apart = [draw.one_of("apart", &[0, 0, 8, 3]), draw.one_of("dy-apart", &[0, 0, 8, 3])];
    let [row_stride, dy_stride] = apart.map(|apart| channels + apart);
    let contiguous =
        BatchNormProblem::contiguous(rows, channels, dtype(storage), dtype(parameter), EPSILON);
    let problem = BatchNormProblem { row_stride, dy_stride, ..contiguous };

    let offset = draw.one_of("offset", &[0.0, 0.0, 30.0]);
    let mut x = draw.normal(rows * channels, 1.0, storage);
    x.iter_mut().for_each(|x| *x = storage.round(*x + offset));
    let residual = adds.then(|| draw.normal(rows * channels, 1.0, storage));
    let gamma = draw.normal(channels, 1.0, parameter);
    let beta = draw.normal(channels, 1.0, parameter);
    let dy = draw.normal(rows * channels, 1.0, storage);
    let send = |values: &[f64], stride: usize| {
        // Something behind the last row, too.
        let layout = Layout::rows(rows, channels, stride);
        upload(client, &layout.scatter(values, stride - channels), storage)
    };
    let x_buffer = send(&x, row_stride);
    let statistics = batch_norm_statistics(client, &problem, &x_buffer)?;
    let Statistics { mean, variance } = statistics.clone();
    let of = |buffer| download(client, buffer, F32);
    let moments = Moments { mean: of(mean)?, variance: of(variance)? };
    let sums = |pass| {
        let plan = BatchNormBlueprint::plan(&problem, pass, client);
        Sums { additions: plan.unit_rows(), merges: plan.merges(client) }
    };
    let bounds = Moments::bounds(&x, channels, sums(BatchNormPass::Statistics));
    let exact = Moments::of(&x, channels);
    check.compare("mean", moments.mean.clone(), &exact.mean, &bounds.mean)?;
    check.compare("variance", moments.variance.clone(), &exact.variance, &bounds.variance)?;

    // What follows is judged by the statistics that it read.
    let inputs = BatchNormInputs {
        statistics: statistics.clone(),
        x: x_buffer.clone(),
        gamma: upload(client, &gamma, parameter),
        beta: upload(client, &beta, parameter),
        residual: residual.as_ref().map(|residual| upload(client, residual, storage)),
        relu,
    };
    let y = batch_norm_apply(client, &problem, &inputs)?;
    let op = BatchNorm { gamma: &gamma, beta: &beta, epsilon: EPSILON, relu };
    let none = Moments::exact(channels);
    let added = residual.as_deref();
    let y_bounds = op.forward_bounds(&x, &moments, &none, added, storage);
    let made = download(client, y.clone(), storage)?;
    check.compare("y", made.clone(), &op.forward(&x, &moments, added), &y_bounds)?;

    let saved =
        BatchNormSaved { x: x_buffer, statistics, gamma: inputs.gamma, y: relu.then_some(y) };
    let BatchNormGradients { dx, dgamma, dbeta, dresidual } =
        batch_norm_backward(client, &problem, &saved, &send(&dy, dy_stride), adds)?;
    let gate = relu.then_some(&made[..]);
    let saved = Saved { x: &x, statistics: &moments, y: gate };
    let expected = op.backward(saved, &dy);
    let how = Arithmetic {
        rows: storage,
        parameters: parameter,
        sums: sums(BatchNormPass::Sums { relu }),
    };
    let bounds = op.backward_bounds(saved, &none, &dy, how);
    for (what, gradient, kept, expected, bounds) in [
        ("dx", dx, storage, &expected.dx, &bounds.dx),
        ("dgamma", dgamma, parameter, &expected.dgamma, &bounds.dgamma),
        ("dbeta", dbeta, parameter, &expected.dbeta, &bounds.dbeta),
    ] {
        check.compare(what, download(client, gradient, kept)?, expected, bounds)?;
    }
    match dresidual {
        Some(dresidual) if relu => {
            let gated = BatchNorm::gated(&dy, gate);
            check.exactly("dresidual", download(client, dresidual, storage)?, &gated, storage)
        }
        _ => Ok(()),
    }
}
