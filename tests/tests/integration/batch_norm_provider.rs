//! `burn::nn::BatchNorm` in training, unmodified: on the kernels, and against f64.

use blackburn_reference::{
    batch_norm::{Arithmetic, BatchNorm as Reference, Gradients, Saved, Statistics, Sums},
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
    module::{Param, RunningState},
    nn::{BatchNorm, BatchNormConfig},
    prelude::*,
    tensor::{
        activation::{gelu, hard_swish, leaky_relu, relu, silu},
        module::{conv1d, conv2d},
        ops::ConvOptions,
    },
};
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |name: &str, test: fn(&Device) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("batch_norm::provider::{name}"), move || {
            on_burn_device(|device| test(&device))
        })
    };
    let mut trials = vec![
        trial("sequences_run_on_the_kernels", |device| {
            let weight = Tensor::ones([8, 1, 1], device);
            let copied = |x: Tensor<3>| {
                let weight = Tensor::from_inner(weight.clone());
                conv1d(x, weight, None, ConvOptions::new([1], [0], [1], 8))
            };
            check(device, F32, [3, 8, 11], Behind::Nothing, copied)
        }),
        trial("a_norm_behind_a_convolution_reads_its_images_in_place", behind_a_convolution),
        trial("norms_in_front_of_any_activation_copy_nothing", in_front_of_activations),
        trial("a_gradient_cut_off_elsewhere_than_at_zero_is_computed_as_written", other_threshold),
        trial("statistics_over_other_dimensions_are_computed_as_written", other_dimensions),
    ];
    type Test = fn(&Device, Storage) -> Result<(), Failed>;
    let tests: [(&str, Test); 3] = [
        ("images", |device, storage| images(device, storage, Behind::Nothing)),
        ("images_behind_a_relu", |device, storage| images(device, storage, Behind::Relu)),
        ("images_with_a_residual", |device, storage| {
            images(device, storage, Behind::ResidualAndRelu)
        }),
    ];
    for (name, test) in tests {
        let name = format!("batch_norm::provider::{name}_run_on_the_kernels_and_are_within_bounds");
        trials.extend(trials_in(&name, &[F32, Storage::Bf16], test));
    }
    trials
}

/// What follows the normalization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behind {
    Nothing,
    Relu,
    ResidualAndRelu,
}

/// `[n, c, ...]` as rows of channels.
fn to_rows(values: &[f64], shape: &[usize]) -> Vec<f64> {
    let channels = shape[1];
    let pixels: usize = shape[2..].iter().product();
    let at = |row: usize, c: usize| (row / pixels * channels + c) * pixels + row % pixels;
    (0..values.len()).map(|i| values[at(i / channels, i % channels)]).collect()
}

fn norm(gamma: &[f64], beta: &[f64], storage: Storage, device: &Device) -> BatchNorm {
    let channels = gamma.len();
    let parameter =
        |values: &[f64]| Param::from_tensor(tensor(values, [channels], storage, device));
    // Burn adds the batch's statistics to them, in its type.
    let running =
        |value: f64| RunningState::new(tensor(&vec![value; channels], [channels], storage, device));
    let (running_mean, running_var) = (running(0.0), running(1.0));
    let plain = BatchNormConfig::new(channels).init(device);
    let (gamma, beta) = (parameter(gamma), parameter(beta));
    BatchNorm { gamma, beta, running_mean, running_var, ..plain }
}

/// Whether the passes ran on kernels of batch normalization, and on no reductions of rows.
fn expect_ours(blocks: &[Block]) -> Result<(), Failed> {
    let kernels: Vec<&str> = blocks.iter().flat_map(|block| block.kernels.clone()).collect();
    let ours = |name: &str| {
        kernels.iter().any(|kernel| kernel.contains("batch_norm") && kernel.contains(name))
    };
    if !(ours("statistics") && ours("apply") && ours("running") && ours("backward")) {
        return Err(format!("a pass ran elsewhere: {blocks:#?}").into());
    }
    // The loss is a sum of its own, which Burn's kernels may run.
    let is_reduction = |kernel: &&str| kernel.contains("ReduceKernel") || kernel.contains("RowSum");
    let reduces = |block: &&Block| block.kernels.iter().any(is_reduction);
    match blocks.iter().filter(reduces).count() {
        0 | 1 => Ok(()),
        reductions => Err(format!("{reductions} reductions ran: {blocks:#?}").into()),
    }
}

