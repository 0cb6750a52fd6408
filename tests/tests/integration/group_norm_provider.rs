//! `burn::nn::GroupNorm` and `InstanceNorm`, unmodified: on the kernels, and against f64.

use blackburn_reference::{
    group_norm::{Arithmetic, Gradients, GroupNorm as Reference, Statistics, Sums},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    on_burn_device,
    tensors::{float, tensor, values},
    trials_in,
};
use burn::{
    module::Param,
    nn::{GroupNorm, GroupNormConfig, InstanceNorm, InstanceNormConfig},
    prelude::*,
    tensor::{
        activation::silu,
        module::{conv1d, conv2d},
        ops::ConvOptions,
    },
};
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;
const EPSILON: f64 = 1e-5;
const SHAPE: [usize; 4] = [2, 8, 5, 7];

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |name: &str, test: fn(&Device) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("group_norm::provider::{name}"), move || {
            on_burn_device(|device| test(&device))
        })
    };
    let mut trials = vec![
        trial("without_a_gradient_nothing_is_kept", inference),
        trial("without_parameters_forward_runs_on_the_kernels", without_parameters),
        trial("other_rows_are_computed_as_written", others),
        trial("long_rows_without_parameters_run_on_the_kernels_in_both_passes", long_rows),
        trial("parameters_of_another_type_are_cast_first", cast_parameters),
        trial("instances_of_sequences_run_on_the_kernels", sequences),
    ];
    type Test = fn(&Device, Storage) -> Result<(), Failed>;
    let tests: [(&str, Test); 5] = [
        ("images", |device, storage| check(device, storage, 4, Images::Plain)),
        ("images_of_a_convolution", |device, storage| check(device, storage, 2, Images::Convolved)),
        ("images_in_front_of_an_activation", |device, storage| {
            check(device, storage, 2, Images::Activated)
        }),
        ("sums_of_images", |device, storage| check(device, storage, 2, Images::Summed)),
        ("one_group", |device, storage| check(device, storage, 1, Images::Convolved)),
    ];
    for (name, test) in tests {
        let name = format!("group_norm::provider::{name}_run_on_the_kernels_and_are_within_bounds");
        trials.extend(trials_in(&name, &[F32, Storage::Bf16], test));
    }
    trials
}

/// Where images come from, and go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Images {
    /// With their pixels innermost.
    Plain,
    /// Between convolutions, with their channels innermost.
    Convolved,
    /// The same, with an activation behind the norm.
    Activated,
    /// Two convolutions are added.
    Summed,
}

/// A norm of these parameters.
fn group_norm(
    groups: usize,
    [gamma, beta]: [&[f64]; 2],
    storage: Storage,
    device: &Device,
) -> GroupNorm {
    let channels = gamma.len();
    let parameter =
        |values: &[f64]| Some(Param::from_tensor(tensor(values, [channels], storage, device)));
    let plain = GroupNormConfig::new(groups, channels).init(device);
    GroupNorm { gamma: parameter(gamma), beta: parameter(beta), ..plain }
}

fn kernels<'a>(blocks: &'a [Block]) -> impl Iterator<Item = &'static str> + 'a {
    blocks.iter().flat_map(|block| block.kernels.iter().copied())
}

fn launches(blocks: &[Block], name: &str) -> usize {
    kernels(blocks).filter(|kernel| kernel.contains("group_norm") && kernel.contains(name)).count()
}

/// Whether both passes ran on the kernels, and none of them by sums of rows.
fn expect_ours(blocks: &[Block]) -> Result<(), Failed> {
    let found = ["Statistics", "Apply", "Sums", "InputGradient"].map(|name| launches(blocks, name));
    let rows = kernels(blocks).filter(|kernel| kernel.contains("RowSum")).count();
    // One of sums is their merge. The loss is a sum of its own, by up to two launches.
    match (found, rows) {
        ([1, 1, 2, 1], 0..=2) => Ok(()),
        _ => Err(format!("{found:?} launches, {rows} sums of rows: {blocks:#?}").into()),
    }
}

/// A convolution that changes nothing.
fn copied(x: Tensor<4>) -> Tensor<4> {
    let channels = x.dims()[1];
    let weight = Tensor::<4>::ones([channels, 1, 1, 1], &x.device().without_autodiff());
    let weight = Tensor::from_inner(weight.cast(x.dtype()));
    conv2d(x, weight, None, ConvOptions::new([1; 2], [0; 2], [1; 2], channels))
}

