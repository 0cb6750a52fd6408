//! `burn::nn::Dropout`, unmodified, where a kernel takes it along: behind softmax and GELU, in front of layer norm, and
//! in their gradients. Its mask is read off its results, and the rest is held against f64.

use crate::{
    layer_norm_provider::{module as layer_norm, with_kept_roundings},
    softmax::activation::{Case, gradient as softmax_gradient},
};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    dropout::{KeptElements, add_masked},
    gelu::{GeluCall, gelu_call_backward, gelu_call_backward_sum, gelu_call_forward},
    softmax::{SoftmaxOutputs, SoftmaxProblem, masked_softmax_rows},
};
use blackburn_reference::{
    gelu::{PORTABLE_ERF_ERROR, backward_bound, forward_bound, gelu, gelu_derivative},
    layer_norm::{Arithmetic, LayerNorm as Reference, Norm},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    buffers::{download, dtype, upload},
    on_burn_device, on_device_with,
    tensors::{tensor, values},
};
use burn::{
    nn::{Dropout, DropoutConfig},
    prelude::*,
    tensor::activation::{self, softmax},
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;
/// Of which the scale, 2, rounds nothing.
const RATE: f64 = 0.5;
const SCALE: f64 = 2.0;

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |name: &str, test: fn(&Device) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("dropout::provider::{name}"), move || {
            on_burn_device(|device| test(&device.clone().autodiff()))
        })
    };
    let mut trials = vec![
        trial("behind_softmax_it_is_one_launch_with_it", behind_softmax),
        trial("behind_gelu_it_is_one_launch_with_it", behind_gelu),
        trial("in_front_of_a_layer_norm_it_leaves_the_norm_whole", before_layer_norm),
        trial("products_in_other_places_are_computed_as_written", others),
    ];
    for storage in Storage::ALL {
        let name = format!("dropout::a_mask_in_memory_is_one_factor_more_in_{storage:?}");
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_device_with(dtype(storage), |client| masked_kernels(client, storage))
        }));
    }
    trials
}

fn dropout() -> Dropout {
    DropoutConfig::new(RATE).init()
}

/// Whether one block of at least that many operations launches the kernel.
fn expect(blocks: &[Block], least: usize, name: &str) -> Result<(), Failed> {
    let launches = |block: &Block| block.kernels.iter().any(|kernel| kernel.ends_with(name));
    match blocks.iter().any(|block| block.operations >= least && launches(block)) {
        true => Ok(()),
        false => Err(format!("no {name} stands for {least} operations: {blocks:#?}").into()),
    }
}

/// What elements were multiplied by, given what came of others than zeros. Both kinds have to be there.
fn factors(y: &[f64]) -> Result<Vec<f64>, Failed> {
    let factors: Vec<f64> = y.iter().map(|y| if *y == 0.0 { 0.0 } else { SCALE }).collect();
    let kept = factors.iter().filter(|factor| **factor != 0.0).count();
    // Eight standard deviations.
    let most = 4.0 * (y.len() as f64).sqrt();
    match (kept as f64 - 0.5 * y.len() as f64).abs() <= most {
        true => Ok(factors),
        false => Err(format!("{kept} of {} elements stay at a rate of {RATE}", y.len()).into()),
    }
}

fn times(values: &[f64], factors: &[f64]) -> Vec<f64> {
    values.iter().zip(factors).map(|(value, factor)| value * factor).collect()
}

