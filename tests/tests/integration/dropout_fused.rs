//! Dropout as a part of other operations: behind GELU, and of a residual in front of a norm.

use super::{SEED, factors};
use blackburn_backend::{
    attention::Dropout,
    dropout::dropout,
    gelu_dropout::gelu_dropout,
    layer_norm::{add_dropout_layer_norm, add_layer_norm},
};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    dropout::DropoutMask,
    gelu::{
        GeluCall, GeluGradients, gelu_call_backward, gelu_call_backward_sum, gelu_call_forward,
    },
};
use blackburn_reference::{
    gelu::{backward_bound, forward_bound, gelu, gelu_derivative},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::{
    on_burn_device, on_device, on_device_with,
    tensors::{tensor, values},
};
use burn::{prelude::*, tensor::activation};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

use crate::gelu::erf_error;

const F32: Storage = Storage::F32;

type Test = fn(&Device) -> Result<(), Failed>;

pub(super) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = format!("dropout::behind_gelu_is_within_bounds_in_{storage:?}").to_lowercase();
        trials.push(Trial::ignorable_test(name, move || {
            on_device_with(dtype(storage), |client| behind_gelu(client, storage))
        }));
    }
    trials.extend([
        Trial::ignorable_test("dropout::a_mask_of_another_seed_behind_gelu_is_caught", || {
            on_device(another_seed)
        }),
        Trial::ignorable_test("dropout::bad_arguments_behind_gelu_are_named", || {
            on_device(bad_arguments)
        }),
    ]);
    let tests: [(&str, Test); 3] = [
        ("gelu_with_dropout_is_both_after_another", gelu_op),
        ("a_residual_with_dropout_is_both_after_another", residual_op),
        ("a_sum_alone_passes_on_what_dropout_leaves", sum_alone),
    ];
    trials.extend(tests.map(|(name, test)| {
        Trial::ignorable_test(format!("dropout::{name}"), move || {
            on_burn_device(|device| {
                test(&Device::flex())?;
                test(&device)
            })
        })
    }));
    trials
}

/// A call of GELU with its numbers, here.
struct Case {
    storage: Storage,
    columns: usize,
    x: Vec<f64>,
    bias: Option<Vec<f64>>,
    dy: Vec<f64>,
    rate: f64,
}

/// Exact results and what they may be off by.
type Bounded = (Vec<f64>, Vec<f64>);

impl Case {
    fn new([rows, columns]: [usize; 2], storage: Storage, biased: bool, rate: f64) -> Self {
        Self {
            storage,
            columns,
            x: normal(1, rows * columns, 1.5, storage),
            bias: biased.then(|| normal(2, columns, 0.5, storage)),
            dy: normal(3, rows * columns, 1.0, storage),
            rate,
        }
    }

    fn call(&self, client: &Client) -> GeluCall {
        GeluCall {
            x: upload(client, &self.x, self.storage),
            bias: self.bias.as_ref().map(|bias| upload(client, bias, self.storage)),
            dropout: Some(DropoutMask { rate: self.rate, seed: SEED, key: None }),
            kept: None,
        }
    }

    /// What GELU is made of, and what each of its results is multiplied by.
    fn terms(&self) -> impl Iterator<Item = (f64, f64)> {
        let bias = |i: usize| self.bias.as_ref().map_or(0.0, |bias| bias[i % self.columns]);
        let values: Vec<f64> = self.x.iter().enumerate().map(|(i, x)| x + bias(i)).collect();
        values.into_iter().zip(factors(self.x.len(), self.rate))
    }

    /// `exact`, computed in f32 to within `error` and rounded to storage.
    fn rounded(&self, exact: f64, error: f64) -> (f64, f64) {
        let rounding = self.storage.unit_roundoff() * (exact.abs() + error);
        (exact, error + rounding + self.storage.underflow())
    }

    fn forward(&self, client: &Client) -> Bounded {
        let u = F32.unit_roundoff();
        let element = |(value, factor): (f64, f64)| {
            let y = factor * gelu(value);
            // The sum with the bias, which GELU widens by 1.13 at most, the scale and the product with it.
            let of_gelu =
                forward_bound(value, F32, erf_error(client, self.storage)) + 1.13 * u * value.abs();
            self.rounded(y, factor * of_gelu * (1.0 + 3.0 * u) + 3.0 * u * y.abs())
        };
        self.terms().map(element).unzip()
    }

