//! Normalization as programs call it, through fusion and automatic differentiation, on the CPU and on
//! the device that kernels are tested on, against f64.

use blackburn_backend::layer_norm::{
    Addend, add_layer_norm, add_rms_norm, layer_norm, layer_norm_of_sum, rms_norm,
};
use blackburn_reference::{
    layer_norm::{Arithmetic, Gradients, LayerNorm, Norm},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    blocks::blocks_of,
    on_burn_device,
    tensors::{tensor, values},
};
use burn::prelude::*;
use libtest_mimic::{Completion, Failed, Trial};
use std::panic::{AssertUnwindSafe, catch_unwind};

const ROWS: usize = 6;
const WIDTH: usize = 40;
const EPSILON: f64 = 1e-5;
/// No sum of 40 terms has more additions.
const HOW: Arithmetic =
    Arithmetic { rows: Storage::F32, parameters: Storage::F32, additions: WIDTH };

type Test = fn(&Device) -> Result<(), Failed>;

pub(crate) fn trials() -> Vec<Trial> {
    let tests: [(&str, Test); 9] = [
        ("both_passes_are_within_bounds", both_passes),
        ("a_sum_and_its_norm_share_their_gradients", joined),
        ("a_bias_of_what_is_added_gets_its_gradient", biased),
        ("results_that_nobody_uses_are_left_out", unused_results),
        ("inputs_that_need_no_gradient_get_none", untracked),
        ("strided_inputs_are_read_as_they_are_meant", strided),
        ("parameters_of_another_type_get_gradients_of_theirs", other_types),
        ("rows_that_no_kernel_holds_are_left_to_burn", beyond_a_cube),
        ("bad_arguments_are_named", bad_arguments),
    ];
    let mut trials = Vec::new();
    for (name, test) in tests {
        trials.push(Trial::ignorable_test(format!("layer_norm::op::{name}"), move || {
            on_burn_device(|device| test(&device))
        }));
        trials
            .push(Trial::ignorable_test(format!("layer_norm::op::{name}_on_the_cpu"), move || {
                test(&Device::flex()).map(|()| Completion::Completed)
            }));
    }
    trials.push(Trial::ignorable_test("layer_norm::op::each_pass_is_one_operation", || {
        on_burn_device(|device| one_operation(&device))
    }));
    trials
}

/// Seeded numbers, here and on the device.
struct Numbers {
    x: Vec<f64>,
    residual: Vec<f64>,
    gamma: Vec<f64>,
    beta: Vec<f64>,
    dy: Vec<f64>,
    dsum: Vec<f64>,
}

impl Numbers {
    fn of(rows: usize, width: usize) -> Self {
        let of_rows = |seed| normal(seed, rows * width, 1.0, Storage::F32);
        let of_row = |seed| normal(seed, width, 1.0, Storage::F32);
        Self {
            x: of_rows(1),
            residual: of_rows(2),
            gamma: of_row(3),
            beta: of_row(4),
            dy: of_rows(5),
            dsum: of_rows(6),
        }
    }

    fn reference(&self, norm: Norm) -> LayerNorm<'_> {
        let beta = (norm == Norm::Layer).then_some(&self.beta[..]);
        LayerNorm { norm, gamma: &self.gamma, beta, epsilon: EPSILON }
    }

    /// x and the residual as f32 adds them.
    fn sum(&self) -> Vec<f64> {
        let pairs = self.x.iter().zip(&self.residual);
        pairs.map(|(x, residual)| Storage::F32.round(x + residual)).collect()
    }
}

fn leaf<const D: usize>(values: &[f64], shape: [usize; D], device: &Device) -> Tensor<D> {
    tensor(values, shape, Storage::F32, &device.clone().autodiff()).require_grad()
}

fn gradient<const D: usize>(
    of: &Tensor<D>,
    gradients: &burn::tensor::Gradients,
) -> Result<Vec<f64>, Failed> {
    values(of.grad(gradients).ok_or("a tensor has no gradient")?)
}

