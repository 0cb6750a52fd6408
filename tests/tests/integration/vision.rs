//! `blackburn::nn::vision` against Burn's modules: results, gradients and running statistics.

use blackburn::{
    nn::vision,
    train::{
        graph::GradientGraph,
        precision::{PrecisionPolicy, full_precision},
    },
};
use blackburn_backend::batch_norm::running_statistics;
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    blocks::blocks_of,
    on_burn_device, on_burn_device_with, run_alone,
    tensors::{float, tensor, values},
};
use burn::{
    module::Param,
    nn::{
        BatchNorm, BatchNormConfig, PaddingConfig2d,
        conv::{Conv2d, Conv2dConfig},
    },
    optim::GradientsParams,
    prelude::*,
    tensor::activation::relu as relu_of,
};
use libtest_mimic::{Failed, Trial};
use std::{
    env,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Set in a process that runs one test alone: a recording is of one thread.
const ALONE: &str = "BLACKBURN_TEST_VISION_HERE";

pub(crate) fn trials() -> Vec<Trial> {
    let on_both = |name: String, test: fn(&Device, Storage) -> Result<(), Failed>, storage| {
        let on_cpu = format!("{name}_on_the_cpu");
        [
            Trial::ignorable_test(name, move || {
                on_burn_device_with(storage, |device, _| test(device, storage))
            }),
            Trial::test(on_cpu, move || test(&Device::flex(), storage)),
        ]
    };
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = format!("vision::batch_norm_is_that_of_burn_in_{storage:?}").to_lowercase();
        trials.extend(on_both(name, batch_norms, storage));
    }
    trials.extend(on_both("vision::running_statistics_stay_in_f32".into(), running, Storage::F16));
    trials.extend(on_both("vision::bad_arguments_are_named".into(), refusals, Storage::F32));
    trials.push(Trial::test("vision::in_inference_the_running_statistics_count", inference));
    trials.push(Trial::ignorable_test("vision::all_convolutions_run_on_kernels_of_ours", || {
        on_burn_device(|device| kernels(&device.autodiff()))
    }));
    let name = "vision::a_recorded_network_is_trained_as_one_that_runs";
    trials.push(Trial::ignorable_test(name, move || {
        on_burn_device(|device| match env::var_os(ALONE) {
            Some(_) => recorded(&device.autodiff()),
            None => run_alone(name, &[(ALONE, "1")]).map(drop),
        })
    }));
    trials
}

const CHANNELS: usize = 6;

fn norm(device: &Device) -> BatchNorm {
    let fill = |seed, param: Param<Tensor<1>>, around: f64| {
        param.map(|old| {
            let drawn: Vec<f64> =
                normal(seed, CHANNELS, 0.5, Storage::F32).iter().map(|x| x + around).collect();
            let made: Tensor<1> = tensor(&drawn, [CHANNELS], Storage::F32, &old.device());
            made.detach().require_grad()
        })
    };
    let norm = BatchNormConfig::new(CHANNELS).with_momentum(0.3).init(device);
    BatchNorm { gamma: fill(1, norm.gamma, 1.0), beta: fill(2, norm.beta, 0.0), ..norm }
}

