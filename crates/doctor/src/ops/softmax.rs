//! Softmax of whole rows and its gradient.

use crate::{
    buffers::{download, dtype},
    check::{Check, Stop},
    draw::Draw,
    memory::{Layout, place},
    target::Target,
};
use blackburn_kernels::{
    buffer::Buffer,
    softmax::{
        SoftmaxBlueprint, SoftmaxGradient, SoftmaxOutputs, SoftmaxProblem, plan_backward,
        plan_forward, softmax_rows, softmax_rows_backward,
    },
};
use blackburn_reference::{
    cross_entropy::Steps,
    softmax::{Bounded, SoftmaxRow},
    softmax_rows::softmax_gradient,
    storage::Storage,
};

const F32: Storage = Storage::F32;

/// What is drawn of a softmax.
struct Case {
    problem: SoftmaxProblem,
    outputs: SoftmaxOutputs,
    from: Storage,
    to: Storage,
    x: Vec<f64>,
    layout: Layout,
}

pub(super) fn case(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let from = draw.plan("type", &on.storages);
    let to = if draw.planned("cast", 5) { draw.plan("to", &on.storages) } else { from };
    let outputs = SoftmaxOutputs {
        logarithms: draw.planned("logarithms", 3),
        shifted: draw.planned("shifted", 4),
        exponentials: draw.planned("exponentials", 2),
    };
    let around = draw.planned_size("around", 1..=30_000);
    let step = if draw.planned("aligned", 2) { 8 } else { 1 };
    // What a plan depends on besides: whether rows end with vectors, and how wide these may be.
    let plan = |classes: usize| {
        let buffer = Buffer::empty(&on.client, classes.next_multiple_of(8), dtype(from));
        let (dtype, out) = (dtype(from), dtype(to));
        let problem = SoftmaxProblem { rows: 1, classes, row_stride: classes, dtype, out };
        let forward = plan_forward(&on.client, &problem, &buffer);
        (forward, plan_backward(&on.client, &problem, &buffer, &buffer, classes))
    };
    let classes = draw.size_alike("classes", around, |classes| plan(classes) == plan(around));
    let most = if draw.holds("large", 200) { 1 << 19 } else { 1 << 15 };
    let rows = draw.size("rows", 1..=(most / classes).max(1));
    let rows = if draw.holds("empty", 100) { 0 } else { rows };
    let row_stride = (classes + draw.one_of("apart", &[0, 0, 8])).next_multiple_of(step);
    let problem = SoftmaxProblem { rows, classes, row_stride, dtype: dtype(from), out: dtype(to) };

    let narrow = if from == F32 { to } else { from };
    let deviation = draw.one_of("deviation", &[3.0, 3.0, 0.1, 40.0]);
    let mut x = draw.normal(rows * classes, deviation, narrow);
    if draw.holds("left-out", 10) {
        for x in &mut x {
            if draw.place(5) == 0 {
                *x = f64::NEG_INFINITY;
            }
        }
    }
    // WGSL knows no NaN: a compiler may take an element of its own row for zero less than itself.
    if classes > 1 || on.is_cuda() {
        draw.spoil("x", &mut x);
    }
    let layout = Layout::rows(rows, classes, row_stride);
    run(on, draw, check, &Case { problem, outputs, from, to, x, layout })
}

