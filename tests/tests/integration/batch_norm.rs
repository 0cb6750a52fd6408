//! Batch normalization of channels and its gradients on the device, against f64.

#[path = "batch_norm_arguments.rs"]
mod arguments;

use blackburn_kernels::{
    KernelError,
    batch_norm::{
        BatchNormBlueprint, BatchNormGradients, BatchNormInputs, BatchNormPass, BatchNormProblem,
        BatchNormSaved, RunningStatistics, Statistics, batch_norm_apply, batch_norm_backward,
        batch_norm_running, batch_norm_statistics, variants::CHANNELS,
    },
    buffer::Buffer,
};
use blackburn_reference::{
    batch_norm::{Arithmetic, BatchNorm, Saved, Statistics as Moments, Sums},
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

/// (rows, channels) beside those whose machine code is checked: one element; one row; odd channels, which take
/// scalar loads; around lanes and around what a cube has on its way; rows that many splits share.
const SHAPES: [(usize, usize); 14] = [
    (1, 1),
    (1, 24),
    (2, 3),
    (5, 1),
    (31, 8),
    (32, 16),
    (33, 20),
    (127, 7),
    (257, 64),
    (1025, 33),
    (4, 1000),
    (3136, 24),
    (20_011, 8),
    (70_001, 1),
];

const EPSILON: f64 = 1e-5;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let trial = |what: &str, test: fn(&Client, Storage) -> Result<(), Failed>| {
            let name = format!("batch_norm::{what}_in_{storage:?}").to_lowercase();
            Trial::ignorable_test(name, move || {
                on_device_with(dtype(storage), |client| test(client, storage))
            })
        };
        trials.extend([
            trial("every_shape_is_within_bounds", every_shape),
            trial("every_combination_is_within_bounds", every_combination),
            trial("running_statistics_are_within_bounds", running),
        ]);
    }
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("batch_norm::{name}"), move || on_device(test))
    };
    trials.extend([
        trial("a_large_mean_loses_no_digits", large_mean),
        trial("a_first_value_far_from_the_others_does_no_harm", far_first_value),
        trial("one_row_has_no_variance", one_row),
        trial("constant_channels_have_no_variance", constant),
        trial("padded_rows_are_stepped_over", padded),
        trial("planted_faults_are_caught", faults),
        trial("a_nan_stays_in_its_channel", nan),
        trial("relu_passes_nan_and_its_gradient", relu_of_nan),
        trial("repeated_runs_give_the_same_bits", repeats),
    ]);
    trials.extend(arguments::trials());
    trials
}

/// A problem with its numbers' seed.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    channels: usize,
    /// Elements between the rows of x, and between those of dy.
    padding: [usize; 2],
    storage: Storage,
    parameter: Storage,
    /// What backward reads of mean and variance, and forward too.
    statistics: Storage,
    residual: bool,
    relu: bool,
    /// Is added to x.
    offset: f64,
}

/// Its numbers, here; rows without padding.
struct Numbers {
    x: Vec<f64>,
    residual: Vec<f64>,
    gamma: Vec<f64>,
    beta: Vec<f64>,
    dy: Vec<f64>,
}

/// What the device made of it, here.
#[derive(Clone, Debug, PartialEq)]
struct Results {
    moments: Moments,
    /// As the later passes read them.
    read: Moments,
    y: Vec<f64>,
    dx: Vec<f64>,
    dgamma: Vec<f64>,
    dbeta: Vec<f64>,
    dresidual: Option<Vec<f64>>,
}

impl Case {
    fn plain(storage: Storage) -> Self {
        Self {
            rows: 300,
            channels: 24,
            padding: [0; 2],
            storage,
            parameter: storage,
            statistics: Storage::F32,
            residual: false,
            relu: false,
            offset: 0.0,
        }
    }