fn behind_softmax(device: &Device) -> Result<(), Failed> {
    for shape in [[2, 3, 8, 33], [1, 2, 16, 256]] {
        // Products of f32 may be of operands with 11 bits.
        let mut case = Case::new(shape, F32);
        case.x.iter_mut().for_each(|x| *x = Storage::Bf16.round(*x));
        let dy = normal(3, case.x.len(), 1.0, Storage::Bf16);
        let identity = Tensor::<2>::eye(shape[3], device).unsqueeze::<4>();
        let (x, weights) = (case.tensor(device).require_grad(), tensor(&dy, shape, F32, device));
        let ((y, dx), blocks) = blocks_of(device, || {
            // Behind a product and in front of one, as in attention.
            let scores = x.clone().matmul(identity.clone());
            let y = dropout().forward(softmax(scores, 3));
            let gradients = (y.clone().matmul(identity) * weights).sum().backward();
            Ok((y, x.grad(&gradients).ok_or("x has no gradient")?))
        })?;
        let y = values(y.inner())?;
        let factors = factors(&y)?;
        expect(&blocks, 8, "SoftmaxRowsKernel")?;
        expect(&blocks, 12, "SoftmaxRowsBackwardKernel")?;
        let (exact, bounds): (Vec<f64>, Vec<f64>) = case.softmax().into_iter().unzip();
        compare(&y, &times(&exact, &factors), &times(&bounds, &[SCALE].repeat(y.len())))
            .map_err(|error| format!("{shape:?}: {error}"))?;
        // A product of f32, which may cut its operands to 11 bits, hands the gradient on.
        let (exact, bounds): (Vec<f64>, Vec<f64>) = softmax_gradient(&case, &times(&dy, &factors))
            .into_iter()
            .map(|(dx, bound)| (dx, bound + 2f64.powi(-10) * (dx.abs() + bound)))
            .unzip();
        compare(&values(dx)?, &exact, &bounds)
            .map_err(|error| format!("the gradient of {shape:?}: {error}"))?;
    }
    Ok(())
}

fn behind_gelu(device: &Device) -> Result<(), Failed> {
    let shape = [2, 12, 64];
    let elements = shape.iter().product();
    let x = normal(1, elements, 1.0, F32);
    let dy = normal(2, elements, 1.0, Storage::Bf16);
    // Behind a product the gradient is taken along with that; behind one of trained weights, whose gradient comes in
    // between, it is not.
    for is_trained in [false, true] {
        let identity = Tensor::<2>::eye(shape[2], device).unsqueeze::<3>();
        let identity = if is_trained { identity.require_grad() } else { identity };
        let (input, weights) =
            (tensor(&x, shape, F32, device).require_grad(), tensor(&dy, shape, F32, device));
        let ((y, dx), blocks) = blocks_of(device, || {
            let y = dropout().forward(activation::gelu(input.clone()));
            let gradients = (y.clone().matmul(identity) * weights).sum().backward();
            Ok((y, input.grad(&gradients).ok_or("x has no gradient")?))
        })?;
        let y = values(y.inner())?;
        let factors = factors(&y)?;
        expect(&blocks, 8, "GeluForwardKernel")?;
        expect(&blocks, 18, "GeluBackwardKernel")?;
        let exact: Vec<f64> = x.iter().zip(&factors).map(|(x, by)| gelu(*x) * by).collect();
        let bounds: Vec<f64> =
            x.iter().map(|x| SCALE * forward_bound(*x, F32, PORTABLE_ERF_ERROR)).collect();
        compare(&y, &exact, &bounds)?;
        let dy = times(&dy, &factors);
        let pairs = || x.iter().zip(&dy);
        let exact: Vec<f64> = pairs().map(|(x, dy)| dy * gelu_derivative(*x)).collect();
        let bounds: Vec<f64> =
            pairs().map(|(x, dy)| backward_bound(*x, *dy, F32, PORTABLE_ERF_ERROR)).collect();
        compare(&values(dx)?, &exact, &bounds)
            .map_err(|error| format!("the gradient, trained weights {is_trained}: {error}"))?;
    }
    Ok(())
}

