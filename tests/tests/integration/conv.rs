//! Convolutions and their gradients: every plan that the device offers, against f64.

#[path = "conv_arguments.rs"]
mod arguments;
#[path = "conv_blocks.rs"]
mod blocks;
#[path = "conv_boxes.rs"]
mod boxes;
#[path = "conv_depthwise.rs"]
mod depthwise;
#[path = "conv_groups.rs"]
mod in_groups;
#[path = "conv_limits.rs"]
mod limits;
#[path = "conv_networks.rs"]
mod networks;
#[path = "conv_provider.rs"]
mod provider;
#[path = "conv_volumes.rs"]
mod volumes;

use blackburn_kernels::{
    DeviceProfile, Family, KernelError,
    buffer::Buffer,
    conv::{
        ConvBlueprint, ConvOptions, ConvPass, ConvProblem, conv_with,
        variants::{Layer, PASSES, RESNET50},
    },
    matmul::{F32Precision, TensorLayout},
};
use blackburn_reference::{
    conv::{self as reference, ConvCase, ConvPass as ReferencePass, ConvSums},
    matmul::MatmulPrecision,
    random::normal,
    storage::Storage,
};
use blackburn_tests::{
    buffers::{download, dtype, upload},
    on_cuda_with, on_device, on_device_with,
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let mut add = |what: &str, test: fn(&Client, Storage) -> Result<(), Failed>| {
            let name = format!("conv::{what}_in_{storage:?}").to_lowercase();
            trials.push(Trial::ignorable_test(name, move || {
                on_device_with(dtype(storage), |client| test(client, storage))
            }));
        };
        add("kernels_and_strides_are_within_bounds", kernels_and_strides);
        add("dilation_and_uneven_padding_are_within_bounds", dilation);
        add("channels_around_tiles_are_within_bounds", channels);
        add("groups_are_within_bounds", in_groups::all);
        add("products_of_matrices_are_within_bounds", products);
        add("long_sums_over_pixels_are_within_bounds", long_sums);
        add("all_layouts_are_within_bounds", layouts);
        add("a_bias_is_added", bias);
        let name = format!("conv::layers_of_resnet_50_are_within_bounds_in_{storage:?}");
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_cuda_with(dtype(storage), |client| resnet(client, storage))
        }));
    }
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("conv::{name}"), move || on_device(test))
    };
    trials.extend([
        trial("repeated_runs_give_the_same_bits", repeats),
        trial("a_lost_tap_and_a_shifted_image_are_caught", faults),
    ]);
    trials.extend(arguments::trials());
    trials.extend(blocks::trials());
    trials.extend(boxes::trials());
    trials.extend(depthwise::trials());
    trials.extend(in_groups::trials());
    trials.extend(limits::trials());
    trials.extend(networks::trials());
    trials.extend(provider::trials());
    trials.extend(volumes::trials());
    trials
}

/// How a tensor `[n, c, h, w]` or `[k, c, r, s]` lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lies {
    /// The last dimension is innermost, as Burn has weights and users have images.
    InOrder,
    /// Channels are innermost, as Burn's convolutions leave images.
    ChannelsLast,
    /// As the last, with something behind the channels of each pixel and the pixels of each row.
    WithGaps,
}

impl Lies {
    fn strides(self, [_, c, h, w]: [usize; 4]) -> [usize; 4] {
        match self {
            Self::InOrder => [c * h * w, h * w, w, 1],
            Self::ChannelsLast => [h * w * c, 1, w * c, c],
            Self::WithGaps => {
                let pixel = c.next_multiple_of(8) + 8;
                let row = w * pixel + 16;
                [h * row, 1, row, pixel]
            }
        }
    }
}

/// Where each element of a tensor lies, in the order of its dimensions.
fn offsets(shape: [usize; 4], strides: [usize; 4]) -> Vec<usize> {
    let [n, c, h, w] = shape;
    let mut all = Vec::with_capacity(n * c * h * w);
    for (n, c) in (0..n).flat_map(|n| (0..c).map(move |c| (n, c))) {
        for (h, w) in (0..h).flat_map(|h| (0..w).map(move |w| (h, w))) {
            all.push(n * strides[0] + c * strides[1] + h * strides[2] + w * strides[3]);
        }
    }
    all
}

