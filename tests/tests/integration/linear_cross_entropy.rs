//! A linear layer with its loss in chunks of rows, against the formulas in f64, on the device and on the CPU.

use crate::resources::alone_on_cuda;
use blackburn::{nn::loss, train::memory::MemoryMonitor};
use blackburn_reference::{
    activation::Activation,
    column_sum::column_sum,
    cross_entropy::{Steps, log_sum_exp, lse_bound},
    linear::Linear as ReferenceLayer,
    matmul::{MatmulCase, MatmulPrecision, magnitudes},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    on_burn_device,
    tensors::{float, tensor, values},
};
use burn::{
    module::Param,
    nn::{
        Linear,
        loss::{CrossEntropyLoss, CrossEntropyLossConfig},
    },
    prelude::*,
};
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;
const WIDTH: usize = 24;
const CLASSES: usize = 33;

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |name: &str, test: fn(&Device) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("linear_cross_entropy::{name}"), move || {
            on_burn_device(|device| {
                test(&Device::flex()).map_err(|error| on("the CPU", &error))?;
                Ok(test(&device).map_err(|error| on("the device", &error))?)
            })
        })
    };
    vec![
        trial("every_chunk_size_gives_the_loss_and_gradients_of_the_whole", chunks),
        trial("every_kind_of_loss_gives_the_loss_and_gradients_of_the_whole", kinds),
        trial("narrow_types_are_within_their_roundings", types),
        trial("a_gradient_that_comes_in_multiplies_all", scaled),
        trial("zeros_and_rows_that_are_left_out_are_caught", planted_faults),
        trial("bad_arguments_are_named", arguments),
        alone_on_cuda("linear_cross_entropy::the_logits_are_never_there_at_once", memory),
    ]
}

fn on(device: &str, error: &Failed) -> String {
    format!("on {device}: {}", error.message().unwrap_or(""))
}

/// What the loss is told, as its module is.
#[derive(Clone, Debug, Default)]
struct Kind {
    pads: Vec<usize>,
    smoothing: f32,
    weights: Option<Vec<f32>>,
}

impl Kind {
    fn module(&self, device: &Device) -> CrossEntropyLoss {
        CrossEntropyLossConfig::new()
            .with_pad_tokens((!self.pads.is_empty()).then(|| self.pads.clone()))
            .with_smoothing((self.smoothing != 0.0).then_some(self.smoothing))
            .with_weights(self.weights.clone())
            .init(device)
    }

    /// By what the logarithm of each probability is multiplied in the loss, less the sign.
    fn shares(&self, targets: &[i32]) -> Vec<f64> {
        let weight =
            |class: usize| self.weights.as_ref().map_or(1.0, |weights| f64::from(weights[class]));
        let smoothing = f64::from(self.smoothing);
        let counted = |target: usize| !self.pads.contains(&target);
        let targets: Vec<usize> = targets.iter().map(|target| *target as usize).collect();
        let total: f64 = targets.iter().filter(|t| counted(**t)).map(|t| weight(*t)).sum();
        let share = |target: usize, class: usize| {
            let at_target = if class == target { 1.0 - smoothing } else { 0.0 };
            let share = weight(class) * (at_target + smoothing / CLASSES as f64) / total;
            if counted(target) { share } else { 0.0 }
        };
        targets.iter().flat_map(|t| (0..CLASSES).map(move |class| share(*t, class))).collect()
    }
}

/// Rows with a layer and targets.
struct Case {
    rows: usize,
    storage: Storage,
    kind: Kind,
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Option<Vec<f64>>,
    targets: Vec<i32>,
}

/// Loss, and gradients of x, weight and bias.
type Results = [Vec<f64>; 4];

const NAMES: [&str; 4] = ["loss", "dx", "dweight", "dbias"];

impl Case {
    fn new(rows: usize, bias: bool, storage: Storage) -> Self {
        Self {
            rows,
            storage,
            kind: Kind::default(),
            x: normal(1, rows * WIDTH, 1.0, storage),
            weight: normal(2, WIDTH * CLASSES, 0.5, storage),
            bias: bias.then(|| normal(3, CLASSES, 1.0, storage)),
            targets: (0..rows as i32).map(|row| row * 7 % CLASSES as i32).collect(),
        }
    }

