//! `burn::nn::LayerNorm`, unmodified: on the kernels, and against f64.

use blackburn_reference::{
    layer_norm::{Arithmetic, Gradients, LayerNorm as Reference, Norm},
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
    nn::{
        LayerNorm, LayerNormConfig, LinearConfig,
        transformer::{TransformerEncoderConfig, TransformerEncoderInput},
    },
    prelude::*,
};
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;
const EPSILON: f64 = 1e-5;
/// Elements of a row: no sum of a row has more additions.
const WIDTH: usize = 40;

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |name: &str, test: fn(&Device) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("layer_norm::provider::{name}"), move || {
            on_burn_device(|device| test(&device))
        })
    };
    let mut trials = vec![
        trial("without_a_gradient_it_is_one_launch", inference),
        trial("behind_products_and_in_front_of_them_it_is_found", between_products),
        trial("behind_a_feed_forward_layer_it_stays_whole", behind_a_gelu),
        trial("a_normalization_by_other_numbers_is_computed_as_written", others),
    ];
    let name = "layer_norm::provider::both_passes_run_on_the_kernels_and_are_within_bounds";
    trials.extend(trials_in(name, &[F32, Storage::Bf16], |device, storage| {
        check(device, storage, [48, WIDTH], true)?;
        check(device, storage, [3, 16, WIDTH], true)?;
        check(device, storage, [3, 16, WIDTH], false)?;
        check(device, storage, [2, 3, 8, WIDTH], true)
    }));
    trials
}

fn kernels<'a>(blocks: &'a [Block]) -> impl Iterator<Item = &'static str> + 'a {
    blocks.iter().flat_map(|block| block.kernels.iter().copied())
}

/// How many launches of a kernel there were.
fn launches(blocks: &[Block], name: &str) -> usize {
    kernels(blocks).filter(|kernel| kernel.ends_with(name)).count()
}

/// Whether so many norms ran on the kernels of both passes, and none by sums of rows, of which the loss is one. What is
/// in front of a gradient may keep that of gamma from it.
fn expect(blocks: &[Block], norms: usize) -> Result<(), Failed> {
    let found = [
        launches(blocks, "LayerNormForwardKernel"),
        launches(blocks, "LayerNormBackwardKernel"),
        launches(blocks, "RowSumKernel"),
    ];
    match found[..2] == [norms, norms] && found[2] <= 1 {
        true => Ok(()),
        false => Err(format!("{found:?} launches in both passes of {norms}: {blocks:#?}").into()),
    }
}

pub(crate) fn module(
    gamma: &[f64],
    beta: Option<&[f64]>,
    storage: Storage,
    device: &Device,
) -> LayerNorm {
    let parameter =
        |values: &[f64]| Param::from_tensor(tensor(values, [values.len()], storage, device));
    let mut norm = LayerNormConfig::new(gamma.len()).with_bias(beta.is_some()).init(device);
    norm.gamma = parameter(gamma);
    norm.beta = beta.map(parameter);
    norm
}

/// Rows whose mean is not zero.
fn rows(elements: usize, storage: Storage) -> Vec<f64> {
    let around_zero = normal(1, elements, 1.0, storage);
    around_zero.into_iter().map(|x| storage.round(x + 1.5)).collect()
}