/// The memory of a tensor, with NaN wherever none of its elements lies.
fn memory(values: &[f64], shape: [usize; 4], strides: [usize; 4]) -> Vec<f64> {
    let offsets = offsets(shape, strides);
    let mut memory = vec![f64::NAN; offsets.iter().max().map_or(0, |last| last + 1)];
    for (offset, value) in offsets.into_iter().zip(values) {
        memory[offset] = *value;
    }
    memory
}

/// A pass with its operands and the exact result.
struct Convolution {
    case: ConvCase,
    pass: ConvPass,
    operands: [Vec<f64>; 2],
    lies: [Lies; 2],
    storage: Storage,
    sums: ConvSums,
}

fn reference_pass(pass: ConvPass) -> ReferencePass {
    match pass {
        ConvPass::Fprop => ReferencePass::Fprop,
        ConvPass::Dgrad => ReferencePass::Dgrad,
        ConvPass::Wgrad => ReferencePass::Wgrad,
    }
}

fn options(case: &ConvCase) -> ConvOptions {
    let ConvCase { stride, padding, dilation, groups, .. } = *case;
    ConvOptions { stride, padding, dilation, groups }
}

impl Convolution {
    fn new(case: ConvCase, pass: ConvPass, storage: Storage) -> Self {
        let [first, second, _] = case.shapes(reference_pass(pass));
        let draw = |seed, shape: [usize; 4]| normal(seed, shape.iter().product(), 1.0, storage);
        let operands = [draw(1, first), draw(2, second)];
        Self::of(case, pass, storage, operands)
    }

    fn of(case: ConvCase, pass: ConvPass, storage: Storage, operands: [Vec<f64>; 2]) -> Self {
        let sums = reference::conv(&case, reference_pass(pass), &operands[0], &operands[1]);
        let second = if pass == ConvPass::Wgrad { Lies::ChannelsLast } else { Lies::InOrder };
        Self { case, pass, operands, lies: [Lies::ChannelsLast, second], storage, sums }
    }

    fn lying(self, lies: [Lies; 2]) -> Self {
        Self { lies, ..self }
    }

    fn problem(&self, out: Storage) -> Result<ConvProblem, KernelError> {
        self.problem_with(out, options(&self.case))
    }

    fn problem_with(&self, out: Storage, options: ConvOptions) -> Result<ConvProblem, KernelError> {
        let [first, second, _] = self.case.shapes(reference_pass(self.pass));
        let strides = [self.lies[0].strides(first), self.lies[1].strides(second)];
        let layout = |shape, strides| TensorLayout { shape, strides, dtype: dtype(self.storage) };
        let (a, b) = (layout(&first, &strides[0]), layout(&second, &strides[1]));
        let (out, precision) = (dtype(out), F32Precision::Tf32);
        let ConvCase { input, kernel, .. } = self.case;
        match self.pass {
            ConvPass::Fprop => ConvProblem::fprop(a, b, options, out, precision),
            ConvPass::Dgrad => ConvProblem::dgrad(a, b, input, options, out, precision),
            ConvPass::Wgrad => ConvProblem::wgrad(a, b, kernel, options, out, precision),
        }
    }

    fn upload(&self, client: &Client, problem: &ConvProblem) -> [Buffer; 2] {
        let shapes = problem.shapes();
        let strides = [problem.first, problem.second];
        [0, 1].map(|i| {
            let memory = memory(&self.operands[i], shapes[i], strides[i]);
            upload(client, &memory, self.storage)
        })
    }

    /// Runs every plan, and hands over what it computed, in the order of the result's dimensions.
    fn for_each_plan(
        &self,
        client: &Client,
        problem: &ConvProblem,
        out: Storage,
        bias: Option<&Buffer>,
        judge: impl FnMut(&ConvBlueprint, Vec<f64>) -> Result<(), Failed>,
    ) -> Result<(), Failed> {
        self.for_each_of(client, problem, out, bias, |_| true, judge)
    }

