//! Cross-entropy and its gradient on the device, against f64.

#[path = "cross_entropy_at_once.rs"]
mod at_once;
#[path = "cross_entropy_limits.rs"]
mod limits;
#[path = "cross_entropy_op.rs"]
mod op;

use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    cross_entropy::{
        CrossEntropyBlueprint, CrossEntropyOutput, CrossEntropyProblem, Reduction,
        cross_entropy_backward, cross_entropy_forward, cross_entropy_forward_with,
        cross_entropy_reduce,
    },
};
use blackburn_reference::{
    cross_entropy::{CrossEntropy, Steps},
    random::normal,
    storage::Storage,
    tolerance::{Mismatch, compare},
};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::{on_device, on_device_with};
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind},
    prelude::CubeElement,
};
use libtest_mimic::{Failed, Trial};

const IGNORED: i32 = -100;

/// Rows and classes around vectors (4 and 8 elements), lanes, cubes of rows, and GPT-2's vocabulary,
/// whose rows begin at every place of a vector.
const SIZES: [(usize, usize); 14] = [
    (1, 1),
    (70, 1),
    (33, 2),
    (5, 3),
    (40, 7),
    (40, 8),
    (40, 9),
    (9, 17),
    (3, 127),
    (2, 128),
    (7, 1000),
    (3, 4097),
    (1, 50_257),
    (9, 50_257),
];

type Test = fn(&Client) -> Result<(), Failed>;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = |what: &str| format!("cross_entropy::{what}_in_{storage:?}").to_lowercase();
        trials.push(Trial::ignorable_test(name("both_passes_are_within_bounds"), move || {
            on_device_with(dtype(storage), |client| each_size(client, storage))
        }));
        trials.push(Trial::ignorable_test(name("huge_logits_are_within_bounds"), move || {
            on_device_with(dtype(storage), |client| huge(client, storage))
        }));
        trials.push(Trial::ignorable_test(name("classes_left_out_have_no_gradient"), move || {
            on_device_with(dtype(storage), |client| left_out(client, storage))
        }));
        trials.push(Trial::ignorable_test(name("rows_apart_are_within_bounds"), move || {
            on_device_with(dtype(storage), |client| rows_apart(client, storage))
        }));
        trials.push(Trial::ignorable_test(name("memory_that_is_held_stays"), move || {
            on_device_with(dtype(storage), |client| held(client, storage))
        }));
    }
    let mut tests: Vec<(&str, Test)> = vec![
        ("a_planted_fault_is_caught", planted_faults),
        ("means_and_sums_are_within_bounds", reductions),
        ("a_gradient_of_the_mean_is_that_of_each_row_by_their_number", reduced_gradient),
        ("every_way_to_share_rows_is_within_bounds", blueprints),
        ("repeated_runs_give_the_same_bits", repeats),
    ];
    tests.extend(limits::TESTS);
    for (name, test) in tests {
        trials
            .push(Trial::ignorable_test(format!("cross_entropy::{name}"), move || on_device(test)));
    }
    trials.extend(at_once::trials());
    trials.extend(op::trials());
    trials
}

/// Rows with their targets, as device and reference see them.
struct Case {
    problem: CrossEntropyProblem,
    storage: Storage,
    /// Without what lies between rows.
    logits: Vec<f64>,
    targets: Vec<i32>,
    /// The gradient of each row's loss.
    grads: Vec<f64>,
}

impl Case {
    fn new(rows: usize, classes: usize, smoothing: f32, storage: Storage) -> Self {
        let problem = CrossEntropyProblem {
            rows,
            classes,
            row_stride: classes,
            dtype: dtype(storage),
            ignore_index: Some(IGNORED),
            smoothing,
        };
        let target = |row: usize| match row % 5 {
            4 => IGNORED,
            1 => classes as i32 - 1,
            _ => (row * 7919 % classes) as i32,
        };
        Self {
            problem,
            storage,
            logits: normal((rows + classes) as u64, rows * classes, 2.0, storage),
            targets: (0..rows).map(target).collect(),
            grads: normal(rows as u64, rows, 1.0, Storage::F32),
        }
    }

    fn row(&self, row: usize) -> (CrossEntropy, &[f64]) {
        let target = self.targets[row];
        let classes = self.problem.classes;
        let is_ignored = self.problem.ignore_index == Some(target);
        // What is no class is beyond them.
        let target = (!is_ignored).then(|| usize::try_from(target).unwrap_or(classes));
        let asked = CrossEntropy { target, smoothing: f64::from(self.problem.smoothing) };
        (asked, &self.logits[row * classes..][..classes])
    }