fn check<const D: usize>(
    device: &Device,
    storage: Storage,
    shape: [usize; D],
    bias: bool,
) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let elements = shape.iter().product();
    // Products of f32 may be of operands with 11 bits.
    let (x, dy) = (rows(elements, storage), normal(2, elements, 1.0, Storage::Bf16));
    let (gamma, beta) = (normal(3, WIDTH, 1.0, storage), normal(4, WIDTH, 1.0, storage));
    let beta = bias.then_some(&beta[..]);
    let norm = module(&gamma, beta, storage, device);
    let input = tensor(&x, shape, storage, device).require_grad();
    let weight = tensor(&dy, shape, storage, device);
    let identity = Tensor::<2>::eye(WIDTH, device).cast(float(storage)).unsqueeze::<D>();
    let (results, blocks) = blocks_of(device, || {
        let y = norm.forward(input.clone());
        // Gradients arrive from a product, as in a network.
        let gradients = (y.clone().matmul(identity) * weight).sum().backward();
        let missing = "a gradient is missing";
        let dx = input.grad(&gradients).ok_or(missing)?;
        let dgamma = norm.gamma.grad(&gradients).ok_or(missing)?;
        let dbeta = match &norm.beta {
            Some(beta) => values(beta.grad(&gradients).ok_or(missing)?)?,
            None => vec![0.0; WIDTH],
        };
        Ok([values(y)?, values(dx)?, values(dgamma)?, dbeta])
    })?;
    let [y, dx, dgamma, dbeta] = results;
    expect(&blocks, 1)?;

    let reference = Reference { norm: Norm::Layer, gamma: &gamma, beta, epsilon: EPSILON };
    let how = Arithmetic { rows: storage, parameters: storage, additions: WIDTH };
    let told = |name: &str, error: String| format!("{name} of {shape:?}: {error}");
    compare(&y, &reference.forward(&x), &reference.forward_bounds(&x, how))
        .map_err(|error| told("y", error.to_string()))?;
    let exact = reference.backward(&x, &dy, None);
    let Gradients { dx: of_dx, dgamma: of_dgamma, dbeta: of_dbeta } =
        with_kept_roundings(&reference, &x, &dy, how);
    for (name, actual, expected, bounds) in [
        ("dx", dx, exact.dx, of_dx),
        ("dgamma", dgamma, exact.dgamma, of_dgamma),
        ("dbeta", dbeta, if bias { exact.dbeta } else { vec![0.0; WIDTH] }, of_dbeta),
    ] {
        compare(&actual, &expected, &bounds).map_err(|error| told(name, error.to_string()))?;
    }
    Ok(())
}

/// The bounds of gradients that are made of the centered rows and their deviations, both rounded: a relative error
/// of a unit each in what rows are divided by and in the normalized rows.
pub(crate) fn with_kept_roundings(
    reference: &Reference<'_>,
    x: &[f64],
    dy: &[f64],
    how: Arithmetic,
) -> Gradients {
    let unit = 2.0 * how.rows.unit_roundoff();
    let width = reference.gamma.len();
    let mut bounds = reference.backward_bounds(x, dy, None, how);
    let exact = reference.backward(x, dy, None);
    for (r, (row, dy)) in x.chunks(width).zip(dy.chunks(width)).enumerate() {
        let mean = row.iter().sum::<f64>() / width as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
        let rstd = 1.0 / (variance + reference.epsilon).sqrt();
        let h: Vec<f64> = row.iter().map(|x| (x - mean) * rstd).collect();
        let products = (0..width).map(|j| (reference.gamma[j] * dy[j] * h[j]).abs());
        let share = products.sum::<f64>() / width as f64;
        for j in 0..width {
            let at = r * width + j;
            // Both errors meet twice in the product of the normalized row with its mean.
            bounds.dx[at] += unit * (exact.dx[at].abs() + 2.0 * rstd * h[j].abs() * share);
            bounds.dgamma[j] += unit * (dy[j] * h[j]).abs();
        }
    }
    bounds
}

fn inference(device: &Device) -> Result<(), Failed> {
    let shape = [3, 16, WIDTH];
    let x = rows(shape.iter().product(), F32);
    let (gamma, beta) = (normal(3, WIDTH, 1.0, F32), normal(4, WIDTH, 1.0, F32));
    let norm = module(&gamma, Some(&beta), F32, device);
    let input = tensor(&x, shape, F32, device);
    let (y, blocks) = blocks_of(device, || values(norm.forward(input)))?;
    // Rows that the device keeps apart are copied.
    let is_other = |kernel: &&str| !kernel.contains("opy");
    let others = kernels(&blocks).filter(is_other).count();
    if launches(&blocks, "LayerNormForwardKernel") != 1 || others != 1 {
        return Err(format!("not one launch: {blocks:#?}").into());
    }
    let reference =
        Reference { norm: Norm::Layer, gamma: &gamma, beta: Some(&beta), epsilon: EPSILON };
    let how = Arithmetic { rows: F32, parameters: F32, additions: WIDTH };
    compare(&y, &reference.forward(&x), &reference.forward_bounds(&x, how))?;
    Ok(())
}