/// Gradients of x, gamma and, for the layer norm, beta.
fn check_gradients(
    norm: Norm,
    actual: [Vec<f64>; 3],
    expected: &Gradients,
    bounds: &Gradients,
) -> Result<(), Failed> {
    let [dx, dgamma, dbeta] = actual;
    compare(&dx, &expected.dx, &bounds.dx).map_err(|error| format!("{norm:?}, dx: {error}"))?;
    compare(&dgamma, &expected.dgamma, &bounds.dgamma)
        .map_err(|error| format!("{norm:?}, dgamma: {error}"))?;
    if norm == Norm::Layer {
        compare(&dbeta, &expected.dbeta, &bounds.dbeta)
            .map_err(|error| format!("{norm:?}, dbeta: {error}"))?;
    }
    Ok(())
}

fn both_passes(device: &Device) -> Result<(), Failed> {
    let numbers = Numbers::of(ROWS, WIDTH);
    let shape = [2, ROWS / 2, WIDTH];
    for norm in [Norm::Layer, Norm::Rms] {
        let x = leaf(&numbers.x, shape, device);
        let (gamma, beta) =
            (leaf(&numbers.gamma, [WIDTH], device), leaf(&numbers.beta, [WIDTH], device));
        let y = match norm {
            Norm::Layer => layer_norm(x.clone(), gamma.clone(), Some(beta.clone()), EPSILON),
            Norm::Rms => rms_norm(x.clone(), gamma.clone(), EPSILON),
        };
        let dy: Tensor<3> = tensor(&numbers.dy, shape, Storage::F32, &x.device());
        let gradients = (y.clone() * dy).sum().backward();
        let op = numbers.reference(norm);
        compare(&values(y)?, &op.forward(&numbers.x), &op.forward_bounds(&numbers.x, HOW))?;
        let dbeta = if norm == Norm::Layer { gradient(&beta, &gradients)? } else { Vec::new() };
        check_gradients(
            norm,
            [gradient(&x, &gradients)?, gradient(&gamma, &gradients)?, dbeta],
            &op.backward(&numbers.x, &numbers.dy, None),
            &op.backward_bounds(&numbers.x, &numbers.dy, None, HOW),
        )?;
    }
    Ok(())
}

fn joined(device: &Device) -> Result<(), Failed> {
    let numbers = Numbers::of(ROWS, WIDTH);
    let shape = [ROWS, WIDTH];
    for norm in [Norm::Layer, Norm::Rms] {
        let [x, residual] =
            [&numbers.x, &numbers.residual].map(|values| leaf(values, shape, device));
        let [gamma, beta] =
            [&numbers.gamma, &numbers.beta].map(|values| leaf(values, [WIDTH], device));
        let (sum, y) = match norm {
            Norm::Layer => add_layer_norm(
                x.clone(),
                residual.clone(),
                gamma.clone(),
                Some(beta.clone()),
                EPSILON,
            ),
            Norm::Rms => add_rms_norm(x.clone(), residual.clone(), gamma.clone(), EPSILON),
        };
        let [dy, dsum]: [Tensor<2>; 2] = [&numbers.dy, &numbers.dsum]
            .map(|values| tensor(values, shape, Storage::F32, &x.device()));
        // The sum is used twice, before and behind the norm's gradient.
        let half = dsum * 0.5;
        let loss = (sum.clone() * half.clone()).sum() + (y.clone() * dy).sum();
        let gradients = (loss + (sum.clone() * half).sum()).backward();
        let s = numbers.sum();
        compare(&values(sum)?, &s, &vec![0.0; s.len()])?;
        let op = numbers.reference(norm);
        compare(&values(y)?, &op.forward(&s), &op.forward_bounds(&s, HOW))?;
        let expected = op.backward(&s, &numbers.dy, Some(&numbers.dsum));
        let mut bounds = op.backward_bounds(&s, &numbers.dy, Some(&numbers.dsum), HOW);
        // Burn adds the two halves up before.
        let u = Storage::F32.unit_roundoff();
        bounds.dx.iter_mut().zip(&numbers.dsum).for_each(|(dx, dsum)| *dx += u * dsum.abs());
        let dbeta = if norm == Norm::Layer { gradient(&beta, &gradients)? } else { Vec::new() };
        let dx = gradient(&x, &gradients)?;
        if dx != gradient(&residual, &gradients)? {
            return Err("the two terms of a sum have different gradients".into());
        }
        let actual = [dx, gradient(&gamma, &gradients)?, dbeta];
        check_gradients(norm, actual, &expected, &bounds)?;
    }
    Ok(())
}

