//! Pools of images and their gradients on the device, against f64.

#[path = "pool_arguments.rs"]
mod arguments;

use blackburn_doctor::ops::pool::problem;
use blackburn_kernels::{
    buffer::Buffer,
    pool::{
        PoolProblem, PoolWindow, average_pool, average_pool_backward, max_pool, max_pool_backward,
        variants,
    },
};
use blackburn_reference::{
    pool::{Maxima, Pool, Windows as Reference},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    buffers::{download, download_integers, dtype, upload},
    on_device, on_device_with,
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let trial = |what: &str, test: fn(&Client, Storage) -> Result<(), Failed>| {
            let name = format!("pool::{what}_in_{storage:?}").to_lowercase();
            Trial::ignorable_test(name, move || {
                on_device_with(dtype(storage), |client| test(client, storage))
            })
        };
        trials.extend([
            trial("every_window_is_within_bounds", every_window),
            trial("every_number_of_channels_is_within_bounds", every_channels),
            trial("adaptive_windows_are_within_bounds", adaptive),
            trial("means_of_whole_images_are_within_bounds", whole_images),
        ]);
    }
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("pool::{name}"), move || on_device(test))
    };
    trials.extend([
        trial("windows_of_both_dimensions_may_differ", uneven),
        trial("dilated_windows_are_exact", dilated),
        trial("images_may_be_smaller_than_their_windows", small_images),
        trial("windows_without_pixels_have_no_maximum", between_pixels),
        trial("of_equal_numbers_the_first_counts", ties),
        trial("nan_is_the_largest_and_negative_infinity_a_number", specials),
        trial("gaps_between_pixels_are_stepped_over", gaps),
        trial("planted_faults_are_caught", faults),
        trial("repeated_runs_give_the_same_bits", repeats),
    ]);
    trials.extend(arguments::trials());
    trials
}

/// A square window; a last one may reach beyond the image.
fn square(kernel: usize, stride: usize, padding: usize, ceil: bool) -> Reference {
    Reference::Walking {
        kernel: [kernel; 2],
        stride: [stride; 2],
        padding: [padding; 2],
        dilation: [1; 2],
        ceil,
    }
}

/// A pool with its numbers' seed.
#[derive(Clone, Copy, Debug)]
struct Case {
    pool: Pool,
    storage: Storage,
    /// Elements between the pixels of x, and between those of dy.
    gaps: [usize; 2],
}

/// What the device made of a case by maxima.
#[derive(Clone, Debug, PartialEq)]
struct MaxResults {
    y: Vec<f64>,
    indices: Vec<i32>,
    /// Without indices.
    alone: Vec<f64>,
    dx: Vec<f64>,
}

impl Case {
    fn new(sizes: [usize; 4], windows: Reference, storage: Storage) -> Self {
        Self { pool: Pool { sizes, windows }, storage, gaps: [0; 2] }
    }

    fn x(&self) -> Vec<f64> {
        normal(1, self.pool.sizes.iter().product(), 1.0, self.storage)
    }

    fn dy(&self) -> Vec<f64> {
        normal(2, self.pool.output_sizes().iter().product(), 1.0, self.storage)
    }

    fn problem(&self) -> PoolProblem {
        problem(&self.pool, self.gaps, self.storage)
    }

    /// Pixels with NaN between them, which would show.
    fn upload(&self, client: &Client, values: &[f64], gap: usize) -> Buffer {
        let gap = vec![f64::NAN; gap];
        let pixels = values.chunks(self.pool.sizes[3]);
        let all: Vec<f64> = pixels.flat_map(|pixel| [pixel, &gap]).flatten().copied().collect();
        upload(client, &all, self.storage)
    }

