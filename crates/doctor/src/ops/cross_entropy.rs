//! Softmax cross-entropy: targets, smoothing, rows apart, reductions.

use crate::{
    buffers::{download, dtype, upload, upload_integers},
    check::{Check, Stop},
    draw::Draw,
    memory::{Layout, place},
    target::Target,
};
use blackburn_kernels::{
    buffer::Buffer,
    cross_entropy::{
        CrossEntropyBlueprint, CrossEntropyProblem, Reduction, cross_entropy_backward,
        cross_entropy_forward, cross_entropy_reduce,
    },
};
use blackburn_reference::{
    cross_entropy::{CrossEntropy, Steps},
    storage::Storage,
};

const IGNORED: i32 = -100;
const F32: Storage = Storage::F32;

/// What is drawn of a loss.
struct Case {
    problem: CrossEntropyProblem,
    storage: Storage,
    logits: Vec<f64>,
    targets: Vec<i32>,
}

impl Case {
    /// What a row is told, and its logits.
    fn row(&self, row: usize) -> (CrossEntropy, &[f64]) {
        let CrossEntropyProblem { classes, smoothing, ignore_index, .. } = self.problem;
        let target = self.targets[row];
        // What is no class is beyond them.
        let class = || usize::try_from(target).unwrap_or(classes);
        let asked = CrossEntropy {
            target: (ignore_index != Some(target)).then(class),
            smoothing: f64::from(smoothing),
        };
        (asked, &self.logits[row * classes..][..classes])
    }

    fn rows(&self) -> impl Iterator<Item = (CrossEntropy, &[f64])> {
        (0..self.problem.rows).map(|row| self.row(row))
    }
}

pub(super) fn case(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let storage = draw.plan("type", &on.storages);
    let ignores = draw.planned("ignores", 2);
    let smoothing =
        if draw.planned("smooth", 2) { draw.number("smoothing", 0.01, 0.9) } else { 0.0 };
    let reduction = draw.plan("reduction", &[None, Some(Reduction::Mean), Some(Reduction::Sum)]);
    let around = draw.planned_size("around", 1..=20_000);
    let problem_of = |rows, classes, row_stride| CrossEntropyProblem {
        rows,
        classes,
        row_stride,
        dtype: dtype(storage),
        ignore_index: ignores.then_some(IGNORED),
        smoothing: smoothing as f32,
    };
    let something = Buffer::empty(&on.client, 1, dtype(storage));
    let plan = |classes| {
        CrossEntropyBlueprint::plan(&problem_of(1, classes, classes), &something, &on.client)
    };
    let classes = draw.size_alike("classes", around, |classes| plan(classes) == plan(around));
    let most = if draw.holds("large", 200) { 1 << 19 } else { 1 << 15 };
    let rows = draw.size("rows", 1..=(most / classes).max(1));
    let rows = if draw.holds("empty", 100) { 0 } else { rows };
    let stride = classes + draw.one_of("apart", &[0, 0, 1, 8, 31]);
    let problem = problem_of(rows, classes, stride);

    let deviation = draw.one_of("deviation", &[2.0, 2.0, 0.1, 30.0]);
    let mut logits = draw.normal(rows * classes, deviation, storage);
    if draw.holds("left-out", 10) {
        // Classes that a row cannot be, of which some may be its target.
        for logit in &mut logits {
            if draw.place(5) == 0 {
                *logit = f64::NEG_INFINITY;
            }
        }
    }
    draw.spoil("logits", &mut logits);
    let beyond = draw.holds("beyond", 40);
    let targets = (0..rows).map(|_| match draw.place(8) {
        0 if ignores => IGNORED,
        1 if beyond => classes as i32,
        2 if beyond => -1,
        3 => classes as i32 - 1,
        _ => draw.place(classes) as i32,
    });
    let targets: Vec<i32> = targets.collect();
    run(on, draw, check, &Case { problem, storage, logits, targets }, reduction)
}

