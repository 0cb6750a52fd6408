//! Pools of `burn::nn`, unmodified: on the kernels, and against f64.

use blackburn_reference::{
    pool::{Pool, Windows},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    on_burn_device,
    tensors::{tensor, values},
    trials_in,
};
use burn::{
    nn::{
        PaddingConfig1d, PaddingConfig2d,
        pool::{
            AdaptiveAvgPool1dConfig, AdaptiveAvgPool2dConfig, AvgPool1dConfig, AvgPool2dConfig,
            MaxPool1dConfig, MaxPool2dConfig,
        },
    },
    prelude::*,
    tensor::{
        Int,
        activation::relu,
        module::{conv2d, max_pool2d_with_indices},
        ops::{ConvOptions, MaxPoolOptions},
    },
};
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;
const SHAPE: [usize; 4] = [2, 8, 9, 11];

pub(crate) fn trials() -> Vec<Trial> {
    type Test = fn(&Device) -> Result<(), Failed>;
    let trial = |name: &str, test: Test| {
        Trial::ignorable_test(format!("pool::provider::{name}"), move || {
            on_burn_device(|device| test(&device))
        })
    };
    let tests: [(&str, Test); 7] = [
        ("sequences_run_on_the_kernels_and_are_within_bounds", sequences),
        ("images_of_a_convolution_are_read_in_place", behind_a_convolution),
        ("every_order_of_memory_is_right", orders),
        ("indices_are_those_of_the_pixels", indices),
        ("without_a_gradient_no_indices_are_made", inference),
        ("results_are_those_of_the_cpu", as_on_the_cpu),
        ("a_gradient_that_is_one_number_is_right", expanded),
    ];
    let mut trials: Vec<Trial> = tests.map(|(name, test)| trial(name, test)).into();
    let name = "pool::provider::images_run_on_the_kernels_and_are_within_bounds";
    trials.extend(trials_in(name, &Storage::ALL, images));
    trials
}

/// A module, and what it computes.
struct Asked<const D: usize> {
    name: &'static str,
    windows: Windows,
    /// `None` for maxima, otherwise whether the padding counts.
    mean: Option<bool>,
    module: Box<dyn Fn(Tensor<D>) -> Tensor<D>>,
}

impl<const D: usize> Asked<D> {
    /// The pool of images of one channel, which tensors in Burn's order are.
    fn pool(&self, shape: [usize; D]) -> Pool {
        let height = if D == 4 { shape[2] } else { 1 };
        Pool { sizes: [shape[0] * shape[1], height, shape[D - 1], 1], windows: self.windows }
    }

    /// Output and gradient of x on the device, and what ran.
    fn run(
        &self,
        x: Tensor<D>,
        dy: &[f64],
        storage: Storage,
    ) -> Result<([Vec<f64>; 2], Vec<Block>), Failed> {
        let device = x.device();
        let x = x.require_grad();
        let (results, blocks) = blocks_of(&device, || {
            let y = (self.module)(x.clone());
            let dy = tensor(dy, y.dims(), storage, &device);
            let gradients = (y.clone() * dy).sum().backward();
            Ok((y, x.grad(&gradients).ok_or("x has no gradient")?))
        })?;
        Ok(([values(results.0)?, values(results.1)?], blocks))
    }

    fn check(
        &self,
        device: &Device,
        shape: [usize; D],
        storage: Storage,
        laid_out: impl Fn(Tensor<D>) -> Tensor<D>,
    ) -> Result<Vec<Block>, Failed> {
        let pool = self.pool(shape);
        let device = device.clone().autodiff();
        let numbers = normal(1, shape.iter().product(), 1.0, storage);
        let dy = normal(2, pool.output_sizes().iter().product(), 1.0, storage);
        let x = laid_out(tensor(&numbers, shape, storage, &device)).detach();
        let ([y, dx], blocks) = self.run(x, &dy, storage)?;
        let (expected, bounds, gradient) = match self.mean {
            None => {
                let maxima = pool.max(&numbers);
                let exact = vec![0.0; maxima.values.len()];
                (maxima.values, exact, pool.max_backward(&dy, &maxima.indices))
            }
            Some(padded) => {
                let means = pool.average(&numbers, padded);
                let bounds = means.bounds(storage);
                (means.values, bounds, pool.average_backward(&dy, padded))
            }
        };
        let told = |what: &str| format!("{} of {shape:?} in {storage:?}: {what}", self.name);
        compare(&y, &expected, &bounds).map_err(|error| format!("{}: {error}", told("y")))?;
        let bounds = gradient.bounds(storage);
        compare(&dx, &gradient.values, &bounds)
            .map_err(|error| format!("{}: {error}", told("dx")))?;
        expect_ours(&blocks).map_err(|error| told(&error))?;
        Ok(blocks)
    }
}