    fn run_max(&self, client: &Client, x: &[f64], dy: &[f64]) -> Result<MaxResults, Failed> {
        let problem = self.problem();
        let x = self.upload(client, x, self.gaps[0]);
        let dy = self.upload(client, dy, self.gaps[1]);
        let pooled = max_pool(client, &problem, &x, true)?;
        let indices = pooled.indices.ok_or("no indices came")?;
        let alone = max_pool(client, &problem, &x, false)?;
        if alone.indices.is_some() {
            return Err("indices came that nobody asked for".into());
        }
        let dx = max_pool_backward(client, &problem, &dy, &indices)?;
        Ok(MaxResults {
            y: download(client, pooled.y, self.storage)?,
            indices: download_integers(client, indices)?,
            alone: download(client, alone.y, self.storage)?,
            dx: download(client, dx, self.storage)?,
        })
    }

    /// Maxima are exact, and gradients sums of a few numbers.
    fn judge_max(&self, x: &[f64], dy: &[f64], results: &MaxResults) -> Result<(), String> {
        let Maxima { values, indices } = self.pool.max(x);
        let exact = vec![0.0; values.len()];
        for (name, y) in [("y", &results.y), ("y without indices", &results.alone)] {
            compare(y, &values, &exact).map_err(|error| format!("{self:?}: {name}: {error}"))?;
        }
        if let Some(at) = (0..indices.len()).find(|at| results.indices[*at] != indices[*at]) {
            let (found, expected) = (results.indices[at], indices[at]);
            return Err(format!("{self:?}: index {at} is {found}, and not {expected}"));
        }
        let sums = self.pool.max_backward(dy, &indices);
        compare(&results.dx, &sums.values, &sums.bounds(self.storage))
            .map(drop)
            .map_err(|error| format!("{self:?}: dx: {error}"))
    }

    fn check_max_of(&self, client: &Client, x: &[f64]) -> Result<(), Failed> {
        let dy = self.dy();
        let results = self.run_max(client, x, &dy)?;
        Ok(self.judge_max(x, &dy, &results)?)
    }

    fn check_max(&self, client: &Client) -> Result<(), Failed> {
        self.check_max_of(client, &self.x())
    }

    /// y and dx.
    fn run_average(&self, client: &Client, padded: bool) -> Result<[Vec<f64>; 2], Failed> {
        let problem = self.problem();
        let x = self.upload(client, &self.x(), self.gaps[0]);
        let dy = self.upload(client, &self.dy(), self.gaps[1]);
        let y = average_pool(client, &problem, &x, padded)?;
        let dx = average_pool_backward(client, &problem, &dy, padded)?;
        Ok([download(client, y, self.storage)?, download(client, dx, self.storage)?])
    }

    fn judge_average(&self, [y, dx]: &[Vec<f64>; 2], padded: bool) -> Result<(), String> {
        let expected =
            [self.pool.average(&self.x(), padded), self.pool.average_backward(&self.dy(), padded)];
        for (name, actual, sums) in [("y", y, &expected[0]), ("dx", dx, &expected[1])] {
            compare(actual, &sums.values, &sums.bounds(self.storage)).map_err(|error| {
                format!("{self:?}: mean {name}, over the padding: {padded}: {error}")
            })?;
        }
        Ok(())
    }

    fn check_average(&self, client: &Client) -> Result<(), Failed> {
        for padded in [false, true] {
            self.judge_average(&self.run_average(client, padded)?, padded)?;
        }
        Ok(())
    }

    fn check(&self, client: &Client) -> Result<(), Failed> {
        self.check_max(client)?;
        self.check_average(client)
    }
}

/// Sizes of windows, strides and paddings around all plans: cells of one pixel and of four, loops that are unrolled
/// and such as are not.
fn every_window(client: &Client, storage: Storage) -> Result<(), Failed> {
    for kernel in 1..=5 {
        for stride in 1..=3 {
            for padding in [0, kernel / 2] {
                for ceil in [false, true] {
                    let windows = square(kernel, stride, padding, ceil);
                    Case::new([2, 8, 7, 8], windows, storage).check(client)?;
                }
            }
        }
    }
    Ok(())
}

fn every_channels(client: &Client, storage: Storage) -> Result<(), Failed> {
    for channels in [1, 2, 3, 4, 6, 12, 16, 33] {
        for windows in [square(3, 2, 1, false), square(2, 2, 0, false), square(3, 3, 1, true)] {
            Case::new([3, 9, 8, channels], windows, storage).check(client)?;
        }
    }
    // What the machine code is checked for, of fewer images.
    for [_, height, width, channels] in variants::SIZES {
        for PoolWindow { kernel, stride, padding, dilation } in variants::windows() {
            let windows = Reference::Walking { kernel, stride, padding, dilation, ceil: false };
            Case::new([1, height, width, channels], windows, storage).check(client)?;
        }
    }
    Ok(())
}