    fn numbers(&self) -> Numbers {
        let Self { rows, channels, storage, parameter, .. } = *self;
        let rows_of = |seed| normal(seed, rows * channels, 1.0, storage);
        Numbers {
            x: rows_of(1).into_iter().map(|x| storage.round(x + self.offset)).collect(),
            residual: rows_of(2),
            gamma: normal(3, channels, 1.0, parameter),
            beta: normal(4, channels, 1.0, parameter),
            dy: rows_of(5),
        }
    }

    fn problem(&self) -> BatchNormProblem {
        let Self { rows, channels, padding, storage, parameter, .. } = *self;
        let [row_stride, dy_stride] = padding.map(|padding| channels + padding);
        let contiguous =
            BatchNormProblem::contiguous(rows, channels, dtype(storage), dtype(parameter), EPSILON);
        BatchNormProblem { row_stride, dy_stride, ..contiguous }
    }

    fn op<'a>(&self, numbers: &'a Numbers) -> BatchNorm<'a> {
        let Numbers { gamma, beta, .. } = numbers;
        BatchNorm { gamma, beta, epsilon: EPSILON, relu: self.relu }
    }

    fn sums(&self, client: &Client, pass: BatchNormPass) -> Sums {
        let plan = BatchNormBlueprint::plan(&self.problem(), pass, client);
        Sums { additions: plan.unit_rows(), merges: plan.merges(client) }
    }

    /// Rows with NaN between them, which would show.
    fn upload_rows(&self, client: &Client, values: &[f64], padding: usize) -> Buffer {
        let gap = vec![f64::NAN; padding];
        let padded: Vec<f64> =
            values.chunks(self.channels).flat_map(|row| [row, &gap]).flatten().copied().collect();
        upload(client, &padded, self.storage)
    }

    fn inputs(&self, client: &Client, numbers: &Numbers) -> Result<BatchNormInputs, KernelError> {
        let x = self.upload_rows(client, &numbers.x, self.padding[0]);
        Ok(BatchNormInputs {
            statistics: batch_norm_statistics(client, &self.problem(), &x)?,
            x,
            gamma: upload(client, &numbers.gamma, self.parameter),
            beta: upload(client, &numbers.beta, self.parameter),
            residual: self.residual.then(|| upload(client, &numbers.residual, self.storage)),
            relu: self.relu,
        })
    }

    fn run(&self, client: &Client, numbers: &Numbers) -> Result<Results, Failed> {
        let problem = self.problem();
        let mut inputs = self.inputs(client, numbers)?;
        let Statistics { mean, variance } = inputs.statistics.clone();
        let of = |buffer| download(client, buffer, Storage::F32);
        let moments = Moments { mean: of(mean)?, variance: of(variance)? };
        let rounded = |values: &[f64]| -> Vec<f64> {
            values.iter().map(|value| self.statistics.round(*value)).collect()
        };
        let read = Moments { mean: rounded(&moments.mean), variance: rounded(&moments.variance) };
        inputs.statistics = Statistics {
            mean: upload(client, &read.mean, self.statistics),
            variance: upload(client, &read.variance, self.statistics),
        };
        let y = batch_norm_apply(client, &problem, &inputs)?;
        let BatchNormInputs { x, statistics, gamma, .. } = inputs;
        let saved = BatchNormSaved { x, statistics, gamma, y: self.relu.then(|| y.clone()) };
        let dy = self.upload_rows(client, &numbers.dy, self.padding[1]);
        let BatchNormGradients { dx, dgamma, dbeta, dresidual } =
            batch_norm_backward(client, &problem, &saved, &dy, self.residual)?;
        let rows = |buffer| download(client, buffer, self.storage);
        let parameter = |buffer| download(client, buffer, self.parameter);
        Ok(Results {
            moments,
            read,
            y: rows(y)?,
            dx: rows(dx)?,
            dgamma: parameter(dgamma)?,
            dbeta: parameter(dbeta)?,
            dresidual: dresidual.map(rows).transpose()?,
        })
    }

    fn check(&self, client: &Client) -> Result<(), Failed> {
        self.check_with(client, &self.numbers())
    }

    fn check_with(&self, client: &Client, numbers: &Numbers) -> Result<(), Failed> {
        let results = self.run(client, numbers)?;
        self.compare(client, numbers, &results).map_err(|error| format!("{self:?}: {error}").into())
    }

    /// Each pass is judged by what it read, so that no pass's errors hide those of another. f32 statistics are
    /// also judged with all that follows them.
    fn compare(&self, client: &Client, numbers: &Numbers, results: &Results) -> Result<(), String> {
        let Numbers { x, residual, dy, .. } = numbers;
        let bounds =
            Moments::bounds(x, self.channels, self.sums(client, BatchNormPass::Statistics));
        let exact = Moments::of(x, self.channels);
        let held = |name: &str, actual: &[f64], expected: &[f64], bounds: &[f64]| {
            compare(actual, expected, bounds).map(drop).map_err(|error| format!("{name}: {error}"))
        };
        held("mean", &results.moments.mean, &exact.mean, &bounds.mean)?;
        held("variance", &results.moments.variance, &exact.variance, &bounds.variance)?;

        let op = self.op(numbers);
        let residual = self.residual.then_some(&residual[..]);
        let none = Moments::exact(self.channels);
        let mut given = vec![(&results.read, &none)];
        if self.statistics == Storage::F32 {
            given.push((&exact, &bounds));
        }
        let y = self.relu.then_some(&results.y[..]);
        let how = Arithmetic {
            rows: self.storage,
            parameters: self.parameter,
            sums: self.sums(client, BatchNormPass::Sums { relu: self.relu }),
        };
        for (statistics, errors) in given {
            let bounds = op.forward_bounds(x, statistics, errors, residual, self.storage);
            held("y", &results.y, &op.forward(x, statistics, residual), &bounds)?;
            let saved = Saved { x, statistics, y };
            let expected = op.backward(saved, dy);
            let bounds = op.backward_bounds(saved, errors, dy, how);
            held("dx", &results.dx, &expected.dx, &bounds.dx)?;
            held("dgamma", &results.dgamma, &expected.dgamma, &bounds.dgamma)?;
            held("dbeta", &results.dbeta, &expected.dbeta, &bounds.dbeta)?;
        }
        let expected = (self.residual && self.relu).then(|| BatchNorm::gated(dy, y));
        if results.dresidual != expected {
            return Err("dresidual is not what passes ReLU".into());
        }
        Ok(())
    }
}