/// The bias in the norm is the bias in front of it, whatever else is there, and whichever result is used.
fn biased(device: &Device) -> Result<(), Failed> {
    let numbers = Numbers::of(ROWS, WIDTH);
    let bias_numbers = normal(7, WIDTH, 1.0, Storage::F32);
    let [dy, dsum]: [Tensor<2>; 2] = [&numbers.dy, &numbers.dsum]
        .map(|values| tensor(values, [ROWS, WIDTH], Storage::F32, &device.clone().autodiff()));
    for (has_beta, uses_norm) in [(true, true), (false, true), (true, false), (false, false)] {
        let run = |is_in_norm: bool| {
            let [x, residual] =
                [&numbers.x, &numbers.residual].map(|values| leaf(values, [ROWS, WIDTH], device));
            let [gamma, beta, bias] = [&numbers.gamma, &numbers.beta, &bias_numbers]
                .map(|values| leaf(values, [WIDTH], device));
            let of_beta = has_beta.then(|| beta.clone());
            let (sum, y) = if is_in_norm {
                let addend =
                    Addend { residual: residual.clone(), bias: Some(bias.clone()), dropout: None };
                layer_norm_of_sum(x.clone(), addend, gamma.clone(), of_beta, EPSILON)
            } else {
                let residual = residual.clone() + bias.clone().unsqueeze();
                add_layer_norm(x.clone(), residual, gamma.clone(), of_beta, EPSILON)
            };
            let loss = (sum.clone() * dsum.clone()).sum();
            let loss = if uses_norm { loss + (y.clone() * dy.clone()).sum() } else { loss };
            let gradients = loss.backward();
            let mut results = vec![values(sum)?, values(y)?];
            results.push(gradient(&x, &gradients)?);
            results.push(gradient(&residual, &gradients)?);
            if uses_norm {
                results.push(gradient(&gamma, &gradients)?);
            }
            if uses_norm && has_beta {
                results.push(gradient(&beta, &gradients)?);
            }
            Ok::<_, Failed>((results, gradient(&bias, &gradients)?))
        };
        let ((results, of_bias), (expected, _)) = (run(true)?, run(false)?);
        if results != expected {
            return Err(format!("beta {has_beta}, norm {uses_norm}: other results").into());
        }
        let (mut sums, mut bounds) = (vec![0.0; WIDTH], vec![0.0; WIDTH]);
        for (index, gradient) in results[3].iter().enumerate() {
            sums[index % WIDTH] += gradient;
            // Each was rounded before it was read here, and each addition rounds.
            bounds[index % WIDTH] +=
                gradient.abs() * (ROWS + 1) as f64 * Storage::F32.unit_roundoff();
        }
        compare(&of_bias, &sums, &bounds)
            .map_err(|error| format!("beta {has_beta}, norm {uses_norm}, bias: {error}"))?;
    }
    Ok(())
}

fn unused_results(device: &Device) -> Result<(), Failed> {
    let numbers = Numbers::of(ROWS, WIDTH);
    let run = || {
        let [x, residual] =
            [&numbers.x, &numbers.residual].map(|values| leaf(values, [ROWS, WIDTH], device));
        let gamma = leaf(&numbers.gamma, [WIDTH], device);
        let results = add_layer_norm(x.clone(), residual, gamma.clone(), None, EPSILON);
        (x, gamma, results)
    };
    let weights = |values| -> Tensor<2> {
        tensor(values, [ROWS, WIDTH], Storage::F32, &device.clone().autodiff())
    };
    // The norm alone.
    let (x, _, (_, y)) = run();
    let gradients = (y * weights(&numbers.dy)).sum().backward();
    let s = numbers.sum();
    let op = LayerNorm { beta: None, ..numbers.reference(Norm::Layer) };
    let expected = op.backward(&s, &numbers.dy, None);
    let bounds = op.backward_bounds(&s, &numbers.dy, None, HOW);
    compare(&gradient(&x, &gradients)?, &expected.dx, &bounds.dx)?;
    // The sum alone.
    let (x, gamma, (sum, _)) = run();
    let gradients = (sum * weights(&numbers.dsum)).sum().backward();
    compare(&gradient(&x, &gradients)?, &numbers.dsum, &vec![0.0; s.len()])?;
    if gamma.grad(&gradients).is_some() {
        return Err("a norm that nobody used gave its factors a gradient".into());
    }
    Ok(())
}

