//! What the logarithm of softmax is made of on the device, against f64.

#[path = "softmax_activation.rs"]
pub(crate) mod activation;
#[path = "softmax_masks.rs"]
mod masks;
#[path = "softmax_module.rs"]
mod module;
#[path = "softmax_rows.rs"]
mod rows;

use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    cross_entropy::{CrossEntropyBlueprint, CrossEntropyProblem},
    softmax::{
        SoftmaxProblem, SoftmaxSums, log_softmax, picked_backward, softmax_shifted, softmax_sums,
    },
};
use blackburn_reference::{
    cross_entropy::Steps,
    random::normal,
    softmax::{Bounded, SoftmaxRow},
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::{on_device, on_device_with};
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind},
    prelude::CubeElement,
};
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;

/// Rows, elements of a row, and from one to the next: around vectors, lanes and cubes of rows, next to
/// each other at every place of a vector, and apart.
const SIZES: [(usize, usize, usize); 9] = [
    (1, 1, 1),
    (40, 3, 3),
    (33, 9, 9),
    (9, 17, 24),
    (5, 127, 127),
    (7, 1000, 1024),
    (3, 4097, 4097),
    (3, 4097, 4224),
    (2, 50_257, 50_257),
];

type Test = fn(&Client) -> Result<(), Failed>;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = |what: &str| format!("softmax::{what}_in_{storage:?}").to_lowercase();
        trials.push(Trial::ignorable_test(name("every_step_is_within_bounds"), move || {
            on_device_with(dtype(storage), |client| each_size(client, storage, storage))
        }));
        if storage != F32 {
            trials.push(Trial::ignorable_test(name("casts_are_within_bounds"), move || {
                on_device_with(dtype(storage), |client| {
                    each_size(client, storage, F32)?;
                    each_size(client, F32, storage)
                })
            }));
        }
    }
    let tests: [(&str, Test); 5] = [
        ("rows_beyond_the_grid_are_summed", beyond_the_grid),
        ("a_planted_fault_is_caught", planted_faults),
        ("memory_that_is_held_stays", held),
        ("targets_that_are_no_element_are_met_nowhere", other_targets),
        ("bad_arguments_are_named", arguments),
    ];
    for (name, test) in tests {
        trials.push(Trial::ignorable_test(format!("softmax::{name}"), move || on_device(test)));
    }
    trials.extend(activation::trials());
    trials.extend(module::trials());
    trials.extend(masks::trials());
    trials.extend(rows::trials());
    trials
}

/// Rows with their targets, read in one type and written in another.
struct Case {
    problem: SoftmaxProblem,
    from: Storage,
    to: Storage,
    x: Vec<f64>,
    targets: Vec<i32>,
    grads: Vec<f64>,
}

impl Case {
    fn new(rows: usize, classes: usize, row_stride: usize, from: Storage, to: Storage) -> Self {
        Self {
            problem: SoftmaxProblem {
                rows,
                classes,
                row_stride,
                dtype: dtype(from),
                out: dtype(to),
            },
            from,
            to,
            // Of those that both types have.
            x: normal((rows + classes) as u64, rows * classes, 2.0, narrower(from, to)),
            targets: (0..rows).map(|row| (row * 7919 % classes) as i32).collect(),
            grads: normal(rows as u64, rows, 1.0, F32),
        }
    }

    /// Rows apart by what is NaN.
    fn upload(&self, client: &Client) -> Buffer {
        let SoftmaxProblem { rows, classes, row_stride, .. } = self.problem;
        let mut spaced = vec![f64::NAN; (rows - 1) * row_stride + classes];
        for (i, x) in self.x.iter().enumerate() {
            spaced[i / classes * row_stride + i % classes] = *x;
        }
        upload(client, &spaced, self.from)
    }

    fn upload_targets(&self, client: &Client) -> Buffer {
        Buffer {
            handle: client.create_from_slice(i32::as_bytes(&self.targets)),
            elements: self.targets.len(),
            dtype: ElemType::Int(IntKind::I32),
        }
    }

    fn steps(&self, client: &Client) -> Steps {
        let SoftmaxProblem { rows, classes, row_stride, dtype, .. } = self.problem;
        let problem = CrossEntropyProblem {
            rows,
            classes,
            row_stride,
            dtype,
            ignore_index: None,
            smoothing: 0.0,
        };
        let blueprint = CrossEntropyBlueprint::plan(&problem, &self.upload(client), client);
        Steps { additions: blueprint.additions(classes), rescales: blueprint.rescales(classes) }
    }