/// Norms of two layers with linear layers around them, in front of what is added to the rows as in GPT, or behind it
/// as in BERT: the same gradients as on the CPU.
fn between_products(device: &Device) -> Result<(), Failed> {
    let cpu = Device::flex().autodiff();
    let linear = |from, to| LinearConfig::new(from, to).init(&cpu);
    let norms = [(); 3].map(|()| LayerNormConfig::new(WIDTH).init(&cpu));
    let linears =
        [linear(24, WIDTH), linear(WIDTH, WIDTH), linear(WIDTH, WIDTH), linear(WIDTH, 24)];
    let numbers = rows(3 * 16 * 24, F32);
    for norms_first in [true, false] {
        let run = |device: &Device| -> Result<[Vec<f64>; 3], Failed> {
            let [first, second, third, last] = linears.clone().map(|layer| layer.fork(device));
            let norms = norms.clone().map(|norm| norm.fork(device));
            let x = tensor(&numbers, [3, 16, 24], F32, device);
            let mut x = first.forward(x);
            for (norm, layer) in norms.iter().zip([&second, &third]) {
                x = match norms_first {
                    true => x.clone() + layer.forward(norm.forward(x)),
                    false => norm.forward(x.clone() + layer.forward(x)),
                };
            }
            let y = last.forward(norms[2].forward(x));
            let gradients = y.powf_scalar(2.0).mean().backward();
            let missing = "a gradient is missing";
            Ok([
                values(first.weight.grad(&gradients).ok_or(missing)?)?,
                values(second.weight.grad(&gradients).ok_or(missing)?)?,
                values(norms[0].gamma.grad(&gradients).ok_or(missing)?)?,
            ])
        };
        let expected = run(&cpu)?;
        let (actual, blocks) = blocks_of(device, || run(&device.clone().autodiff()))?;
        expect(&blocks, 3).map_err(|error| format!("norms first: {norms_first}: {error:?}"))?;
        if launches(&blocks, "LayerNormParametersKernel") == 0 {
            return Err(format!("no gradient of gamma is made with its rows': {blocks:#?}").into());
        }
        for (actual, expected) in actual.iter().zip(&expected) {
            // Products of f32 may be of operands with 11 bits, one behind the other.
            let largest = expected.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
            compare(actual, expected, &vec![5e-3 * largest; expected.len()])
                .map_err(|error| format!("norms first: {norms_first}: {error}"))?;
        }
    }
    Ok(())
}

/// The fusion of the GELU must not wait through the product and the sum behind it, into the norm.
fn behind_a_gelu(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    // So many rows that Burn multiplies them as they are.
    let [batch, tokens, width] = [2, 64, 64];
    let encoder = TransformerEncoderConfig::new(width, 4 * width, 1, 1).with_dropout(0.0);
    let encoder = encoder.init(device);
    let last = LinearConfig::new(width, 8).init(device);
    let numbers = normal(7, batch * tokens * width, 1.0, F32);
    let forward = || {
        let x = tensor::<3>(&numbers, [batch, tokens, width], F32, device);
        values(last.forward(encoder.forward(TransformerEncoderInput::new(x.clone() + x))))
    };
    // Parameters are made at their first use.
    forward()?;
    let (_, blocks) = blocks_of(device, forward)?;
    match (launches(&blocks, "LayerNormForwardKernel"), launches(&blocks, "ReduceKernelFused")) {
        (2, 0) => Ok(()),
        found => Err(format!("{found:?} launches of norms and of pieces: {blocks:#?}").into()),
    }
}

/// The operations of a layer norm, but divided by the root of half the variance.
fn others(device: &Device) -> Result<(), Failed> {
    let device = &device.clone().autodiff();
    let shape = [16, WIDTH];
    let x = rows(shape.iter().product(), F32);
    let input = tensor(&x, shape, F32, device).require_grad();
    let gamma = tensor(&[2.0; WIDTH], [1, WIDTH], F32, device);
    let centered = input.clone() - input.clone().mean_dim(1);
    let variance = (centered.clone() * centered.clone()).mean_dim(1) * 0.5;
    let y = centered / (variance + EPSILON).sqrt() * gamma;
    let doubled = [2.0 * 2f64.sqrt(); WIDTH];
    let reference =
        Reference { norm: Norm::Layer, gamma: &doubled, beta: None, epsilon: 2.0 * EPSILON };
    let expected = reference.forward(&x);
    let near: Vec<f64> = expected.iter().map(|y| 1e-5 * (1.0 + y.abs())).collect();
    compare(&values(y.clone())?, &expected, &near)?;
    let dy = normal(5, x.len(), 1.0, F32);
    let gradients = (y * tensor(&dy, shape, F32, device)).sum().backward();
    let dx = values(input.grad(&gradients).ok_or("x has no gradient")?)?;
    let expected = reference.backward(&x, &dy, None).dx;
    let near: Vec<f64> = expected.iter().map(|dx| 1e-4 * (1.0 + dx.abs())).collect();
    compare(&dx, &expected, &near)?;
    Ok(())
}
