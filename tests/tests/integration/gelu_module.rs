//! `burn::nn::Gelu`, unmodified: on the kernels where it is GELU, right where it only looks like it.

#[path = "gelu_training.rs"]
mod training;

use blackburn_reference::{
    activation::{Activation, FunctionErrors},
    column_sum::bound as sum_bound,
    gelu::{PORTABLE_ERF_ERROR, backward_bound, forward_bound, gelu, gelu_derivative},
    linear::{self, LinearPrecision},
    matmul::MatmulPrecision,
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
    nn::{Gelu, Linear, LinearConfig},
    prelude::*,
};
use libtest_mimic::{Failed, Trial};
use std::f64::consts::SQRT_2;

const F32: Storage = Storage::F32;

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |name: &str, test: fn(&Device) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("gelu::{name}"), move || {
            on_burn_device(|device| test(&device))
        })
    };
    let mut trials = vec![
        trial("a_perceptron_has_the_gradients_of_the_exact_form", |device| {
            perceptron(device, [2, 12, 9], 40).map(drop)
        }),
        trial("the_gradient_of_a_bias_is_made_with_that_of_gelu", |device| {
            with_sum(device, [24, 9], 16 + 1)?;
            with_sum(device, [2, 12, 9], 16 + 2)?;
            with_sum(device, [2, 3, 4, 9], 16 + 2)
        }),
        trial("the_gradient_of_a_bias_of_one_column_is_left_to_burn", |device| {
            perceptron(device, [24, 9], 1).map(drop)
        }),
        trial("an_input_that_is_read_again_is_kept", input_is_kept),
        trial("a_strided_input_is_read_in_its_order", strided),
        trial("a_forward_with_other_constants_or_data_flow_is_computed_as_written", lookalikes),
        trial("nothing_but_gelu_is_served_in_both_passes", alone),
        trial("a_gradient_that_nothing_follows_is_served", first),
        trial("a_backward_with_other_constants_is_computed_as_written", other_derivative),
    ];
    let name = "gelu::the_module_runs_on_the_kernels_and_is_within_bounds";
    trials.extend(trials_in(name, &Storage::ALL, |device, storage| {
        module(device, storage, [33, 256])?;
        module(device, storage, [3, 5, 256])
    }));
    trials.extend(training::trials());
    trials
}

fn expect_kernel(blocks: &[Block], operations: usize, name: &str) -> Result<(), Failed> {
    if blocks.iter().any(|block| block.is_one_kernel(operations, name)) {
        return Ok(());
    }
    Err(format!("no block of {operations} operations is one {name}: {blocks:#?}").into())
}

fn check_forward(actual: &[f64], x: &[f64], storage: Storage) -> Result<(), Failed> {
    let expected: Vec<f64> = x.iter().map(|x| gelu(*x)).collect();
    let bounds: Vec<f64> =
        x.iter().map(|x| forward_bound(*x, storage, PORTABLE_ERF_ERROR)).collect();
    compare(actual, &expected, &bounds)?;
    Ok(())
}

/// A linear layer with one output, whose weights every product takes without rounding: where the
/// loss is the sum of its outputs, each row of its input's gradient is the weights.
fn readout(weight: &[f64], storage: Storage, device: &Device) -> Linear {
    let weight = tensor(weight, [weight.len(), 1], storage, device);
    let bias = Tensor::<1>::zeros([1], device).cast(float(storage));
    Linear { weight: Param::from_tensor(weight), bias: Some(Param::from_tensor(bias)) }
}

/// GELU behind a flip, which no fusion takes: so it has a block of its own in both passes, with
/// something behind it, as it has in the middle of a network. The gradient of its output has the
/// readout's weights in each row, which a flip of rows leaves as they are.
fn module<const D: usize>(
    device: &Device,
    storage: Storage,
    shape: [usize; D],
) -> Result<(), Failed> {
    let (elements, columns) = (shape.iter().product(), shape[D - 1]);
    let x = normal(11, elements, 2.0, storage);
    let w = normal(12, columns, 1.0, Storage::Bf16);

    let input = tensor(&x, shape, storage, device);
    let (y, blocks) = blocks_of(device, || Ok(Gelu::new().forward(input)))?;
    expect_kernel(&blocks, 5, "GeluForwardKernel")?;
    check_forward(&values(y)?, &x, storage)?;

    let device = device.clone().autodiff();
    let input = tensor(&x, shape, storage, &device).require_grad();
    let readout = readout(&w, storage, &device);
    let (dx, blocks) = blocks_of(&device, || {
        let y = Gelu::new().forward(input.clone().flip([0]));
        let gradients = readout.forward(y).sum().backward();
        Ok(input.grad(&gradients).ok_or("the input has no gradient")?)
    })?;
    expect_within(&blocks, 16, &["GeluBackwardKernel"])?;
    let dx = values(dx)?;
    let per_element = |f: &dyn Fn(f64, f64) -> f64| -> Vec<f64> {
        x.iter().enumerate().map(|(i, x)| f(*x, w[i % columns])).collect()
    };
    let expected = per_element(&|x, dy| dy * gelu_derivative(x));
    let bounds = per_element(&|x, dy| backward_bound(x, dy, storage, PORTABLE_ERF_ERROR));
    compare(&dx, &expected, &bounds)?;

    // The negative control: the derivative that Burn has is not the one that is asked for here.
    let tanh_form = per_element(&|x, dy| dy * Activation::GeluTanh.derivative(x));
    match compare(&tanh_form, &expected, &bounds) {
        Err(_) => Ok(()),
        Ok(_) if storage != F32 => Ok(()),
        Ok(_) => Err("the derivative of the tanh form is within the bounds".into()),
    }
}

