//! Normalization of groups of channels, and its gradients.

use crate::{
    buffers::{download, dtype, upload},
    check::{Check, Stop},
    draw::Draw,
    memory::Layout,
    target::Target,
};
use blackburn_kernels::group_norm::{
    Affine, Form, GroupNormBlueprint, GroupNormGradients, GroupNormInputs, GroupNormOutput,
    GroupNormPass, GroupNormProblem, GroupNormSaved, Order, group_norm_backward,
    group_norm_forward,
};
use blackburn_reference::{
    group_norm::{Arithmetic, GroupNorm, Sums},
    storage::Storage,
};

const F32: Storage = Storage::F32;

pub(super) fn case(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let client = &on.client;
    let storage = draw.plan("type", &on.storages);
    let parameter = if draw.planned("wide", 3) { F32 } else { storage };
    let affine = !draw.planned("plain", 4);
    let order = draw.plan("order", &[Order::ChannelsLast, Order::PixelsLast]);
    let step = if draw.planned("aligned", 2) { 8 } else { 1 };
    let of_group = draw.multiple("of-group", 1..=100, step);
    let groups = draw.size("groups", 1..=(512 / of_group).max(1));
    let channels = groups * of_group;
    let most = if draw.holds("large", 200) { 1 << 19 } else { 1 << 14 };
    let samples = draw.size("samples", 1..=(most / channels).clamp(1, 8));
    let pixels = draw.size("pixels", 1..=(most / channels / samples).max(1));
    let mut apart = [draw.one_of("apart", &[0, 0, 8, 3]), draw.one_of("dy-apart", &[0, 0, 8, 3])];
    if order == Order::PixelsLast {
        apart = [0; 2];
    }
    let [x_stride, dy_stride] = apart.map(|apart| channels + apart);
    let shape = [samples, channels, pixels];
    let contiguous = GroupNormProblem::contiguous(shape, groups, order, dtype(storage));
    let problem =
        GroupNormProblem { x_stride, dy_stride, parameter: dtype(parameter), ..contiguous };

    let offset = draw.one_of("offset", &[0.0, 0.0, 30.0]);
    let elements = samples * channels * pixels;
    let mut x = draw.normal(elements, 1.0, storage);
    x.iter_mut().for_each(|x| *x = storage.round(*x + offset));
    let gamma = draw.normal(channels, 1.0, parameter);
    let beta = draw.normal(channels, 1.0, parameter);
    let dy = draw.normal(elements, 1.0, storage);
    let turned = |values: &[f64]| Turn { order, samples, channels, pixels }.there(values);
    let back = |values: &[f64]| Turn { order, samples, channels, pixels }.back(values);
    let send = |values: &[f64], stride: usize| {
        // Something behind the last pixel, too.
        let layout = Layout::rows(samples * pixels, channels, stride);
        upload(client, &layout.scatter(&turned(values), stride - channels), storage)
    };
    let parameters = affine.then(|| Affine {
        gamma: upload(client, &gamma, parameter),
        beta: upload(client, &beta, parameter),
    });
    let inputs = GroupNormInputs { x: send(&x, x_stride), affine: parameters.clone() };
    let GroupNormOutput { y, mean, rstd } = group_norm_forward(client, &problem, &inputs)?;
    let [ones, zeros] = [1.0, 0.0].map(|value| vec![value; channels]);
    let op = GroupNorm {
        gamma: if affine { &gamma } else { &ones },
        beta: if affine { &beta } else { &zeros },
        groups,
        pixels,
        epsilon: problem.epsilon,
    };
    let plan = GroupNormBlueprint::plan(&problem, GroupNormPass::Statistics, client);
    let sums = Sums { additions: plan.unit_rows(), merges: plan.moment_merges(&problem) };
    let exact = op.statistics(&x);
    let errors = op.statistics_bounds(&x, sums);
    check.compare("mean", download(client, mean.clone(), F32)?, &exact.mean, &errors.mean)?;
    let rstd_bounds = op.inverse_deviation_bounds(&exact, &errors);
    let of_rstd = download(client, rstd.clone(), F32)?;
    check.compare("rstd", of_rstd, &op.inverse_deviations(&exact), &rstd_bounds)?;
    let y_bounds = op.forward_bounds(&x, &exact, &errors, storage);
    let y = back(&download(client, y, storage)?);
    check.compare("y", y, &op.forward(&x, &exact), &y_bounds)?;

    let saved = GroupNormSaved {
        x: inputs.x,
        form: Form::Input,
        mean: Some(mean),
        rstd,
        gamma: parameters.map(|both| both.gamma),
    };
    let made = group_norm_backward(client, &problem, &saved, &send(&dy, dy_stride), true)?;
    let GroupNormGradients { dx, parameters } = made;
    let plan = GroupNormBlueprint::plan(&problem, GroupNormPass::Sums, client);
    let how = Arithmetic {
        samples: storage,
        parameters: parameter,
        sums: Sums { additions: plan.unit_rows(), merges: plan.sum_merges(&problem) },
        group_merges: GroupNormBlueprint::group_merges(&problem),
    };
    let expected = op.backward(&x, &exact, &dy);
    let bounds = op.backward_bounds(&x, &exact, &errors, &dy, how);
    check.compare("dx", back(&download(client, dx, storage)?), &expected.dx, &bounds.dx)?;
    let [dgamma, dbeta] = parameters.ok_or("no gradients of the parameters")?;
    for (what, gradient, expected, bounds) in [
        ("dgamma", dgamma, &expected.dgamma, &bounds.dgamma),
        ("dbeta", dbeta, &expected.dbeta, &bounds.dbeta),
    ] {
        check.compare(what, download(client, gradient, parameter)?, expected, bounds)?;
    }
    Ok(())
}

/// Between `[samples, channels, pixels]` and the order in memory.
struct Turn {
    order: Order,
    samples: usize,
    channels: usize,
    pixels: usize,
}

impl Turn {
    fn there(&self, values: &[f64]) -> Vec<f64> {
        match self.order {
            Order::PixelsLast => values.to_vec(),
            Order::ChannelsLast => turn(values, self.samples, self.channels, self.pixels),
        }
    }

    fn back(&self, values: &[f64]) -> Vec<f64> {
        match self.order {
            Order::PixelsLast => values.to_vec(),
            Order::ChannelsLast => turn(values, self.samples, self.pixels, self.channels),
        }
    }
}

/// `[samples, rows, columns]` as `[samples, columns, rows]`.
fn turn(values: &[f64], samples: usize, rows: usize, columns: usize) -> Vec<f64> {
    let at = |sample, column, row| values[(sample * rows + row) * columns + column];
    let of_sample = |sample| {
        (0..columns).flat_map(move |column| (0..rows).map(move |row| (sample, column, row)))
    };
    let all = (0..samples).flat_map(of_sample);
    all.map(|(sample, column, row)| at(sample, column, row)).collect()
}