fn kernels(blocks: &[Block]) -> impl Iterator<Item = &'static str> {
    blocks.iter().flat_map(|block| block.kernels.iter().copied())
}

/// Whether both passes ran on the kernels, and nothing on Burn's.
fn expect_ours(blocks: &[Block]) -> Result<(), String> {
    let is_ours = |kernel: &&str| kernel.starts_with("blackburn_kernels::");
    let is_pool = |kernel: &&str| is_ours(kernel) && kernel.contains("::pool::");
    // The mean of a whole image is a sum of columns or rows.
    let is_sum = |kernel: &&str| is_ours(kernel) && kernel.contains("_sum::");
    let burns = kernels(blocks).find(|kernel| kernel.contains("pool") && !is_ours(kernel));
    let ours = kernels(blocks).filter(|kernel| is_pool(kernel) || is_sum(kernel)).count();
    let pools = kernels(blocks).filter(is_pool).count();
    match burns {
        Some(kernel) => Err(format!("a pool ran on {kernel}: {blocks:#?}")),
        None if ours < 2 || pools < 1 => Err(format!("{ours} kernels are ours: {blocks:#?}")),
        None => Ok(()),
    }
}

fn walking(
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    ceil: bool,
) -> Windows {
    Windows::Walking { kernel, stride, padding, dilation, ceil }
}

fn max_2d(
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    ceil: bool,
) -> Asked<4> {
    let module = MaxPool2dConfig::new(kernel)
        .with_strides(stride)
        .with_padding(PaddingConfig2d::Explicit(padding[0], padding[1], padding[0], padding[1]))
        .with_dilation(dilation)
        .with_ceil_mode(ceil)
        .init();
    Asked {
        name: "MaxPool2d",
        windows: walking(kernel, stride, padding, dilation, ceil),
        mean: None,
        module: Box::new(move |x| module.forward(x)),
    }
}

fn average_2d(
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    padded: bool,
    ceil: bool,
) -> Asked<4> {
    let module = AvgPool2dConfig::new(kernel)
        .with_strides(stride)
        .with_padding(PaddingConfig2d::Explicit(padding[0], padding[1], padding[0], padding[1]))
        .with_count_include_pad(padded)
        .with_ceil_mode(ceil)
        .init();
    Asked {
        name: "AvgPool2d",
        windows: walking(kernel, stride, padding, [1; 2], ceil),
        mean: Some(padded),
        module: Box::new(move |x| module.forward(x)),
    }
}

fn adaptive_2d(parts: [usize; 2]) -> Asked<4> {
    let module = AdaptiveAvgPool2dConfig::new(parts).init();
    Asked {
        name: "AdaptiveAvgPool2d",
        windows: Windows::Adaptive(parts),
        mean: Some(false),
        module: Box::new(move |x| module.forward(x)),
    }
}

fn all_2d() -> Vec<Asked<4>> {
    vec![
        max_2d([3; 2], [2; 2], [1; 2], [1; 2], false),
        max_2d([2; 2], [2; 2], [0; 2], [1; 2], true),
        max_2d([3, 2], [1, 3], [1, 0], [2, 1], false),
        average_2d([2; 2], [2; 2], [0; 2], true, false),
        average_2d([3; 2], [2; 2], [1; 2], true, true),
        average_2d([3; 2], [1; 2], [1; 2], false, false),
        average_2d([9, 11], [1; 2], [0; 2], true, false),
        adaptive_2d([1, 1]),
        adaptive_2d([3, 4]),
        adaptive_2d([3, 11]),
    ]
}

/// Channels innermost in memory, as convolutions leave them.
fn channels_last(x: Tensor<4>) -> Tensor<4> {
    x.permute([0, 2, 3, 1]).mul_scalar(1.0).permute([0, 3, 1, 2])
}

fn images(device: &Device, storage: Storage) -> Result<(), Failed> {
    for asked in all_2d() {
        asked.check(device, SHAPE, storage, |x| x)?;
        asked.check(device, SHAPE, storage, channels_last)?;
    }
    Ok(())
}

