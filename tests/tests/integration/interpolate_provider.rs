//! Resized images of `burn::nn`, unmodified: their gradients on the kernel, against f64 and against the CPU.

use blackburn_reference::{
    interpolate::{Interpolation, Mode},
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
        PaddingConfig2d, Tanh,
        conv::{Conv2d, Conv2dConfig},
        interpolate::{Interpolate1dConfig, Interpolate2d, Interpolate2dConfig, InterpolateMode},
        loss::{MseLoss, Reduction},
    },
    optim::{GradientsParams, SgdConfig},
    prelude::*,
    tensor::{
        DType,
        module::interpolate,
        ops::{InterpolateMode as Asked, InterpolateOptions},
    },
};
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;
const SHAPE: [usize; 4] = [2, 8, 6, 7];

pub(crate) fn trials() -> Vec<Trial> {
    type Test = fn(&Device) -> Result<(), Failed>;
    let trial = |name: &str, test: Test| {
        Trial::ignorable_test(format!("interpolate::provider::{name}"), move || {
            on_burn_device(|device| test(&device))
        })
    };
    let tests: [(&str, Test); 8] = [
        ("the_reference_resizes_as_burn_does", as_burn_resizes),
        ("gradients_are_differences_of_the_cpu_s_outputs", differences),
        ("gradients_are_those_of_the_cpu", as_on_the_cpu),
        ("sequences_run_on_the_kernel_and_are_within_bounds", sequences),
        ("every_order_of_memory_is_right", orders),
        ("channels_that_follow_each_other_stay_so", order_is_kept),
        ("a_gradient_that_is_one_number_is_right", expanded),
        ("an_unmodified_network_trains_as_on_the_cpu", network),
    ];
    let mut trials: Vec<Trial> = tests.map(|(name, test)| trial(name, test)).into();
    let name = "interpolate::provider::images_run_on_the_kernel_and_are_within_bounds";
    trials.extend(trials_in(name, &Storage::ALL, images));
    let name = "interpolate::provider::nearest_pixels_of_long_lines_are_right";
    trials.extend(trials_in(name, &Storage::ALL, long_lines));
    trials
}

/// Rows and columns that images of [`SHAPE`] are resized to: larger, smaller, mixed, kept, single pixels.
const OUTPUTS: [[usize; 2]; 6] = [[12, 14], [3, 4], [13, 5], [6, 15], [1, 1], [6, 7]];

fn options(mode: Mode, align_corners: bool, output: [usize; 2]) -> InterpolateOptions {
    let mode = match mode {
        Mode::Nearest => Asked::Nearest,
        Mode::NearestExact => Asked::NearestExact,
        Mode::Linear => Asked::Bilinear,
        Mode::Cubic => Asked::Bicubic,
    };
    InterpolateOptions::new(mode).with_align_corners(align_corners).with_output_size(output)
}

/// What Burn's tensors are to the reference: images of one channel.
fn resized(
    [images, channels, height, width]: [usize; 4],
    output: [usize; 2],
    (mode, align_corners): (Mode, bool),
) -> Interpolation {
    Interpolation { sizes: [images * channels, height, width, 1], output, mode, align_corners }
}

/// Every mode and option.
fn ways() -> impl Iterator<Item = (Mode, bool)> {
    Mode::ALL.into_iter().flat_map(|mode| [(mode, false), (mode, true)])
}

/// Those that Burn's CPU device has.
fn ways_of_the_cpu() -> impl Iterator<Item = (Mode, bool)> {
    ways().filter(|(mode, _)| *mode != Mode::NearestExact)
}

fn kernels(blocks: &[Block]) -> impl Iterator<Item = &'static str> {
    blocks.iter().flat_map(|block| block.kernels.iter().copied())
}

/// The gradient of x, and what ran.
fn gradient<const D: usize>(
    x: Tensor<D>,
    dy: &[f64],
    storage: Storage,
    module: impl Fn(Tensor<D>) -> Tensor<D>,
) -> Result<(Tensor<D>, Vec<Block>), Failed> {
    let device = x.device();
    let x = x.require_grad();
    let (dx, blocks) = blocks_of(&device, || {
        let y = module(x.clone());
        let dy = tensor(dy, y.dims(), storage, &device);
        let gradients = (y * dy).sum().backward();
        Ok(x.grad(&gradients).ok_or("x has no gradient")?)
    })?;
    Ok((dx, blocks))
}

