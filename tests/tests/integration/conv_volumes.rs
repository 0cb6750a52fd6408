//! Convolutions of volumes as `burn::nn` has them, with their gradients: on the kernels, and against f64.

use super::provider::{expect_ours, precision_of};
use blackburn_reference::{
    conv::{ConvCase, ConvPass, ConvSums, VolumeCase, conv_volumes},
    random::normal,
    storage::Storage,
};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    on_burn_device,
    tensors::{tensor, values},
    trials_in,
};
use burn::{
    prelude::*,
    tensor::{
        module::{conv_transpose3d, conv3d},
        ops::{ConvOptions, ConvTransposeOptions},
    },
};
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;

pub(super) fn trials() -> Vec<Trial> {
    let mut trials = trials_in(
        "conv::volumes::run_on_the_kernels_and_are_within_bounds",
        &Storage::ALL,
        volumes,
    );
    type Test = fn(&Device) -> Result<(), Failed>;
    let tests: [(&str, Test); 4] = [
        ("transposed_ones_run_on_the_kernels_and_are_within_bounds", transposed_volumes),
        ("what_one_leaves_is_read_in_place_by_the_next", chained),
        ("frames_in_any_order_are_right", permuted),
        ("no_volumes_have_gradients_of_zero", no_volumes),
    ];
    trials.extend(tests.map(|(name, test)| {
        Trial::ignorable_test(format!("conv::volumes::{name}"), move || {
            on_burn_device(|device| test(&device))
        })
    }));
    trials
}

/// Neither frames nor rows are as many as columns.
const VOLUME: VolumeCase = VolumeCase {
    images: ConvCase { input: [6, 7], ..ConvCase::square(2, [8, 16], 6, 3) }.padded(1),
    input: 5,
    kernel: 3,
    stride: 1,
    padding: 1,
    dilation: 1,
};

/// A convolution, its operands and the gradient of its output.
struct Layer {
    case: VolumeCase,
    storage: Storage,
    x: Vec<f64>,
    weight: Vec<f64>,
    dy: Vec<f64>,
}

/// What Burn computes: the output, and the gradients of the input and of the weights.
type Results = [Vec<f64>; 3];

impl Layer {
    fn new(case: VolumeCase, storage: Storage) -> Self {
        let draw = |seed, shape: [usize; 5]| normal(seed, shape.iter().product(), 1.0, storage);
        let (x, weight, dy) =
            (draw(1, case.x_shape()), draw(2, case.weight_shape()), draw(3, case.y_shape()));
        Self { case, storage, x, weight, dy }
    }

    /// Of `input`, by `asked`, whose output has the gradient `dy`.
    fn run(
        &self,
        device: &Device,
        [(input, input_shape), (dy, dy_shape)]: [(&[f64], [usize; 5]); 2],
        asked: impl Fn(Tensor<5>, Tensor<5>) -> Tensor<5>,
    ) -> Result<(Results, Vec<Block>), Failed> {
        let device = device.clone().autodiff();
        let leaf = |values: &[f64], shape: [usize; 5]| {
            tensor(values, shape, self.storage, &device).require_grad()
        };
        let (input, weight) =
            (leaf(input, input_shape), leaf(&self.weight, self.case.weight_shape()));
        let dy = tensor(dy, dy_shape, self.storage, &device);
        let (results, blocks) = blocks_of(&device, || {
            let y = asked(input.clone(), weight.clone());
            let gradients = (y.clone() * dy).sum().backward();
            let missing = "a gradient is missing";
            let [dx, dw] = [&input, &weight].map(|leaf| leaf.grad(&gradients));
            Ok((y, dx.ok_or(missing)?, dw.ok_or(missing)?))
        })?;
        let (y, dx, dw) = results;
        Ok(([values(y)?, values(dx)?, values(dw)?], blocks))
    }

    fn sums(&self, pass: ConvPass, first: &[f64], second: &[f64]) -> ConvSums {
        conv_volumes(&self.case, pass, first, second)
    }