    /// The logits, rows apart by what is NaN.
    fn upload(&self, client: &Client) -> Buffer {
        let CrossEntropyProblem { rows, classes, row_stride, .. } = self.problem;
        let mut spaced = vec![f64::NAN; rows.saturating_sub(1) * row_stride + classes];
        for (i, logit) in self.logits.iter().enumerate() {
            spaced[i / classes * row_stride + i % classes] = *logit;
        }
        upload(client, &spaced, self.storage)
    }

    fn upload_targets(&self, client: &Client) -> Buffer {
        Buffer {
            handle: client.create_from_slice(i32::as_bytes(&self.targets)),
            elements: self.targets.len(),
            dtype: ElemType::Int(IntKind::I32),
        }
    }

    fn steps(&self, client: &Client) -> Steps {
        let blueprint = CrossEntropyBlueprint::plan(&self.problem, &self.upload(client), client);
        steps_of(&blueprint, self.problem.classes)
    }

    fn check_losses(&self, actual: &[f64], steps: Steps) -> Result<(), Mismatch> {
        let rows = || (0..self.problem.rows).map(|row| self.row(row));
        let expected: Vec<f64> = rows().map(|(asked, logits)| asked.loss(logits)).collect();
        let bounds: Vec<f64> =
            rows().map(|(asked, logits)| asked.loss_bound(logits, steps)).collect();
        compare(actual, &expected, &bounds).map(|_| ())
    }

    /// `actual` has rows apart as the logits are.
    fn check_gradient(&self, actual: &[f64], grads: &[f64], steps: Steps) -> Result<(), Mismatch> {
        let CrossEntropyProblem { classes, row_stride, rows, .. } = self.problem;
        let (mut dense, mut expected, mut bounds) = (Vec::new(), Vec::new(), Vec::new());
        for (row, grad) in (0..rows).zip(grads) {
            let (asked, logits) = self.row(row);
            dense.extend_from_slice(&actual[row * row_stride..][..classes]);
            expected.extend(asked.gradient(logits, *grad));
            bounds.extend(asked.gradient_bounds(logits, *grad, steps, self.storage));
        }
        compare(&dense, &expected, &bounds).map(|_| ())
    }

    fn forward(&self, client: &Client) -> Result<CrossEntropyOutput, KernelError> {
        let (logits, targets) = (self.upload(client), self.upload_targets(client));
        cross_entropy_forward(client, &self.problem, &logits, &targets)
    }

    fn backward(&self, client: &Client) -> Result<Vec<f64>, Failed> {
        let output = self.forward(client)?;
        let grads = upload(client, &self.grads, Storage::F32);
        let targets = self.upload_targets(client);
        // Nobody else holds these.
        let logits = self.upload(client);
        let dlogits = cross_entropy_backward(
            client,
            &self.problem,
            logits,
            &targets,
            &output.lse,
            &grads,
            None,
        )?;
        Ok(download(client, dlogits, self.storage)?)
    }

    fn check(&self, client: &Client) -> Result<(), Failed> {
        let CrossEntropyProblem { rows, classes, smoothing, .. } = self.problem;
        let steps = self.steps(client);
        let named = |pass: &'static str| {
            move |error: Mismatch| format!("{pass} of {rows} by {classes}, {smoothing}: {error}")
        };
        let losses = download(client, self.forward(client)?.loss, Storage::F32)?;
        self.check_losses(&losses, steps).map_err(named("forward"))?;
        let gradient = self.backward(client)?;
        self.check_gradient(&gradient, &self.grads, steps).map_err(named("backward"))?;
        Ok(())
    }
}

fn steps_of(blueprint: &CrossEntropyBlueprint, classes: usize) -> Steps {
    Steps { additions: blueprint.additions(classes), rescales: blueprint.rescales(classes) }
}

fn each_size(client: &Client, storage: Storage) -> Result<(), Failed> {
    for (rows, classes) in SIZES {
        for smoothing in [0.0, 0.1] {
            let case = Case::new(rows, classes, smoothing, storage);
            case.check(client)?;
            let problem = CrossEntropyProblem { ignore_index: None, ..case.problem };
            // Then every row counts.
            let targets = case.targets.iter().map(|target| (*target).max(0)).collect();
            Case { problem, targets, ..case }.check(client)?;
        }
    }
    Ok(())
}