fn check(device: &Device, storage: Storage, groups: usize, images: Images) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let (elements, channels) = (SHAPE.iter().product::<usize>(), SHAPE[1]);
    let draw = |seed, count| normal(seed, count, 1.0, storage);
    let (x, dy) = (draw(1, elements), draw(2, elements));
    let (gamma, beta) = (draw(3, channels), draw(4, channels));
    let module = group_norm(groups, [&gamma, &beta], storage, &device);
    let input = tensor(&x, SHAPE, storage, &device).require_grad();
    let weight = tensor(&dy, SHAPE, storage, &device);
    let one: Tensor<4> = tensor(&vec![1.0; channels], [1, channels, 1, 1], storage, &device);
    let (results, blocks) = blocks_of(&device, || {
        let y = match images {
            Images::Plain => module.forward(input.clone()),
            Images::Convolved => module.forward(copied(input.clone())),
            Images::Summed => {
                let zeros = tensor(&vec![0.0; elements], SHAPE, storage, &device);
                module.forward(copied(input.clone()) + copied(zeros))
            }
            Images::Activated => silu(module.forward(copied(input.clone()))),
        };
        // Blocks begin with convolutions, as they do in a network. Behind a quotient Burn runs what it has collected
        // of the loss's gradient.
        let y = copied(copied(y) / one.clone());
        let gradients = (y.clone() * weight).sum().backward();
        let missing = "a gradient is missing";
        let dx = input.grad(&gradients).ok_or(missing)?;
        let of = |parameter: &Option<Param<Tensor<1>>>| {
            parameter.as_ref().and_then(|parameter| parameter.grad(&gradients)).ok_or(missing)
        };
        let [gamma, beta] = [&module.gamma, &module.beta];
        Ok([values(y)?, values(dx)?, values(of(gamma)?)?, values(of(beta)?)?])
    })?;
    let [y, dx, dgamma, dbeta] = results;
    expect_ours(&blocks)?;

    let pixels = SHAPE[2] * SHAPE[3];
    let op = Reference { gamma: &gamma, beta: &beta, groups, pixels, epsilon: EPSILON };
    let sums = Sums { additions: elements, merges: 10 };
    let exact = op.statistics(&x);
    let bounds = op.statistics_bounds(&x, sums);
    let of_norm = op.forward(&x, &exact);
    let mut y_bounds = op.forward_bounds(&x, &exact, &bounds, storage);
    let u = storage.unit_roundoff();
    let sigmoid = |y: f64| 1.0 / (1.0 + (-y).exp());
    let (mut expected, mut grad) = (of_norm.clone(), dy.clone());
    // What Burn makes of the activation and its gradient is rounded at each of its steps.
    let mut of_grad = vec![0.0; elements];
    if images == Images::Activated {
        for (i, y) in of_norm.iter().enumerate() {
            let s = sigmoid(*y);
            expected[i] = y * s;
            let slope = s + y * s * (1.0 - s);
            grad[i] = dy[i] * slope;
            let error = y_bounds[i];
            y_bounds[i] = 1.1 * error + 8.0 * u * (y.abs() + 1e-3);
            of_grad[i] = dy[i].abs() * (0.5 * error + 12.0 * u * (1.0 + y.abs()));
        }
    }
    compare(&y, &expected, &y_bounds).map_err(|error| format!("y: {error}"))?;

    // Backward reads what is normalized, and deviations, in the type of the stream.
    let each = exact.variance.iter().zip(&bounds.variance);
    let variance = each.map(|(exact, bound)| bound + 4.0 * u * (exact + EPSILON)).collect();
    let of_mean = |(mean, variance): (&f64, &f64)| mean + 6.0 * u * (variance + EPSILON).sqrt();
    let mean = bounds.mean.iter().zip(&exact.variance).map(of_mean).collect();
    let errors = Statistics { mean, variance };
    let how = Arithmetic { samples: storage, parameters: storage, sums, group_merges: channels };
    let exact_gradients = op.backward(&x, &exact, &grad);
    let mut of = op.backward_bounds(&x, &exact, &errors, &grad, how);
    widen(&op, &x, &exact, &of_grad, &mut of);
    for (name, actual, expected, bounds) in [
        ("dx", dx, &exact_gradients.dx, of.dx),
        ("dgamma", dgamma, &exact_gradients.dgamma, of.dgamma),
        ("dbeta", dbeta, &exact_gradients.dbeta, of.dbeta),
    ] {
        compare(&actual, expected, &bounds).map_err(|error| format!("{name}: {error}"))?;
    }
    Ok(())
}