    /// In f32, before the gradient is rounded.
    fn wide_gradients(&self, client: &Client) -> Bounded {
        let u = F32.unit_roundoff();
        let element = |((value, factor), dy): ((f64, f64), &f64)| {
            let grad = factor * dy;
            let dx = grad * gelu_derivative(value);
            // The derivative's slope is 0.8 at most.
            let of_value = grad.abs() * 0.8 * u * value.abs();
            let error =
                backward_bound(value, grad, F32, erf_error(client, self.storage)) + of_value;
            (dx, error * (1.0 + 3.0 * u) + 3.0 * u * dx.abs())
        };
        self.terms().zip(&self.dy).map(element).unzip()
    }

    fn gradients(&self, client: &Client) -> Bounded {
        let (exact, errors) = self.wide_gradients(client);
        exact.into_iter().zip(errors).map(|(dx, error)| self.rounded(dx, error)).unzip()
    }

    /// Of the bias: by f32 values, or by those that were rounded to storage.
    fn sums(&self, client: &Client) -> Bounded {
        let u = F32.unit_roundoff();
        let (exact, errors) = self.gradients(client);
        let column = |column: usize| {
            let terms = || exact.iter().zip(&errors).skip(column).step_by(self.columns);
            let sum: f64 = terms().map(|(dx, _)| dx).sum();
            let error: f64 = terms().map(|(_, error)| error).sum();
            let magnitude: f64 = terms().map(|(dx, error)| dx.abs() + error).sum();
            self.rounded(sum, error + terms().count() as f64 * u * magnitude)
        };
        (0..self.columns).map(column).unzip()
    }
}

/// (rows, columns): columns that take narrow vectors, that leave lanes idle, and that fill them.
const SHAPES: [[usize; 2]; 5] = [[1, 1], [5, 7], [9, 66], [33, 128], [100, 1024]];

fn behind_gelu(client: &Client, storage: Storage) -> Result<(), Failed> {
    for shape in SHAPES {
        for (biased, rate) in [(false, 0.1), (true, 0.1), (true, 0.0), (true, 0.75)] {
            let case = Case::new(shape, storage, biased, rate);
            let (call, dy) = (case.call(client), upload(client, &case.dy, storage));
            let named =
                |what| move |error| format!("{what} of {shape:?}, {biased}, {rate}: {error}");
            let check = |what, actual: Buffer, (exact, bounds): Bounded| {
                compare(&download(client, actual, storage)?, &exact, &bounds)
                    .map(drop)
                    .map_err(|error| Failed::from(named(what)(error)))
            };
            check("y", gelu_call_forward(client, &call)?, case.forward(client))?;
            check("dx", gelu_call_backward(client, &call, &dy)?, case.gradients(client))?;
            // A single column has no kernel of its own for sums.
            if shape[1] > 1 {
                let GeluGradients { dx, db } =
                    gelu_call_backward_sum(client, shape[1], &call, &dy)?;
                check("dx with sums", dx, case.gradients(client))?;
                check("db", db, case.sums(client))?;
            }
        }
    }
    Ok(())
}

/// The negative control.
fn another_seed(client: &Client) -> Result<(), Failed> {
    let case = Case::new([33, 128], F32, true, 0.1);
    let call = case.call(client);
    let dropout = call.dropout.map(|mask| DropoutMask { seed: SEED + 1, ..mask });
    let y = download(client, gelu_call_forward(client, &GeluCall { dropout, ..call })?, F32)?;
    let (exact, bounds) = case.forward(client);
    match compare(&y, &exact, &bounds) {
        Err(_) => Ok(()),
        Ok(agreement) => Err(format!("another mask went unseen: {agreement:?}").into()),
    }
}

fn bad_arguments(client: &Client) -> Result<(), Failed> {
    let call = Case::new([4, 8], F32, true, 0.1).call(client);
    let of = |values: usize| Some(upload(client, &vec![1.0; values], F32));
    let mask = |rate| Some(DropoutMask { rate, seed: SEED, key: None });
    let forward = |call: GeluCall| gelu_call_forward(client, &call).map(drop);
    let sum = |call: GeluCall| gelu_call_backward_sum(client, 8, &call, &call.x).map(drop);
    let refused = [
        ("bias", forward(GeluCall { bias: of(5), ..call.clone() })),
        ("bias", forward(GeluCall { bias: of(0), ..call.clone() })),
        ("bias", sum(GeluCall { bias: of(4), ..call.clone() })),
        ("rate", forward(GeluCall { dropout: mask(1.0), ..call.clone() })),
        ("key", {
            let key = of(3);
            forward(GeluCall { dropout: mask(0.1).map(|mask| DropoutMask { key, ..mask }), ..call })
        }),
    ];
    for (name, result) in refused {
        match result {
            Err(KernelError::InvalidProblem { argument, .. }) if argument == name => {}
            other => return Err(format!("a bad {name} gave {other:?}").into()),
        }
    }
    Ok(())
}