/// The gradient on the kernel, held to its bounds.
fn check<const D: usize>(
    x: Tensor<D>,
    of: &Interpolation,
    storage: Storage,
    module: impl Fn(Tensor<D>) -> Tensor<D>,
) -> Result<(), Failed> {
    let dy = normal(2, of.output_sizes().iter().product(), 1.0, storage);
    let (dx, blocks) = gradient(x, &dy, storage, module)?;
    let expected = of.backward(&dy);
    compare(&values(dx)?, &expected.values, &expected.bounds(storage))
        .map_err(|error| format!("{of:?} in {storage:?}: {error}"))?;
    let is_ours = |kernel: &&str| kernel.starts_with("blackburn_kernels::interpolate::");
    match kernels(&blocks).filter(is_ours).count() {
        1 => Ok(()),
        count => Err(format!("{of:?}: {count} kernels are ours: {blocks:#?}").into()),
    }
}

fn drawn<const D: usize>(shape: [usize; D], storage: Storage, device: &Device) -> Tensor<D> {
    let numbers = normal(1, shape.iter().product(), 1.0, storage);
    tensor(&numbers, shape, storage, device)
}

/// Numbers with channels innermost in memory, as convolutions and Burn's resizing leave them. A view makes it so: a
/// fusion may write the result of a computation in any order.
fn drawn_channels_last(shape: [usize; 4], device: &Device) -> Tensor<4> {
    let [images, channels, height, width] = shape;
    drawn([images, height, width, channels], F32, device).permute([0, 3, 1, 2])
}

/// From images of channels of pixels to images of pixels of channels.
fn turned(numbers: &[f64], channels: usize, pixels: usize) -> Vec<f64> {
    let image = |image: &[f64]| -> Vec<f64> {
        let at = |place: usize| image[place % channels * pixels + place / channels];
        (0..image.len()).map(at).collect()
    };
    numbers.chunks(channels * pixels).flat_map(image).collect()
}

fn images(device: &Device, storage: Storage) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    for (mode, align_corners) in ways() {
        for output in OUTPUTS {
            let of = resized(SHAPE, output, (mode, align_corners));
            let x = drawn(SHAPE, storage, &device);
            check(x, &of, storage, |x| interpolate(x, options(mode, align_corners, output)))?;
        }
    }
    Ok(())
}

/// Burn's kernel finds the outputs of a pixel by quotients in the type of the images, where products of these places are
/// rounded.
fn long_lines(device: &Device, storage: Storage) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    for (pixels, outputs) in [(700, 1400), (1001, 300), (301, 1000)] {
        let shape = [1, 1, 1, pixels];
        let of = resized(shape, [1, outputs], (Mode::Nearest, true));
        let x = drawn(shape, storage, &device);
        check(x, &of, storage, |x| interpolate(x, options(Mode::Nearest, true, [1, outputs])))?;
    }
    Ok(())
}

/// What the gradient is the gradient of: on the device, and on the CPU.
fn as_burn_resizes(device: &Device) -> Result<(), Failed> {
    let numbers = normal(1, SHAPE.iter().product(), 1.0, F32);
    for (way, device) in ways()
        .map(|way| (way, device.clone()))
        .chain(ways_of_the_cpu().map(|way| (way, Device::flex())))
    {
        for output in OUTPUTS {
            let (mode, align_corners) = way;
            let x = tensor(&numbers, SHAPE, F32, &device);
            let y = values(interpolate(x, options(mode, align_corners, output)))?;
            let expected = resized(SHAPE, output, way).forward(&numbers);
            // Burn computes the cubic by Horner's rule, whose terms reach 36, in six roundings for each of two
            // weights; images are below 4, and weights of a dimension add up to less than 1.6 in magnitude.
            let bound = 2.0 * 6.0 * 36.0 * 4.0 * 1.6 * 1.6 * F32.unit_roundoff();
            compare(&y, &expected, &vec![bound; y.len()])
                .map_err(|error| format!("{way:?} to {output:?} on {device:?}: {error}"))?;
        }
    }
    Ok(())
}

/// Central differences of Burn's forward on the CPU, in f64. Resizing is linear, so that a step of 1 errs by
/// rounding alone.
fn differences(device: &Device) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let shape = [1, 1, 5, 4];
    let x = normal(1, 20, 1.0, F32);
    let cpu = Device::flex();
    for (mode, align_corners) in ways_of_the_cpu() {
        for output in [[9, 8], [3, 7], [5, 1]] {
            let of = resized(shape, output, (mode, align_corners));
            let dy = normal(2, of.output_sizes().iter().product(), 1.0, F32);
            let loss = |x: &[f64]| -> Result<f64, Failed> {
                let data = TensorData::new(x.to_vec(), shape);
                let x: Tensor<4> = Tensor::from_data(data, (&cpu, DType::F64));
                let y = values(interpolate(x, options(mode, align_corners, output)))?;
                Ok(y.iter().zip(&dy).map(|(y, dy)| y * dy).sum())
            };
            let mut expected = Vec::new();
            for at in 0..x.len() {
                let moved = |by: f64| {
                    let mut moved = x.clone();
                    moved[at] += by;
                    loss(&moved)
                };
                expected.push((moved(1.0)? - moved(-1.0)?) / 2.0);
            }
            let x = tensor(&x, shape, F32, &device);
            let (dx, _) =
                gradient(x, &dy, F32, |x| interpolate(x, options(mode, align_corners, output)))?;
            // And the rounding of differences in f64.
            let bounds = of.backward(&dy).bounds(F32).into_iter().map(|bound| bound + 1e-12);
            compare(&values(dx)?, &expected, &bounds.collect::<Vec<_>>())
                .map_err(|error| format!("{of:?}: {error}"))?;
        }
    }
    Ok(())
}