fn adaptive(client: &Client, storage: Storage) -> Result<(), Failed> {
    // Parts that divide the image, that overlap, that are pixels, and more parts than pixels.
    for parts in [[1, 1], [2, 3], [4, 1], [3, 5], [1, 4], [8, 6], [11, 7]] {
        for channels in [1, 3, 8] {
            let sizes = [2, 8, 6, channels];
            Case::new(sizes, Reference::Adaptive(parts), storage).check_average(client)?;
        }
    }
    Ok(())
}

fn whole_images(client: &Client, storage: Storage) -> Result<(), Failed> {
    for sizes in [[3, 7, 7, 64], [1, 7, 7, 5], [2, 40, 50, 8], [5, 40, 50, 1], [2, 1, 1, 4]] {
        let [_, height, width, _] = sizes;
        let walking = Reference::Walking {
            kernel: [height, width],
            stride: [1; 2],
            padding: [0; 2],
            dilation: [1; 2],
            ceil: false,
        };
        for windows in [Reference::Adaptive([1, 1]), walking] {
            for gaps in [[0, 0], [8, 4]] {
                Case { gaps, ..Case::new(sizes, windows, storage) }.check_average(client)?;
            }
        }
    }
    Ok(())
}

fn uneven(client: &Client) -> Result<(), Failed> {
    for (kernel, stride, padding) in [
        ([1, 3], [1, 2], [0, 1]),
        ([5, 2], [3, 1], [2, 0]),
        ([2, 4], [2, 5], [1, 1]),
        ([3, 1], [2, 1], [0, 0]),
    ] {
        let windows = Reference::Walking { kernel, stride, padding, dilation: [1; 2], ceil: false };
        for sizes in [[2, 7, 11, 4], [1, 11, 7, 3]] {
            Case::new(sizes, windows, F32).check(client)?;
        }
    }
    Ok(())
}

fn dilated(client: &Client) -> Result<(), Failed> {
    for (kernel, stride, padding, dilation) in [
        ([3, 3], [1, 1], [2, 2], [2, 2]),
        ([3, 3], [2, 2], [1, 1], [2, 2]),
        ([2, 3], [3, 1], [0, 1], [3, 1]),
        ([5, 5], [2, 3], [2, 2], [2, 1]),
    ] {
        for ceil in [false, true] {
            let windows = Reference::Walking { kernel, stride, padding, dilation, ceil };
            Case::new([2, 11, 12, 4], windows, F32).check_max(client)?;
        }
    }
    Ok(())
}

fn small_images(client: &Client) -> Result<(), Failed> {
    for [height, width] in [[1, 1], [2, 1], [1, 3], [3, 3]] {
        for (kernel, stride, padding) in [(5, 1, 2), (5, 2, 4), (3, 2, 1), (4, 3, 3)] {
            for ceil in [false, true] {
                let windows = square(kernel, stride, padding, ceil);
                let case = Case::new([1, height, width, 4], windows, F32);
                if !case.pool.output().contains(&0) {
                    case.check(client)?;
                }
            }
        }
    }
    Ok(())
}

fn between_pixels(client: &Client) -> Result<(), Failed> {
    let windows = Reference::Walking {
        kernel: [2; 2],
        stride: [1; 2],
        padding: [1; 2],
        dilation: [2; 2],
        ceil: false,
    };
    let case = Case::new([2, 1, 1, 4], windows, F32);
    let results = case.run_max(client, &case.x(), &case.dy())?;
    let is_right = results.y.iter().all(|y| *y == f64::NEG_INFINITY)
        && results.indices.iter().all(|index| *index == -1)
        && results.dx.iter().all(|dx| *dx == 0.0);
    if is_right { Ok(()) } else { Err(format!("{results:?}").into()) }
}

