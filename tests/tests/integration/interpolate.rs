//! Gradients of resized images on the device, against f64.

use blackburn_doctor::ops::interpolate::problem;
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    interpolate::{InterpolateProblem, interpolate_backward, variants},
};
use blackburn_reference::{
    interpolate::{Interpolation, Mode},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    buffers::{download, dtype, upload, upload_behind},
    on_device, on_device_with,
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;

/// Pixels and outputs of a dimension: single ones, sizes that are kept, doubled, halved, odd to even, and far apart.
const SIDES: [[usize; 2]; 13] = [
    [1, 1],
    [1, 4],
    [4, 1],
    [2, 3],
    [3, 2],
    [5, 5],
    [4, 8],
    [8, 4],
    [5, 11],
    [11, 5],
    [7, 21],
    [3, 40],
    [40, 3],
];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let trial = |what: &str, test: fn(&Client, Storage) -> Result<(), Failed>| {
            let name = format!("interpolate::{what}_in_{storage:?}").to_lowercase();
            Trial::ignorable_test(name, move || {
                on_device_with(dtype(storage), |client| test(client, storage))
            })
        };
        trials.extend([
            trial("every_size_is_within_bounds", every_size),
            trial("every_number_of_channels_is_within_bounds", every_channels),
            trial("long_lines_are_within_bounds", long_lines),
        ]);
    }
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("interpolate::{name}"), move || on_device(test))
    };
    trials.extend([
        trial("special_numbers_reach_pixels_with_a_weight_and_no_others", specials),
        trial("the_gradient_is_the_adjoint_of_resizing", adjoint),
        trial("gaps_between_pixels_are_stepped_over", gaps),
        trial("planted_faults_are_caught", faults),
        trial("repeated_runs_give_the_same_bits", repeats),
        trial("arguments_that_do_not_go_with_the_problem_are_named", named),
        trial("what_no_kernel_serves_is_declined", declined),
    ]);
    trials
}

#[derive(Clone, Copy, Debug)]
struct Case {
    resized: Interpolation,
    storage: Storage,
    /// Elements between the pixels of dy.
    gap: usize,
}

impl Case {
    fn new(
        (images, channels): (usize, usize),
        [[height, rows], [width, columns]]: [[usize; 2]; 2],
        (mode, align_corners): (Mode, bool),
        storage: Storage,
    ) -> Self {
        let sizes = [images, height, width, channels];
        let resized = Interpolation { sizes, output: [rows, columns], mode, align_corners };
        Self { resized, storage, gap: 0 }
    }

    fn dy(&self) -> Vec<f64> {
        normal(1, self.resized.output_sizes().iter().product(), 1.0, self.storage)
    }

    fn problem(&self) -> InterpolateProblem {
        problem(&self.resized, self.gap, self.storage)
    }

    /// With NaN between pixels, which would show.
    fn run(&self, client: &Client, dy: &[f64]) -> Result<Vec<f64>, Failed> {
        let gap = vec![f64::NAN; self.gap];
        let pixels = dy.chunks(self.resized.sizes[3]);
        let all: Vec<f64> = pixels.flat_map(|pixel| [pixel, &gap]).flatten().copied().collect();
        let dy = upload(client, &all, self.storage);
        let dx = interpolate_backward(client, &self.problem(), &dy)?;
        Ok(download(client, dx, self.storage)?)
    }

    fn judge(&self, dy: &[f64], dx: &[f64]) -> Result<(), String> {
        let expected = self.resized.backward(dy);
        compare(dx, &expected.values, &expected.bounds(self.storage))
            .map(drop)
            .map_err(|error| format!("{self:?}: {error}"))
    }

    fn check_of(&self, client: &Client, dy: &[f64]) -> Result<(), Failed> {
        Ok(self.judge(dy, &self.run(client, dy)?)?)
    }

    fn check(&self, client: &Client) -> Result<(), Failed> {
        self.check_of(client, &self.dy())
    }
}