fn as_on_the_cpu(device: &Device) -> Result<(), Failed> {
    for (mode, align_corners) in ways_of_the_cpu() {
        for output in OUTPUTS {
            let of = resized(SHAPE, output, (mode, align_corners));
            let dy = normal(6, of.output_sizes().iter().product(), 1.0, F32);
            let on = |device: &Device| {
                let x = drawn(SHAPE, F32, &device.clone().autodiff()).require_grad();
                let y = interpolate(x.clone(), options(mode, align_corners, output));
                let dy = tensor(&dy, y.dims(), F32, &x.device());
                let gradients = (y * dy).sum().backward();
                values(x.grad(&gradients).ok_or("x has no gradient")?)
            };
            // Both are held to the same bounds of what is right.
            let bounds = of.backward(&dy).bounds(F32);
            let bounds: Vec<f64> = bounds.into_iter().map(|bound| 2.0 * bound).collect();
            compare(&on(device)?, &on(&Device::flex())?, &bounds)
                .map_err(|error| format!("{of:?}: {error}"))?;
        }
    }
    Ok(())
}

fn sequences(device: &Device) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let shape = [3, 8, 21];
    for (mode, named) in [
        (Mode::Nearest, InterpolateMode::Nearest),
        (Mode::Linear, InterpolateMode::Linear),
        (Mode::Cubic, InterpolateMode::Cubic),
    ] {
        for align_corners in [false, true] {
            for size in [42, 10] {
                let module = Interpolate1dConfig::new()
                    .with_output_size(Some(size))
                    .with_mode(named.clone())
                    .with_align_corners(align_corners)
                    .init();
                let of = resized([3, 8, 1, 21], [1, size], (mode, align_corners));
                let x = drawn(shape, F32, &device);
                check(x, &of, F32, |x| module.forward(x))?;
            }
        }
    }
    Ok(())
}

/// Turned images, and parts of larger ones: some channels, some rows, every other column.
fn orders(device: &Device) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let swapped = |x: Tensor<4>, axes: [isize; 4]| x.permute(axes).mul_scalar(1.0).permute(axes);
    let larger = |x: Tensor<4>, dim: usize| Tensor::cat(vec![x.clone(), x], dim);
    let [images, channels, height, width] = SHAPE;
    for way in [(Mode::Linear, false), (Mode::Cubic, true), (Mode::Nearest, true)] {
        let output = [12, 5];
        let of = resized(SHAPE, output, way);
        let run = |x: Tensor<4>| {
            check(x.detach(), &of, F32, |x| interpolate(x, options(way.0, way.1, output)))
        };
        let x = || drawn(SHAPE, F32, &device);
        run(swapped(x(), [0, 1, 3, 2]))?;
        run(swapped(x(), [1, 0, 2, 3]))?;
        let channel_part = [0..images, channels..2 * channels, 0..height, 0..width];
        let whole = [images, 2 * channels, height, width];
        run(drawn_channels_last(whole, &device).slice(channel_part))?;
        let column_part = [0..images, 0..channels, 0..height, width..2 * width];
        run(larger(x(), 3).slice(column_part))?;
        // The gradient turned: what comes behind reads y in another order.
        check(x(), &of, F32, |x| {
            let y = interpolate(x, options(way.0, way.1, output));
            y.permute([0, 1, 3, 2]).mul_scalar(1.0).permute([0, 1, 3, 2])
        })?;
    }
    Ok(())
}