/// What comes of a norm, by name, for one loss.
type Found = Vec<(&'static str, Vec<f64>)>;

fn found<const D: usize>(
    norm: &BatchNorm,
    [x, residual, weight]: [Tensor<D>; 3],
    run: impl Fn(&BatchNorm, Tensor<D>, Tensor<D>) -> Tensor<D>,
) -> Result<Found, Failed> {
    let [x, residual] = [x, residual].map(|tensor| Tensor::from_inner(tensor).require_grad());
    let y = run(norm, x.clone(), residual.clone());
    let mut all = vec![("y", values(y.clone())?)];
    let loss = (full_precision(y) * Tensor::from_inner(weight)).sum();
    let gradients = loss.backward();
    all.push(("dx", values(x.grad(&gradients).ok_or("x has a gradient")?)?));
    if let Some(gradient) = residual.grad(&gradients) {
        all.push(("dresidual", values(gradient)?));
    }
    for (name, param) in [("dgamma", &norm.gamma), ("dbeta", &norm.beta)] {
        let gradient = param.val().grad(&gradients).ok_or("parameters have gradients")?;
        all.push((name, values(gradient)?));
    }
    all.push(("running mean", values(norm.running_mean.value_sync())?));
    all.push(("running variance", values(norm.running_var.value_sync())?));
    Ok(all)
}

/// Burn's modules run in f32, on the same numbers.
fn compared<const D: usize>(
    shape: [usize; D],
    device: &Device,
    storage: Storage,
) -> Result<(), Failed> {
    /// Roundings to 16 bits: of a result, of the gradient that comes in, of sums' terms.
    const ROUNDINGS: f64 = 3.0;
    let least = match storage {
        Storage::F32 => 2e-5,
        Storage::F16 => ROUNDINGS * (-11f64).exp2(),
        Storage::Bf16 => ROUNDINGS * (-8f64).exp2(),
    };
    let count = shape.iter().product();
    let drawn = |seed, around: f64| -> Vec<f64> {
        let drawn = normal(seed, count, 2.0, storage);
        drawn.iter().map(|x| storage.round(x + around)).collect()
    };
    let (x, residual, weight) = (drawn(3, 5.0), drawn(4, 0.0), normal(5, count, 1.0, Storage::F32));
    let training = device.clone().autodiff();
    for (has_residual, relu) in [(false, false), (false, true), (true, false), (true, true)] {
        let in_type = |storage| {
            let weight = tensor(&weight, shape, Storage::F32, device);
            [tensor(&x, shape, storage, device), tensor(&residual, shape, storage, device), weight]
        };
        let ours = found(&norm(&training), in_type(storage), |norm, x, residual| {
            vision::batch_norm(norm, x, has_residual.then_some(residual), relu)
        })?;
        let burns = found(&norm(&training), in_type(Storage::F32), |norm, x, residual| {
            let y = norm.forward(x);
            let y = if has_residual { y + residual } else { y };
            if relu { relu_of(y) } else { y }
        })?;
        for ((name, ours), (expected, burns)) in ours.iter().zip(&burns) {
            let place = format!("{name} of {shape:?}, residual: {has_residual}, relu: {relu}");
            if name != expected {
                return Err(format!("{place}: expected {expected}").into());
            }
            let norm = burns.iter().map(|x| x * x).sum::<f64>().sqrt();
            let apart = ours.iter().zip(burns).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
            let is_near = apart <= least * norm;
            if ours.len() != burns.len() || !is_near {
                return Err(format!("{place}: {apart} apart, of a norm of {norm}").into());
            }
        }
        if ours.len() != burns.len() {
            return Err(format!("{} results, expected {}", ours.len(), burns.len()).into());
        }
    }
    Ok(())
}

fn batch_norms(device: &Device, storage: Storage) -> Result<(), Failed> {
    compared([5, CHANNELS, 4, 7], device, storage)?;
    compared([9, CHANNELS, 3], device, storage)?;
    compared([40, CHANNELS], device, storage)
}

/// In f16 images: by 16-bit statistics a small momentum would change nothing.
fn running(device: &Device, storage: Storage) -> Result<(), Failed> {
    const MOMENTUM: f64 = 1e-4;
    let norm =
        BatchNormConfig::new(CHANNELS).with_momentum(MOMENTUM).init(&device.clone().autodiff());
    let x = tensor(&[1.0, 3.0].repeat(CHANNELS), [2, CHANNELS], storage, device);
    for _ in 0..2 {
        drop(vision::batch_norm(&norm, Tensor::from_inner(x.clone()), None, true));
    }
    let mean = norm.running_mean.value_sync();
    if mean.dtype() != burn::tensor::DType::F32 {
        return Err(format!("the running mean is in {:?}", mean.dtype()).into());
    }
    // The first row is all 1 and 3 in turns, and so is the second: the mean of a channel is 1 or 3.
    let once = 1.0 - (1.0 - MOMENTUM).powi(2);
    for (channel, found) in values(mean)?.into_iter().enumerate() {
        let expected = once * if channel % 2 == 0 { 1.0 } else { 3.0 };
        let is_near = (found - expected).abs() <= 1e-6 * expected;
        if !is_near {
            return Err(format!("channel {channel}: {found}, expected {expected}").into());
        }
    }
    Ok(())
}

fn inference() -> Result<(), Failed> {
    let device = Device::flex();
    let norm = norm(&device.clone().autodiff());
    let x: Tensor<3> = tensor(
        &normal(6, 4 * CHANNELS * 3, 1.0, Storage::F32),
        [4, CHANNELS, 3],
        Storage::F32,
        &device,
    );
    drop(norm.forward(Tensor::from_inner(x.clone())));
    let valid = norm.valid();
    let expected = relu_of(valid.forward(x.clone()) + x.clone());
    let found = vision::batch_norm(&valid, x.clone(), Some(x.clone()), true);
    let (expected, found) = (values(expected)?, values(found)?);
    if expected != found {
        return Err(format!("{found:?}, expected {expected:?}").into());
    }
    let half = vision::batch_norm(&valid, x.cast(float(Storage::F16)), None, false);
    match half.dtype() {
        burn::tensor::DType::F16 => Ok(()),
        other => Err(format!("images in f16 came out in {other:?}").into()),
    }
}

fn refusals(device: &Device, storage: Storage) -> Result<(), Failed> {
    let training = device.clone().autodiff();
    let images = |shape: [usize; 4]| -> Tensor<4> {
        let count: usize = shape.iter().product();
        Tensor::from_inner(tensor(&normal(7, count, 1.0, storage), shape, storage, device))
    };
    let refused = |names: [&str; 2], x: Tensor<4>, residual: Option<Tensor<4>>| {
        let norm = norm(&training);
        let run = AssertUnwindSafe(|| drop(vision::batch_norm(&norm, x, residual, true)));
        let message = match catch_unwind(run) {
            Ok(()) => return Err(Failed::from(format!("{names:?} was taken"))),
            Err(panic) => panic.downcast_ref::<String>().cloned().unwrap_or_default(),
        };
        match names.iter().all(|name| message.contains(name)) {
            true => Ok(()),
            false => Err(Failed::from(format!("{names:?}: {message}"))),
        }
    };
    refused(["batch_norm: argument `gamma`", "[5]"], images([2, 5, 3, 3]), None)?;
    refused(["batch_norm: argument `x`", "[0, 6, 3, 3]"], images([0, CHANNELS, 3, 3]), None)?;
    let residual = Some(images([2, CHANNELS, 3, 4]));
    refused(["batch_norm: argument `residual`", "3, 4"], images([2, CHANNELS, 3, 3]), residual)?;
    let ones = || Tensor::<1>::ones([CHANNELS], device);
    let statistics = || [ones(), ones()];
    let run = || drop(running_statistics(statistics(), statistics(), 1.5));
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(()) => Err("a momentum of 1.5 was taken".into()),
        Err(_) => Ok(()),
    }
}

