//! A linear layer with its loss in chunks of rows, against both whole, on the device and on the CPU.

use crate::resources::alone_on_cuda;
use blackburn::{nn::loss, train::memory::MemoryMonitor};
use blackburn_reference::{random::normal, storage::Storage, tolerance::compare};
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
        trial("a_chunk_that_is_left_out_is_caught", planted_fault),
        trial("bad_arguments_are_named", arguments),
        alone_on_cuda("linear_cross_entropy::the_logits_are_never_there_at_once", memory),
    ]
}

fn on(device: &str, error: &Failed) -> String {
    format!("on {device}: {}", error.message().unwrap_or(""))
}

/// Rows with a layer and targets.
struct Case {
    rows: usize,
    storage: Storage,
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Option<Vec<f64>>,
    targets: Vec<i32>,
    /// By how much products may round their operands.
    cut: f64,
}

/// Loss, and gradients of x, weight and bias.
type Results = [Vec<f64>; 4];

impl Case {
    fn new(rows: usize, bias: bool, storage: Storage) -> Self {
        let on_cuda = std::env::var("BLACKBURN_REQUIRE_DEVICE").is_ok_and(|name| name == "cuda");
        Self {
            rows,
            storage,
            cut: if on_cuda { 1.0 / 1024.0 } else { 0.0 },
            x: normal(1, rows * WIDTH, 1.0, storage),
            weight: normal(2, WIDTH * CLASSES, 0.5, storage),
            bias: bias.then(|| normal(3, CLASSES, 1.0, storage)),
            targets: (0..rows as i32).map(|row| row * 7 % CLASSES as i32).collect(),
        }
    }