fn run(
    on: &Target,
    draw: &mut Draw,
    check: &mut Check,
    case: &Case,
    reduction: Option<Reduction>,
) -> Result<(), Stop> {
    let (client, problem) = (&on.client, &case.problem);
    let CrossEntropyProblem { rows, classes, row_stride, .. } = *problem;
    let layout = Layout::rows(rows, classes, row_stride);
    let logits = place(on, draw, "logits", (&case.logits, &layout), case.storage);
    let targets = upload_integers(client, &case.targets);
    if draw.holds("contradiction", 60) {
        return contradictions(on, draw, check, problem, [&logits, &targets]);
    }
    let blueprint = CrossEntropyBlueprint::plan(problem, &logits, client);
    let steps =
        Steps { additions: blueprint.additions(classes), rescales: blueprint.rescales(classes) };
    let output = cross_entropy_forward(client, problem, &logits, &targets)?;
    let losses = download(client, output.loss.clone(), F32)?;
    let expected: Vec<f64> = case.rows().map(|(asked, logits)| asked.loss(logits)).collect();
    let bounds: Vec<f64> =
        case.rows().map(|(asked, logits)| asked.loss_bound(logits, steps)).collect();
    check.compare("loss", losses.clone(), &expected, &bounds)?;

    let (grads, factor) = match reduction {
        None => (draw.normal(rows, 1.0, F32), None),
        Some(reduction) => {
            let reduced = cross_entropy_reduce(client, problem, reduction, &output.loss, &targets)?;
            let counted = case.rows().filter(|(asked, _)| asked.target.is_some()).count() as f64;
            let divisor = if reduction == Reduction::Mean { counted } else { 1.0 };
            let (sum, u) = (losses.iter().sum::<f64>(), F32.unit_roundoff());
            let magnitude: f64 = losses.iter().map(|loss| loss.abs()).sum();
            // Sums of f32 in some order, of which each is rounded; a quotient is off by 2.5 units in the
            // last place.
            let bound = (rows as f64 + 5.0) * u * magnitude / divisor + F32.underflow();
            let loss = download(client, reduced.loss, F32)?;
            check.compare("reduced loss", loss, &[sum / divisor], &[bound])?;
            (vec![draw.normal(1, 1.0, F32)[0]], Some((reduced.factor, divisor)))
        }
    };
    let grad = upload(client, &grads, F32);
    let factor_buffer = factor.as_ref().map(|(factor, _)| factor);
    // In place where nobody else holds the logits.
    let held = draw.holds("held", 2).then(|| logits.clone());
    let dlogits = cross_entropy_backward(
        client,
        problem,
        logits,
        &targets,
        &output.lse,
        &grad,
        factor_buffer,
    )?;
    let memory = download(client, dlogits, case.storage)?;
    let actual = if rows == 0 { Vec::new() } else { layout.gather(&memory) };
    let (mut expected, mut bounds) = (Vec::new(), Vec::new());
    for (row, (asked, logits)) in case.rows().enumerate() {
        // The factor is a quotient in f32, as far off as an ordinary rounding and its product.
        let grad = factor.as_ref().map_or_else(|| grads[row], |(_, divisor)| grads[0] / divisor);
        expected.extend(asked.gradient(logits, grad));
        let slack = if factor.is_some() { 7.0 * F32.unit_roundoff() } else { 0.0 };
        let of_grad = asked.gradient(logits, grad * slack);
        let row = asked.gradient_bounds(logits, grad, steps, case.storage);
        bounds.extend(row.iter().zip(of_grad).map(|(bound, moved)| bound + moved.abs()));
    }
    check.compare("dlogits", actual, &expected, &bounds)?;
    if let Some(held) = held {
        let kept = layout.gather(&download(client, held, case.storage)?);
        let none = vec![0.0; kept.len()];
        check.compare("logits that are held", kept, &case.logits, &none)?;
    }
    Ok(())
}

/// Tensors that do not go together.
fn contradictions(
    on: &Target,
    draw: &mut Draw,
    check: &mut Check,
    problem: &CrossEntropyProblem,
    [logits, targets]: [&Buffer; 2],
) -> Result<(), Stop> {
    let forward = |problem: &CrossEntropyProblem, logits: &Buffer, targets: &Buffer| {
        cross_entropy_forward(&on.client, problem, logits, targets).map(drop)
    };
    let longer = Buffer { elements: targets.elements + 1, ..targets.clone() };
    let what = draw.one_of("what", &["targets", "logits", "stride", "classes", "smoothing"]);
    let result = match what {
        "targets" => forward(problem, logits, &longer),
        "logits" => forward(problem, targets, targets),
        "stride" => {
            let row_stride = problem.classes - 1;
            forward(&CrossEntropyProblem { row_stride, ..*problem }, logits, targets)
        }
        "classes" => forward(&CrossEntropyProblem { classes: 0, ..*problem }, logits, targets),
        _ => forward(&CrossEntropyProblem { smoothing: 1.0, ..*problem }, logits, targets),
    };
    check.refuses(what, result)
}
