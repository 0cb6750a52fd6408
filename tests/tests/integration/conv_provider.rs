//! Convolutions as `burn::nn` has them, with their gradients: on the kernels, and against f64.

use super::reference_pass;
use blackburn_kernels::conv::{ConvPass, variants::PASSES};
use blackburn_reference::{
    column_sum,
    conv::{ConvCase, ConvSums, conv},
    matmul::MatmulPrecision,
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
    prelude::*,
    tensor::{
        activation::relu,
        module::{conv_transpose1d, conv_transpose2d, conv1d, conv2d},
        ops::{ConvOptions, ConvTransposeOptions},
    },
};
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;

pub(super) fn trials() -> Vec<Trial> {
    type Test = fn(&Device) -> Result<(), Failed>;
    let trial = |name: &str, test: Test| {
        Trial::ignorable_test(format!("conv::provider::{name}"), move || {
            on_burn_device(|device| test(&device))
        })
    };
    let tests: [(&str, Test); 7] = [
        ("sequences_run_on_the_kernels_and_are_within_bounds", sequences),
        ("transposed_sequences_run_on_the_kernels_and_are_within_bounds", transposed_sequences),
        ("transposed_images_in_groups_are_within_bounds", transposed_groups),
        ("what_one_leaves_is_read_in_place_by_the_next", chained),
        ("operands_behind_a_cast_are_taken", behind_a_cast),
        ("expanded_gradients_are_right", expanded),
        ("no_images_have_gradients_of_zero", no_images),
    ];
    let mut trials: Vec<Trial> = tests.map(|(name, test)| trial(name, test)).into();
    for (name, test) in [
        ("images", images as fn(&Device, Storage) -> Result<(), Failed>),
        ("transposed_images", transposed_images),
    ] {
        let name = format!("conv::provider::{name}_run_on_the_kernels_and_are_within_bounds");
        trials.extend(trials_in(&name, &Storage::ALL, test));
    }
    trials
}

const IMAGE: ConvCase = ConvCase { input: [9, 11], ..ConvCase::square(2, [8, 16], 9, 3) };

/// Which way Burn is asked to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Convolution,
    /// What the case has as the gradient of x is the output.
    Transposed,
}

/// A convolution, its operands and the gradient of its output.
struct Layer {
    case: ConvCase,
    way: Way,
    storage: Storage,
    input: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
    dy: Vec<f64>,
}

impl Layer {
    fn new(case: ConvCase, way: Way, storage: Storage) -> Self {
        let draw = |seed, shape: &[usize]| normal(seed, shape.iter().product(), 1.0, storage);
        let (mut input, mut output) = (case.x_shape(), case.y_shape());
        if way == Way::Transposed {
            std::mem::swap(&mut input, &mut output);
        }
        Self {
            case,
            way,
            storage,
            input: draw(1, &input),
            weight: draw(2, &case.weight_shape()),
            bias: draw(3, &output[1..2]),
            dy: draw(4, &output),
        }
    }

    /// Sizes of the input and of the output.
    fn shapes(&self) -> [[usize; 4]; 2] {
        let (x, y) = (self.case.x_shape(), self.case.y_shape());
        if self.way == Way::Transposed { [y, x] } else { [x, y] }
    }

    /// The output, and the gradients of the input, of the weights and of the bias, as Burn computes them of
    /// tensors of rank `D`: 3 for images of height 1.
    fn run<const D: usize>(
        &self,
        device: &Device,
        asked: impl Fn(Tensor<D>, Tensor<D>, Tensor<1>, &ConvCase) -> Tensor<D>,
    ) -> Result<([Vec<f64>; 4], Vec<Block>), Failed> {
        let device = device.clone().autodiff();
        let [input, output] = self.shapes();
        let sizes = |shape: [usize; 4]| -> [usize; D] {
            let skipped = 4 - D;
            std::array::from_fn(|dim| shape[if dim < 2 { dim } else { dim + skipped }])
        };
        let leaf = |values: &[f64], shape: [usize; 4]| {
            tensor(values, sizes(shape), self.storage, &device).require_grad()
        };
        let x = leaf(&self.input, input);
        let weight = leaf(&self.weight, self.case.weight_shape());
        let bias = tensor(&self.bias, [output[1]], self.storage, &device).require_grad();
        let dy = tensor(&self.dy, sizes(output), self.storage, &device);
        let (results, blocks) = blocks_of(&device, || {
            let y = asked(x.clone(), weight.clone(), bias.clone(), &self.case);
            let gradients = (y.clone() * dy).sum().backward();
            let missing = "a gradient is missing";
            let db = bias.grad(&gradients).ok_or(missing)?;
            let [dx, dw] = [&x, &weight].map(|leaf| leaf.grad(&gradients));
            Ok((y, dx.ok_or(missing)?, dw.ok_or(missing)?, db))
        })?;
        let (y, dx, dw, db) = results;
        Ok(([values(y)?, values(dx)?, values(dw)?, values(db)?], blocks))
    }

