//! Normalization of groups of channels and its gradients on the device, against f64.

#[path = "group_norm_arguments.rs"]
mod arguments;
#[path = "group_norm_numbers.rs"]
mod numbers;

use blackburn_kernels::{
    buffer::Buffer,
    group_norm::{
        Affine, Form, GroupNormBlueprint, GroupNormGradients, GroupNormInputs, GroupNormOutput,
        GroupNormParts, GroupNormPass, GroupNormProblem, GroupNormSaved, Order,
        group_norm_backward, group_norm_forward, group_norm_forward_with_parts, variants::SHAPES,
    },
};
use blackburn_reference::{
    group_norm::{Arithmetic, Gradients, GroupNorm, Statistics, Sums},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    buffers::{download, dtype, upload},
    on_device, on_device_with,
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;

/// ([samples, channels, pixels], groups): one element; images of one pixel; odd channels and pixels, which take
/// scalar loads; one group; groups of one channel; groups that a vector straddles; around lanes and around what a
/// cube has on its way; rows that many splits share.
const IMAGES: [([usize; 3], usize); 16] = [
    ([1, 1, 1], 1),
    ([3, 8, 1], 2),
    ([2, 3, 1], 1),
    ([2, 3, 2], 3),
    ([1, 6, 5], 2),
    ([2, 6, 4], 6),
    ([3, 24, 31], 8),
    ([2, 24, 32], 1),
    ([2, 20, 33], 4),
    ([1, 33, 65], 11),
    ([2, 7, 127], 7),
    ([1, 264, 8], 33),
    ([2, 320, 12], 32),
    ([1, 8, 5000], 2),
    ([2, 4, 3600], 1),
    ([1, 1, 20_011], 1),
];

const ORDERS: [Order; 2] = [Order::ChannelsLast, Order::PixelsLast];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let trial = |what: &str, test: fn(&Client, Storage) -> Result<(), Failed>| {
            let name = format!("group_norm::{what}_in_{storage:?}").to_lowercase();
            Trial::ignorable_test(name, move || {
                on_device_with(dtype(storage), |client| test(client, storage))
            })
        };
        trials.extend([
            trial("every_shape_is_within_bounds", every_shape),
            trial("every_combination_is_within_bounds", every_combination),
        ]);
    }
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("group_norm::{name}"), move || on_device(test))
    };
    trials.extend([
        trial("padded_pixels_are_stepped_over", padded),
        trial("planted_faults_are_caught", faults),
    ]);
    trials.extend(arguments::trials());
    trials.extend(numbers::trials());
    trials
}

/// A problem with its numbers' seed.
#[derive(Clone, Copy, Debug)]
struct Case {
    shape: [usize; 3],
    groups: usize,
    order: Order,
    /// Elements between the pixels of x, and between those of dy.
    padding: [usize; 2],
    storage: Storage,
    parameter: Storage,
    affine: bool,
    /// By the steps that Burn keeps, of which backward reads those.
    form: Form,
    /// Is added to x.
    offset: f64,
}

/// Its numbers, here, pixels last.
struct Numbers {
    x: Vec<f64>,
    gamma: Vec<f64>,
    beta: Vec<f64>,
    dy: Vec<f64>,
}

/// What the device made of it, here, pixels last.
#[derive(Clone, Debug, PartialEq)]
struct Results {
    y: Vec<f64>,
    mean: Vec<f64>,
    rstd: Vec<f64>,
    dx: Vec<f64>,
    dgamma: Vec<f64>,
    dbeta: Vec<f64>,
}

impl Case {
    fn plain(storage: Storage) -> Self {
        Self {
            shape: [3, 24, 100],
            groups: 8,
            order: Order::ChannelsLast,
            padding: [0; 2],
            storage,
            parameter: storage,
            affine: true,
            form: Form::Input,
            offset: 0.0,
        }
    }

    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    fn numbers(&self) -> Numbers {
        let Self { shape: [_, channels, _], storage, parameter, .. } = *self;
        let images = |seed| normal(seed, self.elements(), 1.0, storage);
        Numbers {
            x: images(1).into_iter().map(|x| storage.round(x + self.offset)).collect(),
            gamma: normal(3, channels, 1.0, parameter),
            beta: normal(4, channels, 1.0, parameter),
            dy: images(5),
        }
    }