/// Every mode, with corners aligned and not, where that makes a difference.
fn ways() -> impl Iterator<Item = (Mode, bool)> {
    let nearest = [Mode::Nearest, Mode::NearestExact].map(|mode| (mode, true));
    let numbers = [Mode::Linear, Mode::Cubic].into_iter();
    nearest.into_iter().chain(numbers.flat_map(|mode| [(mode, false), (mode, true)]))
}

fn every_size(client: &Client, storage: Storage) -> Result<(), Failed> {
    for way in ways() {
        for (at, rows) in SIDES.into_iter().enumerate() {
            // Each with itself, and with two others as columns.
            for apart in [0, 4, 7] {
                let columns = SIDES[(at + apart) % SIDES.len()];
                Case::new((2, 4), [rows, columns], way, storage).check(client)?;
            }
        }
    }
    Ok(())
}

fn every_channels(client: &Client, storage: Storage) -> Result<(), Failed> {
    for way in ways() {
        for channels in [1, 2, 3, 4, 6, 8, 12, 16, 33] {
            for images in [1, 3] {
                Case::new((images, channels), [[5, 10], [6, 9]], way, storage).check(client)?;
            }
        }
    }
    // What the machine code is checked for, of fewer images.
    for [_, height, width, channels] in variants::SIZES {
        for (mode, [rows, columns]) in variants::WAYS {
            let way = ways().find(|(other, _)| format!("{other:?}") == format!("{mode:?}"));
            let way = way.ok_or("a mode that the reference has not")?;
            let sides = [[height, height * rows], [width, width * columns]];
            Case::new((1, channels), sides, way, storage).check(client)?;
        }
    }
    Ok(())
}

/// Products of these places are beyond the numbers of 16 bits.
fn long_lines(client: &Client, storage: Storage) -> Result<(), Failed> {
    for way in ways() {
        for columns in [[700, 1400], [1001, 300], [300, 1001]] {
            Case::new((1, 1), [[1, 1], columns], way, storage).check(client)?;
            Case::new((1, 1), [columns, [2, 3]], way, storage).check(client)?;
        }
    }
    Ok(())
}

/// One output at a time, at corners and inside, and a few together.
fn specials(client: &Client) -> Result<(), Failed> {
    for storage in [F32, Storage::F16] {
        for way in ways() {
            for sides in [[[5, 5], [4, 8]], [[9, 4], [3, 7]], [[1, 3], [6, 11]]] {
                let case = Case::new((1, 1), sides, way, storage);
                let outputs = case.dy().len();
                for special in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                    for at in [0, 1, outputs / 2, outputs - 1] {
                        let mut dy = case.dy();
                        dy[at] = special;
                        case.check_of(client, &dy)?;
                    }
                    let mut dy = case.dy();
                    dy.iter_mut().step_by(5).for_each(|dy| *dy = special);
                    case.check_of(client, &dy)?;
                }
            }
        }
    }
    Ok(())
}

/// `<resize(x), dy> = <x, gradient(dy)>`.
fn adjoint(client: &Client) -> Result<(), Failed> {
    for way in ways() {
        for sides in [[[7, 15], [6, 4]], [[12, 5], [5, 20]]] {
            let case = Case::new((2, 8), sides, way, F32);
            let x = normal(3, case.problem().inputs(), 1.0, F32);
            let dy = case.dy();
            let dx = case.run(client, &dy)?;
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let left = dot(&case.resized.forward(&x), &dy);
            let right = dot(&x, &dx);
            let bounds = case.resized.backward(&dy).bounds(F32);
            let bound: f64 = x.iter().zip(&bounds).map(|(x, bound)| x.abs() * bound).sum();
            if (left - right).abs() > bound {
                return Err(format!("{case:?}: {left} and {right}, bound {bound}").into());
            }
        }
    }
    Ok(())
}

fn gaps(client: &Client) -> Result<(), Failed> {
    // Such as vectors fit, and such as they do not.
    for gap in [3, 4, 8, 12] {
        for way in ways() {
            Case { gap, ..Case::new((2, 8), [[5, 9], [6, 12]], way, F32) }.check(client)?;
        }
    }
    Ok(())
}