fn untracked(device: &Device) -> Result<(), Failed> {
    let numbers = Numbers::of(ROWS, WIDTH);
    let device = device.clone().autodiff();
    let x: Tensor<2> = tensor(&numbers.x, [ROWS, WIDTH], Storage::F32, &device);
    let gamma: Tensor<1> = tensor(&numbers.gamma, [WIDTH], Storage::F32, &device);
    let residual = leaf(&numbers.residual, [ROWS, WIDTH], &device);
    let (_, y) = add_layer_norm(x.clone(), residual.clone(), gamma.clone(), None, EPSILON);
    let gradients = y.sum().backward();
    if residual.grad(&gradients).is_none() {
        return Err("the residual has no gradient".into());
    }
    if x.grad(&gradients).is_some() || gamma.grad(&gradients).is_some() {
        return Err("a tensor that needs no gradient has one".into());
    }
    let op = LayerNorm { beta: None, ..numbers.reference(Norm::Layer) };
    let y = layer_norm(x, gamma, None, EPSILON);
    compare(&values(y)?, &op.forward(&numbers.x), &op.forward_bounds(&numbers.x, HOW))?;
    Ok(())
}

fn strided(device: &Device) -> Result<(), Failed> {
    let numbers = Numbers::of(ROWS, WIDTH);
    // The same rows, stored column by column, and within wider ones.
    let x: Tensor<2> = tensor(&numbers.x, [ROWS, WIDTH], Storage::F32, device);
    let transposed = (x.clone().transpose() + 0.0).transpose();
    let padding = Tensor::<2>::full([ROWS, 3], f32::NAN, device);
    let within = Tensor::cat(vec![padding.clone(), x, padding], 1).slice([0..ROWS, 3..WIDTH + 3]);
    let gamma: Tensor<1> = tensor(&numbers.gamma, [WIDTH], Storage::F32, device);
    let op = LayerNorm { beta: None, ..numbers.reference(Norm::Layer) };
    let (expected, bounds) = (op.forward(&numbers.x), op.forward_bounds(&numbers.x, HOW));
    for x in [transposed, within] {
        let y = layer_norm(x, gamma.clone(), None, EPSILON);
        compare(&values(y)?, &expected, &bounds)?;
    }
    Ok(())
}

fn other_types(device: &Device) -> Result<(), Failed> {
    let storage = Storage::F16;
    let half = |values: &[f64]| -> Vec<f64> { values.iter().map(|v| storage.round(*v)).collect() };
    let numbers = Numbers::of(ROWS, WIDTH);
    let (x, dy) = (half(&numbers.x), half(&numbers.dy));
    // Factors in f32 and, for rows in f32, in f16.
    for (rows, parameters) in [(storage, Storage::F32), (Storage::F32, storage)] {
        let gamma_values = half(&numbers.gamma);
        let device = device.clone().autodiff();
        let x_leaf: Tensor<2> = tensor(&x, [ROWS, WIDTH], rows, &device).require_grad();
        let gamma: Tensor<1> = tensor(&gamma_values, [WIDTH], parameters, &device).require_grad();
        let y = layer_norm(x_leaf.clone(), gamma.clone(), None, EPSILON);
        let dy_tensor: Tensor<2> = tensor(&dy, [ROWS, WIDTH], rows, &device);
        if y.dtype() != x_leaf.dtype() {
            return Err(format!("rows of {rows:?} came back as {:?}", y.dtype()).into());
        }
        let gradients = (y.clone() * dy_tensor).sum().backward();
        let dgamma = gamma.grad(&gradients).ok_or("gamma has no gradient")?;
        if dgamma.dtype() != gamma.dtype() {
            return Err(format!("a gamma of {parameters:?} got {:?}", dgamma.dtype()).into());
        }
        let op =
            LayerNorm { norm: Norm::Layer, gamma: &gamma_values, beta: None, epsilon: EPSILON };
        let how = Arithmetic { rows, parameters, additions: WIDTH };
        compare(&values(y)?, &op.forward(&x), &op.forward_bounds(&x, how))?;
        let expected = op.backward(&x, &dy, None);
        let bounds = op.backward_bounds(&x, &dy, None, how);
        compare(&gradient(&x_leaf, &gradients)?, &expected.dx, &bounds.dx)?;
        compare(&values(dgamma)?, &expected.dgamma, &bounds.dgamma)?;
    }
    Ok(())
}