/// Adds to `bounds` what a gradient that is off by `errors` makes of it: the sizes of its terms.
fn widen(
    op: &Reference<'_>,
    x: &[f64],
    statistics: &Statistics,
    errors: &[f64],
    bounds: &mut Gradients,
) {
    let channels = op.gamma.len();
    let count = channels / op.groups * op.pixels;
    let rstd = op.inverse_deviations(statistics);
    let normal = |i: usize| ((x[i] - statistics.mean[i / count]) * rstd[i / count]).abs();
    let of = |i: usize| op.gamma[i / op.pixels % channels].abs() * errors[i];
    for i in 0..x.len() {
        let group = i / count * count..(i / count + 1) * count;
        let plain: f64 = group.clone().map(of).sum();
        let weighted: f64 = group.map(|j| of(j) * normal(j)).sum();
        let of_means = (plain + normal(i) * weighted) / count as f64;
        bounds.dx[i] += rstd[i / count] * (of(i) + of_means);
        let channel = i / op.pixels % channels;
        bounds.dgamma[channel] += errors[i] * normal(i);
        bounds.dbeta[channel] += errors[i];
    }
}

fn inference(device: &Device) -> Result<(), Failed> {
    let (elements, channels) = (SHAPE.iter().product::<usize>(), SHAPE[1]);
    let (x, gamma) = (normal(1, elements, 1.0, F32), normal(3, channels, 1.0, F32));
    let module = group_norm(2, [&gamma, &gamma], F32, device);
    let input = tensor(&x, SHAPE, F32, device);
    let (y, blocks) = blocks_of(device, || values(module.forward(input)))?;
    let others = kernels(&blocks).filter(|kernel| !kernel.contains("opy")).count();
    // Statistics, their merge, and what is normalized.
    if launches(&blocks, "Apply") != 1 || others != 3 {
        return Err(format!("not three launches: {blocks:#?}").into());
    }
    let op = Reference { gamma: &gamma, beta: &gamma, groups: 2, pixels: 35, epsilon: EPSILON };
    let exact = op.statistics(&x);
    let bounds = op.statistics_bounds(&x, Sums { additions: elements, merges: 10 });
    compare(&y, &op.forward(&x, &exact), &op.forward_bounds(&x, &exact, &bounds, F32))?;
    Ok(())
}

fn without_parameters(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let (elements, channels) = (SHAPE.iter().product::<usize>(), SHAPE[1]);
    let (x, dy) = (normal(1, elements, 1.0, F32), normal(2, elements, 1.0, F32));
    let module = GroupNormConfig::new(4, channels).with_affine(false).init(device);
    let input = tensor(&x, SHAPE, F32, device).require_grad();
    let weight = tensor(&dy, SHAPE, F32, device);
    let (results, blocks) = blocks_of(device, || {
        let y = copied(module.forward(copied(input.clone())));
        let gradients = (y.clone() * weight).sum().backward();
        Ok([values(y)?, values(input.grad(&gradients).ok_or("x has no gradient")?)?])
    })?;
    if launches(&blocks, "Apply") != 1 {
        return Err(format!("forward ran elsewhere: {blocks:#?}").into());
    }
    let [ones, zeros] = [1.0, 0.0].map(|value| vec![value; channels]);
    let op = Reference { gamma: &ones, beta: &zeros, groups: 4, pixels: 35, epsilon: EPSILON };
    let exact = op.statistics(&x);
    let sums = Sums { additions: elements, merges: 10 };
    let bounds = op.statistics_bounds(&x, sums);
    let [y, dx] = results;
    compare(&y, &op.forward(&x, &exact), &op.forward_bounds(&x, &exact, &bounds, F32))?;
    let expected = op.backward(&x, &exact, &dy).dx;
    let near: Vec<f64> = expected.iter().map(|dx| 1e-5 * (1.0 + dx.abs())).collect();
    compare(&dx, &expected, &near)?;
    Ok(())
}