    /// In chunks of so many rows; the loss times `factor` is what is differentiated.
    fn run(&self, device: &Device, chunk_rows: usize, factor: f64) -> Result<Results, Failed> {
        let device = &device.clone().autodiff();
        let module = &self.kind.module(device);
        let leaf = |values: &[f64], shape| {
            tensor::<2>(values, shape, self.storage, device).detach().require_grad()
        };
        let x = leaf(&self.x, [self.rows, WIDTH]);
        let bias = self
            .bias
            .as_ref()
            .map(|bias| tensor::<1>(bias, [CLASSES], self.storage, device).detach().require_grad());
        let linear = Linear {
            weight: Param::from_tensor(leaf(&self.weight, [WIDTH, CLASSES])),
            bias: bias.map(Param::from_tensor),
        };
        let data = TensorData::new(self.targets.clone(), [self.rows]);
        let targets = Tensor::<1, Int>::from_data(data, device);
        let value = loss::linear_cross_entropy_in_chunks(
            module,
            &linear,
            x.clone(),
            targets,
            Some(chunk_rows),
        );
        let gradients = (value.clone() * factor).backward();
        let dbias = match &linear.bias {
            Some(bias) => values(bias.val().grad(&gradients).ok_or("no gradient of bias")?)?,
            None => Vec::new(),
        };
        Ok([
            values(value.inner())?,
            values(x.grad(&gradients).ok_or("no gradient of x")?)?,
            values(linear.weight.val().grad(&gradients).ok_or("no gradient of weight")?)?,
            dbias,
        ])
    }

    /// The layer, to the formulas.
    fn layer(&self) -> ReferenceLayer<'_> {
        ReferenceLayer {
            rows: self.rows,
            inputs: WIDTH,
            outputs: CLASSES,
            x: &self.x,
            weight: &self.weight,
            bias: self.bias.as_deref(),
            activation: Activation::Identity,
        }
    }

    /// What loss and gradients are in f64, and how far off a device may be with each.
    ///
    /// An error of a logit moves its probability by as much relatively, and that of the row's sum all of them.
    /// The gradient of the logits errs by that and by its rounding to storage, which the products of backward
    /// carry into the sums over classes and rows, on top of their own errors. The parts of a chunk are rounded
    /// to storage, and the sum over chunks, times what came in, once more.
    fn expected(&self, factor: f64, device: &Device) -> [(Vec<f64>, Vec<f64>); 4] {
        let Self { rows, storage, .. } = *self;
        let (u, stored) = (F32.unit_roundoff(), storage.unit_roundoff());
        let product = precision(storage, device);
        let layer = self.layer();
        let z = layer.forward().z;
        let of_z =
            product.bounds(&z, &magnitudes(&layer.forward_case(), &self.x, &self.weight), WIDTH);
        // The bias is added to what was rounded already.
        let bias = |class: usize| self.bias.as_ref().map_or(0.0, |bias| bias[class].abs());
        let of_z: Vec<f64> = (0..z.len())
            .map(|i| of_z[i] + stored * (z[i].abs() + of_z[i] + 2.0 * bias(i % CLASSES)))
            .collect();

        let shares = self.kind.shares(&self.targets);
        let steps = Steps { additions: CLASSES + 8, rescales: CLASSES + 8 };
        // Until the backward pass, gradients are those of a loss multiplied by it.
        let scale = rows.next_power_of_two().min(1024) as f64;
        let (mut loss, mut of_loss, mut losses) = (0.0, 0.0, 0.0);
        let (mut dz, mut of_dz) = (Vec::new(), Vec::new());
        for ((z, of_z), shares) in
            z.chunks(CLASSES).zip(of_z.chunks(CLASSES)).zip(shares.chunks(CLASSES))
        {
            let lse = log_sum_exp(z);
            let moved: f64 = z.iter().zip(of_z).map(|(z, of_z)| (z - lse + of_z).exp()).sum();
            let of_lse = moved.ln() + lse_bound(z, steps);
            let total: f64 = shares.iter().sum();
            for ((z, of_z), share) in z.iter().zip(of_z).zip(shares) {
                let logarithm = z - lse;
                loss -= share * logarithm;
                losses += share * logarithm.abs();
                of_loss += share * (of_z + of_lse + 3.0 * u * (z.abs() + lse.abs()));
                // The exponent is rounded, and its exponential is off by 3 + 2 |x| units in the last place.
                let of_exponent = of_z + of_lse + u * (6.0 + 7.0 * logarithm.abs());
                let probability = total * logarithm.exp();
                // A row's share is a quotient of as many additions.
                let rounded = (rows as f64 + 16.0) * u * (probability + share);
                let gradient = probability - share;
                let error = probability * of_exponent.exp_m1() + rounded;
                dz.push(gradient);
                of_dz.push(error + stored * (gradient.abs() + error) + storage.underflow() / scale);
            }
        }
        of_loss += (rows as f64 + 16.0) * u * (losses + of_loss);

        let gradients = layer.backward(&z, &dz);
        let largest: Vec<f64> = dz.iter().zip(&of_dz).map(|(dz, bound)| dz.abs() + bound).collect();
        let (dgrad, wgrad) = (layer.dgrad_case(), layer.wgrad_case());
        // Parts of a chunk are rounded to storage, so what they round is at most all magnitudes.
        let bounds = |values: &[f64], case: &MatmulCase, moved: Vec<f64>, magnitudes: Vec<f64>| {
            let own = |((value, moved), magnitude): ((&f64, f64), f64)| {
                let own = product.bound(magnitude, magnitude, case.k);
                let error = moved + own;
                error + (stored + 2.0 * u) * (value.abs() + error) + storage.underflow()
            };
            values.iter().zip(moved).zip(magnitudes).map(own).collect::<Vec<f64>>()
        };
        let of_dx = bounds(
            &gradients.dx,
            &dgrad,
            magnitudes(&dgrad, &of_dz, &self.weight),
            magnitudes(&dgrad, &largest, &self.weight),
        );
        let of_dw = bounds(
            &gradients.dw,
            &wgrad,
            magnitudes(&wgrad, &self.x, &of_dz),
            magnitudes(&wgrad, &self.x, &largest),
        );
        let moved = column_sum(&of_dz, 1, rows, CLASSES);
        let magnitude = column_sum(&largest, 1, rows, CLASSES);
        let of_db =
            gradients.db.iter().zip(moved.iter().zip(magnitude)).map(|(db, (moved, magnitude))| {
                let error = moved + rows as f64 * u * magnitude;
                error + (stored + 2.0 * u) * (db.abs() + error) + storage.underflow()
            });
        let of_db = if self.bias.is_some() { of_db.collect() } else { Vec::new() };
        let db = if self.bias.is_some() { gradients.db.clone() } else { Vec::new() };
        let scaled = |(values, bounds): (Vec<f64>, Vec<f64>)| {
            let times = |values: Vec<f64>, factor: f64| -> Vec<f64> {
                values.iter().map(|x| x * factor).collect()
            };
            (times(values, factor), times(bounds, factor.abs()))
        };
        [
            (vec![loss], vec![of_loss]),
            scaled((gradients.dx.clone(), of_dx)),
            scaled((gradients.dw.clone(), of_dw)),
            scaled((db, of_db)),
        ]
    }

    /// Whether all of `actual` is within bounds.
    fn check(&self, factor: f64, device: &Device, actual: &Results) -> Result<(), Failed> {
        let expected = self.expected(factor, device);
        for ((name, actual), (expected, bounds)) in NAMES.iter().zip(actual).zip(&expected) {
            compare(actual, expected, bounds).map_err(|error| format!("{name}: {error}"))?;
        }
        Ok(())
    }

    /// Runs the layer and its loss, and holds them against the formulas.
    fn run_and_check(&self, device: &Device, chunk_rows: usize, factor: f64) -> Result<(), Failed> {
        let results = self.run(device, chunk_rows, factor)?;
        self.check(factor, device, &results)
    }
}