fn run(on: &Target, draw: &mut Draw, check: &mut Check, case: &Case) -> Result<(), Stop> {
    let Case { problem, outputs, from, to, x, layout } = case;
    let client = &on.client;
    let SoftmaxProblem { rows, classes, row_stride, .. } = *problem;
    let buffer = place(on, draw, "x", (x, layout), *from);
    if draw.holds("contradiction", 60) {
        return contradictions(on, draw, check, problem, &buffer);
    }
    let steps = steps(&plan_forward(client, problem, &buffer), classes);
    let made = softmax_rows(client, problem, *outputs, &buffer)?;
    let all = |of: &dyn Fn(&SoftmaxRow<'_>) -> Vec<Bounded>| -> Vec<Bounded> {
        x.chunks(classes).flat_map(|x| of(&SoftmaxRow { x, steps })).collect()
    };
    let rows_of = |buffer: Buffer, storage: Storage| -> Result<Vec<f64>, Stop> {
        let memory = download(client, buffer, storage)?;
        Ok(if rows == 0 { Vec::new() } else { layout.gather(&memory) })
    };
    let y = rows_of(made.y.clone(), *to)?;
    if outputs.logarithms {
        check.within("log y", y, &all(&|row| row.log_softmax(*to)))?;
    } else {
        check.within("y", y, &all(&|row| row.softmax(*to)))?;
    }
    // What a row without probabilities is made of is unspecified.
    let sound: Vec<bool> = x.chunks(classes).map(has_probabilities).collect();
    let kept = |values: Vec<f64>| -> Vec<f64> {
        let rows = values.chunks(classes).zip(&sound).filter(|(_, sound)| **sound);
        rows.flat_map(|(row, _)| row.to_vec()).collect()
    };
    let all = |of: &dyn Fn(&SoftmaxRow<'_>) -> Vec<Bounded>| -> Vec<Bounded> {
        let rows = x.chunks(classes).zip(&sound).filter(|(_, sound)| **sound);
        rows.flat_map(|(x, _)| of(&SoftmaxRow { x, steps })).collect()
    };
    if let Some(shifted) = made.shifted {
        let shifted = kept(rows_of(shifted, *to)?);
        check.within("shifted", shifted, &all(&|row| row.shifted(*to)))?;
    }
    if let Some(exponentials) = &made.exponentials {
        let exponentials = kept(rows_of(exponentials.clone(), *to)?);
        check.within("exponentials", exponentials, &all(&|row| row.exponentials(*to)))?;
    }
    let sums = download(client, made.sum.clone(), F32)?;
    let of_sound = sums.iter().zip(&sound).filter(|(_, sound)| **sound).map(|(sum, _)| *sum);
    check.within("sum", of_sound.collect(), &all(&|row| vec![row.sum(F32)]))?;

    // Backward, from exponentials with their sums or from softmax.
    if from != to || outputs.logarithms {
        return Ok(());
    }
    let (y, sum) = match made.exponentials {
        Some(exponentials) => (exponentials, Some(&made.sum)),
        None => (made.y, None),
    };
    let dy_stride = draw.one_of("dy-stride", &[row_stride, classes]);
    let mut dy = draw.normal(rows * classes, 1.0, *from);
    draw.spoil("dy", &mut dy);
    let dy_layout = Layout::rows(rows, classes, dy_stride);
    let dy_buffer = place(on, draw, "dy", (&dy, &dy_layout), *from);
    let additions = plan_backward(client, problem, &y, &dy_buffer, dy_stride).additions(classes);
    let dx = softmax_rows_backward(
        client,
        problem,
        &SoftmaxGradient { sum, ..SoftmaxGradient::of(&y, &dy_buffer, dy_stride) },
    )?;
    let y = rows_of(y, *to)?;
    let row = |row: usize| {
        let of = |values: &'_ [f64]| values[row * classes..][..classes].to_vec();
        let divisor = sum.map_or(1.0, |_| sums[row]);
        softmax_gradient(&of(&y), divisor, &of(&dy), additions, *from)
    };
    let expected: Vec<Bounded> = (0..rows).flat_map(row).collect();
    check.within("dx", rows_of(dx, *from)?, &expected)
}

/// Whether the elements of a row add up: some are numbers, and none is too large or NaN.
fn has_probabilities(x: &[f64]) -> bool {
    x.iter().any(|x| x.is_finite()) && x.iter().all(|x| !x.is_nan() && *x != f64::INFINITY)
}

fn steps(blueprint: &SoftmaxBlueprint, classes: usize) -> Steps {
    Steps { additions: blueprint.additions(classes), rescales: blueprint.rescales(classes) }
}

/// Tensors that do not go together.
fn contradictions(
    on: &Target,
    draw: &mut Draw,
    check: &mut Check,
    problem: &SoftmaxProblem,
    x: &Buffer,
) -> Result<(), Stop> {
    let client = &on.client;
    let forward = |problem: &SoftmaxProblem, x: &Buffer| {
        softmax_rows(client, problem, SoftmaxOutputs::default(), x).map(drop)
    };
    let what = draw.one_of("what", &["x", "stride", "classes", "sum"]);
    let result = match what {
        "x" => {
            let more = SoftmaxProblem { rows: problem.rows + 1, ..*problem };
            forward(&more, &Buffer { elements: problem.span(), ..x.clone() })
        }
        "stride" => forward(&SoftmaxProblem { row_stride: problem.classes - 1, ..*problem }, x),
        "classes" => forward(&SoftmaxProblem { classes: 0, ..*problem }, x),
        _ => {
            let problem = SoftmaxProblem { out: problem.dtype, ..*problem };
            let sum = Buffer::empty(client, problem.rows + 1, dtype(F32));
            let inputs = SoftmaxGradient {
                sum: Some(&sum),
                ..SoftmaxGradient::of(x, x, problem.row_stride)
            };
            softmax_rows_backward(client, &problem, &inputs).map(drop)
        }
    };
    check.refuses(what, result)
}