fn sequences(device: &Device) -> Result<(), Failed> {
    let one = |kernel: usize, stride: usize, padding: usize, dilation: usize| {
        walking([1, kernel], [1, stride], [0, padding], [1, dilation], false)
    };
    let max = MaxPool1dConfig::new(3)
        .with_stride(2)
        .with_padding(PaddingConfig1d::Explicit(1, 1))
        .with_dilation(2)
        .init();
    let mean = AvgPool1dConfig::new(4)
        .with_stride(3)
        .with_padding(PaddingConfig1d::Explicit(1, 1))
        .with_count_include_pad(false)
        .init();
    let parts = [AdaptiveAvgPool1dConfig::new(5).init(), AdaptiveAvgPool1dConfig::new(1).init()];
    let [several, whole] = parts;
    let all: [Asked<3>; 4] = [
        Asked {
            name: "MaxPool1d",
            windows: one(3, 2, 1, 2),
            mean: None,
            module: Box::new(move |x| max.forward(x)),
        },
        Asked {
            name: "AvgPool1d",
            windows: one(4, 3, 1, 1),
            mean: Some(false),
            module: Box::new(move |x| mean.forward(x)),
        },
        Asked {
            name: "AdaptiveAvgPool1d",
            windows: Windows::Adaptive([1, 5]),
            mean: Some(false),
            module: Box::new(move |x| several.forward(x)),
        },
        Asked {
            name: "AdaptiveAvgPool1d of one part",
            windows: Windows::Adaptive([1, 1]),
            mean: Some(false),
            module: Box::new(move |x| whole.forward(x)),
        },
    ];
    for asked in all {
        asked.check(device, [3, 8, 33], F32, |x| x)?;
        asked.check(device, [3, 8, 33], F32, |x| {
            x.swap_dims(1, 2).mul_scalar(1.0).swap_dims(1, 2)
        })?;
    }
    Ok(())
}

/// What a convolution and an activation leave is pooled without a copy, and so is what the pool leaves.
fn behind_a_convolution(device: &Device) -> Result<(), Failed> {
    let asked = max_2d([3; 2], [2; 2], [1; 2], [1; 2], false);
    let draw = |seed, shape: [usize; 4]| normal(seed, shape.iter().product(), 1.0, F32);
    let x = channels_last(tensor(&draw(1, SHAPE), SHAPE, F32, device));
    let weight = tensor(&draw(2, [8, 8, 1, 1]), [8, 8, 1, 1], F32, device);
    device.sync().map_err(|error| error.to_string())?;
    let (results, blocks) = blocks_of(device, || {
        let options = || ConvOptions::new([1; 2], [0; 2], [1; 2], 1);
        let hidden = relu(conv2d(x, weight.clone(), None, options()));
        let pooled = (asked.module)(hidden.clone());
        Ok((hidden, pooled.clone(), conv2d(pooled, weight, None, options())))
    })?;
    let (hidden, pooled) = (values(results.0)?, values(results.1)?);
    if pooled != asked.pool(SHAPE).max(&hidden).values {
        return Err("the pool of what the convolution left is wrong".into());
    }
    values(results.2)?;
    let copies = kernels(&blocks).filter(|kernel| kernel.contains("contiguous")).count();
    // Weights are copied where the device leaves gaps behind their rows.
    if copies > 2 {
        return Err(format!("{copies} tensors were copied: {blocks:#?}").into());
    }
    match kernels(&blocks).filter(|kernel| kernel.contains("blackburn_kernels::pool")).count() {
        1 => Ok(()),
        launches => Err(format!("{launches} launches of pools: {blocks:#?}").into()),
    }
}

/// Turned images, and parts of larger ones: some channels, some rows, every other column.
fn orders(device: &Device) -> Result<(), Failed> {
    for asked in all_2d() {
        asked.check(device, SHAPE, F32, |x| {
            x.permute([0, 1, 3, 2]).mul_scalar(1.0).permute([0, 1, 3, 2])
        })?;
        asked.check(device, SHAPE, F32, |x| {
            x.permute([1, 0, 2, 3]).mul_scalar(1.0).permute([1, 0, 2, 3])
        })?;
        let larger = |x: Tensor<4>, dim: usize| Tensor::cat(vec![x.clone(), x], dim);
        asked.check(device, SHAPE, F32, |x| {
            channels_last(larger(x, 1)).slice([0..2, 8..16, 0..9, 0..11])
        })?;
        asked.check(device, SHAPE, F32, |x| {
            channels_last(larger(x, 2)).slice([0..2, 0..8, 9..18, 0..11])
        })?;
        asked.check(device, SHAPE, F32, |x| larger(x, 3).slice([0..2, 0..8, 0..9, 11..22]))?;
    }
    Ok(())
}