    /// As [`for_each_plan`](Self::for_each_plan), of the plans that are taken.
    fn for_each_of(
        &self,
        client: &Client,
        problem: &ConvProblem,
        out: Storage,
        bias: Option<&Buffer>,
        is_taken: impl Fn(&ConvBlueprint) -> bool,
        mut judge: impl FnMut(&ConvBlueprint, Vec<f64>) -> Result<(), Failed>,
    ) -> Result<(), Failed> {
        let [first, second] = self.upload(client, problem);
        for plan in ConvBlueprint::candidates(problem, client).into_iter().filter(is_taken) {
            let output = conv_with(client, problem, &plan, &first, &second, bias)?;
            let output = download(client, output, out)?;
            let offsets = offsets(problem.shapes()[2], problem.out_strides());
            judge(&plan, offsets.into_iter().map(|at| output[at]).collect())?;
        }
        Ok(())
    }

    /// Runs every plan, and holds its result against the exact one.
    fn check(&self, client: &Client, out: Storage) -> Result<(), Failed> {
        let problem = self.problem(out)?;
        self.for_each_plan(client, &problem, out, None, |plan, actual| {
            precision(plan, self.storage, out)
                .check_random(&actual, &self.sums.random())
                .map_err(|error| self.told(plan, &error.to_string()))
        })
    }

    fn told(&self, plan: &ConvBlueprint, error: &str) -> Failed {
        format!("{:?} of {} by {plan}: {error}", self.pass, self.case).into()
    }
}

/// What the plan's instructions compute in.
fn precision(plan: &ConvBlueprint, operands: Storage, out: Storage) -> MatmulPrecision {
    let family = match plan {
        ConvBlueprint::Product(plan) => plan.family,
        ConvBlueprint::Implicit(plan) => plan.family,
        ConvBlueprint::Depthwise(_)
        | ConvBlueprint::Grouped { .. }
        | ConvBlueprint::Direct { .. } => Family::Portable,
    };
    match family {
        Family::Portable => MatmulPrecision::exact(out),
        _ if operands == Storage::F32 => MatmulPrecision::tf32().with_out(out),
        _ => MatmulPrecision::tensor_core(out),
    }
}

fn check_all(
    client: &Client,
    storage: Storage,
    cases: impl IntoIterator<Item = ConvCase>,
) -> Result<(), Failed> {
    for case in cases {
        for pass in PASSES {
            Convolution::new(case, pass, storage).check(client, storage)?;
        }
    }
    Ok(())
}

/// Images that no tile divides, of more than one image.
const IMAGE: ConvCase = ConvCase { input: [9, 11], ..ConvCase::square(2, [8, 16], 9, 3) };

fn kernels_and_strides(client: &Client, storage: Storage) -> Result<(), Failed> {
    let case = |kernel: usize, stride: usize| {
        ConvCase { kernel: [kernel; 2], ..IMAGE }.padded(kernel / 2).strided(stride)
    };
    let square = (1..=7).flat_map(|kernel| (1..=3).map(move |stride| case(kernel, stride)));
    let uneven = ConvCase { kernel: [2, 5], stride: [3, 1], ..IMAGE }.padded(1);
    let one_image = ConvCase { batch: 1, ..IMAGE };
    // A sequence is an image of one row.
    let sequence = ConvCase { input: [1, 33], kernel: [1, 3], stride: [1, 2], ..IMAGE };
    check_all(client, storage, square.chain([uneven, one_image, sequence]))
}

fn dilation(client: &Client, storage: Storage) -> Result<(), Failed> {
    let uneven = ConvCase { padding: [[0, 2], [3, 1]], ..IMAGE };
    let both = ConvCase { dilation: [2, 1], stride: [2, 3], ..uneven };
    check_all(
        client,
        storage,
        [
            IMAGE.dilated(2).padded(2),
            IMAGE.dilated(2).padded(2).strided(2),
            IMAGE.dilated(2).padded(2).strided(3),
            IMAGE.dilated(3).padded(3).strided(2),
            uneven,
            uneven.strided(2),
            both,
        ],
    )
}