    fn judge(&self, name: &str, actual: &[f64], sums: &ConvSums) -> Result<(), Failed> {
        precision_of(self.storage)
            .check_random(actual, &sums.random())
            .map_err(|error| format!("{name} of {}: {error}", self.case).into())
    }
}

/// The sums of an output with as many channels as there are biases, each of which is added to its channel.
fn biased(mut sums: ConvSums, biases: &[f64], [_, channels, sizes @ ..]: [usize; 5]) -> ConvSums {
    let pixels: usize = sizes.iter().product();
    for (at, sum) in sums.values.iter_mut().enumerate() {
        let added = biases[at / pixels % channels];
        *sum += added;
        sums.magnitudes[at] += added.abs();
        sums.squares[at] += added * added;
    }
    sums.terms += 1;
    sums
}

fn options(case: &VolumeCase) -> ConvOptions<3> {
    let ConvCase { stride, padding, dilation, groups, .. } = case.images;
    let [[rows, _], [columns, _]] = padding;
    ConvOptions::new(
        [case.stride, stride[0], stride[1]],
        [case.padding, rows, columns],
        [case.dilation, dilation[0], dilation[1]],
        groups,
    )
}

fn cases() -> [VolumeCase; 7] {
    let images = VOLUME.images;
    let narrow = ConvCase { in_channels: 3, out_channels: 5, ..images };
    let plain = ConvCase { kernel: [1; 2], ..images }.padded(0);
    [
        VOLUME,
        VolumeCase { images: images.strided(2), stride: 2, ..VOLUME },
        VolumeCase { images: narrow, stride: 3, padding: 0, ..VOLUME },
        VolumeCase { images: images.grouped(4), dilation: 2, padding: 2, ..VOLUME },
        VolumeCase { images: images.dilated(2).padded(2), kernel: 2, ..VOLUME },
        // Frames that nothing joins, and pixels that nothing does.
        VolumeCase { kernel: 1, padding: 0, ..VOLUME },
        VolumeCase { images: plain, ..VOLUME },
    ]
}

fn volumes(device: &Device, storage: Storage) -> Result<(), Failed> {
    for case in cases() {
        let layer = Layer::new(case, storage);
        let Layer { x, weight, dy, .. } = &layer;
        let biases = normal(5, case.images.out_channels, 1.0, storage);
        let bias = tensor(&biases, [biases.len()], storage, &device.clone().autodiff());
        let ([y, dx, dw], blocks) =
            layer.run(device, [(x, case.x_shape()), (dy, case.y_shape())], |x, weight| {
                conv3d(x, weight, Some(bias.clone()), options(&case))
            })?;
        let sums = biased(layer.sums(ConvPass::Fprop, x, weight), &biases, case.y_shape());
        layer.judge("y", &y, &sums)?;
        layer.judge("dx", &dx, &layer.sums(ConvPass::Dgrad, dy, weight))?;
        layer.judge("dw", &dw, &layer.sums(ConvPass::Wgrad, x, dy))?;
        expect_ours(&blocks, 3)?;
    }
    Ok(())
}

