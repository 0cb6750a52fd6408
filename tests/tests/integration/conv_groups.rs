//! Convolutions in groups, and the kernels that compute all of a group of few channels at once.

use super::*;
use blackburn_tests::buffers::upload_behind;

pub(super) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let mut add = |what: &str, test: fn(&Client, Storage) -> Result<(), Failed>| {
            let name = format!("conv::groups_at_once::{what}_in_{storage:?}").to_lowercase();
            trials.push(Trial::ignorable_test(name, move || {
                on_device_with(dtype(storage), |client| test(client, storage))
            }));
        };
        add("vectors_hold_the_channels_of_a_group", vectors);
        // Software devices have no tensors that begin between alignments.
        let name = format!("conv::groups_at_once::memory_may_begin_anywhere_in_{storage:?}");
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_cuda_with(dtype(storage), |client| beginnings(client, storage))
        }));
    }
    let name = "conv::groups_at_once::nan_stays_in_its_group";
    trials.push(Trial::ignorable_test(name, || on_device(nan)));
    trials
}

fn of([in_channels, out_channels]: [usize; 2], groups: usize) -> ConvCase {
    ConvCase { in_channels, out_channels, ..IMAGE }.padded(1).grouped(groups)
}

/// Groups of many channels, of few, and of one, by every plan.
pub(super) fn all(client: &Client, storage: Storage) -> Result<(), Failed> {
    let wide = of([32, 64], 2);
    let depthwise = of([8, 8], 8);
    check_all(
        client,
        storage,
        [
            wide,
            wide.strided(2),
            of([6, 9], 3),
            of([12, 4], 2).strided(2),
            depthwise,
            depthwise.strided(2),
            depthwise.dilated(2),
            // Channels that no vector divides, and two outputs for each.
            of([5, 5], 5),
            of([4, 8], 4),
        ],
    )
}

fn is_at_once(plan: &ConvBlueprint) -> bool {
    matches!(plan, ConvBlueprint::Grouped { .. })
}

/// Groups of as many channels as vectors have, of either side, with strides and dilation: such a plan where vectors
/// hold them, within bounds as all others.
fn vectors(client: &Client, storage: Storage) -> Result<(), Failed> {
    let (fours, eights) = (of([8, 8], 2), of([32, 32], 4));
    let asymmetric = of([8, 16], 2);
    let all = [
        fours,
        fours.strided(2),
        fours.dilated(2),
        asymmetric,
        asymmetric.strided(3),
        of([12, 6], 3),
        eights,
        eights.strided(2),
        of([12, 12], 4),
    ];
    for case in all {
        let of_group = [case.in_channels, case.out_channels].map(|all| all / case.groups);
        let fits = of_group.iter().all(|it| matches!(it, 2 | 4 | 8) && it * storage.bytes() <= 16);
        for pass in PASSES {
            let problem = Convolution::new(case, pass, storage).problem(storage)?;
            let plans = ConvBlueprint::candidates(&problem, client);
            if plans.iter().any(is_at_once) != fits {
                return Err(format!("{pass:?} of {case}: {plans:?}").into());
            }
        }
    }
    check_all(client, storage, all)
}

/// Behind an element of something else no vector begins.
fn beginnings(client: &Client, storage: Storage) -> Result<(), Failed> {
    for pass in PASSES {
        let convolution = Convolution::new(of([8, 8], 2), pass, storage);
        let problem = convolution.problem(storage)?;
        let buffers = [0, 1].map(|i| {
            let strides = [problem.first, problem.second][i];
            let memory = memory(&convolution.operands[i], problem.shapes()[i], strides);
            upload_behind(client, 1, &memory, storage)
        });
        let [first, second] = &buffers;
        for plan in ConvBlueprint::candidates(&problem, client).iter().filter(|it| is_at_once(it)) {
            let output = conv_with(client, &problem, plan, first, second, None)?;
            let output = download(client, output, storage)?;
            let offsets = offsets(problem.shapes()[2], problem.out_strides());
            let actual: Vec<f64> = offsets.into_iter().map(|at| output[at]).collect();
            precision(plan, storage, storage)
                .check_random(&actual, &convolution.sums.random())
                .map_err(|error| convolution.told(plan, &error.to_string()))?;
        }
    }
    Ok(())
}

/// What is not a number in a group reaches no other.
fn nan(client: &Client) -> Result<(), Failed> {
    let case = of([8, 8], 2);
    let plain = Convolution::new(case, ConvPass::Fprop, Storage::F32);
    let [mut x, weights] = plain.operands;
    // Channel 5 of the first image, which is of the second group.
    let pixels: usize = case.input.iter().product();
    x[5 * pixels..6 * pixels].fill(f64::NAN);
    let convolution = Convolution::of(case, ConvPass::Fprop, Storage::F32, [x, weights]);
    let problem = convolution.problem(Storage::F32)?;
    let [_, channels, height, width] = problem.shapes()[2];
    convolution.for_each_of(client, &problem, Storage::F32, None, is_at_once, |plan, actual| {
        let expected = |at: usize| {
            let (channel, image) =
                (at / (height * width) % channels, at / (height * width * channels));
            image == 0 && channel >= channels / 2
        };
        match (0..actual.len()).find(|at| actual[*at].is_nan() != expected(*at)) {
            None => Ok(()),
            Some(at) => Err(convolution.told(plan, &format!("element {at} is {}", actual[at]))),
        }
    })
}