#[derive(Module, Debug)]
struct Network {
    convs: [Conv2d; 2],
    norms: [BatchNorm; 2],
}

impl Network {
    fn new(device: &Device) -> Self {
        let conv = |seed: u64, from: usize| {
            let mut conv = Conv2dConfig::new([from, CHANNELS], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .with_bias(false)
                .init(device);
            conv.weight = conv.weight.map(|old| {
                let drawn = normal(seed, old.shape().num_elements(), 0.3, Storage::F32);
                tensor(&drawn, old.dims(), Storage::F32, device).detach().require_grad()
            });
            conv
        };
        Self { convs: [conv(1, 3), conv(2, CHANNELS)], norms: [norm(device), norm(device)] }
    }

    fn pass(&self, images: Tensor<4>) -> (Tensor<1>, GradientsParams) {
        let x = vision::conv_norm(&self.convs[0], &self.norms[0], images, None, true);
        let y = vision::conv_norm(&self.convs[1], &self.norms[1], x.clone(), Some(x), true);
        let loss = full_precision(y).powi_scalar(2).mean();
        let value = loss.clone().inner();
        (value, GradientsParams::from_grads(loss.backward(), self))
    }
}

/// Blocks with a sum around them each, whose gradients meet behind a convolution's.
fn kernels(device: &Device) -> Result<(), Failed> {
    const STEPS: usize = 3;
    const BLOCKS: usize = 3;
    let layers: Vec<Network> = (0..2 * BLOCKS).map(|_| Network::new(device)).collect();
    let step = || {
        let images =
            tensor(&normal(8, 2 * 3 * 64, 1.0, Storage::F32), [2, 3, 8, 8], Storage::F32, device);
        let x = vision::conv_norm(&layers[0].convs[0], &layers[0].norms[0], images, None, true);
        let y = layers.chunks(2).fold(x, |x, pair| {
            let of = |at: usize| (&pair[at].convs[1], &pair[at].norms[1]);
            let ((first, norm), (second, last)) = (of(0), of(1));
            let inner = vision::conv_norm(first, norm, x.clone(), None, true);
            vision::conv_norm(second, last, inner, Some(x), true)
        });
        let gradients = full_precision(y).powi_scalar(2).mean().backward();
        let all: Result<Vec<_>, Failed> = layers
            .iter()
            .map(|layer| values(layer.convs[1].weight.grad(&gradients).ok_or("a gradient")?))
            .collect();
        all.map(drop)
    };
    for _ in 0..STEPS {
        step()?;
    }
    let ((), blocks) = blocks_of(device, step)?;
    let kernels: Vec<&str> = blocks.iter().flat_map(|block| block.kernels.clone()).collect();
    let is_ours = |name: &str| name.starts_with("blackburn_kernels::");
    let is_convolution = |name: &str| name.to_lowercase().contains("conv");
    if let Some(kernel) = kernels.iter().find(|name| is_convolution(name) && !is_ours(name)) {
        return Err(format!("a convolution ran on {kernel}: {blocks:#?}").into());
    }
    // Forward, the weights' gradients, and the images' but of the first.
    let expected = 3 * (2 * BLOCKS + 1) - 1;
    let ours = kernels.iter().filter(|name| is_convolution(name)).count();
    match ours >= expected {
        true => Ok(()),
        false => Err(format!("{ours} kernels of convolutions, of {expected}: {kernels:?}").into()),
    }
}

fn recorded(device: &Device) -> Result<(), Failed> {
    const STEPS: u64 = 30;
    let train = |mut graph: GradientGraph<Network, Tensor<4>, Tensor<1>>| {
        let mut network = Network::new(device);
        let mut optimizer = burn::optim::SgdConfig::new().init();
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let drawn = normal(100 + step, 4 * 3 * 8 * 8, 1.0, Storage::F32);
            let plain = device.clone().without_autodiff();
            let images: Tensor<4> = tensor(&drawn, [4, 3, 8, 8], Storage::F32, &plain);
            let (loss, gradients) =
                graph.run(&network, Tensor::from_inner(images), Network::pass)?;
            network = optimizer.step(1e-2, network, gradients);
            losses.extend(values(loss)?);
        }
        for norm in &network.norms {
            losses.extend(values(norm.running_mean.value_sync())?);
            losses.extend(values(norm.running_var.value_sync())?);
        }
        Ok::<_, Failed>((losses, graph.is_recorded()))
    };
    let (ran, _) = train(GradientGraph::disabled(PrecisionPolicy::default()))?;
    let (replayed, is_recorded) = train(GradientGraph::new(PrecisionPolicy::default()))?;
    if !is_recorded {
        return Err("nothing was recorded".into());
    }
    let apart = ran.iter().zip(&replayed).map(|(a, b)| (a - b).abs() / a.abs().max(1e-3));
    match apart.fold(0.0, f64::max) {
        most if most <= 1e-3 && ran.len() == replayed.len() => Ok(()),
        most => Err(format!("numbers are {most} apart").into()),
    }
}