    /// Of the pass, what is exact.
    fn sums(&self, pass: ConvPass) -> ConvSums {
        let Self { input, weight, dy, .. } = self;
        let [first, second] = match (pass, self.way) {
            (ConvPass::Fprop, Way::Convolution) => [input, weight],
            (ConvPass::Fprop, Way::Transposed) | (ConvPass::Dgrad, Way::Convolution) => {
                [dy, weight]
            }
            (ConvPass::Dgrad, Way::Transposed) => [input, weight],
            (ConvPass::Wgrad, Way::Convolution) => [input, dy],
            (ConvPass::Wgrad, Way::Transposed) => [dy, input],
        };
        conv(&self.case, reference_pass(pass), first, second)
    }

    /// Whether the output and all gradients are within bounds.
    fn judge(&self, [y, dx, dw, db]: &[Vec<f64>; 4]) -> Result<(), Failed> {
        let [_, [_, channels, height, width]] = self.shapes();
        let pixels = height * width;
        let precision = precision_of(self.storage);
        for pass in PASSES {
            let mut sums = self.sums(pass);
            let (name, actual) = match (pass, self.way) {
                (ConvPass::Wgrad, _) => ("dw", dw),
                (ConvPass::Fprop, Way::Convolution) | (ConvPass::Dgrad, Way::Transposed) => {
                    for (at, sum) in sums.values.iter_mut().enumerate() {
                        let added = self.bias[at / pixels % channels];
                        *sum += added;
                        sums.magnitudes[at] += added.abs();
                        sums.squares[at] += added * added;
                    }
                    sums.terms += 1;
                    ("y", y)
                }
                _ => ("dx", dx),
            };
            precision
                .check_random(actual, &sums.random())
                .map_err(|error| format!("{name} of {:?} of {}: {error}", self.way, self.case))?;
        }
        let of_channel = |channel: usize| -> Vec<f64> {
            let images = self.dy.chunks(channels * pixels);
            images.flat_map(|image| &image[channel * pixels..][..pixels]).copied().collect()
        };
        let expected: Vec<f64> =
            (0..channels).map(|channel| of_channel(channel).iter().sum()).collect();
        let bounds: Vec<f64> = (0..channels)
            .map(|channel| {
                let terms = of_channel(channel);
                let magnitudes = terms.iter().map(|term| term.abs()).sum();
                column_sum::bound(expected[channel], magnitudes, terms.len(), self.storage)
            })
            .collect();
        compare(db, &expected, &bounds)
            .map_err(|error| format!("db of {:?} of {}: {error}", self.way, self.case))?;
        Ok(())
    }
}

/// What the device multiplies tensors of that type in.
pub(super) fn precision_of(storage: Storage) -> MatmulPrecision {
    let on_cuda = std::env::var("BLACKBURN_REQUIRE_DEVICE").is_ok_and(|name| name == "cuda");
    match (on_cuda, storage) {
        (false, storage) => MatmulPrecision::exact(storage),
        (true, F32) => MatmulPrecision::tf32(),
        (true, storage) => MatmulPrecision::tensor_core(storage),
    }
}

/// Whether no convolution ran on a kernel of Burn's, and at least so many kernels were ours.
pub(super) fn expect_ours(blocks: &[Block], at_least: usize) -> Result<(), Failed> {
    let kernels: Vec<&str> = blocks.iter().flat_map(|block| block.kernels.clone()).collect();
    let ours = kernels.iter().filter(|kernel| kernel.starts_with("blackburn_kernels::")).count();
    let is_burns =
        |kernel: &&&str| kernel.contains("conv") && !kernel.starts_with("blackburn_kernels::");
    match kernels.iter().find(is_burns) {
        Some(kernel) => Err(format!("a convolution ran on {kernel}: {blocks:#?}").into()),
        None if ours < at_least => Err(format!("{ours} kernels are ours: {kernels:#?}").into()),
        None => Ok(()),
    }
}

fn options_2d(case: &ConvCase) -> ConvOptions<2> {
    let padding = case.padding.map(|[before, behind]| (before, behind));
    ConvOptions::new_with_padding(case.stride, padding, case.dilation, case.groups)
}