    fn problem(&self) -> GroupNormProblem {
        let Self { shape, groups, order, padding, storage, parameter, .. } = *self;
        let [x_stride, dy_stride] = padding.map(|padding| shape[1] + padding);
        let contiguous = GroupNormProblem::contiguous(shape, groups, order, dtype(storage));
        GroupNormProblem { x_stride, dy_stride, parameter: dtype(parameter), ..contiguous }
    }

    /// Without parameters the reference has such as change nothing.
    fn op<'a>(&self, numbers: &'a Numbers, plain: &'a [Vec<f64>; 2]) -> GroupNorm<'a> {
        let [gamma, beta] =
            if self.affine { [&numbers.gamma, &numbers.beta] } else { [&plain[0], &plain[1]] };
        let pixels = self.shape[2];
        GroupNorm { gamma, beta, groups: self.groups, pixels, epsilon: 1e-5 }
    }

    /// `[samples, channels, pixels]` in the order of memory, without padding.
    fn turn(&self, values: &[f64]) -> Vec<f64> {
        let [_, channels, pixels] = self.shape;
        let from = |i: usize| {
            let (row, c) = (i / channels, i % channels);
            (row / pixels * channels + c) * pixels + row % pixels
        };
        match self.order {
            Order::PixelsLast => values.to_vec(),
            Order::ChannelsLast => (0..values.len()).map(|i| values[from(i)]).collect(),
        }
    }

    /// The reverse.
    fn turn_back(&self, values: &[f64]) -> Vec<f64> {
        let [samples, channels, pixels] = self.shape;
        let turned = Self { shape: [samples, pixels, channels], ..*self };
        turned.turn(values)
    }

    /// With NaN between pixels, which would show.
    fn send(&self, client: &Client, values: &[f64], padding: usize) -> Buffer {
        let gap = vec![f64::NAN; padding];
        let turned = self.turn(values);
        let padded: Vec<f64> =
            turned.chunks(self.shape[1]).flat_map(|row| [row, &gap]).flatten().copied().collect();
        upload(client, &padded, self.storage)
    }

    fn inputs(&self, client: &Client, numbers: &Numbers) -> GroupNormInputs {
        let parameter = |values: &[f64]| upload(client, values, self.parameter);
        let affine = self
            .affine
            .then(|| Affine { gamma: parameter(&numbers.gamma), beta: parameter(&numbers.beta) });
        GroupNormInputs { x: self.send(client, &numbers.x, self.padding[0]), affine }
    }

    fn run(&self, client: &Client, numbers: &Numbers) -> Result<Results, Failed> {
        let problem = self.problem();
        let inputs = self.inputs(client, numbers);
        let GroupNormOutput { y, mean, rstd } = group_norm_forward(client, &problem, &inputs)?;
        let statistic = |buffer: &Buffer| download(client, buffer.clone(), F32);
        let images = |buffer| -> Result<Vec<f64>, Failed> {
            Ok(self.turn_back(&download(client, buffer, self.storage)?))
        };
        let gamma = inputs.affine.as_ref().map(|affine| affine.gamma.clone());
        let x = inputs.x.clone();
        let mut results = Results {
            y: images(y)?,
            mean: statistic(&mean)?,
            rstd: statistic(&rstd)?,
            dx: Vec::new(),
            dgamma: Vec::new(),
            dbeta: Vec::new(),
        };
        let form = self.form;
        let mut backward = problem;
        let mut saved = GroupNormSaved { x, form, mean: Some(mean), rstd, gamma };
        let mut dy = self.send(client, &numbers.dy, self.padding[1]);
        if form != Form::Input {
            let (y, parts) = group_norm_forward_with_parts(client, &problem, &inputs)?;
            results.y = images(y)?;
            let GroupNormParts { centered, normalized, variance, deviation } = parts;
            let kept = |buffer| download(client, buffer, self.storage);
            self.compare_parts(numbers, &kept(centered.clone())?, &kept(variance)?)?;
            // Deviations are read in f32.
            let deviation = upload(client, &kept(deviation)?, F32);
            backward = GroupNormProblem { x_stride: self.shape[1], ..problem };
            let x = if form == Form::Normalized {
                normalized
            } else {
                // That one has its pixels last.
                backward = GroupNormProblem {
                    order: Order::PixelsLast,
                    dy_stride: self.shape[1],
                    ..backward
                };
                dy = upload(client, &numbers.dy, self.storage);
                centered
            };
            saved = GroupNormSaved { x, mean: None, rstd: deviation, ..saved };
        }
        let made = group_norm_backward(client, &backward, &saved, &dy, true)?;
        let GroupNormGradients { dx, parameters } = made;
        let [dgamma, dbeta] = parameters.ok_or("no gradients of the parameters")?;
        let dx = download(client, dx, self.storage)?;
        results.dx = if form == Form::Centered { dx } else { self.turn_back(&dx) };
        results.dgamma = download(client, dgamma, self.parameter)?;
        results.dbeta = download(client, dbeta, self.parameter)?;
        Ok(results)
    }