fn leaf<const D: usize>(seed: u64, shape: [usize; D], device: &Device) -> Tensor<D> {
    let numbers = normal(seed, shape.iter().product(), 1.0, F32);
    tensor(&numbers, shape, F32, &device.clone().autodiff()).require_grad()
}

/// Two ways to compute results and gradients agree to within what f32 loses in either.
fn agree(what: &str, fused: &[Vec<f64>], apart: &[Vec<f64>]) -> Result<(), Failed> {
    for (index, (fused, apart)) in fused.iter().zip(apart).enumerate() {
        let largest = apart.iter().fold(0f64, |most, number| most.max(number.abs()));
        let bounds = vec![1e-5 * largest.max(1.0); apart.len()];
        compare(fused, apart, &bounds).map_err(|error| format!("{what}, {index}: {error}"))?;
    }
    Ok(())
}

/// Burn's own gradient of GELU is right on its CPU backend alone.
fn gelu_op(device: &Device) -> Result<(), Failed> {
    for shape in [[2, 3, 40], [1, 2, 9000]] {
        let run = |fused: bool, device: &Device| {
            let (x, bias) = (leaf(1, shape, device), leaf(2, [shape[2]], device));
            let drawn = Dropout::new(0.2, SEED);
            let y = if fused {
                gelu_dropout(x.clone(), bias.clone(), drawn)
            } else {
                dropout(activation::gelu(x.clone() + bias.clone().unsqueeze()), drawn)
            };
            let gradients = (y.clone() * leaf(3, shape, device)).sum().backward();
            let dx = x.grad(&gradients).ok_or("x has no gradient")?;
            let dbias = bias.grad(&gradients).ok_or("the bias has no gradient")?;
            Ok::<_, Failed>([values(y)?, values(dx)?, values(dbias)?])
        };
        agree("gelu", &run(true, device)?, &run(false, &Device::flex())?)?;
    }
    Ok(())
}

/// Narrow rows, and rows that no kernel holds.
fn residual_op(device: &Device) -> Result<(), Failed> {
    for shape in [[6, 40], [2, 30_000]] {
        let run = |fused: bool| {
            let [x, residual] = [1, 2].map(|seed| leaf(seed, shape, device));
            let [gamma, beta] = [3, 4].map(|seed| leaf(seed, [shape[1]], device));
            let drawn = Dropout::new(0.2, SEED);
            let (r, g, b) = (residual.clone(), gamma.clone(), Some(beta.clone()));
            let (sum, y) = if fused {
                add_dropout_layer_norm(x.clone(), r, drawn, g, b, 1e-5)
            } else {
                add_layer_norm(x.clone(), dropout(r, drawn), g, b, 1e-5)
            };
            let weighted =
                y.clone() * leaf(5, shape, device) + sum.clone() * leaf(6, shape, device);
            let gradients = weighted.sum().backward();
            let of = |leaf: Option<Tensor<2>>| values(leaf.ok_or("a tensor has no gradient")?);
            let of_parameter =
                |leaf: &Tensor<1>| values(leaf.grad(&gradients).ok_or("none for a parameter")?);
            Ok::<_, Failed>([
                values(sum)?,
                values(y)?,
                of(x.grad(&gradients))?,
                of(residual.grad(&gradients))?,
                of_parameter(&gamma)?,
                of_parameter(&beta)?,
            ])
        };
        agree("residual", &run(true)?, &run(false)?)?;
    }
    Ok(())
}

/// Nobody reads the norm.
fn sum_alone(device: &Device) -> Result<(), Failed> {
    let shape = [6, 40];
    let [x, residual] = [1, 2].map(|seed| leaf(seed, shape, device));
    let gamma = leaf(3, [shape[1]], device);
    let drawn = Dropout::new(0.2, SEED);
    let (sum, _) = add_dropout_layer_norm(x.clone(), residual.clone(), drawn, gamma, None, 1e-5);
    let gradients = sum.sum().backward();
    let of = |leaf: &Tensor<2>| values(leaf.grad(&gradients).ok_or("no gradient")?);
    let ones = vec![1.0; shape[0] * shape[1]];
    agree("the sum", &[of(&x)?, of(&residual)?], &[ones.clone(), factors(ones.len(), 0.2)])
}
