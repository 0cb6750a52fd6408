//! Dropout of elements with a residual, and its gradient, against f64 with the generator's words.

#[path = "dropout_fused.rs"]
mod fused;
#[path = "dropout_provider.rs"]
mod provider;

use blackburn::nn::{
    dropout::add_dropout,
    transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
};
use blackburn_backend::{attention::Dropout, dropout as op};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    dropout::{DropoutProblem, dropout},
};
use blackburn_reference::{
    attention::dropout::Dropout as Reference, random::normal, storage::Storage, tolerance::compare,
};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::{
    on_burn_device, on_device, on_device_with,
    tensors::{tensor, values},
};
use burn::{nn::DropoutConfig, prelude::*};
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
};
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;
pub(crate) const SEED: u64 = 0x1234_5678_9abc_def0;
/// What the device combines a seed with.
const KEY: u64 = 0xfedc_ba98_0246_8ace;

type Test = fn(&Device) -> Result<(), Failed>;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = format!("dropout::both_forms_are_within_bounds_in_{storage:?}").to_lowercase();
        trials.push(Trial::ignorable_test(name, move || {
            on_device_with(dtype(storage), |client| each_length(client, storage))
        }));
    }
    trials.extend([
        Trial::ignorable_test("dropout::a_planted_fault_is_caught", || on_device(planted_fault)),
        Trial::ignorable_test("dropout::bad_arguments_are_named", || on_device(arguments)),
    ]);
    let tests: [(&str, Test); 3] = [
        ("what_is_left_out_has_no_gradient_and_the_rest_its_scale", gradients),
        ("the_module_draws_in_training_alone", module),
        ("a_transformer_leaves_out_in_training_alone", transformer),
    ];
    trials.extend(tests.map(|(name, test)| {
        Trial::ignorable_test(format!("dropout::{name}"), move || {
            on_burn_device(|device| {
                test(&Device::flex())?;
                test(&device)
            })
        })
    }));
    trials.extend(fused::trials());
    trials.extend(provider::trials());
    trials
}

/// What each element is multiplied by, with [`SEED`].
pub(crate) fn factors(elements: usize, rate: f64) -> Vec<f64> {
    let reference = Reference { rate, seed: SEED };
    let key = [SEED as u32, (SEED >> 32) as u32];
    let factor = |i: usize| if reference.keeps_element(i, key) { reference.rescale() } else { 0.0 };
    (0..elements).map(factor).collect()
}

/// A result with what it may be off: the rounded scale, the product and the sum, and storage.
fn expected(
    x: &[f64],
    residual: Option<&[f64]>,
    rate: f64,
    storage: Storage,
) -> (Vec<f64>, Vec<f64>) {
    let u = F32.unit_roundoff();
    let element = |(i, (x, factor)): (usize, (&f64, f64))| {
        let kept = x * factor;
        let y = kept + residual.map_or(0.0, |residual| residual[i]);
        let error = 2.0 * u * kept.abs() + u * (y.abs() + 2.0 * u * kept.abs());
        let rounding = storage.unit_roundoff() * (y.abs() + error) + storage.underflow();
        (y, error + rounding)
    };
    x.iter().zip(factors(x.len(), rate)).enumerate().map(element).unzip()
}

fn problem(elements: usize, rate: f64, storage: Storage) -> DropoutProblem {
    DropoutProblem { elements, dtype: dtype(storage), rate, seed: SEED }
}

/// Around vectors, calls of the generator and cubes. With a key, the seed is what makes [`SEED`] of it.
fn each_length(client: &Client, storage: Storage) -> Result<(), Failed> {
    let words: Vec<u8> = KEY.to_le_bytes().to_vec();
    let dtype = ElemType::UInt(UIntKind::U32);
    let key = Buffer { handle: client.create_from_slice(&words), elements: 2, dtype };
    for elements in [0, 1, 2, 3, 7, 8, 9, 1023, 1024, 1028, 70_001] {
        for rate in [0.0, 0.1, 0.5, 0.999] {
            let (x, residual) =
                (normal(1, elements, 1.0, storage), normal(2, elements, 1.0, storage));
            let buffers = [&x, &residual].map(|values| upload(client, values, storage));
            for adds in [false, true] {
                let added = adds.then_some(&buffers[1]);
                let y =
                    dropout(client, &problem(elements, rate, storage), &buffers[0], added, None)?;
                let keyed = DropoutProblem { seed: SEED ^ KEY, ..problem(elements, rate, storage) };
                let with_key = dropout(client, &keyed, &buffers[0], added, Some(&key))?;
                let (exact, bounds) = expected(&x, adds.then_some(&residual[..]), rate, storage);
                for (y, by) in [(y, "a seed"), (with_key, "a seed and a key")] {
                    compare(&download(client, y, storage)?, &exact, &bounds).map_err(|error| {
                        format!("{elements} elements, {rate}, {adds}, by {by}: {error}")
                    })?;
                }
            }
        }
    }
    Ok(())
}