/// Pixels that the output has behind those which the taps of the last one reach.
fn padding_out(case: &ConvCase) -> [usize; 2] {
    let output = case.output();
    [0, 1].map(|dim| {
        let reach =
            (output[dim] - 1) * case.stride[dim] + (case.kernel[dim] - 1) * case.dilation[dim] + 1;
        case.input[dim] + 2 * case.padding[dim][0] - reach
    })
}

fn images(device: &Device, storage: Storage) -> Result<(), Failed> {
    let uneven = ConvCase { padding: [[0, 2], [3, 1]], ..IMAGE };
    let plain = ConvCase { kernel: [1; 2], ..IMAGE };
    let depthwise = ConvCase { in_channels: 8, out_channels: 8, ..IMAGE }.grouped(8);
    let odd = ConvCase { in_channels: 3, out_channels: 7, kernel: [7; 2], ..IMAGE }.padded(3);
    for case in [
        IMAGE.padded(1),
        IMAGE.padded(1).strided(2),
        IMAGE.dilated(2).padded(2),
        uneven,
        uneven.strided(2),
        plain,
        plain.strided(2),
        odd.strided(2),
        IMAGE.grouped(2),
        depthwise.padded(1),
    ] {
        let layer = Layer::new(case, Way::Convolution, storage);
        let (results, blocks) = layer
            .run(device, |x, weight, bias, case| conv2d(x, weight, Some(bias), options_2d(case)))?;
        layer.judge(&results)?;
        // One for each pass, and the sum for the bias.
        expect_ours(&blocks, 4)?;
    }
    Ok(())
}

fn transposed(
    x: Tensor<4>,
    weight: Tensor<4>,
    bias: Option<Tensor<1>>,
    case: &ConvCase,
) -> Tensor<4> {
    let padding = case.padding.map(|[before, _]| before);
    let ConvCase { stride, dilation, groups, .. } = *case;
    let options = ConvTransposeOptions::new(stride, padding, padding_out(case), dilation, groups);
    conv_transpose2d(x, weight, bias, options)
}

fn transposed_images(device: &Device, storage: Storage) -> Result<(), Failed> {
    // Of many images the gradient of the weights is a sum so long that it is shared.
    let many = ConvCase { batch: 16, ..IMAGE }.padded(1);
    let cases =
        [IMAGE.padded(1), IMAGE.padded(1).strided(2), IMAGE.strided(3), many, many.strided(2)];
    for case in cases {
        let layer = Layer::new(case, Way::Transposed, storage);
        let (results, blocks) =
            layer.run(device, |x, weight, bias, case| transposed(x, weight, Some(bias), case))?;
        layer.judge(&results)?;
        expect_ours(&blocks, 3)?;
    }
    Ok(())
}

/// Forward alone: Burn computes the gradient of the weights group by group, of copies.
fn transposed_groups(device: &Device) -> Result<(), Failed> {
    let case = ConvCase { in_channels: 12, out_channels: 8, ..IMAGE }.grouped(2).strided(2);
    let layer = Layer::new(case, Way::Transposed, F32);
    let x = tensor(&layer.input, case.y_shape(), F32, device);
    let weight = tensor(&layer.weight, case.weight_shape(), F32, device);
    let (y, blocks) = blocks_of(device, || Ok(transposed(x, weight, None, &case)))?;
    precision_of(F32).check_random(&values(y)?, &layer.sums(ConvPass::Dgrad).random())?;
    expect_ours(&blocks, 1)
}

/// Images of height 1 by sequences of 33.
const SEQUENCE: ConvCase = ConvCase { input: [1, 33], kernel: [1, 3], ..IMAGE };

fn sequences(device: &Device) -> Result<(), Failed> {
    let padded = ConvCase { padding: [[0; 2], [1, 2]], ..SEQUENCE };
    let strided = ConvCase { stride: [1, 2], dilation: [1, 3], ..padded };
    for case in [SEQUENCE, padded, strided, padded.grouped(4)] {
        let layer = Layer::new(case, Way::Convolution, F32);
        let (results, blocks) = layer.run(device, |x, weight, bias, case| {
            let ConvCase { stride, padding, dilation, groups, .. } = *case;
            let [before, behind] = padding[1];
            let options = ConvOptions::new_with_padding(
                [stride[1]],
                [(before, behind)],
                [dilation[1]],
                groups,
            );
            conv1d(x, weight, Some(bias), options)
        })?;
        layer.judge(&results)?;
        expect_ours(&blocks, 4)?;
    }
    Ok(())
}

