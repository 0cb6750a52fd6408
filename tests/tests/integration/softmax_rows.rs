//! Softmax of whole rows and its gradient on the device, against f64.

use super::within;
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    softmax::{
        SoftmaxBlueprint, SoftmaxGradient, SoftmaxOutputs, SoftmaxProblem, plan_backward,
        plan_forward, softmax_rows, softmax_rows_backward, variants::LENGTHS,
    },
};
use blackburn_reference::{
    cross_entropy::Steps,
    random::normal,
    softmax::{Bounded, SoftmaxRow},
    softmax_rows::softmax_gradient,
    storage::Storage,
};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::{on_device, on_device_with};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;

/// Rows, elements of a row, and from one to the next, beside those whose machine code is checked: one element; around vectors, and apart by whole
/// vectors and not; a plane's rows, more than a cube has at once; around what planes and cubes hold, and
/// beyond, on devices with planes of 8 and of 32.
const SIZES: [(usize, usize, usize); 11] = [
    (1, 1, 1),
    (40, 3, 3),
    (9, 17, 24),
    (9, 17, 19),
    (1000, 24, 24),
    (7, 257, 257),
    (5, 1000, 1024),
    (3, 4097, 4104),
    (3, 8200, 8200),
    (2, 12_289, 12_296),
    (2, 24_577, 24_577),
];

/// [`SIZES`], and rows of each checked length, as far apart as CubeCL puts them.
fn sizes() -> impl Iterator<Item = (usize, usize, usize)> {
    SIZES.into_iter().chain(LENGTHS.map(|classes| (2, classes, classes.next_multiple_of(64))))
}

const ALL: SoftmaxOutputs = SoftmaxOutputs { logarithms: false, shifted: true, exponentials: true };

type Test = fn(&Client) -> Result<(), Failed>;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = |what: &str| format!("softmax::rows::{what}_in_{storage:?}").to_lowercase();
        let mut add = |what: &str, test: fn(&Client, Storage) -> Result<(), Failed>| {
            trials.push(Trial::ignorable_test(name(what), move || {
                on_device_with(dtype(storage), |client| test(client, storage))
            }));
        };
        add("forward_is_within_bounds", forward);
        add("every_output_is_within_bounds", outputs);
        add("backward_is_within_bounds", backward);
    }
    let tests: [(&str, Test); 6] = [
        ("casts_are_within_bounds", casts),
        ("a_planted_fault_is_caught", faults),
        ("huge_and_missing_elements_come_out_as_the_maths_has_them", special),
        ("no_rows_give_no_rows", empty),
        ("repeated_runs_give_the_same_bits", repeats),
        ("bad_arguments_are_named", arguments),
    ];
    for (name, test) in tests {
        let name = format!("softmax::rows::{name}");
        trials.push(Trial::ignorable_test(name, move || on_device(test)));
    }
    trials
}

struct Case {
    problem: SoftmaxProblem,
    from: Storage,
    to: Storage,
    x: Vec<f64>,
}

impl Case {
    fn new((rows, classes, row_stride): (usize, usize, usize), from: Storage, to: Storage) -> Self {
        let (dtype, out) = (dtype(from), dtype(to));
        let problem = SoftmaxProblem { rows, classes, row_stride, dtype, out };
        Self { problem, from, to, x: normal((rows + classes) as u64, rows * classes, 3.0, from) }
    }

    fn upload(&self, client: &Client) -> Buffer {
        upload(client, &self.apart(&self.x, self.problem.row_stride), self.from)
    }

    /// Rows apart by what is NaN.
    fn apart(&self, values: &[f64], stride: usize) -> Vec<f64> {
        let SoftmaxProblem { rows, classes, .. } = self.problem;
        let mut spaced = vec![f64::NAN; rows.saturating_sub(1) * stride + classes];
        for (i, value) in values.iter().enumerate() {
            spaced[i / classes * stride + i % classes] = *value;
        }
        // Memory behind the last row, which a vector may reach into.
        if rows > 0 {
            spaced.resize(rows * stride, f64::NAN);
        }
        spaced
    }

    fn download(
        &self,
        client: &Client,
        buffer: Buffer,
        storage: Storage,
    ) -> Result<Vec<f64>, Failed> {
        let SoftmaxProblem { rows, classes, row_stride, .. } = self.problem;
        let spaced = download(client, buffer, storage)?;
        let row = |row: usize| &spaced[row * row_stride..][..classes];
        Ok((0..rows).flat_map(row).copied().collect())
    }