/// The negative control: a result that is a little off, lacks an output, or belongs to other options, must not pass.
fn faults(client: &Client) -> Result<(), Failed> {
    for (mode, align_corners) in ways() {
        let case = Case::new((2, 8), [[5, 9], [6, 12]], (mode, align_corners), F32);
        let dy = case.dy();
        let right = case.run(client, &dy)?;
        case.judge(&dy, &right)?;
        let is_caught = |what: &str, dx: &[f64]| match case.judge(&dy, dx) {
            Err(_) => Ok(()),
            Ok(()) => Err(Failed::from(format!("{case:?}: {what} went unseen"))),
        };
        let mut off = right.clone();
        off[7] *= 1.0001;
        is_caught("a scaled number", &off)?;
        let mut lost = dy.clone();
        lost[40] = 0.0;
        is_caught("a lost output", &case.run(client, &lost)?)?;
        let other = |mode, align_corners| {
            let resized = Interpolation { mode, align_corners, ..case.resized };
            Case { resized, ..case }.run(client, &dy)
        };
        if matches!(mode, Mode::Linear | Mode::Cubic) {
            is_caught("other corners", &other(mode, !align_corners)?)?;
        }
        let mode = if mode == Mode::Linear { Mode::Cubic } else { Mode::Linear };
        is_caught("another mode", &other(mode, align_corners)?)?;
    }
    Ok(())
}

fn repeats(client: &Client) -> Result<(), Failed> {
    let case = Case::new((4, 8), [[33, 66], [31, 75]], (Mode::Cubic, false), F32);
    let dy = case.dy();
    let first = case.run(client, &dy)?;
    for _ in 0..3 {
        if case.run(client, &dy)? != first {
            return Err("two runs on the same input differ".into());
        }
    }
    Ok(())
}

/// Two images of 3 by 3 pixels to 6 by 6, of 4 channels.
fn plain() -> InterpolateProblem {
    Case::new((2, 4), [[3, 6], [3, 6]], (Mode::Linear, false), F32).problem()
}

fn named(client: &Client) -> Result<(), Failed> {
    let problem = plain();
    let dy = upload(client, &[1.0; 288], F32);
    interpolate_backward(client, &problem, &dy)?;
    let short = Buffer { elements: 287, ..dy.clone() };
    let typed = upload(client, &[1.0; 288], Storage::F16);
    let narrow = InterpolateProblem { dy_stride: 3, ..problem };
    let apart = InterpolateProblem { dy_stride: 5, ..problem };
    for (problem, dy, expected) in [
        (&problem, &short, "dy"),
        (&problem, &typed, "dy"),
        (&apart, &dy, "dy"),
        (&narrow, &dy, "dy_stride"),
    ] {
        match interpolate_backward(client, problem, dy) {
            Err(KernelError::InvalidProblem { op: "interpolate", argument, .. })
                if argument == expected => {}
            other => return Err(format!("{expected}: {other:?}").into()),
        }
    }
    Ok(())
}

fn declined(client: &Client) -> Result<(), Failed> {
    let problem = plain();
    let dy = upload(client, &[1.0; 288], F32);
    let askew = upload_behind(client, 1, &[1.0; 288], F32);
    for (problem, dy) in [
        (InterpolateProblem { images: 0, ..problem }, &dy),
        (InterpolateProblem { input: [0, 3], ..problem }, &dy),
        (InterpolateProblem { output: [6, 0], ..problem }, &dy),
        (InterpolateProblem { input: [1 << 20, 3], output: [(1 << 20) + 1, 6], ..problem }, &dy),
        (problem, &askew),
    ] {
        match interpolate_backward(client, &problem, dy) {
            Err(KernelError::Unsupported { op: "interpolate", .. }) => {}
            other => return Err(format!("{problem:?}: {other:?}").into()),
        }
    }
    Ok(())
}