fn images(device: &Device, storage: Storage, behind: Behind) -> Result<(), Failed> {
    let weight = Tensor::<4>::ones([8, 1, 1, 1], device).cast(float(storage));
    let copied = |x: Tensor<4>| {
        let weight = Tensor::from_inner(weight.clone());
        conv2d(x, weight, None, ConvOptions::new([1; 2], [0; 2], [1; 2], 8))
    };
    check(device, storage, [4, 8, 5, 7], behind, copied)
}

/// `copied` is a convolution that changes nothing: blocks begin with it, as they do in a network.
fn check<const D: usize>(
    device: &Device,
    storage: Storage,
    shape: [usize; D],
    behind: Behind,
    copied: impl Fn(Tensor<D>) -> Tensor<D>,
) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let (elements, channels) = (shape.iter().product::<usize>(), shape[1]);
    let draw = |seed, count, scale| normal(seed, count, scale, storage);
    let (x, dy) = (draw(1, elements, 2.0), draw(2, elements, 1.0));
    let (gamma, beta) = (draw(3, channels, 1.0), draw(4, channels, 1.0));
    let residual = draw(5, elements, 1.0);
    let module = norm(&gamma, &beta, storage, &device);
    let input = tensor(&x, shape, storage, &device).require_grad();
    let added = tensor(&residual, shape, storage, &device).require_grad();
    let weight = tensor(&dy, shape, storage, &device);

    let (results, blocks) = blocks_of(&device, || {
        let y = module.forward(copied(input.clone()));
        let y = copied(copied(match behind {
            Behind::Nothing => y,
            Behind::Relu => relu(y),
            Behind::ResidualAndRelu => relu(y + added.clone()),
        }));
        let gradients = (y.clone() * weight).sum().backward();
        let missing = "a gradient is missing";
        let dx = input.grad(&gradients).ok_or(missing)?;
        let dgamma = module.gamma.grad(&gradients).ok_or(missing)?;
        let dbeta = module.beta.grad(&gradients).ok_or(missing)?;
        Ok((y, dx, dgamma, dbeta, added.grad(&gradients)))
    })?;
    let (y, dx, dgamma, dbeta, dresidual) = results;
    let (y, dx, dgamma, dbeta) = (values(y)?, values(dx)?, values(dgamma)?, values(dbeta)?);
    expect_ours(&blocks)?;

    let [rows, dy_rows, residual_rows] = [&x, &dy, &residual].map(|all| to_rows(all, &shape));
    let sums = Sums { additions: elements / channels, merges: elements / channels };
    let exact = Statistics::of(&rows, channels);
    let bounds = Statistics::bounds(&rows, channels, sums);
    let reference =
        Reference { gamma: &gamma, beta: &beta, epsilon: 1e-5, relu: behind != Behind::Nothing };
    // What follows is computed by Burn's operations, of an output that was rounded.
    let roundings = |values: &[f64]| -> Vec<f64> {
        values.iter().map(|y| 4.0 * storage.unit_roundoff() * (y.abs() + 4.0)).collect()
    };
    let of_residual = (behind == Behind::ResidualAndRelu).then_some(&residual_rows[..]);
    let expected = reference.forward(&rows, &exact, of_residual);
    let mut y_bounds = reference.forward_bounds(&rows, &exact, &bounds, of_residual, storage);
    if behind != Behind::Nothing {
        y_bounds.iter_mut().zip(roundings(&expected)).for_each(|(bound, more)| *bound += more);
    }
    let y_rows = to_rows(&y, &shape);
    compare(&y_rows, &expected, &y_bounds).map_err(|error| format!("y: {error}"))?;

    // Backward reads statistics in the type of the stream.
    let rounded = |values: &[f64], bounds: &[f64]| -> Vec<f64> {
        let each = values.iter().zip(bounds);
        each.map(|(value, bound)| bound + storage.unit_roundoff() * value.abs()).collect()
    };
    let errors = Statistics {
        mean: rounded(&exact.mean, &bounds.mean),
        variance: rounded(&exact.variance, &bounds.variance),
    };
    let saved = Saved {
        x: &rows,
        statistics: &exact,
        y: (behind != Behind::Nothing).then_some(&y_rows[..]),
    };
    let how = Arithmetic { rows: storage, parameters: storage, sums };
    let gradients = reference.backward(saved, &dy_rows);
    let Gradients { dx: of_dx, dgamma: of_dgamma, dbeta: of_dbeta } =
        reference.backward_bounds(saved, &errors, &dy_rows, how);
    for (name, actual, expected, bounds) in [
        ("dx", to_rows(&dx, &shape), &gradients.dx, of_dx),
        ("dgamma", dgamma, &gradients.dgamma, of_dgamma),
        ("dbeta", dbeta, &gradients.dbeta, of_dbeta),
    ] {
        compare(&actual, expected, &bounds)
            .map_err(|error| format!("{name} with {behind:?}: {error}"))?;
    }
    if let Some(dresidual) = dresidual {
        let gated = Reference::gated(&dy_rows, saved.y);
        if to_rows(&values(dresidual)?, &shape) != gated {
            return Err("the residual's gradient is not that behind the ReLU".into());
        }
    }
    let unit = 8.0 * storage.unit_roundoff();
    let running = |values: &[f64], start: f64| -> (Vec<f64>, Vec<f64>) {
        values.iter().map(|value| (0.9 * start + 0.1 * value, unit * (1.0 + value.abs()))).unzip()
    };
    let (mean, mean_bounds) = running(&exact.mean, 0.0);
    let (variance, variance_bounds) = running(&exact.variance, 1.0);
    compare(&values(module.running_mean.value_sync())?, &mean, &mean_bounds)?;
    compare(&values(module.running_var.value_sync())?, &variance, &variance_bounds)?;
    Ok(())
}