    fn rows(&self, steps: Steps) -> impl Iterator<Item = SoftmaxRow<'_>> {
        self.x.chunks(self.problem.classes).map(move |x| SoftmaxRow { x, steps })
    }

    fn sums(&self, client: &Client) -> Result<SoftmaxSums, KernelError> {
        let targets = self.upload_targets(client);
        softmax_sums(client, &self.problem, &self.upload(client), Some(&targets))
    }

    /// The gradient of what [`softmax_shifted`] made in `to`.
    fn backward(&self, client: &Client, shifted: Buffer, sum: &Buffer) -> Result<Buffer, Failed> {
        // Read as it was written, and written as x was.
        let SoftmaxProblem { dtype, out, .. } = self.problem;
        let problem = SoftmaxProblem { dtype: out, out: dtype, ..self.problem };
        let (targets, grads) = (self.upload_targets(client), upload(client, &self.grads, F32));
        Ok(picked_backward(client, &problem, shifted, sum, &targets, &grads)?)
    }

    fn gradient(&self, steps: Steps) -> Vec<Bounded> {
        let rows = self.rows(steps).zip(&self.targets).zip(&self.grads);
        rows.flat_map(|((row, target), grad)| {
            let target = usize::try_from(*target).unwrap_or(usize::MAX);
            row.picked_gradient(target, *grad, self.to, self.from)
        })
        .collect()
    }

    /// The elements of rows, without what lies between them.
    fn elements(&self, client: &Client, of: Buffer, storage: Storage) -> Result<Vec<f64>, Failed> {
        let SoftmaxProblem { classes, row_stride, .. } = self.problem;
        let spaced = download(client, of, storage)?;
        Ok(spaced.chunks(row_stride).flat_map(|row| &row[..classes]).copied().collect())
    }

    fn check(&self, client: &Client) -> Result<(), Failed> {
        let SoftmaxProblem { rows, classes, row_stride, .. } = self.problem;
        let steps = self.steps(client);
        let named = |step: &'static str| {
            move |error: String| format!("{step} of {rows} by {classes} ({row_stride}): {error}")
        };
        let sums = self.sums(client)?;
        let numbers = |buffer: &Buffer| download(client, buffer.clone(), F32);
        let peaks: Vec<f64> = self.rows(steps).map(|row| row.peak()).collect();
        if numbers(&sums.peak)? != peaks {
            return Err(named("the peak")("not the largest element".into()).into());
        }
        let expected: Vec<Bounded> = self.rows(steps).map(|row| row.sum(F32)).collect();
        within(&numbers(&sums.sum)?, &expected).map_err(named("the sum"))?;
        let picked = sums.picked.clone().ok_or("targets were given")?;
        let expected: Vec<Bounded> = self
            .rows(steps)
            .zip(&self.targets)
            .map(|(row, target)| row.log_softmax(F32)[*target as usize])
            .collect();
        within(&numbers(&picked)?, &expected).map_err(named("the element at the target"))?;

        let y = log_softmax(client, &self.problem, self.upload(client), &sums)?;
        let expected: Vec<Bounded> =
            self.rows(steps).flat_map(|row| row.log_softmax(self.to)).collect();
        within(&self.elements(client, y, self.to)?, &expected).map_err(named("the logarithm"))?;

        let shifted = softmax_shifted(client, &self.problem, self.upload(client), &sums.peak)?;
        let expected: Vec<Bounded> =
            self.rows(steps).flat_map(|row| row.shifted(self.to)).collect();
        within(&self.elements(client, shifted.clone(), self.to)?, &expected)
            .map_err(named("what elements lack to the peak"))?;

        let dx = self.backward(client, shifted, &sums.sum)?;
        within(&self.elements(client, dx, self.from)?, &self.gradient(steps))
            .map_err(named("the gradient"))?;
        Ok(())
    }
}

fn narrower(from: Storage, to: Storage) -> Storage {
    if from == F32 { to } else { from }
}

fn within(actual: &[f64], expected: &[Bounded]) -> Result<(), String> {
    let (expected, bounds): (Vec<f64>, Vec<f64>) = expected.iter().copied().unzip();
    compare(actual, &expected, &bounds).map(drop).map_err(|error| error.to_string())
}

fn each_size(client: &Client, from: Storage, to: Storage) -> Result<(), Failed> {
    let sizes = SIZES.into_iter();
    sizes
        .map(|(rows, classes, stride)| Case::new(rows, classes, stride, from, to))
        .try_for_each(|case| case.check(client))
}