fn every_shape(client: &Client, storage: Storage) -> Result<(), Failed> {
    let shapes = SHAPES.into_iter().chain(CHANNELS.map(|channels| (70, channels)));
    for (rows, channels) in shapes {
        for tail in [false, true] {
            let case = Case { rows, channels, residual: tail, relu: tail, ..Case::plain(storage) };
            case.check(client)?;
        }
    }
    Ok(())
}

fn every_combination(client: &Client, storage: Storage) -> Result<(), Failed> {
    for residual in [false, true] {
        for relu in [false, true] {
            for parameter in [Storage::F32, storage] {
                for statistics in [Storage::F32, storage] {
                    let of = Case { residual, relu, parameter, statistics, ..Case::plain(storage) };
                    of.check(client)?;
                    Case { rows: 70, channels: 35, ..of }.check(client)?;
                }
            }
        }
    }
    Ok(())
}

fn large_mean(client: &Client) -> Result<(), Failed> {
    for (rows, channels) in [(2000, 24), (19, 7)] {
        let case = Case { rows, channels, offset: 1000.0, ..Case::plain(Storage::F32) };
        case.check(client)?;
        // In figures, too: squares less the square of the mean are off by hundredths.
        let numbers = case.numbers();
        let exact = Moments::of(&numbers.x, channels).variance;
        let variances = case.run(client, &numbers)?.moments.variance;
        let off = variances.iter().zip(&exact).map(|(a, e)| (a / e - 1.0).abs());
        let worst = off.fold(0.0, f64::max);
        if worst > 1e-5 {
            return Err(format!("{case:?}: a variance is off by a share of {worst:e}").into());
        }
    }
    Ok(())
}

