//! GELU with its gradient and the sums of its columns, `SwiGLU` and its gradients, and dropout.

use crate::{
    buffers::{download, dtype, upload, upload_behind},
    check::{Check, Stop, settle},
    draw::Draw,
    target::Target,
};
use blackburn_kernels::{
    buffer::Buffer,
    column_sum::{ColumnSumBlueprint, ColumnSumProblem},
    dropout::{self as of_dropout, DropoutProblem},
    gelu::{
        GeluSumBlueprint, gelu_backward, gelu_backward_sum, gelu_backward_sum_with, gelu_forward,
    },
    swiglu::{swiglu_backward, swiglu_forward},
};
use blackburn_reference::{attention::dropout::Dropout, gelu, storage::Storage, swiglu};

pub(super) fn gelu(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let client = &on.client;
    let storage = draw.plan("type", &on.storages);
    let way = draw.plan("sums", &["planned", "fused", "separate"]);
    let step = if draw.planned("aligned", 2) { 8 } else { 1 };
    let most = if draw.holds("large", 200) { 1 << 18 } else { 1 << 14 };
    let columns = draw.multiple("columns", 1..=3000, step);
    let rows = draw.size("rows", 1..=(most / columns).max(1));
    let rows = if draw.holds("empty", 100) { 0 } else { rows };
    let deviation = draw.one_of("deviation", &[2.0, 2.0, 0.01, 30.0]);
    let mut x = draw.normal(rows * columns, deviation, storage);
    draw.spoil("x", &mut x);
    let mut dy = draw.normal(rows * columns, 1.0, storage);
    draw.spoil("dy", &mut dy);

    let front = draw.one_of("front", on.offsets());
    let x_buffer = upload_behind(client, front, &x, storage);
    let dy_buffer = upload(client, &dy, storage);
    if draw.holds("contradiction", 60) {
        let longer = Buffer { elements: dy.len() + 1, ..dy_buffer };
        return check.refuses("a longer dy", gelu_backward(client, &x_buffer, &longer));
    }
    let erf = on.erf_error(storage);
    let y = download(client, gelu_forward(client, &x_buffer)?, storage)?;
    let expected: Vec<f64> = x.iter().map(|x| gelu::gelu(*x)).collect();
    let bounds: Vec<f64> = x.iter().map(|x| gelu::forward_bound(*x, storage, erf)).collect();
    check.compare("y", y, &expected, &bounds)?;

    let pairs = || x.iter().zip(&dy);
    let expected: Vec<f64> = pairs().map(|(x, dy)| dy * gelu::gelu_derivative(*x)).collect();
    let bounds: Vec<f64> =
        pairs().map(|(x, dy)| gelu::backward_bound(*x, *dy, storage, erf)).collect();
    // A slope that is zero to a device makes NaN of an infinite dy, and one of another sign another infinity.
    let may_vanish =
        |x: f64| gelu::gelu_derivative(x).abs() <= gelu::backward_bound(x, 1.0, Storage::F32, erf);
    let read_dx = |dx: Buffer| -> Result<Vec<f64>, Stop> {
        let mut dx = download(client, dx, storage)?;
        settle(&mut dx, &expected, |i| may_vanish(x[i]));
        Ok(dx)
    };
    let dx = read_dx(gelu_backward(client, &x_buffer, &dy_buffer)?)?;
    check.compare("dx", dx, &expected, &bounds)?;

    let problem = ColumnSumProblem::new(&[rows, columns], &[columns, 1], 0..1, dtype(storage))?;
    let fused = GeluSumBlueprint::Fused(ColumnSumBlueprint::plan(&problem, client));
    let planned = GeluSumBlueprint::plan(&problem, client);
    let (made, plan) = match way {
        "planned" => (gelu_backward_sum(client, columns, &x_buffer, &dy_buffer)?, planned),
        way => {
            let plan = if way == "fused" { fused } else { GeluSumBlueprint::Separate };
            (gelu_backward_sum_with(client, columns, plan, &x_buffer, &dy_buffer)?, plan)
        }
    };
    check.compare("dx beside sums", read_dx(made.dx)?, &expected, &bounds)?;
    // What the sums add up is rounded where another kernel wrote it.
    let terms = if plan == GeluSumBlueprint::Separate { storage } else { Storage::F32 };
    let column = |column: usize| {
        let of = move |values: &'_ [f64]| -> Vec<f64> {
            values.iter().copied().skip(column).step_by(columns).collect()
        };
        of(&x).into_iter().zip(of(&dy))
    };
    let sum = |c| column(c).map(|(x, dy)| dy * gelu::gelu_derivative(x)).sum();
    let expected: Vec<f64> = (0..columns).map(sum).collect();
    let bound = |c| gelu::backward_sum_bound(column(c), terms, storage, erf);
    let bounds: Vec<f64> = (0..columns).map(bound).collect();
    let mut db = download(client, made.db, storage)?;
    settle(&mut db, &expected, |c| column(c).any(|(x, dy)| dy.is_infinite() && may_vanish(x)));
    check.compare("db", db, &expected, &bounds)
}