/// One kernel makes the gradient of GELU and its sum, for a layer so wide that its lanes are busy.
fn with_sum<const D: usize>(
    device: &Device,
    shape: [usize; D],
    operations: usize,
) -> Result<(), Failed> {
    let blocks = perceptron(device, shape, 128)?;
    expect_within(&blocks, operations, &["GeluBackwardSumKernel"])?;
    let is_sum = |block: &&Block| block.kernels.iter().any(|k| k.ends_with("BackwardSumKernel"));
    let block = blocks.iter().find(is_sum).ok_or("no block has the kernel")?;
    match block.kernels.iter().any(|kernel| kernel.ends_with("ColumnSumKernel")) {
        false => Ok(()),
        true => Err(format!("few rows were summed in two launches: {block:?}").into()),
    }
}

/// Linear, GELU, and [`readout`], on rows that are the last dimension of `shape`.
fn perceptron<const D: usize>(
    device: &Device,
    shape: [usize; D],
    hidden: usize,
) -> Result<Vec<Block>, Failed> {
    let device = device.clone().autodiff();
    let inputs = shape[D - 1];
    let rows = shape.iter().product::<usize>() / inputs;
    let inner = LinearConfig::new(inputs, hidden).init(&device);
    let outer_weight = normal(22, hidden, 0.3, Storage::Bf16);
    let outer = readout(&outer_weight, F32, &device);
    let x = normal(21, rows * inputs, 2.0, F32);
    let input = tensor(&x, shape, F32, &device);
    let inner_bias = inner.bias.as_ref().ok_or("LinearConfig gives a bias")?;
    let (weight, bias) = (values(inner.weight.val())?, values(inner_bias.val())?);

    let (gradients, blocks) = blocks_of(&device, || {
        let h = Gelu::new().forward(inner.forward(input));
        Ok(outer.forward(h).sum().backward())
    })?;
    let of = |gradient: Option<Tensor<2>>| values(gradient.ok_or("a weight has no gradient")?);
    let db = inner_bias.grad(&gradients).ok_or("the bias has no gradient")?;
    let (dw, db) = (of(inner.weight.grad(&gradients))?, values(db)?);
    let dw_outer = of(outer.weight.grad(&gradients))?;

    let layer = linear::Linear {
        rows,
        inputs,
        outputs: hidden,
        x: &x,
        weight: &weight,
        bias: Some(&bias),
        activation: Activation::Gelu,
    };
    let on_cuda = std::env::var("BLACKBURN_REQUIRE_DEVICE").is_ok_and(|name| name == "cuda");
    let precision = LinearPrecision {
        product: if on_cuda { MatmulPrecision::tf32() } else { MatmulPrecision::exact(F32) },
        z: F32,
        dz: F32,
        functions: FunctionErrors::PORTABLE,
    };
    let forward = layer.forward();
    let forward_bounds = layer.forward_bounds(&forward, &precision);
    let dy = outer_weight.repeat(rows);
    let expected = layer.backward(&forward.z, &dy);
    let bounds = layer.backward_bounds(&forward.z, &forward_bounds.z, &dy, &expected, &precision);
    compare(&dw, &expected.dw, &bounds.dw)?;
    compare(&db, &expected.db, &bounds.db)?;

    let column = |of: &[f64], j: usize| -> f64 { of.iter().skip(j).step_by(hidden).sum() };
    let magnitudes: Vec<f64> =
        forward.y.iter().zip(&forward_bounds.y).map(|(y, bound)| y.abs() + bound).collect();
    let expected: Vec<f64> = (0..hidden).map(|j| column(&forward.y, j)).collect();
    let bounds: Vec<f64> = (0..hidden)
        .map(|j| {
            let sum = sum_bound(expected[j], column(&magnitudes, j), rows, F32);
            column(&forward_bounds.y, j) + sum
        })
        .collect();
    compare(&dw_outer, &expected, &bounds)?;
    Ok(blocks)
}

