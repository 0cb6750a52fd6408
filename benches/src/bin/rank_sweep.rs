//! Proves that numbers come right from GPU to GPU, and tells how fast they move.

use blackburn::{
    Config,
    distributed::{self, Group, GroupConfig, Started},
    train::{
        graph::GradientGraph,
        optim::AdamWGroups,
        precision::{Precision, PrecisionPolicy, full_precision},
    },
};
#[cfg(feature = "cuda")]
use blackburn_backend::cuda_memory::{AnyTensor, CudaMemory};
use blackburn_backend::graph::Identity;
use burn::{
    module::{Module, ModuleVisitor, Param},
    nn::{Linear, LinearConfig},
    optim::GradientsParams,
    tensor::{DType, Device, FloatDType, Tensor, TensorData},
};
use clap::Parser;
use std::{error::Error, process::ExitCode, time::Instant};

/// Adds numbers up over the GPUs of this machine, in each type and at lengths of all kinds, and compares every result
/// with the sum that the host makes. Does the same with parameters that go to all ranks, and with an optimizer that is
/// split over them. Then it prints how long sums of several sizes take.
///
/// Where a launcher has started the ranks (torchrun, srun, mpirun), leave out --gpus.
#[derive(Parser)]
#[command(version)]
struct CommandLine {
    /// Starts so many ranks on this machine.
    #[arg(long)]
    gpus: Option<usize>,

    /// Rounds that are timed; 0 times nothing.
    #[arg(long, default_value_t = 20)]
    rounds: usize,
}

/// Elements of the sums that are checked: none, fewer than a unit moves at once, and no multiple of anything.
const LENGTHS: [usize; 6] = [0, 1, 7, 1000, 65_537, 3_000_017];
/// Elements of the sums that are timed. The last are the parameters of GPT-2 with a head of its own.
const TIMED: [usize; 3] = [1_000_000, 8_000_000, 163_037_184];

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let CommandLine { gpus, rounds } = CommandLine::parse();
    let group = match distributed::start(gpus, &GroupConfig::default())? {
        Started::Rank(group) => group,
        Started::Ended(code) => return Ok(ExitCode::from(code)),
    };
    let report = blackburn::init_with(Config::from_env()?.with_group(&group))?;
    let device = blackburn::device()?;
    println!("{group}: {} ({})", report.device, report.device_name);
    let done = check(&group, &device).and_then(|()| time(&group, &device, rounds));
    if let Err(error) = &done {
        group.fail(&error.to_string());
    }
    done.map(|()| ExitCode::SUCCESS)
}

/// Numbers of several sizes, other ones for each rank.
fn numbers(rank: usize, length: usize) -> Vec<f32> {
    let number = |i: usize| ((i * 7919 + rank * 104_729 + 1) as f32).sin();
    (0..length).map(|i| number(i) * 10f32.powi(i as i32 % 5)).collect()
}

fn tensor(numbers: &[f32], dtype: FloatDType, device: &Device) -> Tensor<1> {
    let data = TensorData::new(numbers.to_vec(), [numbers.len()]);
    Tensor::<1>::from_data(data, (device, DType::F32)).cast(dtype)
}