    fn rows(&self, client: &Client) -> impl Iterator<Item = SoftmaxRow<'_>> {
        let steps =
            steps(&plan_forward(client, &self.problem, &self.upload(client)), &self.problem);
        self.x.chunks(self.problem.classes).map(move |x| SoftmaxRow { x, steps })
    }

    /// Rows of y, and what else is asked for, in the order in which it is asked for.
    fn run(&self, client: &Client, outputs: SoftmaxOutputs) -> Result<Vec<Vec<f64>>, Failed> {
        let rows = softmax_rows(client, &self.problem, outputs, &self.upload(client))?;
        let written = [Some(rows.y), rows.shifted, rows.exponentials];
        let written = written.into_iter().flatten();
        written.map(|buffer| self.download(client, buffer, self.to)).collect()
    }

    fn check(&self, client: &Client, outputs: SoftmaxOutputs) -> Result<(), Failed> {
        let all = |of: &dyn Fn(&SoftmaxRow<'_>) -> Vec<Bounded>| -> Vec<Bounded> {
            self.rows(client).flat_map(|row| of(&row)).collect()
        };
        let mut expected = vec![match outputs.logarithms {
            true => ("log y", all(&|row| row.log_softmax(self.to))),
            false => ("y", all(&|row| row.softmax(self.to))),
        }];
        if outputs.shifted {
            expected.push(("shifted", all(&|row| row.shifted(self.to))));
        }
        if outputs.exponentials {
            expected.push(("exponentials", all(&|row| row.exponentials(self.to))));
        }
        for (actual, (name, expected)) in self.run(client, outputs)?.iter().zip(expected) {
            within(actual, &expected)
                .map_err(|error| format!("{name} of {:?}: {error}", self.problem))?;
        }
        Ok(())
    }
}

fn steps(blueprint: &SoftmaxBlueprint, problem: &SoftmaxProblem) -> Steps {
    let SoftmaxProblem { classes, .. } = *problem;
    Steps { additions: blueprint.additions(classes), rescales: blueprint.rescales(classes) }
}

fn forward(client: &Client, storage: Storage) -> Result<(), Failed> {
    for size in sizes() {
        let case = Case::new(size, storage, storage);
        for logarithms in [false, true] {
            case.check(client, SoftmaxOutputs { logarithms, ..SoftmaxOutputs::default() })?;
        }
    }
    Ok(())
}

fn outputs(client: &Client, storage: Storage) -> Result<(), Failed> {
    for size in [(9, 17, 24), (7, 257, 257), (3, 4096, 4096), (2, 24_577, 24_577)] {
        let case = Case::new(size, storage, storage);
        for outputs in [ALL, SoftmaxOutputs { logarithms: true, ..ALL }] {
            case.check(client, outputs)?;
        }
        let rows = softmax_rows(client, &case.problem, ALL, &case.upload(client))?;
        let [peak, sum] = [rows.peak, rows.sum].map(|buffer| download(client, buffer, F32));
        let peaks: Vec<Bounded> = case.rows(client).map(|row| (row.peak(), 0.0)).collect();
        within(&peak?, &peaks)?;
        let sums: Vec<Bounded> = case.rows(client).map(|row| row.sum(F32)).collect();
        within(&sum?, &sums)?;
    }
    Ok(())
}

fn casts(client: &Client) -> Result<(), Failed> {
    for size in [(9, 17, 24), (5, 1000, 1024), (3, 4097, 4104)] {
        Case::new(size, Storage::F16, F32).check(client, ALL)?;
        Case::new(size, F32, Storage::F16).check(client, ALL)?;
    }
    Ok(())
}

/// From softmax, and from exponentials with their sums, as the device has them.
fn backward(client: &Client, storage: Storage) -> Result<(), Failed> {
    for (i, size) in sizes().enumerate() {
        let case = Case::new(size, storage, storage);
        let SoftmaxProblem { rows, classes, row_stride, .. } = case.problem;
        // As far apart as x, and otherwise.
        let dy_stride = if i % 2 == 0 { row_stride } else { classes };
        let dy = normal(7, rows * classes, 1.0, storage);
        let dy_buffer = upload(client, &case.apart(&dy, dy_stride), storage);
        let made = softmax_rows(client, &case.problem, ALL, &case.upload(client))?;
        let sums = download(client, made.sum.clone(), F32)?;
        for (y, sum) in [(made.exponentials, Some(&made.sum)), (Some(made.y), None)] {
            let y = y.ok_or("exponentials were asked for")?;
            let plan = plan_backward(client, &case.problem, &y, &dy_buffer, dy_stride);
            let inputs = SoftmaxGradient { sum, ..SoftmaxGradient::of(&y, &dy_buffer, dy_stride) };
            let dx = softmax_rows_backward(client, &case.problem, &inputs)?;
            let y = case.download(client, y, storage)?;
            let divisor = |row: usize| sum.map_or(1.0, |_| sums[row]);
            let expected: Vec<Bounded> = (0..rows)
                .flat_map(|row| {
                    let of = |values: &'_ [f64]| values[row * classes..][..classes].to_vec();
                    let additions = plan.additions(classes);
                    softmax_gradient(&of(&y), divisor(row), &of(&dy), additions, storage)
                })
                .collect();
            within(&case.download(client, dx, storage)?, &expected)
                .map_err(|error| format!("{:?}, {}: {error}", case.problem, sum.is_some()))?;
        }
    }
    Ok(())
}