fn before_layer_norm(device: &Device) -> Result<(), Failed> {
    const WIDTH: usize = 40;
    let shape = [3, 16, WIDTH];
    let elements = shape.iter().product();
    let (x, residual) = (normal(1, elements, 1.0, F32), normal(2, elements, 1.0, F32));
    let dy = normal(3, elements, 1.0, Storage::Bf16);
    let (gamma, beta) = (vec![1.0; WIDTH], vec![0.0; WIDTH]);
    let norm = layer_norm(&gamma, Some(&beta), F32, device);
    let identity = Tensor::<2>::eye(WIDTH, device).unsqueeze::<3>();
    let [of_x, of_residual] =
        [&x, &residual].map(|numbers| tensor(numbers, shape, F32, device).require_grad());
    let weights = tensor(&dy, shape, F32, device);
    let ((sum, y, dx, dresidual), blocks) = blocks_of(device, || {
        let sum = of_residual.clone() + dropout().forward(of_x.clone());
        let y = norm.forward(sum.clone());
        let gradients = (y.clone().matmul(identity) * weights).sum().backward();
        let missing = "a gradient is missing";
        let dx = of_x.grad(&gradients).ok_or(missing)?;
        Ok((sum, y, dx, of_residual.grad(&gradients).ok_or(missing)?))
    })?;
    let (sum, dx) = (values(sum.inner())?, values(dx)?);
    expect(&blocks, 14, "MaskedKernel")?;
    expect(&blocks, 14, "LayerNormForwardKernel")?;
    let left: Vec<f64> = sum.iter().zip(&residual).map(|(sum, other)| sum - other).collect();
    let factors = factors(&left)?;
    let u = F32.unit_roundoff();
    let exact: Vec<f64> =
        times(&x, &factors).iter().zip(&residual).map(|(x, other)| x + other).collect();
    let bounds: Vec<f64> = exact.iter().map(|sum| u * sum.abs()).collect();
    compare(&sum, &exact, &bounds)?;

    let reference =
        Reference { norm: Norm::Layer, gamma: &gamma, beta: Some(&beta), epsilon: 1e-5 };
    let how = Arithmetic { rows: F32, parameters: F32, additions: WIDTH };
    compare(&values(y.inner())?, &reference.forward(&sum), &reference.forward_bounds(&sum, how))?;
    let exact = reference.backward(&sum, &dy, None).dx;
    let bounds = with_kept_roundings(&reference, &sum, &dy, how).dx;
    compare(&values(dresidual)?, &exact, &bounds)?;
    let with_rounding: Vec<f64> =
        exact.iter().zip(&bounds).map(|(dx, bound)| SCALE * (bound + u * dx.abs())).collect();
    compare(&dx, &times(&exact, &factors), &with_rounding)?;
    Ok(())
}

/// A product with a tensor of another shape, and with one that lies otherwise.
fn others(device: &Device) -> Result<(), Failed> {
    let shape = [2, 3, 8, 16];
    let case = Case::new(shape, F32);
    let elements = case.x.len();
    let exact: Vec<f64> = case.softmax().into_iter().map(|(y, _)| y).collect();
    let bounds: Vec<f64> =
        case.softmax().into_iter().map(|(y, bound)| 4.0 * (bound + y * 1e-6)).collect();
    let row = normal(1, 16, 1.0, F32);
    let y = softmax(case.tensor(device), 3) * tensor(&row, [1, 1, 1, 16], F32, device) * 2.0;
    let expected: Vec<f64> = exact.iter().enumerate().map(|(i, y)| y * row[i % 16] * 2.0).collect();
    let wide: Vec<f64> =
        bounds.iter().zip(&expected).map(|(b, y)| b * 4.0 + y.abs() * 1e-6).collect();
    compare(&values(y.inner())?, &expected, &wide)?;

    let factor = normal(2, elements, 1.0, F32);
    let turned = tensor(&factor, [2, 3, 16, 8], F32, device).swap_dims(2, 3);
    let y = softmax(case.tensor(device), 3) * turned * 2.0;
    let at = |i: usize| {
        let (matrix, row, column) = (i / 128, i / 16 % 8, i % 16);
        factor[matrix * 128 + column * 8 + row]
    };
    let expected: Vec<f64> = exact.iter().enumerate().map(|(i, y)| y * at(i) * 2.0).collect();
    let wide: Vec<f64> =
        bounds.iter().zip(&expected).map(|(b, y)| b * 4.0 + y.abs() * 1e-6).collect();
    compare(&values(y.inner())?, &expected, &wide)?;
    Ok(())
}