fn beyond_a_cube(device: &Device) -> Result<(), Failed> {
    let (rows, width) = (2, 70_000);
    let numbers = Numbers::of(rows, width);
    let [x, residual] =
        [&numbers.x, &numbers.residual].map(|values| leaf(values, [rows, width], device));
    let gamma = leaf(&numbers.gamma, [width], device);
    let (sum, y) = add_layer_norm(x.clone(), residual, gamma.clone(), None, EPSILON);
    let weights =
        |values| -> Tensor<2> { tensor(values, [rows, width], Storage::F32, &x.device()) };
    let loss = (y.clone() * weights(&numbers.dy)).sum() + (sum * weights(&numbers.dsum)).sum();
    let gradients = loss.backward();
    let s = numbers.sum();
    let op = LayerNorm { beta: None, ..numbers.reference(Norm::Layer) };
    // In whatever order Burn adds.
    let how = Arithmetic { additions: width, ..HOW };
    compare(&values(y)?, &op.forward(&s), &op.forward_bounds(&s, how))?;
    let expected = op.backward(&s, &numbers.dy, Some(&numbers.dsum));
    let bounds = op.backward_bounds(&s, &numbers.dy, Some(&numbers.dsum), how);
    compare(&gradient(&x, &gradients)?, &expected.dx, &bounds.dx)?;
    compare(&gradient(&gamma, &gradients)?, &expected.dgamma, &bounds.dgamma)?;
    Ok(())
}

fn bad_arguments(device: &Device) -> Result<(), Failed> {
    fn ones<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
        Tensor::ones(shape, device)
    }
    type Call = fn(&Device);
    let calls: [(&str, Call); 4] = [
        ("gamma", |device| {
            drop(layer_norm(ones([2, 4], device), ones([3], device), None, EPSILON));
        }),
        ("beta", |device| {
            let beta = Some(ones([3], device));
            drop(layer_norm(ones([2, 4], device), ones([4], device), beta, EPSILON));
        }),
        ("residual", |device| {
            let [x, residual] = [4, 3].map(|width| ones([2, width], device));
            drop(add_rms_norm(x, residual, ones([4], device), EPSILON));
        }),
        ("epsilon", |device| {
            drop(rms_norm(ones([2, 4], device), ones([4], device), f64::NAN));
        }),
    ];
    for (argument, call) in calls {
        let panic = catch_unwind(AssertUnwindSafe(|| call(device))).err().ok_or("no panic")?;
        let message = panic.downcast_ref::<String>().cloned().unwrap_or_default();
        if !message.contains(&format!("`{argument}`")) {
            return Err(format!("a wrong {argument} was reported as: {message}").into());
        }
    }
    Ok(())
}

/// Forward and backward are one operation of Burn's stream each, and the second is two kernels.
fn one_operation(device: &Device) -> Result<(), Failed> {
    let numbers = Numbers::of(ROWS, WIDTH);
    let [x, residual] =
        [&numbers.x, &numbers.residual].map(|values| leaf(values, [ROWS, WIDTH], device));
    let [gamma, beta] = [&numbers.gamma, &numbers.beta].map(|values| leaf(values, [WIDTH], device));
    let (_, blocks) = blocks_of(device, || {
        let (sum, y) =
            add_layer_norm(x.clone(), residual, gamma.clone(), Some(beta.clone()), EPSILON);
        let gradients = (sum + y).sum().backward();
        gradient(&x, &gradients)
    })?;
    let launches = |name: &str| {
        let of = |block: &&blackburn_tests::blocks::Block| {
            block.operations == 1 && block.kernels.iter().any(|kernel| kernel.ends_with(name))
        };
        blocks.iter().filter(of).count()
    };
    for name in ["LayerNormForwardKernel", "LayerNormBackwardKernel", "LayerNormParametersKernel"] {
        if launches(name) != 1 {
            return Err(format!("not one block with a {name}: {blocks:?}").into());
        }
    }
    Ok(())
}