fn floats(tensor: Tensor<1>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// `value`, rounded to `dtype`.
fn rounded(value: f32, dtype: FloatDType) -> f32 {
    match dtype {
        FloatDType::BF16 => half::bf16::from_f32(value).to_f32(),
        FloatDType::F16 => half::f16::from_f32(value).to_f32(),
        _ => value,
    }
}

fn check(group: &Group, device: &Device) -> Result<(), Box<dyn Error>> {
    for (dtype, unit) in [
        (FloatDType::F32, 2f32.powi(-24)),
        (FloatDType::BF16, 2f32.powi(-8)),
        (FloatDType::F16, 2f32.powi(-11)),
    ] {
        for length in LENGTHS {
            let parts: Vec<Vec<f32>> = (0..group.size())
                .map(|rank| numbers(rank, length).into_iter().map(|x| rounded(x, dtype)).collect())
                .collect();
            let sum = group.sum_on_device(tensor(&parts[group.rank()], dtype, device))?;
            for (at, sum) in floats(sum).into_iter().enumerate() {
                let terms = parts.iter().map(|part| f64::from(part[at]));
                let (exact, sizes) = terms.fold((0.0, 0.0), |(a, b), x| (a + x, b + x.abs()));
                // Two are rounded once, to the nearest; more at each addition, in the order of the library.
                let is_right = match group.size() {
                    1 | 2 => sum == rounded(exact as f32, dtype),
                    size => (f64::from(sum) - exact).abs() <= sizes * f64::from(unit) * size as f64,
                };
                if !is_right {
                    let wrong = format!(
                        "element {at} of {length} in {dtype:?}: expected {exact}, got {sum}"
                    );
                    return Err(wrong.into());
                }
            }
        }
        say(group, &format!("sums in {dtype:?}: right"));
    }
    parameters(group, device)?;
    columns(group, device)?;
    for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
        beside_a_pass(group, device, precision)?;
    }
    Ok(())
}

/// Layers of a pass whose gradients are added up beside it, and what they take and give.
const LAYERS: usize = 12;
const WIDTH: usize = 2048;
const WIDE: usize = 8 * WIDTH;
const ROWS: usize = 4096;
/// Passes that are compared. The checks of recordings, after which others are made, are among them.
const PASSES: usize = 30;

/// Gradients that move while a replay goes on have the sums of gradients that move when it is over.
fn beside_a_pass(
    group: &Group,
    device: &Device,
    precision: Precision,
) -> Result<(), Box<dyn Error>> {
    let device = device.clone().autodiff();
    device.seed(1);
    // The first one's gradient comes last, and is large enough to be added in several parts.
    let input = |layer| if layer == 0 { WIDE } else { WIDTH };
    // On CUDA there are gaps between the rows of the last one's.
    let output = |layer| if layer + 1 == LAYERS { WIDTH + 1 } else { WIDTH };
    let layers: Vec<Linear> = (0..LAYERS)
        .map(|layer| LinearConfig::new(input(layer), output(layer)).with_bias(false).init(&device))
        .collect();
    let policy = PrecisionPolicy::new(precision);
    let layers = group.broadcast(policy.apply(layers)?)?;
    let mut graph = GradientGraph::new(policy).with_milestones(WIDTH * WIDTH);
    let pass = |layers: &Vec<Linear>, x: Tensor<2>| {
        let y = layers.iter().fold(x, |x, layer| layer.forward(x));
        let loss = full_precision(y).powi_scalar(2).mean();
        ((), GradientsParams::from_grads(loss.backward(), layers))
    };
    let plain = device.clone().without_autodiff();
    let (mut moved, mut compared) = (0, 0);
    for number in 0..PASSES {
        let x = numbers(group.rank() + number * group.size(), ROWS);
        let x = tensor(&x, FloatDType::F32, &plain).reshape([ROWS, 1]).div_scalar(1e4);
        let x = x.repeat_dim(1, WIDE)
            * tensor(&kept(group, number), FloatDType::F32, &plain).unsqueeze();
        let x = x.cast(precision.dtype());
        let (_, gradients) = graph.run(&layers, x.clone(), pass)?;
        let copies = copied(&layers, &gradients);
        drop(gradients);
        let expected = group.sums(&layers, copies, Vec::new(), 1.0)?.gradients;
        let (_, gradients) = graph.run(&layers, x, pass)?;
        let Some(progress) = graph.progress() else { continue };
        for layer in &layers {
            let gradient = gradients.get::<2>(layer.weight.id).ok_or("a layer has no gradient")?;
            let identity = Identity::of(gradient).ok_or("a gradient is on no GPU")?;
            moved += usize::from(progress.milestone(identity).is_some());
            compared += 1;
        }
        let sums = group.sums_in_place(&layers, gradients, Vec::new(), 1.0, Some(progress))?;
        for (at, layer) in layers.iter().enumerate() {
            let bytes = |gradients: &GradientsParams| {
                let gradient = gradients.get::<2>(layer.weight.id);
                gradient.map(|gradient| gradient.into_data().as_bytes().to_vec())
            };
            if bytes(&sums.gradients) != bytes(&expected) {
                let wrong =
                    format!("pass {number}, layer {at}: the sum beside the pass is another");
                return Err(wrong.into());
            }
        }
    }
    if moved == 0 {
        return Err("no gradient is there before its pass is over".into());
    }
    say(group, &format!("sums beside a pass in {precision:?}: right, {moved} of {compared}"));
    Ok(())
}