    /// In chunks of so many rows, or whole; the loss times `factor` is what is differentiated.
    fn run(
        &self,
        device: &Device,
        module: &CrossEntropyLoss,
        chunk_rows: Option<usize>,
        factor: f64,
    ) -> Result<Results, Failed> {
        let device = &device.clone().autodiff();
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
        let value = match chunk_rows {
            Some(_) => loss::linear_cross_entropy_in_chunks(
                module,
                &linear,
                x.clone(),
                targets,
                chunk_rows,
            ),
            None => module.forward(linear.forward(x.clone()), targets),
        };
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

    /// What the whole, in f32 on the CPU, gives of the same numbers, and what a device may be off.
    ///
    /// A logit is a sum of [`WIDTH`] products of numbers that the device may cut to TF32's ten bits, or to
    /// its type's; its error is an absolute one of a logarithm of a probability, and so a relative one of
    /// that. An element of a gradient is then a sum over classes or rows of products with as much error,
    /// and of as many roundings.
    fn check(
        &self,
        module: impl Fn(&Device) -> CrossEntropyLoss,
        factor: f64,
        actual: &Results,
    ) -> Result<(), Failed> {
        let cpu = Device::flex();
        let wide = Self {
            storage: F32,
            x: self.x.clone(),
            weight: self.weight.clone(),
            bias: self.bias.clone(),
            targets: self.targets.clone(),
            ..*self
        };
        let expected = wide.run(&cpu, &module(&cpu.clone().autodiff()), None, factor)?;
        let cut = self.cut;
        let u =
            if self.storage == F32 { F32.unit_roundoff() } else { self.storage.unit_roundoff() };
        // Of a product's terms, and of what is added up of it.
        let per_term = 2.0 * cut + WIDTH as f64 * F32.unit_roundoff();
        let largest_logit = |row: &[f64]| -> f64 {
            (0..CLASSES)
                .map(|class| {
                    let column = self.weight.iter().skip(class).step_by(CLASSES);
                    let terms: f64 = row.iter().zip(column).map(|(x, w)| (x * w).abs()).sum();
                    terms + self.bias.as_ref().map_or(0.0, |bias| bias[class].abs())
                })
                .fold(0.0, f64::max)
        };
        let of_logit = self
            .x
            .chunks(WIDTH)
            .map(|row| largest_logit(row) * (per_term + 2.0 * u))
            .fold(0.0, f64::max);
        // Two logits make each probability; the exponential and sums of a row add roundings of f32.
        let relative = (2.0 * of_logit).exp_m1() + 64.0 * F32.unit_roundoff() + 2.0 * u + 2.0 * cut;
        // Of a row's gradient, the sum of absolute values is at most twice its share.
        let largest = |values: &[f64]| values.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        let of_row = 2.0 * factor.abs() * relative;
        let share = module(&cpu).weights.map_or(1.0, |_| 3.0) / self.rows as f64;
        let counted = 2.0 * share * self.rows as f64;
        let bounds = [
            2.0 * of_logit + relative * largest(&expected[0]),
            2.0 * of_row * share * largest(&self.weight),
            of_row * counted * largest(&self.x),
            of_row * counted,
        ];
        for ((name, bound), (actual, expected)) in
            ["loss", "dx", "dweight", "dbias"].iter().zip(bounds).zip(actual.iter().zip(&expected))
        {
            let bounds: Vec<f64> = expected
                .iter()
                .map(|exact| bound + self.storage.underflow() + u * exact.abs())
                .collect();
            compare(actual, expected, &bounds).map_err(|error| format!("{name}: {error}"))?;
        }
        Ok(())
    }
}

fn plain(device: &Device) -> CrossEntropyLoss {
    CrossEntropyLossConfig::new().init(device)
}

fn chunks(device: &Device) -> Result<(), Failed> {
    for bias in [false, true] {
        let case = Case::new(13, bias, F32);
        for rows in [1, 4, 12, 13, 100] {
            let autodiff = device.clone().autodiff();
            let results = case.run(device, &plain(&autodiff), Some(rows), 1.0)?;
            case.check(plain, 1.0, &results)
                .map_err(|error| on(&format!("{rows} rows"), &error))?;
        }
    }
    Ok(())
}

fn kinds(device: &Device) -> Result<(), Failed> {
    let config = CrossEntropyLossConfig::new;
    let weights: Vec<f32> = (0..CLASSES).map(|class| 1.0 + class as f32 / 32.0).collect();
    let kinds = [
        ("padded", config().with_pad_tokens(Some(vec![7, 21]))),
        ("smoothed", config().with_smoothing(Some(0.1))),
        ("weighted", config().with_weights(Some(weights.clone()))),
        (
            "padded and weighted",
            config().with_pad_tokens(Some(vec![0])).with_weights(Some(weights.clone())),
        ),
        ("smoothed and weighted", config().with_smoothing(Some(0.2)).with_weights(Some(weights))),
    ];
    let case = Case::new(13, true, F32);
    for (name, config) in kinds {
        let module = |device: &Device| config.init(device);
        let results = case.run(device, &module(&device.clone().autodiff()), Some(5), 1.0)?;
        case.check(module, 1.0, &results).map_err(|error| on(name, &error))?;
    }
    Ok(())
}

fn types(device: &Device) -> Result<(), Failed> {
    for storage in [Storage::F16, Storage::Bf16] {
        if device.supports_dtype(float(storage)) {
            let case = Case::new(13, true, storage);
            let results = case.run(device, &plain(&device.clone().autodiff()), Some(4), 1.0)?;
            case.check(plain, 1.0, &results)
                .map_err(|error| on(&format!("{storage:?}"), &error))?;
        }
    }
    Ok(())
}

fn scaled(device: &Device) -> Result<(), Failed> {
    let case = Case::new(13, true, F32);
    let results = case.run(device, &plain(&device.clone().autodiff()), Some(4), -2.75)?;
    case.check(plain, -2.75, &results)
}

/// The negative control, by the bounds of products that round nothing.
fn planted_fault(device: &Device) -> Result<(), Failed> {
    let case = Case { cut: 0.0, ..Case::new(13, true, F32) };
    let module = plain(&device.clone().autodiff());
    let right = case.run(device, &module, Some(7), 1.0)?;
    // The last chunk, of six rows, has no part in the weight's gradient.
    let config = CrossEntropyLossConfig::new();
    let last = case.targets[7..].iter().map(|target| *target as usize).collect();
    let without = config.with_pad_tokens(Some(last)).init(&device.clone().autodiff());
    let mut wrong = case.run(device, &without, Some(7), 7.0 / 13.0)?;
    wrong[0].clone_from(&right[0]);
    wrong[1].clone_from(&right[1]);
    match case.check(plain, 1.0, &wrong) {
        Err(_) => Ok(()),
        Ok(()) => Err("rows without gradient went unseen".into()),
    }
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