/// Channels that no vector divides, single ones, and those around a tile and a block of terms.
fn channels(client: &Client, storage: Storage) -> Result<(), Failed> {
    let small = ConvCase { batch: 1, input: [5, 6], ..IMAGE }.padded(1);
    let of = |channels: [usize; 2]| ConvCase {
        in_channels: channels[0],
        out_channels: channels[1],
        ..small
    };
    let all = [[1, 1], [3, 5], [7, 9], [65, 8], [8, 65], [64, 64], [63, 63], [40, 72]];
    check_all(client, storage, all.map(of).into_iter().chain([of([3, 16]).strided(2)]))
}

/// Kernels of 1 by 1: plain products, and what is none because of its stride.
fn products(client: &Client, storage: Storage) -> Result<(), Failed> {
    let plain = ConvCase { kernel: [1; 2], input: [9, 8], ..IMAGE };
    let odd = ConvCase { in_channels: 7, out_channels: 9, ..plain };
    check_all(client, storage, [plain, odd, plain.strided(2), plain.padded(1)])?;
    for pass in PASSES {
        let problem = Convolution::new(plain, pass, storage).problem(storage)?;
        let plans = ConvBlueprint::candidates(&problem, client);
        // Hopper's products would turn both operands.
        let is_turned = pass == ConvPass::Wgrad
            && storage == Storage::F32
            && DeviceProfile::of(client).compute_capability == Some(90);
        if matches!(plans[0], ConvBlueprint::Product(_)) == is_turned {
            return Err(format!("{pass:?} of {plain}, plans: {plans:?}").into());
        }
        // An image of whole planes: a product for each image.
        Convolution::new(plain, pass, storage).lying([Lies::InOrder; 2]).check(client, storage)?;
    }
    Ok(())
}

/// Gradients of weights in more than one split, whose last one is not full.
fn long_sums(client: &Client, storage: Storage) -> Result<(), Failed> {
    let case = ConvCase { input: [15, 17], batch: 4, ..IMAGE }.padded(1);
    let depthwise = ConvCase { in_channels: 8, out_channels: 8, ..case }.grouped(8);
    for case in [case, depthwise] {
        let convolution = Convolution::new(case, ConvPass::Wgrad, storage);
        let plans = ConvBlueprint::candidates(&convolution.problem(storage)?, client);
        let is_split = |plan: &ConvBlueprint| match plan {
            ConvBlueprint::Implicit(plan) => plan.splits > 1,
            ConvBlueprint::Depthwise(plan) => plan.splits > 1,
            ConvBlueprint::Grouped { splits } | ConvBlueprint::Direct { splits } => *splits > 1,
            ConvBlueprint::Product(_) => false,
        };
        if !plans.iter().any(is_split) {
            return Err(format!("no plan for {case} is split: {plans:?}").into());
        }
        convolution.check(client, storage)?;
    }
    Ok(())
}

fn layouts(client: &Client, storage: Storage) -> Result<(), Failed> {
    let all = [Lies::InOrder, Lies::ChannelsLast, Lies::WithGaps];
    let grouped = ConvCase { in_channels: 32, out_channels: 32, ..IMAGE }.grouped(2);
    let depthwise = ConvCase { in_channels: 8, out_channels: 8, ..IMAGE }.grouped(8);
    for case in [IMAGE.padded(1), grouped.strided(2), depthwise.padded(1)] {
        for first in all {
            for second in all {
                for pass in PASSES {
                    Convolution::new(case, pass, storage)
                        .lying([first, second])
                        .check(client, storage)?;
                }
            }
        }
    }
    Ok(())
}