/// Ones for the inputs of a pass that are not zeros, whose rows of the first gradient are zeros, too: on both ranks, on
/// either, or on none.
fn kept(group: &Group, number: usize) -> Vec<f32> {
    let is_kept = |input: usize| (input / 3 + 2 * group.rank() + number) % 5 < 3;
    (0..WIDE).map(|input| f32::from(u8::from(is_kept(input)))).collect()
}

/// Gradients in memory of their own.
fn copied(layers: &[Linear], gradients: &GradientsParams) -> GradientsParams {
    let mut copies = GradientsParams::new();
    for layer in layers {
        if let Some(gradient) = gradients.get::<2>(layer.weight.id) {
            let device = gradient.device();
            let data = gradient.into_data();
            let dtype = data.dtype();
            copies.register(layer.weight.id, Tensor::<2>::from_data(data, (&device, dtype)));
        }
    }
    copies
}

/// Parameters go to all ranks, and a split optimizer does what a whole one does.
fn parameters(group: &Group, device: &Device) -> Result<(), Box<dyn Error>> {
    let device = device.clone().autodiff();
    device.seed(group.rank() as u64);
    let module = LinearConfig::new(301, 4099).init(&device);
    #[cfg(feature = "cuda")]
    let before = span(&module)?;
    let module = group.broadcast(vec![module, LinearConfig::new(5, 3).init(&device)])?;
    group.same(&module)?;
    #[cfg(feature = "cuda")]
    match span(&module[0])? {
        after if after == before => {}
        after => {
            return Err(format!("a weight over {before} bytes is over {after} as rank 0's").into());
        }
    }
    let gradients = |rank: usize| Filled::of(&module, rank, &device);
    let optimizer = || AdamWGroups::default().init(&module, &device);
    let mut whole = optimizer();
    let mut split = group.sharded(optimizer(), &module)?;
    let (mut expected, mut updated) = (module.clone(), module.clone());
    for step in 0..3 {
        let own = || gradients(group.rank() + step * group.size());
        let mean = group.mean(&module, own(), 1.0)?;
        expected = whole.step(1e-2, expected, mean);
        let mut sums = split.sums(&module, own(), Vec::new(), 1.0)?;
        let means = sums.means(&module);
        updated = split.step(1e-2, updated, means)?;
    }
    group.same(&updated)?;
    let weights = |module: &Vec<Linear>| floats(module[0].weight.val().inner().flatten(0, 1));
    if weights(&expected) != weights(&updated) {
        return Err("a split optimizer gives other parameters than a whole one".into());
    }
    say(group, "parameters of all ranks, and a split optimizer: right");
    Ok(())
}