/// Nothing but GELU: the gradient of its output is nothing but ones, and nothing follows it.
fn alone(device: &Device) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let x = normal(71, 33 * 40, 2.0, F32);
    let input = tensor(&x, [33, 40], F32, &device).require_grad();
    let ((y, dx), blocks) = blocks_of(&device, || {
        let y = Gelu::new().forward(input.clone());
        let gradients = y.clone().backward();
        Ok((y, input.grad(&gradients).ok_or("the input has no gradient")?))
    })?;
    // With the operation that makes the ones.
    expect_within(&blocks, 5 + 16 + 1, &["GeluForwardKernel", "GeluBackwardKernel"])?;
    check_forward(&values(y)?, &x, F32)?;
    check_backward(&values(dx)?, &x, |_| 1.0)
}

/// GELU of the input itself, and [`readout`]: its gradient is the last thing that is computed.
fn first(device: &Device) -> Result<(), Failed> {
    const COLUMNS: usize = 40;

    let device = device.clone().autodiff();
    let x = normal(72, 30 * COLUMNS, 2.0, F32);
    let w = normal(73, COLUMNS, 1.0, Storage::Bf16);
    let readout = readout(&w, F32, &device);
    let input = tensor(&x, [2, 15, COLUMNS], F32, &device).require_grad();
    let (dx, blocks) = blocks_of(&device, || {
        let gradients = readout.forward(Gelu::new().forward(input.clone())).sum().backward();
        Ok(input.grad(&gradients).ok_or("the input has no gradient")?)
    })?;
    expect_within(&blocks, 16, &["GeluBackwardKernel"])?;
    check_backward(&values(dx)?, &x, |i| w[i % COLUMNS])
}

/// Whether one block of that many operations, or more, launches these kernels.
fn expect_within(blocks: &[Block], least: usize, names: &[&str]) -> Result<(), Failed> {
    let launches = |block: &Block, name: &str| block.kernels.iter().any(|k| k.ends_with(name));
    let is_one = |block: &&Block| names.iter().all(|name| launches(block, name));
    match blocks.iter().find(is_one) {
        Some(block) if block.operations >= least => Ok(()),
        _ => Err(format!("{least} operations do not launch {names:?}: {blocks:#?}").into()),
    }
}

fn check_backward(actual: &[f64], x: &[f64], dy: impl Fn(usize) -> f64) -> Result<(), Failed> {
    let per_element = |f: &dyn Fn(f64, f64) -> f64| -> Vec<f64> {
        x.iter().enumerate().map(|(i, x)| f(*x, dy(i))).collect()
    };
    let expected = per_element(&|x, dy| dy * gelu_derivative(x));
    let bounds = per_element(&|x, dy| backward_bound(x, dy, F32, PORTABLE_ERF_ERROR));
    compare(actual, &expected, &bounds)?;
    Ok(())
}

fn input_is_kept(device: &Device) -> Result<(), Failed> {
    let x = normal(31, 1000, 2.0, F32);
    let input = tensor(&x, [10, 100], F32, device);
    let y = Gelu::new().forward(input.clone());
    let shifted = input.clone() + 3.0;
    check_forward(&values(y)?, &x, F32)?;
    let expected: Vec<f64> = x.iter().map(|x| x + 3.0).collect();
    let bounds: Vec<f64> = expected.iter().map(|y| y.abs() * F32.unit_roundoff()).collect();
    compare(&values(shifted)?, &expected, &bounds)?;
    // Once more, with nobody else to read it.
    check_forward(&values(Gelu::new().forward(input))?, &x, F32)
}

fn strided(device: &Device) -> Result<(), Failed> {
    let (rows, columns) = (31, 17);
    let x = normal(41, rows * columns, 2.0, F32);
    let transposed = tensor(&x, [rows, columns], F32, device).swap_dims(0, 1);
    // Now the transposition is settled, and GELU is by itself.
    device.sync().map_err(|error| error.to_string())?;
    let y = values(Gelu::new().forward(transposed))?;
    let in_order: Vec<f64> =
        (0..rows * columns).map(|i| x[i % rows * columns + i / rows]).collect();
    check_forward(&y, &in_order, F32)
}