/// Images as a convolution leaves them, with their channels innermost: they are not copied. The gradient of an activation
/// that is cut off above zero, too, stands in front of the norm's.
fn behind_a_convolution(device: &Device) -> Result<(), Failed> {
    let cut_off: Activation = |x| relu(x).clamp_max(6.0);
    [relu as Activation, cut_off]
        .into_iter()
        .try_for_each(|activation| copies_no_images(activation, device))
}

fn copies_no_images(activation: Activation, device: &Device) -> Result<(), Failed> {
    use burn::nn::conv::Conv2dConfig;
    let device = device.clone().autodiff();
    let first = Conv2dConfig::new([8, 16], [3, 3]).with_bias(false).init(&device);
    let second = Conv2dConfig::new([16, 8], [3, 3]).with_bias(false).init(&device);
    let norm = BatchNormConfig::new(16).init(&device);
    let x = tensor(&normal(1, 2 * 8 * 9 * 9, 1.0, F32), [2, 8, 9, 9], F32, &device);
    let (_, blocks) = blocks_of(&device, || {
        let y = second.forward(activation(norm.forward(first.forward(x.clone()))));
        let gradients = y.powf_scalar(2.0).sum().backward();
        let dw = first.weight.grad(&gradients).ok_or("the first weights have no gradient")?;
        values(dw)
    })?;
    expect_ours(&blocks)?;
    // Weights are copied in each of four passes where the device leaves gaps behind their rows.
    let is_copy = |kernel: &&&str| kernel.contains("copy_kernel");
    let copies = blocks.iter().flat_map(|block| &block.kernels).filter(is_copy).count();
    match copies <= 4 {
        true => Ok(()),
        false => Err(format!("{copies} tensors were copied: {blocks:#?}").into()),
    }
}