/// Thousands, of which the largest alone counts.
fn huge(client: &Client, storage: Storage) -> Result<(), Failed> {
    for smoothing in [0.0, 0.1] {
        let mut case = Case::new(6, 1001, smoothing, storage);
        for (i, logit) in case.logits.iter_mut().enumerate() {
            let sign = if i % 3 == 0 { -1.0 } else { 1.0 };
            *logit = storage.round(sign * 1e4 + *logit);
        }
        case.check(client)?;
    }
    Ok(())
}

/// Minus infinity takes a class out, at both ends of a row and within it.
fn left_out(client: &Client, storage: Storage) -> Result<(), Failed> {
    let mut case = Case::new(6, 77, 0.0, storage);
    for (i, logit) in case.logits.iter_mut().enumerate() {
        let class = i % 77;
        if class < 12 || (30..40).contains(&class) {
            *logit = f64::NEG_INFINITY;
        }
    }
    case.targets = vec![20, 76, 41, 50, IGNORED, 60];
    case.check(client)?;
    let gradient = case.backward(client)?;
    if gradient.iter().zip(&case.logits).any(|(dx, x)| x.is_infinite() && *dx != 0.0) {
        return Err("a class that was left out has a gradient".into());
    }
    // The loss of such a target is infinite, and so it is with smoothing, for all.
    case.targets[0] = 3;
    case.check(client)
}

/// What lies between rows must not be read as logits; here it is NaN.
fn rows_apart(client: &Client, storage: Storage) -> Result<(), Failed> {
    for (classes, row_stride) in [(7, 9), (9, 16), (50, 53), (1000, 1024), (4097, 4100)] {
        let case = Case::new(7, classes, 0.1, storage);
        let problem = CrossEntropyProblem { row_stride, ..case.problem };
        Case { problem, ..case }.check(client)?;
    }
    Ok(())
}

/// In place where nobody else holds the logits, and nowhere else.
fn held(client: &Client, storage: Storage) -> Result<(), Failed> {
    let case = Case::new(7, 1001, 0.0, storage);
    let output = case.forward(client)?;
    let grads = upload(client, &case.grads, Storage::F32);
    let targets = case.upload_targets(client);
    let logits = case.upload(client);
    let backward = |logits: Buffer| {
        cross_entropy_backward(client, &case.problem, logits, &targets, &output.lse, &grads, None)
    };
    let id = |buffer: &Buffer| buffer.handle.memory.descriptor().id.value;
    let dlogits = backward(logits.clone())?;
    if id(&dlogits) == id(&logits) {
        return Err("the gradient is where logits are that somebody holds".into());
    }
    case.check_gradient(&download(client, dlogits, storage)?, &case.grads, case.steps(client))?;
    if download(client, logits.clone(), storage)? != case.logits {
        return Err("logits that were held have changed".into());
    }
    let before = id(&logits);
    if id(&backward(logits)?) != before {
        return Err("memory that nobody holds was not used again".into());
    }
    Ok(())
}

/// The negative control: what a fault would make must not pass.
fn planted_faults(client: &Client) -> Result<(), Failed> {
    let case = Case::new(5, 50_257, 0.0, Storage::F32);
    let steps = case.steps(client);
    let mut losses = download(client, case.forward(client)?.loss, Storage::F32)?;
    losses[2] *= 1.0001;
    if case.check_losses(&losses, steps).is_ok() {
        return Err("a loss that is off went unseen".into());
    }
    let gradient = case.backward(client)?;
    for (what, fault) in [
        ("a class's gradient that is a thousandth off", gradient[60_000] * 1.001),
        ("a class without gradient", 0.0),
    ] {
        let mut wrong = gradient.clone();
        wrong[60_000] = fault;
        if case.check_gradient(&wrong, &case.grads, steps).is_ok() {
            return Err(format!("{what} went unseen").into());
        }
    }
    // Of a row, the last vector was skipped.
    let mut cut = Case::new(5, 50_257, 0.0, Storage::F32);
    for row in 0..5 {
        cut.logits[row * 50_257 + 50_224..][..33].fill(f64::NEG_INFINITY);
    }
    cut.targets = vec![1, 2, 3, 4, 5];
    let losses = download(client, cut.forward(client)?.loss, Storage::F32)?;
    let whole = Case { logits: case.logits, ..cut };
    match whole.check_losses(&losses, steps) {
        Err(_) => Ok(()),
        Ok(()) => Err("skipped classes went unseen".into()),
    }
}