/// What the case has as the gradient of x is the output.
fn transposed_volumes(device: &Device) -> Result<(), Failed> {
    let images = VOLUME.images;
    let many = ConvCase { batch: 16, ..images };
    for case in [
        VOLUME,
        VolumeCase { images: images.strided(2), stride: 2, ..VOLUME },
        // The gradient of the weights is a convolution whose kernel is as large as the volumes.
        VolumeCase { images: many, ..VOLUME },
    ] {
        let layer = Layer::new(case, F32);
        let Layer { x, weight, dy, .. } = &layer;
        let ConvCase { stride, padding, .. } = case.images;
        let [height, width] = case.images.output();
        let sizes = [(case.input, case.output(), case.kernel, case.stride, case.padding)]
            .into_iter()
            .chain((0..2).map(|dim| {
                let images = case.images;
                let (size, out) = (images.input[dim], [height, width][dim]);
                (size, out, images.kernel[dim], stride[dim], padding[dim][0])
            }));
        // Elements that the output has behind those which the taps of the last one reach.
        let behind: Vec<usize> = sizes
            .map(|(size, out, kernel, stride, padding)| {
                size + 2 * padding - ((out - 1) * stride + kernel)
            })
            .collect();
        let options = ConvTransposeOptions::new(
            [case.stride, stride[0], stride[1]],
            [case.padding, padding[0][0], padding[1][0]],
            [behind[0], behind[1], behind[2]],
            [1; 3],
            1,
        );
        let biases = normal(5, case.images.in_channels, 1.0, F32);
        let bias = tensor(&biases, [biases.len()], F32, &device.clone().autodiff());
        let ([y, dx, dw], blocks) =
            layer.run(device, [(dy, case.y_shape()), (x, case.x_shape())], |dy, weight| {
                conv_transpose3d(dy, weight, Some(bias.clone()), options.clone())
            })?;
        let sums = biased(layer.sums(ConvPass::Dgrad, dy, weight), &biases, case.x_shape());
        layer.judge("a transposed y", &y, &sums)?;
        layer.judge("a transposed dx", &dx, &layer.sums(ConvPass::Fprop, x, weight))?;
        layer.judge("a transposed dw", &dw, &layer.sums(ConvPass::Wgrad, x, dy))?;
        expect_ours(&blocks, 3)?;
    }
    Ok(())
}

/// Channels lie innermost in what a convolution makes, so that nothing copies it for the next one.
fn chained(device: &Device) -> Result<(), Failed> {
    let case = VOLUME;
    let layer = Layer::new(case, F32);
    let x = tensor(&layer.x, case.x_shape(), F32, device);
    let weight = tensor(&layer.weight, case.weight_shape(), F32, device);
    let second = normal(4, 16 * 16 * 27, 1.0, F32);
    let second = tensor(&second, [16, 16, 3, 3, 3], F32, device);
    let bias = tensor(&normal(5, 16, 1.0, F32), [16], F32, device);
    let y = conv3d(x, weight, None, options(&case));
    // What is timed is the second one alone.
    let _ = y.clone().sum().into_data();
    let (y, blocks) = blocks_of(device, || Ok(conv3d(y, second, Some(bias), options(&case))))?;
    let kernels: Vec<&str> = blocks.iter().flat_map(|block| block.kernels.clone()).collect();
    let copies = kernels.iter().filter(|kernel| kernel.contains("copy")).count();
    // That of the weights.
    if copies > 1 {
        return Err(format!("{copies} copies: {kernels:#?}").into());
    }
    let finite = values(y)?.iter().all(|number| number.is_finite());
    if finite { Ok(()) } else { Err("a result is not finite".into()) }
}

/// Volumes whose frames and rows were swapped by the user.
fn permuted(device: &Device) -> Result<(), Failed> {
    let case =
        VolumeCase { images: ConvCase { input: [5, 7], ..VOLUME.images }, input: 6, ..VOLUME };
    let layer = Layer::new(case, F32);
    let lying = case.x_shape();
    let swapped = [lying[0], lying[1], lying[3], lying[2], lying[4]];
    let x = tensor(&layer.x, lying, F32, device);
    let weight = tensor(&layer.weight, case.weight_shape(), F32, device);
    // Twice, so that the memory is that of the other order.
    let there = x.swap_dims(2, 3).add_scalar(0.0).reshape(swapped).swap_dims(2, 3);
    let y = conv3d(there, weight, None, options(&case));
    layer.judge("y", &values(y)?, &layer.sums(ConvPass::Fprop, &layer.x, &layer.weight))
}

fn no_volumes(device: &Device) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let weight = Tensor::<5>::ones([4, 2, 3, 3, 3], &device).require_grad();
    let x = Tensor::<5>::zeros([0, 2, 5, 5, 5], &device);
    let y = conv3d(x, weight.clone(), None, options(&VolumeCase { stride: 1, ..VOLUME }));
    let gradients = y.sum().backward();
    let gradient = weight.grad(&gradients).ok_or("the weights have no gradient")?;
    let sum = values(gradient.abs().sum())?;
    if sum == [0.0] { Ok(()) } else { Err(format!("gradients come to {sum:?}").into()) }
}