/// The negative control: what a fault would make must not pass.
fn faults(client: &Client) -> Result<(), Failed> {
    let case = Case::new((3, 4097, 4104), F32, F32);
    let expected: Vec<Bounded> = case.rows(client).flat_map(|row| row.softmax(F32)).collect();
    let mut y = case.run(client, SoftmaxOutputs::default())?.remove(0);
    within(&y, &expected)?;
    y[9000] *= 1.0001;
    if within(&y, &expected).is_ok() {
        return Err("an element that is off went unseen".into());
    }
    // The last element of each row is left out, as if it lay beyond the end.
    let mut cut = Case::new((3, 4097, 4104), F32, F32);
    cut.x.iter_mut().skip(4096).step_by(4097).for_each(|x| *x = f64::NEG_INFINITY);
    let mut y = cut.run(client, SoftmaxOutputs::default())?.remove(0);
    for (y, (expected, _)) in y.iter_mut().zip(&expected).skip(4096).step_by(4097) {
        *y = *expected;
    }
    if within(&y, &expected).is_ok() {
        return Err("a skipped element went unseen".into());
    }
    Ok(())
}

fn special(client: &Client) -> Result<(), Failed> {
    for classes in [5, 300, 30_001] {
        let mut case = Case::new((4, classes, classes), F32, F32);
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        // Some are left out; all are; one is too large, one is none.
        let rows: Vec<&mut [f64]> = case.x.chunks_mut(classes).collect();
        for (row, values) in rows.into_iter().enumerate() {
            match row {
                0 => values[..classes / 2].fill(-inf),
                1 => values.fill(-inf),
                2 => values[classes - 1] = inf,
                _ => values[classes / 3] = nan,
            }
        }
        for logarithms in [false, true] {
            let outputs = SoftmaxOutputs { logarithms, ..SoftmaxOutputs::default() };
            let y = case.run(client, outputs)?.remove(0);
            let (first, others) = y.split_at(classes);
            let left_out = if logarithms { -inf } else { 0.0 };
            if first[..classes / 2].iter().any(|y| *y != left_out)
                || first[classes / 2..].iter().any(|y| !y.is_finite())
            {
                return Err(format!("{classes} elements, of which some were left out").into());
            }
            if others.iter().any(|y| !y.is_nan()) {
                return Err(format!("rows of {classes} without probabilities have some").into());
            }
        }
        let mut huge = Case::new((4, classes, classes), F32, F32);
        for (i, x) in huge.x.iter_mut().enumerate() {
            *x = F32.round(if i % 3 == 0 { *x - 1e4 } else { *x + 1e4 });
        }
        huge.check(client, ALL)?;
    }
    Ok(())
}

fn empty(client: &Client) -> Result<(), Failed> {
    let case = Case::new((0, 7, 7), F32, F32);
    let x = Buffer::empty(client, 0, dtype(F32));
    let rows = softmax_rows(client, &case.problem, ALL, &x)?;
    let dx = softmax_rows_backward(client, &case.problem, &SoftmaxGradient::of(&rows.y, &x, 7))?;
    match (rows.y.elements, rows.sum.elements, dx.elements) {
        (0, 0, 0) => Ok(()),
        other => Err(format!("{other:?} elements of no rows").into()),
    }
}

fn repeats(client: &Client) -> Result<(), Failed> {
    let case = Case::new((40, 4096, 4096), F32, F32);
    let first = case.run(client, ALL)?;
    for _ in 0..3 {
        if case.run(client, ALL)? != first {
            return Err("another run gave other bits".into());
        }
    }
    Ok(())
}

fn arguments(client: &Client) -> Result<(), Failed> {
    let case = Case::new((4, 9, 9), F32, F32);
    let x = case.upload(client);
    let short = upload(client, &[1.0; 35], F32);
    let sum = upload(client, &[1.0; 3], F32);
    let wide = SoftmaxProblem { out: dtype(Storage::F16), ..case.problem };
    let back = |problem: &SoftmaxProblem, sum, dy, stride| {
        let inputs = SoftmaxGradient { sum, ..SoftmaxGradient::of(&x, dy, stride) };
        softmax_rows_backward(client, problem, &inputs).map(drop)
    };
    let problem = &case.problem;
    let refused = [
        ("x", softmax_rows(client, problem, ALL, &short).map(drop)),
        ("dy", back(problem, None, &short, 9)),
        ("row_stride", back(problem, None, &x, 8)),
        ("sum", back(problem, Some(&sum), &x, 9)),
        ("out", back(&wide, None, &x, 9)),
    ];
    for (expected, result) in refused {
        match result {
            Err(KernelError::InvalidProblem { argument, .. }) if argument == expected => {}
            other => return Err(format!("a wrong {expected} gave {other:?}").into()),
        }
    }
    Ok(())
}