pub(super) fn swiglu(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let client = &on.client;
    let storage = draw.plan("type", &on.storages);
    let step = if draw.planned("aligned", 2) { 8 } else { 1 };
    let elements = draw.multiple("elements", 1..=20_000, step);
    let gate = draw.normal(elements, 3.0, storage);
    let up = draw.normal(elements, 2.0, storage);
    let dy = draw.normal(elements, 1.0, storage);
    let [gates, ups, dys] = [&gate, &up, &dy].map(|values| upload(client, values, storage));
    if draw.holds("contradiction", 60) {
        let longer = Buffer { elements: elements + 1, ..ups };
        return check.refuses("a longer operand", swiglu_forward(client, &gates, &longer));
    }
    let each = |of: &dyn Fn(f64, f64, f64) -> (f64, f64)| -> (Vec<f64>, Vec<f64>) {
        gate.iter().zip(&up).zip(&dy).map(|((gate, up), dy)| of(*gate, *up, *dy)).unzip()
    };
    let y = download(client, swiglu_forward(client, &gates, &ups)?, storage)?;
    let (expected, bounds) =
        each(&|gate, up, _| (swiglu::swiglu(gate, up), swiglu::forward_bound(gate, up, storage)));
    check.compare("y", y, &expected, &bounds)?;
    let gradients = swiglu_backward(client, &gates, &ups, &dys)?;
    for (at, what, gradient) in [(0, "dgate", gradients.dgate), (1, "dup", gradients.dup)] {
        let (expected, bounds) = each(&|gate, up, dy| {
            let bound = swiglu::backward_bounds(gate, up, dy, storage)[at];
            (swiglu::swiglu_gradients(gate, up, dy)[at], bound)
        });
        check.compare(what, download(client, gradient, storage)?, &expected, &bounds)?;
    }
    Ok(())
}

pub(super) fn dropout(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let client = &on.client;
    let storage = draw.plan("type", &on.storages);
    let adds = draw.planned("residual", 2);
    let step = if draw.planned("aligned", 2) { 8 } else { 1 };
    let elements = draw.multiple("elements", 1..=20_000, step);
    let rate = draw.one_of("rate", &[0.1, 0.5, 0.0, 0.999]);
    let seed = draw.seed();
    let x = draw.normal(elements, 1.0, storage);
    let residual = adds.then(|| draw.normal(elements, 1.0, storage));
    let problem = DropoutProblem { elements, dtype: dtype(storage), rate, seed };
    let added = residual.as_ref().map(|residual| upload(client, residual, storage));
    let x_buffer = upload(client, &x, storage);
    if draw.holds("contradiction", 60) {
        let longer = DropoutProblem { elements: elements + 1, ..problem };
        let result = of_dropout::dropout(client, &longer, &x_buffer, added.as_ref(), None);
        return check.refuses("a short x", result);
    }
    let y = of_dropout::dropout(client, &problem, &x_buffer, added.as_ref(), None)?;

    let drops = Dropout { rate, seed };
    let key = [seed as u32, (seed >> 32) as u32];
    let u = Storage::F32.unit_roundoff();
    let element = |i: usize| {
        let kept = if drops.keeps_element(i, key) { x[i] * drops.rescale() } else { 0.0 };
        let y = kept + residual.as_ref().map_or(0.0, |residual| residual[i]);
        // The scale is rounded, and so are the product, the sum and what is stored.
        let error = 2.0 * u * kept.abs() + u * (y.abs() + 2.0 * u * kept.abs());
        let rounding = storage.unit_roundoff() * (y.abs() + error) + storage.underflow();
        (y, error + rounding)
    };
    let (expected, bounds): (Vec<f64>, Vec<f64>) = (0..elements).map(element).unzip();
    check.compare("y", download(client, y, storage)?, &expected, &bounds)
}