fn bias(client: &Client, storage: Storage) -> Result<(), Failed> {
    let depthwise = ConvCase { in_channels: 8, out_channels: 8, ..IMAGE }.grouped(8);
    let grouped = ConvCase { in_channels: 32, out_channels: 48, ..IMAGE }.grouped(2);
    let plain = ConvCase { kernel: [1; 2], ..IMAGE };
    let odd = ConvCase { out_channels: 21, ..IMAGE };
    let strided = IMAGE.strided(3);
    let boxes = ConvCase { in_channels: 64, out_channels: 128, ..IMAGE }.padded(1);
    let cases = [IMAGE.padded(1), odd, grouped, depthwise, plain, strided, boxes];
    let both = |case| [ConvPass::Fprop, ConvPass::Dgrad].map(|pass| (case, pass));
    for (case, pass) in cases.into_iter().flat_map(both) {
        let mut convolution = Convolution::new(case, pass, storage);
        let [_, _, [_, channels, height, width]] = case.shapes(reference_pass(pass));
        let values = normal(3, channels, 1.0, storage);
        // One term more.
        let sums = &mut convolution.sums;
        for at in 0..sums.values.len() {
            let added = values[at / (height * width) % channels];
            sums.values[at] += added;
            sums.magnitudes[at] += added.abs();
            sums.squares[at] += added * added;
        }
        sums.terms += 1;
        let buffer = upload(client, &values, storage);
        let problem = convolution.problem(storage)?;
        convolution.for_each_plan(client, &problem, storage, Some(&buffer), |plan, actual| {
            precision(plan, storage, storage)
                .check_random(&actual, &convolution.sums.random())
                .map_err(|error| convolution.told(plan, &error.to_string()))
        })?;
    }
    Ok(())
}

/// The convolutions that are no plain products, by every plan.
fn resnet(client: &Client, storage: Storage) -> Result<(), Failed> {
    let is_implicit = |layer: &&Layer| layer.kernel > 1 || layer.stride > 1;
    let case = |layer: &Layer| {
        let Layer { in_channels, out_channels, size, kernel, stride, .. } = *layer;
        ConvCase::square(1, [in_channels, out_channels], size, kernel)
            .padded((kernel - 1) / 2)
            .strided(stride)
    };
    check_all(client, storage, RESNET50.iter().filter(is_implicit).map(case))
}

fn repeats(client: &Client) -> Result<(), Failed> {
    let case = ConvCase { input: [15, 17], batch: 4, ..IMAGE }.padded(1);
    for pass in PASSES {
        let convolution = Convolution::new(case, pass, Storage::F32);
        let problem = convolution.problem(Storage::F32)?;
        let run = || -> Result<Vec<Vec<u64>>, Failed> {
            let mut all = Vec::new();
            convolution.for_each_plan(client, &problem, Storage::F32, None, |_, actual| {
                all.push(actual.into_iter().map(f64::to_bits).collect());
                Ok(())
            })?;
            Ok(all)
        };
        let first = run()?;
        for _ in 0..3 {
            if run()? != first {
                return Err(format!("two runs of {pass:?} on the same input differ").into());
            }
        }
    }
    Ok(())
}

/// The negative controls: weights without their last tap, and images that are read a pixel off.
fn faults(client: &Client) -> Result<(), Failed> {
    let case = IMAGE.padded(1).strided(2);
    for pass in PASSES {
        let right = Convolution::new(case, pass, Storage::F32);
        let unseen = |what: &str, plan: &ConvBlueprint, actual: &[f64]| {
            precision(plan, Storage::F32, Storage::F32)
                .check_random(actual, &right.sums.random())
                .err()
                .map(drop)
                .ok_or_else(|| right.told(plan, &format!("{what} went unseen")))
        };
        let mut options = options(&case);
        options.padding[1] = [0, 2];
        let shifted = right.problem_with(Storage::F32, options)?;
        right.for_each_plan(client, &shifted, Storage::F32, None, |plan, actual| {
            unseen("a shifted image", plan, &actual)
        })?;
        if pass == ConvPass::Wgrad {
            continue;
        }
        let mut short = Convolution::new(case, pass, Storage::F32);
        for tap in short.operands[1].iter_mut().skip(8).step_by(9) {
            *tap = 0.0;
        }
        let problem = short.problem(Storage::F32)?;
        short.for_each_plan(client, &problem, Storage::F32, None, |plan, actual| {
            unseen("a lost tap", plan, &actual)
        })?;
    }
    Ok(())
}