fn far_first_value(client: &Client) -> Result<(), Failed> {
    let case = Case { rows: 5000, channels: 12, ..Case::plain(Storage::F32) };
    let mut numbers = case.numbers();
    numbers.x[..12].fill(1000.0);
    case.check_with(client, &numbers)
}

/// Two products and a sum in f32, of a factor that is rounded, and one rounding.
fn running(client: &Client, storage: Storage) -> Result<(), Failed> {
    let draw = |seed, storage| normal(seed, 100, 3.0, storage);
    let [before, batch] =
        [[1, 2].map(|seed| draw(seed, storage)), [3, 4].map(|seed| draw(seed, Storage::F32))];
    let [mean, variance] = [0, 1].map(|i| upload(client, &batch[i], Storage::F32));
    let statistics = Statistics { mean, variance };
    let [mean, variance] = [0, 1].map(|i| upload(client, &before[i], storage));
    let running = RunningStatistics { mean, variance, kept: 0.9, new: 0.1 };
    let updated = batch_norm_running(client, &running, &statistics)?;
    for (i, updated) in updated.into_iter().enumerate() {
        let of_channel = |(before, batch): (&f64, &f64)| {
            let (kept, new) = (0.9 * before, 0.1 * batch);
            let roundings = 4.0 * Storage::F32.unit_roundoff() * (kept.abs() + new.abs());
            let value = kept + new;
            (value, roundings + storage.unit_roundoff() * value.abs() + storage.underflow())
        };
        let (expected, bounds): (Vec<f64>, Vec<f64>) =
            before[i].iter().zip(&batch[i]).map(of_channel).unzip();
        compare(&download(client, updated, storage)?, &expected, &bounds)?;
    }
    let short = Statistics {
        mean: statistics.variance.clone(),
        variance: upload(client, &[1.0], Storage::F32),
    };
    match batch_norm_running(client, &running, &short) {
        Err(KernelError::InvalidProblem { argument: "statistics", .. }) => Ok(()),
        other => Err(format!("statistics of one channel gave {other:?}").into()),
    }
}

fn one_row(client: &Client) -> Result<(), Failed> {
    let case = Case { rows: 1, offset: 1000.0, ..Case::plain(Storage::F32) };
    let numbers = case.numbers();
    case.check_with(client, &numbers)?;
    let results = case.run(client, &numbers)?;
    let is_right = results.moments.mean == numbers.x
        && results.moments.variance.iter().all(|variance| *variance == 0.0)
        && results.y == numbers.beta;
    if is_right { Ok(()) } else { Err(format!("one row gave {results:?}").into()) }
}

/// Every distance is zero, so that nothing is rounded.
fn constant(client: &Client) -> Result<(), Failed> {
    let case = Case { rows: 3000, ..Case::plain(Storage::F32) };
    let mut numbers = case.numbers();
    numbers.x.fill(-777.7);
    numbers.x.iter_mut().for_each(|x| *x = Storage::F32.round(*x));
    let Moments { mean, variance } = case.run(client, &numbers)?.moments;
    let is_right =
        mean.iter().all(|m| *m == numbers.x[0]) && variance.iter().all(|variance| *variance == 0.0);
    if is_right { Ok(()) } else { Err(format!("{mean:?} {variance:?}").into()) }
}

fn padded(client: &Client) -> Result<(), Failed> {
    // The paddings differ, and are such as vectors fit and such as they do not.
    for padding in [[4, 12], [3, 8], [8, 5], [0, 4], [4, 0]] {
        let case = Case { padding, residual: true, relu: true, ..Case::plain(Storage::F32) };
        case.check(client)?;
    }
    Ok(())
}