    /// What Burn keeps, against its formula: a figure would hide in gradients of other channels.
    fn compare_parts(
        &self,
        numbers: &Numbers,
        centered: &[f64],
        variance: &[f64],
    ) -> Result<(), Failed> {
        let plain = self.without_parameters();
        let op = self.op(numbers, &plain);
        let exact = op.statistics(&numbers.x);
        let u = 2.0 * self.storage.unit_roundoff() + 1e-5;
        let of_group = numbers.x.len() / exact.mean.len();
        let distances: Vec<f64> =
            numbers.x.iter().enumerate().map(|(i, x)| x - exact.mean[i / of_group]).collect();
        let near = |values: &[f64]| -> Vec<f64> {
            values.iter().map(|value| u * value.abs() + 1e-5 * (1.0 + self.offset)).collect()
        };
        compare(centered, &distances, &near(&distances))?;
        let shifted: Vec<f64> = exact.variance.iter().map(|variance| variance + 1e-5).collect();
        compare(variance, &shifted, &near(&shifted))?;
        Ok(())
    }

    fn without_parameters(&self) -> [Vec<f64>; 2] {
        [1.0, 0.0].map(|value| vec![value; self.shape[1]])
    }

    fn check(&self, client: &Client) -> Result<(), Failed> {
        self.check_with(client, &self.numbers())
    }

    fn check_with(&self, client: &Client, numbers: &Numbers) -> Result<(), Failed> {
        let results = self.run(client, numbers).map_err(|error| {
            Failed::from(format!("{self:?}: {}", error.message().unwrap_or("no message")))
        })?;
        self.compare(client, numbers, &results).map_err(|error| format!("{self:?}: {error}").into())
    }

    fn compare(&self, client: &Client, numbers: &Numbers, results: &Results) -> Result<(), String> {
        let Numbers { x, dy, .. } = numbers;
        let plain = self.without_parameters();
        let op = self.op(numbers, &plain);
        let problem = self.problem();
        let plan = GroupNormBlueprint::plan(&problem, GroupNormPass::Statistics, client);
        let sums = Sums { additions: plan.unit_rows(), merges: plan.moment_merges(&problem) };
        let exact = op.statistics(x);
        let bounds = op.statistics_bounds(x, sums);
        let held = |name: &str, actual: &[f64], expected: &[f64], bounds: &[f64]| {
            compare(actual, expected, bounds).map(drop).map_err(|error| format!("{name}: {error}"))
        };
        held("mean", &results.mean, &exact.mean, &bounds.mean)?;
        let rstd = op.inverse_deviations(&exact);
        held("rstd", &results.rstd, &rstd, &op.inverse_deviation_bounds(&exact, &bounds))?;
        let y_bounds = op.forward_bounds(x, &exact, &bounds, self.storage);
        held("y", &results.y, &op.forward(x, &exact), &y_bounds)?;

        let plan = GroupNormBlueprint::plan(&problem, GroupNormPass::Sums, client);
        let how = Arithmetic {
            samples: self.storage,
            parameters: self.parameter,
            sums: Sums { additions: plan.unit_rows(), merges: plan.sum_merges(&problem) },
            group_merges: GroupNormBlueprint::group_merges(&problem),
        };
        let errors = self.errors_of_form(&exact, bounds);
        let expected = op.backward(x, &exact, dy);
        let Gradients { dx, dgamma, dbeta } = op.backward_bounds(x, &exact, &errors, dy, how);
        held("dx", &results.dx, &expected.dx, &dx)?;
        held("dgamma", &results.dgamma, &expected.dgamma, &dgamma)?;
        held("dbeta", &results.dbeta, &expected.dbeta, &dbeta)
    }