/// What products are computed in.
fn precision(storage: Storage, device: &Device) -> MatmulPrecision {
    let is_asked = std::env::var("BLACKBURN_REQUIRE_DEVICE").is_ok_and(|name| name == "cuda");
    match storage {
        _ if !is_asked || *device == Device::flex() => MatmulPrecision::exact(storage),
        Storage::F32 => MatmulPrecision::tf32(),
        Storage::F16 | Storage::Bf16 => MatmulPrecision::tensor_core(storage),
    }
}

fn plain(device: &Device) -> CrossEntropyLoss {
    Kind::default().module(device)
}

fn chunks(device: &Device) -> Result<(), Failed> {
    for bias in [false, true] {
        let case = Case::new(13, bias, F32);
        for rows in [1, 4, 12, 13, 100] {
            case.run_and_check(device, rows, 1.0)
                .map_err(|error| on(&format!("{rows} rows"), &error))?;
        }
    }
    Ok(())
}

fn kinds(device: &Device) -> Result<(), Failed> {
    let weights: Vec<f32> = (0..CLASSES).map(|class| 1.0 + class as f32 / 32.0).collect();
    let weights = Some(weights);
    let kinds = [
        Kind { pads: vec![7, 21], ..Kind::default() },
        Kind { smoothing: 0.1, ..Kind::default() },
        Kind { weights: weights.clone(), ..Kind::default() },
        Kind { pads: vec![0], weights: weights.clone(), ..Kind::default() },
        Kind { smoothing: 0.2, weights, ..Kind::default() },
    ];
    for kind in kinds {
        let case = Case { kind: kind.clone(), ..Case::new(13, true, F32) };
        case.run_and_check(device, 5, 1.0).map_err(|error| on(&format!("{kind:?}"), &error))?;
    }
    Ok(())
}

/// The types of the device.
fn each_type(device: &Device, test: impl Fn(Storage) -> Result<(), Failed>) -> Result<(), Failed> {
    for storage in Storage::ALL.into_iter().filter(|it| device.supports_dtype(float(*it))) {
        test(storage).map_err(|error| on(&format!("{storage:?}"), &error))?;
    }
    Ok(())
}