fn ties(client: &Client) -> Result<(), Failed> {
    for windows in [square(3, 2, 1, false), square(5, 1, 2, false), square(2, 3, 0, true)] {
        let case = Case::new([2, 9, 8, 8], windows, F32);
        let coarse: Vec<f64> = case.x().into_iter().map(f64::round).collect();
        case.check_max_of(client, &coarse)?;
        case.check_max_of(client, &vec![1.5; coarse.len()])?;
    }
    Ok(())
}

fn specials(client: &Client) -> Result<(), Failed> {
    let ends = [f64::NAN, f64::NEG_INFINITY, f64::INFINITY, f64::from(f32::MIN)];
    for storage in [F32, Storage::F16] {
        let windows = [square(3, 2, 1, false), square(5, 1, 2, false), square(2, 2, 0, false)];
        for windows in windows {
            let case = Case::new([2, 9, 8, 4], windows, storage);
            let mut x = case.x();
            for (i, x) in x.iter_mut().enumerate() {
                if i % 3 == 0 {
                    *x = storage.round(ends[i / 3 % 4]);
                }
            }
            case.check_max_of(client, &x)?;
            for whole in ends {
                case.check_max_of(client, &vec![storage.round(whole); x.len()])?;
            }
        }
    }
    Ok(())
}

fn gaps(client: &Client) -> Result<(), Failed> {
    // Such as vectors fit, and such as they do not; for both tensors, and for one.
    for gaps in [[4, 12], [3, 8], [8, 5], [0, 4], [4, 0]] {
        for windows in [square(3, 2, 1, false), square(4, 3, 0, false)] {
            Case { gaps, ..Case::new([2, 7, 9, 8], windows, F32) }.check(client)?;
        }
        let parts = Reference::Adaptive([3, 2]);
        Case { gaps, ..Case::new([2, 7, 9, 8], parts, F32) }.check_average(client)?;
    }
    Ok(())
}

/// The negative control: a result that is a little off, or lacks a window, must not pass.
fn faults(client: &Client) -> Result<(), Failed> {
    type Fault = fn(&mut MaxResults, usize);
    let case = Case::new([2, 9, 8, 8], square(3, 2, 1, false), F32);
    let (x, dy) = (case.x(), case.dy());
    let right = case.run_max(client, &x, &dy)?;
    case.judge_max(&x, &dy, &right)?;
    let is_caught = |what: &str, judged: Result<(), String>| match judged {
        Err(_) => Ok(()),
        Ok(()) => Err(Failed::from(format!("{what}: a fault went unseen"))),
    };
    let named = case.pool.max_backward(&dy, &right.indices).values;
    let named = named.iter().rposition(|dx| *dx != 0.0).ok_or("no pixel is named")?;
    let by_max: [(&str, Fault); 4] = [
        ("y", |results, _| results.y[3] *= 1.0001),
        ("y alone", |results, _| results.alone[3] *= 1.0001),
        ("an index", |results, _| results.indices[5] += 1),
        ("a window's gradient", |results, named| results.dx[named] = 0.0),
    ];
    for (what, fault) in by_max {
        let mut results = right.clone();
        fault(&mut results, named);
        is_caught(what, case.judge_max(&x, &dy, &results))?;
    }
    let right = case.run_average(client, false)?;
    case.judge_average(&right, false)?;
    // At the borders the counts differ.
    is_caught("means over the padding", case.judge_average(&right, true))?;
    for which in [0, 1] {
        let mut results = right.clone();
        results[which][7] *= 1.0001;
        is_caught("a mean", case.judge_average(&results, false))?;
    }
    Ok(())
}

fn repeats(client: &Client) -> Result<(), Failed> {
    let case = Case::new([4, 33, 31, 8], square(3, 1, 1, false), F32);
    let first = (case.run_max(client, &case.x(), &case.dy())?, case.run_average(client, true)?);
    for _ in 0..3 {
        let again = (case.run_max(client, &case.x(), &case.dy())?, case.run_average(client, true)?);
        if again != first {
            return Err("two runs on the same input differ".into());
        }
    }
    Ok(())
}