/// Rows that no cube holds.
fn long_rows(device: &Device) -> Result<(), Failed> {
    const LONG: [usize; 4] = [1, 2, 300, 400];
    let device = &device.clone().autodiff();
    let (x, dy) = (normal(1, 240_000, 1.0, F32), normal(2, 240_000, 1.0, F32));
    let module = GroupNormConfig::new(1, 2).with_affine(false).init(device);
    let input = tensor(&x, LONG, F32, device).require_grad();
    let weight = tensor(&dy, LONG, F32, device);
    let one: Tensor<4> = tensor(&[1.0; 2], [1, 2, 1, 1], F32, device);
    let (results, blocks) = blocks_of(device, || {
        let y = copied(copied(module.forward(input.clone())) / one);
        let gradients = (y.clone() * weight).sum().backward();
        Ok([values(y)?, values(input.grad(&gradients).ok_or("x has no gradient")?)?])
    })?;
    let found = ["Apply", "InputGradient"].map(|name| launches(&blocks, name));
    if found != [1, 1] {
        return Err(format!("{found:?} launches of both passes: {blocks:#?}").into());
    }
    let [y, dx] = results;
    let op = Reference {
        gamma: &[1.0; 2],
        beta: &[0.0; 2],
        groups: 1,
        pixels: 120_000,
        epsilon: EPSILON,
    };
    let exact = op.statistics(&x);
    let near = |values: &[f64]| -> Vec<f64> {
        values.iter().map(|value| 1e-5 * (1.0 + value.abs())).collect()
    };
    let expected = op.forward(&x, &exact);
    compare(&y, &expected, &near(&expected))?;
    let expected = op.backward(&x, &exact, &dy).dx;
    compare(&dx, &expected, &near(&expected))?;
    Ok(())
}

/// Channels of a sequence are rows already.
fn sequences(device: &Device) -> Result<(), Failed> {
    const SEQUENCES: [usize; 3] = [2, 8, 35];
    let device = &device.clone().autodiff();
    let (elements, channels) = (SEQUENCES.iter().product::<usize>(), SEQUENCES[1]);
    let (x, dy) = (normal(1, elements, 1.0, F32), normal(2, elements, 1.0, F32));
    let (gamma, beta) = (normal(3, channels, 1.0, F32), normal(4, channels, 1.0, F32));
    let parameter =
        |values: &[f64]| Some(Param::from_tensor(tensor(values, [channels], F32, device)));
    let plain = InstanceNormConfig::new(channels).init(device);
    let module = InstanceNorm { gamma: parameter(&gamma), beta: parameter(&beta), ..plain };
    let input = tensor(&x, SEQUENCES, F32, device).require_grad();
    let weight = tensor(&dy, SEQUENCES, F32, device);
    let one: Tensor<3> = tensor(&vec![1.0; channels], [1, channels, 1], F32, device);
    let kernel =
        Tensor::from_inner(Tensor::<3>::ones([channels, 1, 1], &device.clone().without_autodiff()));
    let copied =
        |x: Tensor<3>| conv1d(x, kernel.clone(), None, ConvOptions::new([1], [0], [1], channels));
    let (results, blocks) = blocks_of(device, || {
        let y = copied(copied(module.forward(copied(input.clone()))) / one);
        let gradients = (y.clone() * weight).sum().backward();
        let missing = "a gradient is missing";
        let dgamma = module.gamma.as_ref().and_then(|gamma| gamma.grad(&gradients));
        Ok([
            values(y)?,
            values(input.grad(&gradients).ok_or(missing)?)?,
            values(dgamma.ok_or(missing)?)?,
        ])
    })?;
    expect_ours(&blocks)?;
    let [y, dx, dgamma] = results;
    let op = Reference { gamma: &gamma, beta: &beta, groups: 8, pixels: 35, epsilon: EPSILON };
    let exact = op.statistics(&x);
    let expected = op.backward(&x, &exact, &dy);
    for (actual, expected) in
        [(y, op.forward(&x, &exact)), (dx, expected.dx), (dgamma, expected.dgamma)]
    {
        let near: Vec<f64> = expected.iter().map(|value| 1e-5 * (1.0 + value.abs())).collect();
        compare(&actual, &expected, &near)?;
    }
    Ok(())
}