/// The operations of the gradient, as Burn has them, behind a mask of what is 0.5 or less.
fn other_threshold(device: &Device) -> Result<(), Failed> {
    const THRESHOLD: f64 = 0.5;
    let shape = [4, 8, 5, 7];
    let draw = |seed| normal(seed, shape.iter().product(), 1.0, F32);
    let (x, y, grad) = (draw(1), draw(2), draw(3));
    let gamma = normal(4, 8, 1.0, F32);
    let [of_x, of_y, of_grad] = [&x, &y, &grad].map(|all| tensor(all, shape, F32, device));
    let (mean, variance) = (Tensor::<1>::zeros([8], device), Tensor::<1>::ones([8], device));
    let of_gamma: Tensor<1> = tensor(&gamma, [8], F32, device);
    let of_all = |numbers: Tensor<1>| numbers.reshape([1, 8, 1, 1]);
    let rows = |images: Tensor<4>| images.swap_dims(0, 1).reshape([8, 140]);
    let (results, _) = blocks_of(device, || {
        let dy = of_grad.mask_fill(of_y.lower_equal_elem(THRESHOLD), 0.0);
        let rstd = of_all(variance.add_scalar(1e-5).sqrt().recip());
        let normalized = (of_x - of_all(mean)) * rstd.clone();
        let dy_rows = rows(dy.clone());
        let product_rows = rows(dy.clone() * normalized.clone());
        let (dbeta, dgamma) = (dy_rows.clone().sum_dim(1), product_rows.clone().sum_dim(1));
        let dy_mean = dy_rows.mean_dim(1).reshape([1, 8, 1, 1]);
        let product_mean = product_rows.mean_dim(1).reshape([1, 8, 1, 1]);
        let centered = dy - dy_mean;
        let projected = normalized * product_mean;
        let scale = of_all(of_gamma) * rstd;
        let dx = scale * (centered - projected);
        let (dgamma, dbeta): (Tensor<1>, Tensor<1>) = (dgamma.reshape([8]), dbeta.reshape([8]));
        // Numbers are read when all operations are in the stream.
        Ok([values(dx)?, values(dgamma)?, values(dbeta)?])
    })?;
    let cut: Vec<f64> =
        grad.iter().zip(&y).map(|(dy, y)| if *y <= THRESHOLD { 0.0 } else { *dy }).collect();
    let (rows, dy_rows) = (to_rows(&x, &shape), to_rows(&cut, &shape));
    let statistics = Statistics { mean: vec![0.0; 8], variance: vec![1.0; 8] };
    let reference = Reference { gamma: &gamma, beta: &gamma, epsilon: 1e-5, relu: false };
    let saved = Saved { x: &rows, statistics: &statistics, y: None };
    let Gradients { dx, dgamma, dbeta } = reference.backward(saved, &dy_rows);
    // A wrong mask is off by whole gradients; sums of 140 terms in f32 are not.
    let near = |expected: &[f64]| -> Vec<f64> { vec![1e-4; expected.len()] };
    for (actual, expected) in [
        (to_rows(&results[0], &shape), dx),
        (results[1].clone(), dgamma),
        (results[2].clone(), dbeta),
    ] {
        compare(&actual, &expected, &near(&expected))?;
    }
    Ok(())
}

/// The same operations over the pixels of each channel, as an instance norm of one image has them.
fn other_dimensions(device: &Device) -> Result<(), Failed> {
    let x = normal(1, 6 * 6 * 4, 1.0, F32);
    let rows = tensor(&x, [6, 6, 4], F32, device);
    let turned = rows.clone().swap_dims(0, 1).reshape([36, 4]);
    let mean = turned.mean_dim(1).reshape([6, 6, 1]);
    let centered = values(rows - mean)?;
    let at = |a: usize, b: usize, c: usize| x[(a * 6 + b) * 4 + c];
    let expected: Vec<f64> = (0..6 * 6 * 4)
        .map(|i| {
            let (a, b, c) = (i / 24, i / 4 % 6, i % 4);
            at(a, b, c) - (0..4).map(|c| at(b, a, c)).sum::<f64>() / 4.0
        })
        .collect();
    compare(&centered, &expected, &vec![1e-6; expected.len()])?;
    Ok(())
}