    /// What Burn keeps is rounded to storage: the deviation, as twice the same share of the variance, and distances,
    /// the largest of which are taken for those of the mean.
    fn errors_of_form(&self, exact: &Statistics, bounds: Statistics) -> Statistics {
        if self.form == Form::Input {
            return bounds;
        }
        let u = self.storage.unit_roundoff();
        let each = exact.variance.iter().zip(&bounds.variance);
        // h is rounded too, and what is normalized of numbers is at most 6 deviations from their mean.
        let variance = each.map(|(exact, bound)| bound + 4.0 * u * (exact + 1e-5)).collect();
        let of_mean = |(mean, variance): (&f64, &f64)| mean + 6.0 * u * (variance + 1e-5).sqrt();
        let mean = bounds.mean.iter().zip(&exact.variance).map(of_mean).collect();
        Statistics { mean, variance }
    }
}

fn every_shape(client: &Client, storage: Storage) -> Result<(), Failed> {
    // Fewer samples than machine code is checked for.
    let others = SHAPES.map(|([_, channels, _], groups)| ([2, channels, 70], groups));
    for (shape, groups) in IMAGES.into_iter().chain(others) {
        for order in ORDERS {
            Case { shape, groups, order, ..Case::plain(storage) }.check(client)?;
        }
    }
    Ok(())
}

fn every_combination(client: &Client, storage: Storage) -> Result<(), Failed> {
    for form in [Form::Input, Form::Centered, Form::Normalized] {
        for order in ORDERS {
            for affine in [false, true] {
                for parameter in [F32, storage] {
                    let of = Case { form, order, affine, parameter, ..Case::plain(storage) };
                    of.check(client)?;
                    Case { shape: [2, 35, 37], groups: 5, ..of }.check(client)?;
                }
            }
        }
    }
    Ok(())
}

fn padded(client: &Client) -> Result<(), Failed> {
    // The paddings differ, and are such as vectors fit and such as they do not.
    for padding in [[4, 12], [3, 8], [8, 5], [0, 4], [4, 0]] {
        Case { padding, ..Case::plain(F32) }.check(client)?;
        Case { padding, shape: [1, 24, 1], ..Case::plain(F32) }.check(client)?;
    }
    Ok(())
}

/// The negative control: one result a little off, and a pixel that the statistics leave out, must not pass.
fn faults(client: &Client) -> Result<(), Failed> {
    let case = Case::plain(F32);
    let numbers = case.numbers();
    let right = case.run(client, &numbers)?;
    case.compare(client, &numbers, &right)?;
    let is_caught = |what: &str, fault: &dyn Fn(&mut Results)| {
        let mut results = right.clone();
        fault(&mut results);
        match case.compare(client, &numbers, &results) {
            Err(_) => Ok(()),
            Ok(()) => Err(Failed::from(format!("{what}: a fault went unseen"))),
        }
    };
    let at = 1234;
    let group = at / 300;
    is_caught("mean", &|results| results.mean[group] += 0.001)?;
    is_caught("rstd", &|results| results.rstd[group] *= (299.0f64 / 300.0).sqrt())?;
    is_caught("y", &|results| results.y[at] += 0.001)?;
    is_caught("dx", &|results| results.dx[at] += 0.001)?;
    // A term that counts: x has a mean of about 0 and a deviation of about 1.
    let size = |i: &usize| (numbers.dy[*i] * numbers.x[*i]).abs();
    let largest = (0..numbers.x.len()).max_by(|a, b| size(a).total_cmp(&size(b)));
    let term = largest.ok_or("no numbers")?;
    let channel = term / 100 % 24;
    is_caught("dgamma", &|results| {
        results.dgamma[channel] -= numbers.dy[term] * numbers.x[term];
    })?;
    is_caught("dbeta", &|results| results.dbeta[channel] -= numbers.dy[term])?;
    // Groups of another size have another mean.
    let others = Case { groups: 4, ..case }.run(client, &numbers)?;
    is_caught("other groups", &|results| results.y.clone_from(&others.y))?;
    is_caught("gradients of other groups", &|results| results.dx.clone_from(&others.dx))
}