/// The negative control: one result a little off, and a row that the sums leave out, must not pass.
fn faults(client: &Client) -> Result<(), Failed> {
    let case = Case { residual: true, relu: true, ..Case::plain(Storage::F32) };
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
    let passed = right.y.iter().rposition(|y| *y > 0.0).ok_or("nothing passes ReLU")?;
    let stopped = right.y.iter().rposition(|y| *y == 0.0).ok_or("everything passes ReLU")?;
    let (of, grad) = (passed % case.channels, numbers.dy[passed]);
    is_caught("mean", &|results| results.moments.mean[of] += 0.001)?;
    is_caught("variance", &|results| results.moments.variance[of] *= 300.0 / 299.0)?;
    is_caught("y", &|results| results.y[passed] *= 1.001)?;
    is_caught("y without its residual", &|results| {
        results.y[passed] -= numbers.residual[passed];
    })?;
    is_caught("dx", &|results| results.dx[passed] *= 1.001)?;
    // x has a mean of about 0 and a deviation of about 1.
    is_caught("dgamma", &|results| results.dgamma[of] -= grad * numbers.x[passed])?;
    is_caught("dbeta", &|results| results.dbeta[of] -= grad)?;
    is_caught("dresidual", &|results| {
        if let Some(dresidual) = &mut results.dresidual {
            dresidual[stopped] = numbers.dy[stopped];
        }
    })?;
    // Rows of the device are fewer than those of the reference.
    let fewer = Case { rows: case.rows - 1, ..case };
    let moments = fewer.run(client, &fewer.numbers())?.moments;
    is_caught("a missing row", &|results| results.moments = moments.clone())
}

fn nan(client: &Client) -> Result<(), Failed> {
    let spoiled = 5;
    for special in [f64::NAN, f64::INFINITY] {
        let case = Case { rows: 1000, residual: true, relu: true, ..Case::plain(Storage::F32) };
        let mut numbers = case.numbers();
        numbers.x[777 * case.channels + spoiled] = special;
        let results = case.run(client, &numbers)?;
        for (what, values) in [
            ("variance", &results.moments.variance),
            ("y", &results.y),
            ("dx", &results.dx),
            ("dgamma", &results.dgamma),
        ] {
            for (i, value) in values.iter().enumerate() {
                let channel = i % case.channels;
                let is_right = if channel == spoiled { value.is_nan() } else { value.is_finite() };
                if !is_right {
                    let place = format!("{what} of channel {channel}");
                    return Err(format!("{special} in channel {spoiled}: {place}: {value}").into());
                }
            }
        }
    }
    Ok(())
}

/// A NaN that comes by the residual alone: y keeps it, and dy passes there, as Burn's `ReLU` has it.
fn relu_of_nan(client: &Client) -> Result<(), Failed> {
    let case = Case { residual: true, relu: true, ..Case::plain(Storage::F32) };
    let mut numbers = case.numbers();
    let spoiled = 100;
    numbers.residual[spoiled] = f64::NAN;
    case.check_with(client, &numbers)?;
    let results = case.run(client, &numbers)?;
    let found: Vec<usize> = (0..results.y.len()).filter(|at| results.y[*at].is_nan()).collect();
    let gradient = results.dresidual.ok_or("no gradient of the residual")?[spoiled];
    if found == [spoiled] && gradient == numbers.dy[spoiled] && gradient != 0.0 {
        return Ok(());
    }
    Err(format!("NaN at {found:?}, gradient {gradient} of {}", numbers.dy[spoiled]).into())
}

fn repeats(client: &Client) -> Result<(), Failed> {
    let case = Case { rows: 20_011, relu: true, residual: true, ..Case::plain(Storage::F32) };
    if BatchNormBlueprint::plan(&case.problem(), BatchNormPass::Statistics, client).splits < 2 {
        return Err("the shape does not split, so this shows nothing".into());
    }
    let numbers = case.numbers();
    let first = case.run(client, &numbers)?;
    for _ in 0..3 {
        if case.run(client, &numbers)? != first {
            return Err("two runs on the same input differ".into());
        }
    }
    Ok(())
}