/// More rows than the largest grid of WebGPU has at once, of 32 to a cube: cubes come back for the others.
/// Some rows are looked at, the last ones among them.
fn beyond_the_grid(client: &Client) -> Result<(), Failed> {
    const CLASSES: usize = 2;
    let case = Case::new(32 * 65_535 + 70, CLASSES, CLASSES, F32, F32);
    let (steps, rows) = (case.steps(client), case.problem.rows);
    let sums = case.sums(client)?;
    let [peaks, totals] = [&sums.peak, &sums.sum].map(|of| download(client, of.clone(), F32));
    let (peaks, totals) = (peaks?, totals?);
    for row in (0..rows).step_by(9973).chain(rows - 70..rows) {
        let exact = SoftmaxRow { x: &case.x[row * CLASSES..][..CLASSES], steps };
        if peaks[row] != exact.peak() {
            let peak = exact.peak();
            return Err(format!("the peak of row {row}: {}, not {peak}", peaks[row]).into());
        }
        within(&totals[row..][..1], &[exact.sum(F32)])
            .map_err(|error| format!("the sum of row {row}: {error}"))?;
    }
    Ok(())
}

/// The negative control.
fn planted_faults(client: &Client) -> Result<(), Failed> {
    let case = Case::new(3, 4097, 4097, F32, F32);
    let steps = case.steps(client);
    let sums = case.sums(client)?;
    let shifted = softmax_shifted(client, &case.problem, case.upload(client), &sums.peak)?;
    let dx = case.elements(client, case.backward(client, shifted, &sums.sum)?, F32)?;
    let expected = case.gradient(steps);
    within(&dx, &expected)?;
    let target = case.targets[1] as usize + 4097;
    for (what, at, fault) in [
        ("a target's gradient without the target", target, dx[target] - case.grads[1]),
        ("an element that is a thousandth off", 5000, dx[5000] * 1.001),
        ("an element without gradient", 4096, 0.0),
    ] {
        let mut wrong = dx.clone();
        wrong[at] = fault;
        if within(&wrong, &expected).is_ok() {
            return Err(format!("{what} went unseen").into());
        }
    }
    Ok(())
}

/// What is written lies where nobody else holds what was read.
fn held(client: &Client) -> Result<(), Failed> {
    let case = Case::new(7, 1001, 1001, F32, F32);
    let sums = case.sums(client)?;
    let id = |buffer: &Buffer| buffer.handle.memory.descriptor().id.value;
    let x = case.upload(client);
    let shifted = softmax_shifted(client, &case.problem, x.clone(), &sums.peak)?;
    if id(&shifted) == id(&x) || download(client, x, F32)? != case.x {
        return Err("memory that somebody holds was written".into());
    }
    let before = id(&shifted);
    if id(&case.backward(client, shifted, &sums.sum)?) != before {
        return Err("memory that nobody holds was not used again".into());
    }
    Ok(())
}

fn other_targets(client: &Client) -> Result<(), Failed> {
    let mut case = Case::new(4, 50, 50, F32, F32);
    case.targets = vec![-1, 50, i32::MAX, i32::MIN];
    let sums = case.sums(client)?;
    let picked = download(client, sums.picked.ok_or("targets were given")?, F32)?;
    if !picked.iter().all(|picked| picked.is_nan()) {
        return Err(format!("{picked:?} where the targets are no elements").into());
    }
    let shifted = softmax_shifted(client, &case.problem, case.upload(client), &sums.peak)?;
    let dx = case.elements(client, case.backward(client, shifted, &sums.sum)?, F32)?;
    Ok(within(&dx, &case.gradient(case.steps(client)))?)
}

fn arguments(client: &Client) -> Result<(), Failed> {
    let case = Case::new(4, 50, 50, F32, F32);
    let (problem, x) = (case.problem, case.upload(client));
    let sums = case.sums(client)?;
    let short = upload(client, &[1.0; 3], F32);
    let targets = case.upload_targets(client);
    let backward = |sum: &Buffer, targets: &Buffer, grad: &Buffer| {
        picked_backward(client, &problem, x.clone(), sum, targets, grad).map(drop)
    };
    let refused = [
        ("x", softmax_sums(client, &problem, &short, None).map(drop)),
        ("targets", softmax_sums(client, &problem, &x, Some(&short)).map(drop)),
        ("peak", softmax_shifted(client, &problem, x.clone(), &short).map(drop)),
        ("sum", backward(&short, &targets, &sums.sum)),
        ("targets", backward(&sums.sum, &sums.sum, &sums.sum)),
        ("grad", backward(&sums.sum, &targets, &short)),
    ];
    for (expected, result) in refused {
        match result {
            Err(KernelError::InvalidProblem { argument, .. }) if argument == expected => {}
            other => return Err(format!("{expected} was not named: {other:?}").into()),
        }
    }
    Ok(())
}