/// Chains of the five operations that are not GELU, with what they are in f64.
type Chain = (&'static str, fn(Tensor<1>, Tensor<1>) -> Tensor<1>, fn(f64, f64) -> f64);

const LOOKALIKES: [Chain; 5] = [
    (
        "another divisor inside",
        |x, _| x.clone() * (x / 1.5).erf().add_scalar(1.0) / 2.0,
        |x, _| x * (1.0 + libm::erf(x / 1.5)) / 2.0,
    ),
    (
        "another addend",
        |x, _| x.clone() * (x / SQRT_2).erf().add_scalar(1.25) / 2.0,
        |x, _| x * (1.25 + libm::erf(x / SQRT_2)) / 2.0,
    ),
    (
        "another divisor outside",
        |x, _| x.clone() * (x / SQRT_2).erf().add_scalar(1.0) / 3.0,
        |x, _| x * (1.0 + libm::erf(x / SQRT_2)) / 3.0,
    ),
    (
        "two inputs",
        |x, z| z * (x / SQRT_2).erf().add_scalar(1.0) / 2.0,
        |x, z| z * (1.0 + libm::erf(x / SQRT_2)) / 2.0,
    ),
    (
        "an intermediate that is read again",
        |x, _| {
            let erf = (x.clone() / SQRT_2).erf();
            let y = x * erf.clone().add_scalar(1.0) / 2.0;
            y + erf
        },
        |x, _| gelu(x) + libm::erf(x / SQRT_2),
    ),
];

fn lookalikes(device: &Device) -> Result<(), Failed> {
    let (x, z) = (normal(51, 500, 2.0, F32), normal(52, 500, 2.0, F32));
    for (name, chain, exact) in LOOKALIKES {
        let y = values(chain(tensor(&x, [500], F32, device), tensor(&z, [500], F32, device)))?;
        let expected: Vec<f64> = x.iter().zip(&z).map(|(x, z)| exact(*x, *z)).collect();
        // The device's erf, as it is or times an input, and a rounding of every operation.
        let bounds: Vec<f64> = x
            .iter()
            .zip(&z)
            .map(|(x, z)| {
                let factor = 1.0 + x.abs().max(z.abs());
                factor * (PORTABLE_ERF_ERROR + 16.0 * F32.unit_roundoff())
            })
            .collect();
        compare(&y, &expected, &bounds).map_err(|error| format!("{name}: {error}"))?;
        let served: Vec<f64> = x.iter().map(|x| gelu(*x)).collect();
        if compare(&served, &expected, &bounds).is_ok() {
            return Err(format!("{name}: GELU would pass for it").into());
        }
    }
    Ok(())
}

/// Burn's sixteen operations with one constant twice as large.
fn other_derivative(device: &Device) -> Result<(), Failed> {
    let (x, dy) = (normal(61, 600, 1.0, F32), normal(62, 600, 1.0, F32));
    let (input, grad) = (tensor(&x, [600], F32, device), tensor(&dy, [600], F32, device));
    let actual = {
        let x3 = input.clone().powi_scalar(3);
        let c1 = x3.clone() * 0.071_354_8;
        let c2 = input.clone() * 0.797_885;
        let c3 = x3 * 0.053_516_1;
        let c4 = input * 0.398_942;
        let (inner1, inner2) = (c1 + c2, c3 + c4);
        let tanh = inner1.tanh();
        let sech = -tanh.clone().powi_scalar(2) + 1.0;
        let y1 = tanh * 0.5;
        let y2 = inner2 * sech + 0.5;
        values((y1 + y2) * grad)?
    };
    let exact = |x: f64, dy: f64, cubic: f64| {
        let tanh = (cubic * x.powi(3) + 0.797_885 * x).tanh();
        let inner2 = 0.053_516_1 * x.powi(3) + 0.398_942 * x;
        dy * (0.5 * tanh + inner2 * (1.0 - tanh * tanh) + 0.5)
    };
    let pairs = || x.iter().zip(&dy);
    let expected: Vec<f64> = pairs().map(|(x, dy)| exact(*x, *dy, 0.071_354_8)).collect();
    // The device's tanh, once as it is and once squared and times `inner2`, which is at most
    // x^3 + |x|, and a rounding of every operation.
    let bounds: Vec<f64> = pairs()
        .map(|(x, dy)| {
            let tanh_error = FunctionErrors::PORTABLE.tanh + 16.0 * F32.unit_roundoff();
            let inner2 = x.abs().powi(3) + x.abs();
            dy.abs() * (0.5 + 2.0 * inner2) * tanh_error + F32.unit_roundoff()
        })
        .collect();
    compare(&actual, &expected, &bounds)?;
    let served: Vec<f64> = pairs().map(|(x, dy)| dy * gelu_derivative(*x)).collect();
    match compare(&served, &expected, &bounds) {
        Err(_) => Ok(()),
        Ok(_) => Err("the kernel's gradient would pass for it".into()),
    }
}
