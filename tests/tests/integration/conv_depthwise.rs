//! Convolutions of single channels by the kernels for them: everything that those are compiled for, and its edges.

use super::*;
use blackburn_kernels::conv::DepthwiseBlueprint;

pub(super) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let mut add = |what: &str, test: fn(&Client, Storage) -> Result<(), Failed>| {
            let name = format!("conv::depthwise::{what}_in_{storage:?}").to_lowercase();
            trials.push(Trial::ignorable_test(name, move || {
                on_device_with(dtype(storage), |client| test(client, storage))
            }));
        };
        add("all_channels_and_layouts_are_within_bounds", channels);
        add("strides_and_odd_tiles_are_within_bounds", tiles);
    }
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("conv::depthwise::{name}"), move || on_device(test))
    };
    trials.extend([
        trial("kernels_up_to_7_with_strides_up_to_3_are_within_bounds", kernels),
        trial("dilation_and_uneven_padding_are_within_bounds", dilation),
        trial("images_of_few_pixels_are_within_bounds", small_images),
        trial("sums_over_pixels_in_splits_are_within_bounds_and_repeat", splits),
        trial("nan_and_infinity_reach_what_they_are_terms_of_and_nothing_else", not_finite),
        trial("a_lost_tap_and_a_shifted_image_are_caught", faults),
        trial("plans_for_other_problems_are_refused", bad_plans),
    ]);
    trials
}

/// Images of single channels that no tile divides.
const SINGLE: ConvCase = ConvCase {
    in_channels: 8,
    out_channels: 8,
    groups: 8,
    ..ConvCase { input: [9, 11], ..ConvCase::square(2, [8, 8], 9, 3) }
};

fn of_channels(channels: usize) -> ConvCase {
    ConvCase { in_channels: channels, out_channels: channels, groups: channels, ..SINGLE }
}

/// Runs every plan of the kernels for single channels, of which there has to be one.
fn for_each_single(
    convolution: &Convolution,
    client: &Client,
    problem: &ConvProblem,
    mut judge: impl FnMut(&ConvBlueprint, Vec<f64>) -> Result<(), Failed>,
) -> Result<(), Failed> {
    let storage = convolution.storage;
    let mut runs = 0;
    let is_single = |plan: &ConvBlueprint| matches!(plan, ConvBlueprint::Depthwise(_));
    convolution.for_each_of(client, problem, storage, None, is_single, |plan, actual| {
        runs += 1;
        judge(plan, actual)
    })?;
    if runs == 0 {
        return Err(format!("no plan for single channels: {:?}", convolution.case).into());
    }
    Ok(())
}

/// As [`for_each_single`], against the exact results.
fn check_single(client: &Client, convolution: &Convolution) -> Result<(), Failed> {
    let storage = convolution.storage;
    let problem = convolution.problem(storage)?;
    for_each_single(convolution, client, &problem, |plan, actual| {
        precision(plan, storage, storage)
            .check_random(&actual, &convolution.sums.random())
            .map_err(|error| convolution.told(plan, &error.to_string()))
    })
}

fn check_passes(
    client: &Client,
    storage: Storage,
    cases: impl IntoIterator<Item = ConvCase>,
) -> Result<(), Failed> {
    for case in cases {
        for pass in PASSES {
            check_single(client, &Convolution::new(case, pass, storage))?;
        }
    }
    Ok(())
}

/// Channels of every width of vectors, more of them than a cube has, and images with gaps.
fn channels(client: &Client, storage: Storage) -> Result<(), Failed> {
    let padded = |channels: usize| of_channels(channels).padded(1);
    let wide = ConvCase { batch: 1, input: [3, 5], ..padded(264) };
    check_passes(client, storage, [5, 6, 12, 16].map(padded).into_iter().chain([wide]))?;
    for pass in PASSES {
        let second = if pass == ConvPass::Wgrad { Lies::WithGaps } else { Lies::ChannelsLast };
        let convolution = Convolution::new(padded(16), pass, storage);
        check_single(client, &convolution.lying([Lies::WithGaps, second]))?;
    }
    Ok(())
}

fn tiles(client: &Client, storage: Storage) -> Result<(), Failed> {
    let case = of_channels(16).padded(1);
    // Tiles that divide the gradient, and such that do not.
    let sizes = [[8, 12], [6, 14], [7, 13]].map(|input| ConvCase { input, ..case });
    check_passes(client, storage, sizes.into_iter().chain([case.strided(2)]))
}

/// Each size of a kernel in one of its dimensions, and each stride: a kernel of many taps takes seconds to compile here.
fn kernels(client: &Client) -> Result<(), Failed> {
    let case = |kernel: [usize; 2], stride: [usize; 2]| {
        let padding = kernel.map(|taps| [taps / 2; 2]);
        ConvCase { kernel, stride, padding, ..SINGLE }
    };
    let sequence = ConvCase { input: [1, 33], kernel: [1, 3], stride: [1, 2], ..SINGLE };
    check_passes(
        client,
        Storage::F32,
        [
            case([1, 1], [2, 2]),
            case([2, 2], [2, 2]),
            case([3, 3], [3, 3]),
            case([5, 5], [1, 1]),
            case([4, 1], [3, 1]),
            case([6, 2], [1, 3]),
            case([1, 7], [1, 2]),
            // More taps than a unit has registers for.
            case([7, 4], [1, 1]),
            sequence,
        ],
    )
}

fn dilation(client: &Client) -> Result<(), Failed> {
    let uneven = ConvCase { padding: [[0, 2], [3, 1]], ..SINGLE };
    check_passes(
        client,
        Storage::F32,
        [
            SINGLE.dilated(2).padded(2),
            SINGLE.dilated(3).padded(3).strided(2),
            uneven.strided(2),
            ConvCase { dilation: [2, 1], stride: [2, 3], ..uneven },
        ],
    )
}