fn types(device: &Device) -> Result<(), Failed> {
    each_type(device, |storage| Case::new(13, true, storage).run_and_check(device, 4, 1.0))
}

fn scaled(device: &Device) -> Result<(), Failed> {
    each_type(device, |storage| Case::new(13, true, storage).run_and_check(device, 4, -2.75))
}

/// The negative controls, in every type and by the bounds of the tests: a result of zeros, one whose sign is
/// wrong, and gradients that lack the last chunk's rows.
fn planted_faults(device: &Device) -> Result<(), Failed> {
    each_type(device, |storage| {
        let case = Case::new(13, true, storage);
        let right = case.run(device, 7, 1.0)?;
        case.check(1.0, device, &right)?;
        let caught = |what: &str, name: &str, wrong: &Results| match case.check(1.0, device, wrong)
        {
            Err(error) if error.message().is_some_and(|it| it.starts_with(name)) => Ok(()),
            other => Err(Failed::from(format!("{name} {what}: {other:?}"))),
        };
        // The last chunk, of six rows, has no part in the gradients.
        let pads = case.targets[7..].iter().map(|target| *target as usize).collect();
        let kind = Kind { pads, ..Kind::default() };
        let short = Case { kind, ..Case::new(13, true, storage) }.run(device, 7, 7.0 / 13.0)?;
        for (i, name) in NAMES.iter().enumerate() {
            let with = |values: Vec<f64>| {
                let mut results = right.clone();
                results[i] = values;
                results
            };
            caught("of zeros", name, &with(vec![0.0; right[i].len()]))?;
            caught("of the wrong sign", name, &with(right[i].iter().map(|x| -x).collect()))?;
            if i > 0 {
                caught("without the last rows", name, &with(short[i].clone()))?;
            }
        }
        Ok(())
    })
}

fn arguments(device: &Device) -> Result<(), Failed> {
    let refused = |name: &str, x: [usize; 2], targets: usize, rows: Option<usize>| {
        let device = device.clone();
        let result = std::panic::catch_unwind(move || {
            let linear = Linear {
                weight: Param::from_tensor(Tensor::zeros([WIDTH, CLASSES], &device)),
                bias: None,
            };
            let (x, targets) = (Tensor::zeros(x, &device), Tensor::zeros([targets], &device));
            loss::linear_cross_entropy_in_chunks(&plain(&device), &linear, x, targets, rows)
        });
        let message = match result {
            Ok(_) => return Err(Failed::from(format!("a wrong {name} was taken"))),
            Err(panic) => panic.downcast_ref::<String>().cloned().unwrap_or_default(),
        };
        let expected = format!("linear_cross_entropy: argument `{name}`");
        if message.contains(&expected) { Ok(()) } else { Err(message.into()) }
    };
    refused("weight", [3, WIDTH + 1], 3, None)?;
    refused("targets", [3, WIDTH], 4, None)?;
    refused("x", [0, WIDTH], 0, None)?;
    refused("chunk_rows", [3, WIDTH], 3, Some(0))
}

/// On CUDA, where the pool is the process's alone.
fn memory(device: &Device) -> Result<(), Failed> {
    const ROWS: usize = 8192;
    const WIDE: usize = 256;
    const VOCABULARY: usize = 32_768;
    let device = &device.clone().autodiff();
    let module = plain(device);
    let run = |is_chunked: bool| -> Result<u64, Failed> {
        let linear = burn::nn::LinearConfig::new(WIDE, VOCABULARY).with_bias(false).init(device);
        let x = Tensor::<2>::ones([ROWS, WIDE], device).require_grad();
        let targets = Tensor::<1, Int>::arange(0..ROWS as i64, device);
        let sync = || device.sync().map_err(|error| error.to_string());
        device.memory_cleanup();
        sync()?;
        let mut monitor = MemoryMonitor::new(device);
        let before = monitor.read().ok_or("CUDA's pools report")?.reserved_bytes;
        let loss = match is_chunked {
            true => loss::linear_cross_entropy(&module, &linear, x.clone(), targets),
            false => loss::cross_entropy(&module, linear.forward(x.clone()), targets),
        };
        let gradients = loss.backward();
        drop((x.grad(&gradients), linear.weight.val().grad(&gradients)));
        sync()?;
        let after = monitor.read().ok_or("CUDA's pools report")?.reserved_bytes;
        Ok(after.saturating_sub(before))
    };
    // The pool keeps what it had: the least first.
    let (chunked, whole) = (run(true)?, run(false)?);
    let logits = (ROWS * VOCABULARY * 4) as u64;
    println!("{chunked} bytes in chunks, and {whole} more for {logits} of logits");
    if chunked < logits / 2 && whole > logits / 2 {
        return Ok(());
    }
    Err(format!("{chunked} bytes in chunks, {whole} more whole, logits {logits}").into())
}