/// The negative control: an element that should have been left out, and another seed.
fn planted_fault(client: &Client) -> Result<(), Failed> {
    let x = normal(3, 1000, 1.0, F32);
    let (exact, bounds) = expected(&x, None, 0.1, F32);
    let buffer = upload(client, &x, F32);
    let mut y =
        download(client, dropout(client, &problem(1000, 0.1, F32), &buffer, None, None)?, F32)?;
    let left_out = exact.iter().position(|y| *y == 0.0).ok_or("nothing is left out")?;
    y[left_out] = x[left_out] / 0.9;
    let other = DropoutProblem { seed: SEED + 1, ..problem(1000, 0.1, F32) };
    let other = download(client, dropout(client, &other, &buffer, None, None)?, F32)?;
    match (compare(&y, &exact, &bounds), compare(&other, &exact, &bounds)) {
        (Err(_), Err(_)) => Ok(()),
        _ => Err("an element that is there, or another seed, went unseen".into()),
    }
}

fn arguments(client: &Client) -> Result<(), Failed> {
    let x = upload(client, &[1.0; 8], F32);
    let short = upload(client, &[1.0; 7], F32);
    let refused = [
        ("rate", dropout(client, &problem(8, 1.0, F32), &x, None, None)),
        ("x", dropout(client, &problem(9, 0.5, F32), &x, None, None)),
        ("residual", dropout(client, &problem(8, 0.5, F32), &x, Some(&short), None)),
    ];
    for (expected, result) in refused {
        match result {
            Err(KernelError::InvalidProblem { argument, .. }) if argument == expected => {}
            other => return Err(format!("a wrong {expected} gave {other:?}").into()),
        }
    }
    Ok(())
}

/// Of the operation, on any device: the host's words are the device's.
fn gradients(device: &Device) -> Result<(), Failed> {
    const RATE: f64 = 0.25;
    let device = &device.clone().autodiff();
    let (x, residual, dy) =
        (normal(4, 3 * 37, 1.0, F32), normal(5, 3 * 37, 1.0, F32), normal(6, 3 * 37, 1.0, F32));
    let leaf = |values: &[f64]| tensor::<2>(values, [3, 37], F32, device).require_grad();
    let (x_leaf, residual_leaf) = (leaf(&x), leaf(&residual));
    let drawn = Dropout::new(RATE, SEED);
    let y = op::add_dropout(residual_leaf.clone(), x_leaf.clone(), drawn);
    let gradients = (y.clone() * tensor(&dy, [3, 37], F32, device)).sum().backward();
    let (exact, bounds) = expected(&x, Some(&residual), RATE, F32);
    compare(&values(y.inner())?, &exact, &bounds).map_err(|error| format!("y: {error}"))?;
    let of = |leaf: Tensor<2>| values(leaf.grad(&gradients).ok_or("no gradient")?);
    let (exact, bounds) = expected(&dy, None, RATE, F32);
    compare(&of(x_leaf)?, &exact, &bounds).map_err(|error| format!("dx: {error}"))?;
    compare(&of(residual_leaf)?, &dy, &vec![0.0; dy.len()])
        .map_err(|error| format!("dresidual: {error}"))?;
    Ok(())
}

fn module(device: &Device) -> Result<(), Failed> {
    let module = DropoutConfig::new(0.5).init();
    let run = |device: &Device| {
        let x = Tensor::<2>::ones([8, 64], device);
        values(add_dropout(&module, x.clone(), x))
    };
    let training = &device.clone().autodiff();
    let (first, second) = (run(training)?, run(training)?);
    if first == second {
        return Err("two calls leave out the same".into());
    }
    if first.iter().any(|y| *y != 1.0 && *y != 3.0) {
        return Err("an element is neither left out nor doubled".into());
    }
    if run(device)?.iter().any(|y| *y != 2.0) {
        return Err("something was left out without a backward pass".into());
    }
    Ok(())
}

/// Its dropout is in training alone, and reaches every gradient.
fn transformer(device: &Device) -> Result<(), Failed> {
    let x = normal(8, 2 * 5 * 16, 1.0, F32);
    let config = TransformerEncoderConfig::new(16, 32, 2, 2).with_dropout(0.2);
    for norm_first in [false, true] {
        let config = config.clone().with_norm_first(norm_first);
        let run = |device: &Device, encoder: &TransformerEncoder| {
            let x: Tensor<3> = tensor(&x, [2, 5, 16], F32, device);
            encoder.forward(TransformerEncoderInput::new(x))
        };
        let training = &device.clone().autodiff();
        let encoder = config.init(training);
        let (first, second) = (run(training, &encoder), run(training, &encoder));
        if values(first.clone())? == values(second)? {
            return Err("two steps leave out the same".into());
        }
        let gradients = first.powi_scalar(2).sum().backward();
        let weight = &encoder.layers[0].pwff.linear_inner.weight;
        let gradient = values(weight.val().grad(&gradients).ok_or("a weight has no gradient")?)?;
        if gradient.iter().any(|dw| !dw.is_finite()) || gradient.iter().all(|dw| *dw == 0.0) {
            return Err("a weight's gradient is nothing or no number".into());
        }
        let still = config.init(device);
        if values(run(device, &still))? != values(run(device, &still))? {
            return Err("something was left out without a backward pass".into());
        }
    }
    Ok(())
}