fn small_images(client: &Client) -> Result<(), Failed> {
    let small = ConvCase { input: [3, 2], kernel: [5; 2], ..SINGLE }.padded(2);
    let single = ConvCase { batch: 1, input: [1, 1], ..SINGLE }.padded(1);
    check_passes(client, Storage::F32, [small, single, single.strided(2)])
}

/// Splits of which the last has fewer tiles, or none, and more of them than units add up at once.
fn splits(client: &Client) -> Result<(), Failed> {
    let case = ConvCase { batch: 3, input: [15, 17], ..SINGLE }.padded(1);
    let convolution = Convolution::new(case, ConvPass::Wgrad, Storage::F32);
    let problem = convolution.problem(Storage::F32)?;
    let [first, second] = convolution.upload(client, &problem);
    let plans = ConvBlueprint::candidates(&problem, client);
    let plan = plans.iter().find_map(|plan| match plan {
        ConvBlueprint::Depthwise(plan) => Some(*plan),
        _ => None,
    });
    let plan = plan.ok_or("no plan for single channels")?;
    for splits in [1, 2, 7, 19, 400] {
        let plan = ConvBlueprint::Depthwise(DepthwiseBlueprint { splits, ..plan });
        let run = || -> Result<Vec<f64>, Failed> {
            let output = conv_with(client, &problem, &plan, &first, &second, None)?;
            Ok(download(client, output, Storage::F32)?)
        };
        let output = run()?;
        let offsets = offsets(problem.shapes()[2], problem.out_strides());
        let actual: Vec<f64> = offsets.into_iter().map(|at| output[at]).collect();
        precision(&plan, Storage::F32, Storage::F32)
            .check_random(&actual, &convolution.sums.random())
            .map_err(|error| convolution.told(&plan, &error.to_string()))?;
        let bits = |values: &[f64]| values.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
        for _ in 0..3 {
            if bits(&run()?) != bits(&output) {
                return Err(format!("two runs by {plan} on the same input differ").into());
            }
        }
    }
    Ok(())
}

fn not_finite(client: &Client) -> Result<(), Failed> {
    // Kernels that meet no padding, so that every product is one of the definition's. No tile divides 11 pixels.
    let plain = ConvCase { input: [9, 13], ..SINGLE };
    let strided = ConvCase { kernel: [2; 2], input: [10, 23], ..SINGLE }.strided(2);
    for (case, pass) in [plain, strided].into_iter().flat_map(|case| PASSES.map(|it| (case, it))) {
        let Convolution { mut operands, .. } = Convolution::new(case, pass, Storage::F32);
        let [_, c, h, w] = case.shapes(reference_pass(pass))[0];
        // The last pixel of one channel, the first one of another.
        operands[0][(c / 2 + 1) * h * w - 1] = f64::NAN;
        operands[0][(c - 1) * h * w] = f64::INFINITY;
        let convolution = Convolution::of(case, pass, Storage::F32, operands);
        let values = &convolution.sums.values;
        let has = |what: fn(f64) -> bool| values.iter().any(|value| what(*value));
        if !has(f64::is_finite) || !has(f64::is_infinite) {
            return Err("the case tells nothing".into());
        }
        check_single(client, &convolution)?;
    }
    Ok(())
}

/// The negative controls: weights without their last tap, and images that are read a pixel off.
fn faults(client: &Client) -> Result<(), Failed> {
    let case = SINGLE.padded(1).strided(2);
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
        for_each_single(&right, client, &shifted, |plan, actual| {
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
        for_each_single(&short, client, &problem, |plan, actual| {
            unseen("a lost tap", plan, &actual)
        })?;
    }
    Ok(())
}

fn bad_plans(client: &Client) -> Result<(), Failed> {
    let refused = |case: ConvCase, pass, plan: DepthwiseBlueprint| -> Result<(), Failed> {
        let convolution = Convolution::new(case, pass, Storage::F32);
        let problem = convolution.problem(Storage::F32)?;
        let [first, second] = convolution.upload(client, &problem);
        let blueprint = ConvBlueprint::Depthwise(plan);
        match conv_with(client, &problem, &blueprint, &first, &second, None) {
            Err(KernelError::InvalidProblem { argument: "blueprint", .. }) => Ok(()),
            other => Err(format!("{blueprint} for {pass:?} of {case}: {other:?}").into()),
        }
    };
    let plan = DepthwiseBlueprint { width: 4, tile: [2, 4], splits: 1 };
    refused(IMAGE, ConvPass::Fprop, plan)?;
    refused(ConvCase { out_channels: 16, ..SINGLE }, ConvPass::Fprop, plan)?;
    refused(ConvCase { kernel: [8; 2], ..SINGLE }.padded(2), ConvPass::Fprop, plan)?;
    refused(SINGLE, ConvPass::Fprop, DepthwiseBlueprint { splits: 2, ..plan })?;
    refused(SINGLE, ConvPass::Wgrad, DepthwiseBlueprint { splits: 0, ..plan })?;
    refused(SINGLE, ConvPass::Fprop, DepthwiseBlueprint { width: 3, ..plan })?;
    refused(SINGLE, ConvPass::Fprop, DepthwiseBlueprint { tile: [0, 4], ..plan })?;
    refused(SINGLE, ConvPass::Fprop, DepthwiseBlueprint { tile: [usize::MAX, 4], ..plan })?;
    refused(SINGLE.strided(2), ConvPass::Dgrad, DepthwiseBlueprint { tile: [1, 4], ..plan })
}