/// Sums of f32 in some order, of which each is rounded.
fn reductions(client: &Client) -> Result<(), Failed> {
    for rows in [1, 2, 255, 256, 257, 3000] {
        let case = Case::new(rows, 5, 0.0, Storage::F32);
        let (losses, targets) = (case.forward(client)?.loss, case.upload_targets(client));
        let values = download(client, losses.clone(), Storage::F32)?;
        let counted = case.targets.iter().filter(|target| **target != IGNORED).count() as f64;
        let (sum, u) = (values.iter().sum::<f64>(), Storage::F32.unit_roundoff());
        let bound = rows as f64 * u * sum;
        for (reduction, divisor) in [(Reduction::Sum, 1.0), (Reduction::Mean, counted)] {
            let reduced =
                cross_entropy_reduce(client, &case.problem, reduction, &losses, &targets)?;
            let [loss, factor] =
                [reduced.loss, reduced.factor].map(|buffer| download(client, buffer, Storage::F32));
            // A quotient is off by 2.5 units in the last place.
            compare(&loss?, &[sum / divisor], &[(bound + 5.0 * u * sum) / divisor])
                .map_err(|error| format!("{reduction:?} of {rows}: {error}"))?;
            compare(&factor?, &[1.0 / divisor], &[5.0 * u / divisor])?;
        }
    }
    let mut none = Case::new(3, 5, 0.0, Storage::F32);
    none.targets = vec![IGNORED; 3];
    let (losses, targets) = (none.forward(client)?.loss, none.upload_targets(client));
    let mean = cross_entropy_reduce(client, &none.problem, Reduction::Mean, &losses, &targets)?;
    let mean = download(client, mean.loss, Storage::F32)?;
    if mean[0].is_nan() { Ok(()) } else { Err(format!("the mean of no rows is {mean:?}").into()) }
}

fn reduced_gradient(client: &Client) -> Result<(), Failed> {
    let case = Case::new(12, 1001, 0.1, Storage::F32);
    let output = case.forward(client)?;
    let targets = case.upload_targets(client);
    let reduced =
        cross_entropy_reduce(client, &case.problem, Reduction::Mean, &output.loss, &targets)?;
    let grad = upload(client, &[-1.75], Storage::F32);
    let dlogits = cross_entropy_backward(
        client,
        &case.problem,
        case.upload(client),
        &targets,
        &output.lse,
        &grad,
        Some(&reduced.factor),
    )?;
    let counted = case.targets.iter().filter(|target| **target != IGNORED).count() as f64;
    let gradient = download(client, dlogits, Storage::F32)?;
    case.check_gradient(&gradient, &[-1.75 / counted; 12], case.steps(client))?;
    Ok(())
}

/// Every number of lanes, with and without vectors; with the device's own plane, and without any.
fn blueprints(client: &Client) -> Result<(), Failed> {
    let case = Case::new(9, 1001, 0.1, Storage::F32);
    let (logits, targets) = (case.upload(client), case.upload_targets(client));
    let planned = CrossEntropyBlueprint::plan(&case.problem, &logits, client);
    let mut planes = vec![1, planned.plane];
    planes.dedup();
    for plane in planes {
        for lanes in [8, 16, 32, 64, 128, 256] {
            for vector_size in [1, planned.vector_size] {
                let blueprint = CrossEntropyBlueprint { vector_size, lanes, plane, ..planned };
                let output = cross_entropy_forward_with(
                    client,
                    &case.problem,
                    blueprint,
                    &logits,
                    &targets,
                )?;
                let losses = download(client, output.loss, Storage::F32)?;
                case.check_losses(&losses, steps_of(&blueprint, 1001))
                    .map_err(|error| format!("{blueprint:?}: {error}"))?;
            }
        }
    }
    Ok(())
}

fn repeats(client: &Client) -> Result<(), Failed> {
    let case = Case::new(300, 1001, 0.1, Storage::F32);
    let run = || -> Result<_, Failed> {
        let output = case.forward(client)?;
        let targets = case.upload_targets(client);
        let mean =
            cross_entropy_reduce(client, &case.problem, Reduction::Mean, &output.loss, &targets)?;
        Ok((download(client, mean.loss, Storage::F32)?, case.backward(client)?))
    };
    let first = run()?;
    for _ in 0..3 {
        if run()? != first {
            return Err("another run gave other bits".into());
        }
    }
    Ok(())
}