/// A gradient whose channels follow each other is read where it lies, and what comes out lies so: a convolution in front
/// takes it without a copy.
fn order_is_kept(device: &Device) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let [images, channels, height, width] = SHAPE;
    for (mode, align_corners) in ways() {
        for output @ [rows, columns] in OUTPUTS {
            let x = drawn_channels_last(SHAPE, &device).require_grad();
            let of = resized(SHAPE, output, (mode, align_corners));
            let dy = normal(2, of.output_sizes().iter().product(), 1.0, F32);
            let turned_dy = turned(&dy, channels, rows * columns);
            let turned_dy = tensor(&turned_dy, [images, rows, columns, channels], F32, &device);
            let (dx, blocks) = blocks_of(&device, || {
                let y = interpolate(x.clone(), options(mode, align_corners, output));
                let gradients = (y.permute([0, 2, 3, 1]) * turned_dy).sum().backward();
                let dx = x.grad(&gradients).ok_or("x has no gradient")?;
                Ok(dx.permute([0, 2, 3, 1]).reshape([images * height * width * channels]))
            })?;
            let expected = of.backward(&dy);
            let of_pixels = |numbers: &[f64]| turned(numbers, channels, height * width);
            let bounds = of_pixels(&expected.bounds(F32));
            compare(&values(dx)?, &of_pixels(&expected.values), &bounds)
                .map_err(|error| format!("{of:?}: {error}"))?;
            if let Some(copy) = kernels(&blocks).find(|kernel| kernel.contains("contiguous")) {
                return Err(format!("{of:?}: {copy} ran: {blocks:#?}").into());
            }
        }
    }
    Ok(())
}

/// The gradient of a plain sum is one number that is seen as a whole tensor.
fn expanded(device: &Device) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    for (mode, align_corners) in ways() {
        let of = resized(SHAPE, [12, 5], (mode, align_corners));
        let expected = of.backward(&vec![1.0; of.output_sizes().iter().product()]);
        let x = drawn_channels_last(SHAPE, &device).require_grad();
        let y = interpolate(x.clone(), options(mode, align_corners, [12, 5]));
        let dx = values(x.grad(&y.sum().backward()).ok_or("x has no gradient")?)?;
        compare(&dx, &expected.values, &expected.bounds(F32))
            .map_err(|error| format!("{of:?}: {error}"))?;
    }
    Ok(())
}

/// The end of a U-Net.
#[derive(Module, Debug)]
struct Network {
    coarse: Conv2d,
    activation: Tanh,
    up: Interpolate2d,
    fine: Conv2d,
}

impl Network {
    fn new(mode: InterpolateMode, device: &Device) -> Self {
        let conv = |channels| {
            let config = Conv2dConfig::new(channels, [3; 2]);
            config.with_padding(PaddingConfig2d::Same).init(device)
        };
        let up = Interpolate2dConfig::new()
            .with_scale_factor(Some([2.0, 2.0]))
            .with_mode(mode)
            .with_align_corners(false);
        Self { coarse: conv([3, 8]), activation: Tanh::new(), up: up.init(), fine: conv([8, 2]) }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.fine.forward(self.up.forward(self.activation.forward(self.coarse.forward(x))))
    }
}

/// One step of gradient descent from the same parameters on both devices.
fn network(device: &Device) -> Result<(), Failed> {
    for mode in [InterpolateMode::Linear, InterpolateMode::Cubic] {
        let start = Network::new(mode, &Device::flex().autodiff());
        let step = |device: &Device| -> Result<[Vec<f64>; 3], Failed> {
            let device = device.clone().autodiff();
            let network = start.clone().fork(&device);
            let x = drawn([2, 3, 8, 6], F32, &device);
            let target = drawn([2, 2, 16, 12], F32, &device);
            let loss = MseLoss::new().forward(network.forward(x), target, Reduction::Mean);
            let gradients = GradientsParams::from_grads(loss.backward(), &network);
            let coarse: Tensor<4> =
                gradients.get(network.coarse.weight.id).ok_or("no gradient of the first layer")?;
            let fine: Tensor<4> =
                gradients.get(network.fine.weight.id).ok_or("no gradient of the last layer")?;
            let coarse = (values(coarse)?, values(fine)?);
            let network = SgdConfig::new().init().step(0.1, network, gradients);
            Ok([coarse.0, coarse.1, values(network.coarse.weight.val())?])
        };
        let before = blackburn_backend::profile::served();
        let (ours, theirs) = (step(device)?, step(&Device::flex())?);
        let served = blackburn_backend::profile::served();
        let count = |of: &std::collections::BTreeMap<&str, u64>| {
            of.get("BlackburnInterpolate").copied().unwrap_or(0)
        };
        if count(&served) <= count(&before) {
            return Err("the gradient was not served".into());
        }
        for (what, ours, theirs) in [
            ("gradient of the first layer", &ours[0], &theirs[0]),
            ("gradient of the last layer", &ours[1], &theirs[1]),
            ("first layer after a step", &ours[2], &theirs[2]),
        ] {
            // Sums of up to 2 * 16 * 12 terms, of numbers that are sums of up to 72. On CUDA, up to three products
            // follow each other, whose two operands are cut to TF32's ten bits.
            let largest = theirs.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
            compare(ours, theirs, &vec![6.0 / 1024.0 * largest; ours.len()])
                .map_err(|error| format!("{what}: {error}"))?;
        }
    }
    Ok(())
}
