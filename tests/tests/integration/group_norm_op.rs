//! The operation and its gradient, and `blackburn::nn`'s modules, beside Burn's on the CPU.

use blackburn::nn;
use blackburn_backend::group_norm::{GroupNormCall, group_norm};
use blackburn_reference::{random::normal, storage::Storage, tolerance::compare};
use blackburn_tests::{
    on_burn_device_with,
    tensors::{tensor, values},
};
use burn::{module::Param, nn as burns, prelude::*};
use libtest_mimic::{Failed, Trial};
use std::panic::{AssertUnwindSafe, catch_unwind};

const F32: Storage = Storage::F32;

pub(crate) fn trials() -> Vec<Trial> {
    let on_both = |name: String, test: fn(&Device, Storage) -> Result<(), Failed>, storage| {
        let on_cpu = format!("{name}_on_the_cpu");
        [
            Trial::ignorable_test(name, move || {
                on_burn_device_with(storage, |device, _| test(device, storage))
            }),
            Trial::test(on_cpu, move || test(&Device::flex(), storage)),
        ]
    };
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = format!("group_norm::op::it_is_burns_in_{storage:?}").to_lowercase();
        trials.extend(on_both(name, of_burn, storage));
    }
    let name = "group_norm::op::images_of_other_orders_are_normalized_in_place";
    trials.extend(on_both(name.into(), orders, F32));
    trials.extend(on_both("group_norm::op::bad_arguments_are_named".into(), refusals, F32));
    trials
}

/// What comes of a norm for one loss: the result, and the gradients of x, gamma and beta.
type Found = [Vec<f64>; 4];

fn found<const D: usize>(
    x: Tensor<D>,
    parameters: [Tensor<1>; 2],
    weight: Tensor<D>,
    run: impl Fn(Tensor<D>, [Tensor<1>; 2]) -> Tensor<D>,
) -> Result<Found, Failed> {
    let x = Tensor::from_inner(x).require_grad();
    let parameters = parameters.map(|parameter| Tensor::from_inner(parameter).require_grad());
    let y = run(x.clone(), parameters.clone());
    let gradients = (y.clone() * Tensor::from_inner(weight)).sum().backward();
    let of = |parameter: &Tensor<1>| {
        values(parameter.grad(&gradients).ok_or("parameters have gradients")?)
    };
    let [gamma, beta] = &parameters;
    Ok([values(y)?, values(x.grad(&gradients).ok_or("x has a gradient")?)?, of(gamma)?, of(beta)?])
}

/// Burn's module runs in f32 on the CPU, on the same numbers.
fn compared<const D: usize>(
    device: &Device,
    storage: Storage,
    shape: [usize; D],
    groups: usize,
    turn: impl Fn(Tensor<D>) -> Tensor<D>,
) -> Result<(), Failed> {
    let (elements, channels) = (shape.iter().product(), shape[1]);
    let draw = |seed, count| normal(seed, count, 1.0, storage);
    let [x, dy] = [1, 2].map(|seed| draw(seed, elements));
    let both = [3, 4].map(|seed| draw(seed, channels));
    let on = |values: &[f64], storage, device: &Device| tensor(values, shape, storage, device);
    let parameters = |storage, device: &Device| {
        both.clone().map(|parameter| tensor::<1>(&parameter, [channels], storage, device))
    };
    let cpu = Device::flex();
    let burns = |x, [gamma, beta]: [Tensor<1>; 2]| {
        let plain = burns::GroupNormConfig::new(groups, channels).init(&cpu.clone().autodiff());
        let [gamma, beta] = [gamma, beta].map(|tensor| Some(Param::from_tensor(tensor)));
        burns::GroupNorm { gamma, beta, ..plain }.forward(x)
    };
    let (x_here, dy_here) = (on(&x, F32, &cpu), on(&dy, F32, &cpu));
    let expected = found(x_here, parameters(F32, &cpu), dy_here, burns)?;
    // Parameters in f32 go with images of every type, too.
    for of_parameters in [storage, F32] {
        let actual = found(
            turn(on(&x, storage, device)),
            parameters(of_parameters, device),
            on(&dy, storage, device),
            |x, affine| {
                group_norm(GroupNormCall { x, affine: Some(affine), groups, epsilon: 1e-5 })
            },
        )?;
        // Sums of gradients have the sizes of their terms.
        let u = 3.0 * storage.unit_roundoff() + 2e-5;
        let rows = (x.len() / channels) as f64;
        for (what, (actual, expected)) in
            ["y", "dx", "dgamma", "dbeta"].into_iter().zip(actual.iter().zip(&expected))
        {
            let size = if what.len() > 2 { rows.sqrt() * 3.0 } else { 3.0 };
            let near: Vec<f64> = expected.iter().map(|value| u * (size + value.abs())).collect();
            compare(actual, expected, &near).map_err(|error| format!("{what}: {error}"))?;
        }
    }
    Ok(())
}

fn of_burn(device: &Device, storage: Storage) -> Result<(), Failed> {
    compared(device, storage, [2, 6, 5, 7], 3, |x| x)?;
    compared(device, storage, [3, 8, 33], 8, |x| x)?;
    compared(device, storage, [2, 6, 2, 3, 5], 1, |x| x)?;
    compared(device, storage, [5, 12], 4, |x| x)
}

/// Channels innermost, and dimensions of pixels in each other's place, which are copied.
fn orders(device: &Device, storage: Storage) -> Result<(), Failed> {
    let lies_as = |x: Tensor<4>, order: [isize; 4], back: [isize; 4]| {
        let permuted = x.permute(order);
        // A sum makes a tensor that lies as it is read.
        (permuted + 0.0).permute(back)
    };
    compared(device, storage, [2, 6, 5, 7], 3, |x| lies_as(x, [0, 2, 3, 1], [0, 3, 1, 2]))?;
    compared(device, storage, [2, 6, 5, 7], 2, |x| lies_as(x, [0, 1, 3, 2], [0, 1, 3, 2]))
}

fn refusals(device: &Device, _: Storage) -> Result<(), Failed> {
    let x = Tensor::<3>::ones([2, 6, 4], device);
    let affine = |channels| Some([(); 2].map(|()| Tensor::<1>::ones([channels], device)));
    let call = |affine, groups, epsilon| GroupNormCall { x: x.clone(), affine, groups, epsilon };
    let empty = GroupNormCall { x: Tensor::<3>::ones([0, 6, 4], device), ..call(None, 2, 1e-5) };
    for (argument, call) in [
        ("groups", call(None, 4, 1e-5)),
        ("groups", call(None, 0, 1e-5)),
        ("gamma", call(affine(5), 2, 1e-5)),
        ("epsilon", call(affine(6), 2, -1.0)),
        ("x", empty),
    ] {
        let refused = catch_unwind(AssertUnwindSafe(|| group_norm(call)));
        let message = refused.err().and_then(|panic| panic.downcast::<String>().ok());
        if !message.is_some_and(|message| message.contains(&format!("`{argument}`"))) {
            return Err(format!("a wrong {argument} was not named").into());
        }
    }
    let norm = nn::GroupNormConfig::new(2, 4).init(device);
    match catch_unwind(AssertUnwindSafe(|| norm.forward(x.clone()))) {
        Err(_) => Ok(()),
        Ok(_) => Err("six channels passed for four".into()),
    }
}