/// As a policy of precision has Burn's module read them.
fn cast_parameters(device: &Device) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let (elements, channels) = (SHAPE.iter().product::<usize>(), SHAPE[1]);
    let (x, dy) = (normal(1, elements, 1.0, F32), normal(2, elements, 1.0, F32));
    let draw = |seed| normal(seed, channels, 1.0, Storage::F16);
    let (gamma, beta) = (draw(3), draw(4));
    let parameter =
        |values: &[f64]| tensor::<1>(values, [channels], Storage::F16, &device).require_grad();
    let parameters = [parameter(&gamma), parameter(&beta)];
    let input = tensor(&x, SHAPE, F32, &device).require_grad();
    let weight = tensor(&dy, SHAPE, F32, &device);
    let one: Tensor<4> = tensor(&vec![1.0; channels], [1, channels, 1, 1], F32, &device);
    let (results, blocks) = blocks_of(&device, || {
        let x = copied(input.clone());
        let cast = parameters.clone().map(|parameter| parameter.cast(float(F32)));
        let y = by_hand(x, cast, 2);
        let y = copied(copied(y) / one);
        let gradients = (y.clone() * weight).sum().backward();
        Ok([values(y)?, values(input.grad(&gradients).ok_or("x has no gradient")?)?])
    })?;
    expect_ours(&blocks)?;
    let [y, dx] = results;
    let op = Reference { gamma: &gamma, beta: &beta, groups: 2, pixels: 35, epsilon: EPSILON };
    let exact = op.statistics(&x);
    let near = |values: &[f64]| -> Vec<f64> {
        values.iter().map(|value| 1e-5 * (1.0 + value.abs())).collect()
    };
    let expected = op.forward(&x, &exact);
    compare(&y, &expected, &near(&expected))?;
    let expected = op.backward(&x, &exact, &dy).dx;
    compare(&dx, &expected, &near(&expected))?;
    Ok(())
}

/// The operations of Burn's module, in their order.
fn by_hand(x: Tensor<4>, [gamma, beta]: [Tensor<1>; 2], groups: usize) -> Tensor<4> {
    let [samples, channels, height, width] = x.dims();
    let rows = x.reshape([samples, groups, channels / groups * height * width]);
    let mean = rows.clone().mean_dim(2);
    let centered = rows.sub(mean);
    let variance = centered.clone().square().mean_dim(2);
    let normalized = centered.div(variance.add_scalar(EPSILON).sqrt());
    let of_all = |parameter: Tensor<1>| parameter.reshape([1, channels, 1, 1]);
    normalized.reshape([samples, channels, height, width]).mul(of_all(gamma)).add(of_all(beta))
}

/// The operations of a norm of groups, of rows that are made of pixels and not of channels, and with a parameter of
/// another dimension.
fn others(device: &Device) -> Result<(), Failed> {
    let elements = SHAPE.iter().product::<usize>();
    let x = normal(1, elements, 1.0, F32);
    let input = tensor(&x, SHAPE, F32, device);
    // Rows of 4 numbers: [2, 70, 4] are no groups of whole channels.
    let rows = input.reshape([2, 70, 4]);
    let centered = rows.clone() - rows.mean_dim(2);
    let variance = (centered.clone() * centered.clone()).mean_dim(2);
    let normalized = centered / (variance + EPSILON).sqrt();
    let gamma = tensor(&[2.0; 8], [1, 8, 1, 1], F32, device);
    let beta = tensor(&[0.5; 8], [1, 8, 1, 1], F32, device);
    let y = values(normalized.reshape(SHAPE) * gamma + beta)?;
    let expected: Vec<f64> = x
        .chunks(4)
        .flat_map(|row| {
            let mean = row.iter().sum::<f64>() / 4.0;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 4.0;
            row.iter().map(move |x| 2.0 * (x - mean) / (variance + EPSILON).sqrt() + 0.5)
        })
        .collect();
    let near: Vec<f64> = expected.iter().map(|y| 1e-4 * (1.0 + y.abs())).collect();
    compare(&y, &expected, &near)?;
    Ok(())
}