type Activation = fn(Tensor<4>) -> Tensor<4>;

/// Activations that networks have behind a norm, but for ReLU, whose gradient is taken along with the norm's.
const ACTIVATIONS: [(&str, Activation); 6] = [
    ("relu and a maximum", |x| relu(x).clamp_max(6.0)),
    ("a minimum and a maximum", |x| x.clamp(0.0, 6.0)),
    ("silu", silu),
    ("leaky relu", |x| leaky_relu(x, 0.1)),
    ("hard swish", hard_swish),
    ("gelu", gelu),
];

/// The gradients of a convolution's weights and of a norm's parameters, behind them an activation and a convolution.
fn gradients_in_front_of(activation: Activation, device: &Device) -> Result<[Vec<f64>; 3], Failed> {
    let device = device.clone().autodiff();
    let draw = |seed, shape: [usize; 4], scale| -> Tensor<4> {
        tensor(&normal(seed, shape.iter().product(), scale, F32), shape, F32, &device)
    };
    let [first, second] = [(1, [16, 8, 3, 3]), (2, [8, 16, 3, 3])]
        .map(|(seed, shape)| draw(seed, shape, 0.3).require_grad());
    let x = draw(3, [2, 8, 9, 9], 1.0);
    let module = norm(&normal(4, 16, 2.0, F32), &normal(5, 16, 2.0, F32), F32, &device);
    let options = || ConvOptions::new([1; 2], [0; 2], [1; 2], 1);
    let y = activation(module.forward(conv2d(x, first.clone(), None, options())));
    let gradients = conv2d(y, second, None, options()).powf_scalar(2.0).mean().backward();
    let missing = "a gradient is missing";
    Ok([
        values(first.grad(&gradients).ok_or(missing)?)?,
        values(module.gamma.grad(&gradients).ok_or(missing)?)?,
        values(module.beta.grad(&gradients).ok_or(missing)?)?,
    ])
}

/// Whatever stands between a norm and the next convolution: its gradient runs on the norm's kernels, in place.
fn in_front_of_activations(device: &Device) -> Result<(), Failed> {
    for (name, activation) in ACTIVATIONS {
        let (ours, blocks) = blocks_of(device, || gradients_in_front_of(activation, device))?;
        let of = |part: &str, block: &Block| {
            block.kernels.iter().filter(|kernel| kernel.contains(part)).count()
        };
        let copies: usize = blocks.iter().map(|block| of("copy_kernel", block)).sum();
        let reductions = blocks.iter().filter(|block| of("ReduceKernel", block) > 0).count();
        // Weights are copied in each of four passes where the device leaves gaps behind their rows, and the loss is a
        // mean of its own.
        let is_backward =
            |kernel: &&str| kernel.contains("batch_norm") && kernel.contains("backward");
        let is_whole = blocks.iter().any(|block| block.kernels.iter().any(is_backward));
        if copies > 4 || reductions > 1 || !is_whole {
            return Err(format!("behind a norm, {name}: {blocks:#?}").into());
        }
        let theirs = gradients_in_front_of(activation, &Device::flex())?;
        for (what, (ours, theirs)) in ["dw", "dgamma", "dbeta"].iter().zip(ours.iter().zip(&theirs))
        {
            // Sums of some hundred terms, whose factors tensor cores round to the 11 bits of TF32, through four
            // convolutions.
            let largest = theirs.iter().fold(0.0f64, |most, value| most.max(value.abs()));
            let bound = 4.0 * Storage::F16.unit_roundoff() * largest;
            compare(ours, theirs, &vec![bound; theirs.len()])
                .map_err(|error| format!("{what} behind {name}: {error}"))?;
        }
    }
    Ok(())
}