/// Gradients that are columns of one buffer are added up once, whether Burn leaves them there or copies them.
fn columns(group: &Group, device: &Device) -> Result<(), Box<dyn Error>> {
    const ROWS: usize = 70;
    const WIDTHS: [usize; 3] = [32, 100, 64];
    let device = device.clone().autodiff();
    let all: usize = WIDTHS.iter().sum();
    let layer = |width| LinearConfig::new(ROWS, width).with_bias(false).init(&device);
    let layers = group.broadcast(WIDTHS.map(layer).to_vec())?;
    let whole = numbers(group.rank(), ROWS * all);
    let buffer = tensor(&whole, FloatDType::F32, &device.clone().without_autodiff());
    let buffer: Tensor<2> = buffer.reshape([ROWS, all]);
    let mut begin = 0;
    let mut gradients = GradientsParams::new();
    for (layer, width) in layers.iter().zip(WIDTHS) {
        gradients.register(layer.weight.id, buffer.clone().slice([0..ROWS, begin..begin + width]));
        begin += width;
    }
    #[cfg(feature = "cuda")]
    {
        let gradient = gradients.get::<2>(layers[0].weight.id).ok_or("a layer has no gradient")?;
        let bytes = CudaMemory::spans_of(vec![AnyTensor::of(gradient)])?[0].bytes;
        say(group, &format!("the first of {WIDTHS:?} columns of {ROWS} rows: over {bytes} bytes"));
    }
    let sums = |gradients| group.sums(&layers, gradients, Vec::new(), 1.0);
    let expected = sums(copied(&layers, &gradients))?.gradients;
    let sums = group.sums_in_place(&layers, gradients, Vec::new(), 1.0, None)?.gradients;
    for layer in &layers {
        let of = |gradients: &GradientsParams| {
            gradients.get::<2>(layer.weight.id).map(|sum| floats(sum.flatten(0, 1)))
        };
        if of(&sums) != of(&expected) {
            return Err("the sums of columns of one buffer are others".into());
        }
    }
    say(group, "columns of one buffer: right");
    Ok(())
}

/// The bytes from a weight's first element to its last.
#[cfg(feature = "cuda")]
fn span(linear: &Linear) -> Result<usize, Box<dyn Error>> {
    let spans = CudaMemory::spans_of(vec![AnyTensor::of(linear.weight.val())])?;
    Ok(spans.first().ok_or("a weight is nowhere")?.bytes)
}

/// Gradients of a module without a pattern.
struct Filled {
    rank: usize,
    device: Device,
    gradients: GradientsParams,
}

impl Filled {
    fn of<M: Module>(module: &M, rank: usize, device: &Device) -> GradientsParams {
        let device = device.clone().without_autodiff();
        let mut filled = Self { rank, device, gradients: GradientsParams::new() };
        module.visit(&mut filled);
        filled.gradients
    }
}

impl ModuleVisitor for Filled {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let shape = param.lazy_shape();
        let numbers = numbers(self.rank, shape.num_elements());
        let gradient = tensor(&numbers, FloatDType::F32, &self.device).reshape(shape);
        self.gradients.register::<D>(param.id, gradient);
    }
}

fn time(group: &Group, device: &Device, rounds: usize) -> Result<(), Box<dyn Error>> {
    if rounds == 0 || group.size() == 1 {
        return Ok(());
    }
    say(group, "numbers\ttype\tms\tGB/s of each link");
    for length in TIMED {
        for dtype in [FloatDType::BF16, FloatDType::F32] {
            let own = Tensor::<1>::ones([length], (device, DType::from(dtype)));
            for _ in 0..3 {
                group.sum_on_device(own.clone())?;
            }
            device.sync()?;
            group.barrier()?;
            let (since, moved) = (Instant::now(), group.time_moving().all);
            for _ in 0..rounds {
                group.sum_on_device(own.clone())?;
            }
            device.sync()?;
            let ms = 1e3 * since.elapsed().as_secs_f64() / rounds as f64;
            let moving_ms = 1e3 * (group.time_moving().all - moved).as_secs_f64() / rounds as f64;
            let size = group.size() as f64;
            let bytes = 2.0 * (size - 1.0) / size * (length * DType::from(dtype).size()) as f64;
            let rate = bytes / moving_ms / 1e6;
            say(
                group,
                &format!("{length}\t{dtype:?}\t{moving_ms:.3} ({ms:.3} with the host)\t{rate:.0}"),
            );
        }
    }
    Ok(())
}

fn say(group: &Group, text: &str) {
    if group.is_main() {
        println!("{text}");
    }
}