fn transposed_sequences(device: &Device) -> Result<(), Failed> {
    let strided = ConvCase { stride: [1, 2], padding: [[0; 2], [1; 2]], ..SEQUENCE };
    for case in [SEQUENCE, strided] {
        let layer = Layer::new(case, Way::Transposed, F32);
        let (results, blocks) = layer.run(device, |x, weight, bias, case| {
            let ConvCase { stride, padding, dilation, groups, .. } = *case;
            let options = ConvTransposeOptions::new(
                [stride[1]],
                [padding[1][0]],
                [padding_out(case)[1]],
                [dilation[1]],
                groups,
            );
            conv_transpose1d(x, weight, Some(bias), options)
        })?;
        layer.judge(&results)?;
        expect_ours(&blocks, 3)?;
    }
    Ok(())
}

/// The second convolution reads what the first one and an activation leave, and no copy is in between.
fn chained(device: &Device) -> Result<(), Failed> {
    let first = IMAGE.padded(1);
    let second = ConvCase { in_channels: 16, out_channels: 8, ..first };
    let draw = |seed, shape: [usize; 4]| normal(seed, shape.iter().product(), 1.0, F32);
    let x = tensor(&draw(1, first.x_shape()), first.x_shape(), F32, device);
    let [a, b] = [first, second]
        .map(|case| tensor(&draw(2, case.weight_shape()), case.weight_shape(), F32, device));
    let (results, blocks) = blocks_of(device, || {
        let hidden = relu(conv2d(x, a, None, options_2d(&first)));
        Ok((hidden.clone(), conv2d(hidden, b.clone(), None, options_2d(&second))))
    })?;
    let (hidden, y) = (values(results.0)?, values(results.1)?);
    let exact = conv(&second, reference_pass(ConvPass::Fprop), &hidden, &values(b)?);
    let precision = precision_of(F32);
    precision.check_random(&y, &exact.random())?;
    expect_ours(&blocks, 2)?;
    // Weights are copied where the device leaves gaps behind their rows.
    let is_copy = |kernel: &&&str| kernel.contains("contiguous");
    let copies = blocks.iter().flat_map(|block| &block.kernels).filter(is_copy).count();
    match copies <= 2 {
        true => Ok(()),
        false => Err(format!("{copies} tensors were copied: {blocks:#?}").into()),
    }
}

/// Weights that are cast right before they are used, as mixed precision has them.
fn behind_a_cast(device: &Device) -> Result<(), Failed> {
    if !device.supports_dtype(burn::tensor::FloatDType::F16) {
        return Ok(());
    }
    let case = IMAGE.padded(1);
    let layer = Layer::new(case, Way::Convolution, Storage::F16);
    let (results, blocks) = layer.run(device, |x, weight, bias, case| {
        let wide = weight.cast(burn::tensor::FloatDType::F32);
        let weight = wide.add_scalar(0.0).cast(burn::tensor::FloatDType::F16);
        conv2d(x, weight, Some(bias), options_2d(case))
    })?;
    layer.judge(&results)?;
    expect_ours(&blocks, 4)
}

/// The gradient of a plain sum is one number that is seen as a whole tensor.
fn expanded(device: &Device) -> Result<(), Failed> {
    let case = IMAGE.padded(1);
    let mut layer = Layer::new(case, Way::Convolution, F32);
    layer.dy.fill(1.0);
    let device = device.clone().autodiff();
    let x = tensor(&layer.input, case.x_shape(), F32, &device).require_grad();
    let weight = tensor(&layer.weight, case.weight_shape(), F32, &device).require_grad();
    let gradients = conv2d(x.clone(), weight.clone(), None, options_2d(&case)).sum().backward();
    let precision = precision_of(F32);
    for (leaf, pass) in [(x, ConvPass::Dgrad), (weight, ConvPass::Wgrad)] {
        let actual = values(leaf.grad(&gradients).ok_or("a gradient is missing")?)?;
        precision.check_random(&actual, &layer.sums(pass).random())?;
    }
    Ok(())
}

fn no_images(device: &Device) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let x = Tensor::<4>::zeros([0, 8, 9, 11], &device).require_grad();
    let weight =
        tensor(&normal(1, 16 * 8 * 9, 1.0, F32), [16, 8, 3, 3], F32, &device).require_grad();
    let y = conv2d(x.clone(), weight.clone(), None, ConvOptions::new([1; 2], [1; 2], [1; 2], 1));
    if y.dims() != [0, 16, 9, 11] {
        return Err(format!("the output is {:?}", y.dims()).into());
    }
    let gradients = y.sum().backward();
    let dw = values(weight.grad(&gradients).ok_or("the weights have no gradient")?)?;
    match dw.iter().all(|value| *value == 0.0) && dw.len() == 16 * 8 * 9 {
        true => Ok(()),
        false => Err(format!("gradients of nothing are {dw:?}").into()),
    }
}