fn indices(device: &Device) -> Result<(), Failed> {
    let pool =
        Pool { sizes: [16, 9, 11, 1], windows: walking([3; 2], [2; 2], [1; 2], [1; 2], false) };
    let numbers: Vec<f64> = normal(1, 16 * 99, 1.0, F32).into_iter().map(f64::round).collect();
    let expected = pool.max(&numbers);
    let options = MaxPoolOptions::new([3; 2]).with_stride([2; 2]).with_padding([1; 2]);
    for laid_out in [|x| x, channels_last as fn(Tensor<4>) -> Tensor<4>] {
        let x = laid_out(tensor(&numbers, SHAPE, F32, device));
        let ((y, indices), blocks) = blocks_of(device, || {
            let (y, indices): (Tensor<4>, Tensor<4, Int>) =
                max_pool2d_with_indices(x, options.clone());
            let indices = indices.try_into_data().map_err(|error| error.to_string())?;
            let indices = indices.try_cast_as::<i32>().map_err(|error| error.to_string())?;
            Ok((values(y)?, indices.try_to_vec::<i32>().map_err(|error| format!("{error:?}"))?))
        })?;
        if y != expected.values || indices != expected.indices {
            return Err(format!("{indices:?}, and not {:?}", expected.indices).into());
        }
        let pools = kernels(&blocks).filter(|kernel| kernel.contains("blackburn_kernels::pool"));
        if pools.count() != 1 {
            return Err(format!("not on the kernel: {blocks:#?}").into());
        }
    }
    Ok(())
}

fn inference(device: &Device) -> Result<(), Failed> {
    let asked = max_2d([3; 2], [2; 2], [1; 2], [1; 2], false);
    let numbers = normal(1, SHAPE.iter().product(), 1.0, F32);
    let x = tensor(&numbers, SHAPE, F32, device);
    let before = served();
    let y = values((asked.module)(x))?;
    if y != asked.pool(SHAPE).max(&numbers).values {
        return Err("the maxima are wrong".into());
    }
    if served() > before { Ok(()) } else { Err("no pool was served".into()) }
}

/// Operations that the provider has run.
fn served() -> u64 {
    blackburn_backend::profile::served().get("BlackburnPool").copied().unwrap_or(0)
}

/// The same modules on Burn's CPU backend: ties, NaN and infinities included.
fn as_on_the_cpu(device: &Device) -> Result<(), Failed> {
    let mut numbers: Vec<f64> =
        normal(5, SHAPE.iter().product(), 1.0, F32).into_iter().map(f64::round).collect();
    for (at, special) in [(7, f64::NAN), (130, f64::INFINITY), (500, f64::NEG_INFINITY)] {
        numbers[at] = special;
    }
    numbers[99..198].fill(f64::NEG_INFINITY);
    for asked in all_2d() {
        let outputs = asked.pool(SHAPE).output_sizes().iter().product();
        let dy = normal(6, outputs, 1.0, F32);
        let of = |device: &Device| {
            let x = tensor(&numbers, SHAPE, F32, &device.clone().autodiff()).require_grad();
            let y = (asked.module)(x.clone());
            let dy = tensor(&dy, y.dims(), F32, &x.device());
            let gradients = (y.clone() * dy).sum().backward();
            let dx = x.grad(&gradients).ok_or("x has no gradient")?;
            Ok::<_, Failed>([values(y)?, values(dx)?])
        };
        let before = served();
        let ours = of(device)?;
        if served() < before + 2 {
            return Err(format!("{} was not served", asked.name).into());
        }
        let theirs = of(&Device::flex())?;
        for (what, ours, theirs) in [("y", &ours[0], &theirs[0]), ("dx", &ours[1], &theirs[1])] {
            // Sums of up to 99 numbers below 4, in f32 on both sides.
            let bounds = vec![2.0 * 4.0 * 105.0 * F32.unit_roundoff(); ours.len()];
            compare(ours, theirs, &bounds)
                .map_err(|error| format!("{} {what}: {error}", asked.name))?;
        }
    }
    Ok(())
}

/// The gradient of a plain sum is one number that is seen as a whole tensor.
fn expanded(device: &Device) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let numbers = normal(1, SHAPE.iter().product(), 1.0, F32);
    for asked in all_2d() {
        let pool = asked.pool(SHAPE);
        let ones = vec![1.0; pool.output_sizes().iter().product()];
        let expected = match asked.mean {
            None => pool.max_backward(&ones, &pool.max(&numbers).indices),
            Some(padded) => pool.average_backward(&ones, padded),
        };
        let x = channels_last(tensor(&numbers, SHAPE, F32, &device)).detach().require_grad();
        let gradients = (asked.module)(x.clone()).sum().backward();
        let dx = values(x.grad(&gradients).ok_or("x has no gradient")?)?;
        compare(&dx, &expected.values, &expected.bounds(F32))
            .map_err(|error| format!("{}: {error}", asked.name))?;
    }
    Ok(())
}