/// By a scale of 2, which rounds nothing, each kernel makes what it makes without dropout, times the factor.
fn masked_kernels(client: &Client, storage: Storage) -> Result<(), Failed> {
    let same = |actual: Vec<f64>, expected: &[f64], what: &str| {
        // Twice a number that is too small for all of its bits has one more.
        let bounds = vec![2.0 * storage.underflow(); expected.len()];
        compare(&actual, expected, &bounds)
            .map(drop)
            .map_err(|error| Failed::from(format!("{what} in {storage:?}: {error}")))
    };
    // Rows in whole vectors, with gaps, of odd lengths, and longer than registers hold.
    for (rows, classes, row_stride) in
        [(8, 64, 64), (5, 196, 200), (7, 33, 33), (2, 40_001, 40_001)]
    {
        let elements = rows * classes;
        let mask: Vec<f64> = normal(1, elements, 1.0, storage)
            .into_iter()
            .map(|z| f64::from(u8::from(z > -1.0)))
            .collect();
        let factors: Vec<f64> = mask.iter().map(|kept| SCALE * kept).collect();
        let kept = KeptElements { mask: upload(client, &mask, storage), scale: SCALE as f32 };

        let float = dtype(storage);
        let problem = SoftmaxProblem { rows, classes, row_stride, dtype: float, out: float };
        let x = upload(client, &normal(2, rows * row_stride, 2.0, storage), storage);
        let outputs = SoftmaxOutputs { logarithms: false, shifted: true, exponentials: true };
        let run = |kept: Option<&KeptElements>| {
            let made = masked_softmax_rows(client, &problem, outputs, &x, None, kept)?;
            let within = |buffer: Buffer| -> Result<Vec<f64>, Failed> {
                let all = download(client, buffer, storage)?;
                let at = |i: usize| all[i / classes * row_stride + i % classes];
                Ok((0..elements).map(at).collect())
            };
            let buffers = [Some(made.y), made.shifted, made.exponentials];
            buffers.into_iter().flatten().map(within).collect::<Result<Vec<_>, Failed>>()
        };
        let (dropped, plain) = (run(Some(&kept))?, run(None)?);
        same(dropped[0].clone(), &times(&plain[0], &factors), "softmax")?;
        same(dropped[1].clone(), &plain[1], "what elements lack to the largest")?;
        same(dropped[2].clone(), &plain[2], "exponentials")?;

        let [x, dy] = [3, 4].map(|seed| normal(seed, elements, 1.0, storage));
        let of_x = GeluCall::alone(&upload(client, &x, storage));
        let call = GeluCall { kept: Some(kept.clone()), ..of_x.clone() };
        let y = |call| -> Result<Vec<f64>, Failed> {
            Ok(download(client, gelu_call_forward(client, call)?, storage)?)
        };
        same(y(&call)?, &times(&y(&of_x)?, &factors), "GELU")?;
        let gradient = |call, dy: &[f64]| -> Result<Vec<f64>, Failed> {
            let dy = upload(client, dy, storage);
            Ok(download(client, gelu_call_backward(client, call, &dy)?, storage)?)
        };
        let dropped = times(&dy, &factors);
        same(gradient(&call, &dy)?, &gradient(&of_x, &dropped)?, "the gradient of GELU")?;
        let sums = |call, dy: &[f64]| {
            let dy = upload(client, dy, storage);
            let gradients = gelu_call_backward_sum(client, classes, call, &dy)?;
            Ok::<_, Failed>([
                download(client, gradients.dx, storage)?,
                download(client, gradients.db, storage)?,
            ])
        };
        let ([dx, db], [of_dx, of_db]) = (sums(&call, &dy)?, sums(&of_x, &dropped)?);
        same(dx, &of_dx, "the gradient of GELU with sums")?;
        same(db, &of_db, "sums of the gradient of GELU")?;

        let [x, residual] = [&x, &dy].map(|numbers| upload(client, numbers, storage));
        let sum = download(client, add_masked(client, &x, &kept, &residual)?, storage)?;
        let x = download(client, x, storage)?;
        let exact: Vec<f64> =
            times(&x, &factors).iter().zip(&dy).map(|(kept, other)| kept + other).collect();
        let unit = storage.unit_roundoff() + F32.unit_roundoff();
        let bounds: Vec<f64> =
            exact.iter().map(|sum| unit * sum.abs() + storage.underflow()).collect();
        compare(&sum, &exact, &bounds)?;

        let short = KeptElements { mask: upload(client, &mask[1..], storage), scale: 2.0 };
        let refused = add_masked(client, &residual, &short, &residual);
        let Err(KernelError::InvalidProblem { argument: "mask", .. }) = refused else {
            return Err(format!("a mask that is too short: {refused:?}").into());
        };
    }
    Ok(())
}
