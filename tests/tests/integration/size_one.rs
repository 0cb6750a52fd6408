//! Dimensions of size 1, whose stride means nothing, in Burn's fused kernels: images of one channel as convolutions leave
//! them, and tensors that programs permute.

use blackburn::train::precision::full_precision;
use blackburn_reference::{
    random::normal,
    storage::Storage::{self, F32},
    tolerance::compare,
};
use blackburn_tests::{
    on_burn_device, on_burn_device_with,
    tensors::{float, tensor, values},
};
use burn::{
    prelude::*,
    tensor::{activation, module::conv_transpose2d, ops::ConvTransposeOptions},
};
use libtest_mimic::{Failed, Trial};

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = format!("size_one::losses_of_one_channel_are_right_in_{storage:?}");
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_burn_device_with(storage, |device, client| {
                losses(device, storage, client.name() == "cuda")
            })
        }));
    }
    trials.push(Trial::ignorable_test("size_one::permuted_tensors_are_read_right", || {
        on_burn_device(|device| permuted(&device))
    }));
    trials
}

/// What stands between the convolution and the loss.
const ACTIVATIONS: [fn(Tensor<4>) -> Tensor<4>; 3] =
    [|y| y, activation::sigmoid::<4>, activation::relu::<4>];

/// The loss, and the gradients of the input, the weights and the bias.
type Found = [Vec<f64>; 4];

fn losses(device: &Device, storage: Storage, cuts_to_tf32: bool) -> Result<(), Failed> {
    let bound = match storage {
        // Two operands of a product are cut to TF32's ten bits, all downwards, and the loss squares what they make; the
        // gradients' products cut that error's result once more.
        F32 if cuts_to_tf32 => 6.0 / 1024.0,
        F32 => 1e-5,
        // Roundings also decide on which side of a ReLU's kink a number near zero is.
        _ => 0.05,
    };
    for (at, activation) in ACTIVATIONS.into_iter().enumerate() {
        let expected = loss(&Device::flex(), F32, storage, activation)?;
        let actual = loss(device, storage, storage, activation)?;
        let names = ["loss", "dx", "dw", "db"];
        for ((name, actual), expected) in names.iter().zip(&actual).zip(&expected) {
            let squares =
                |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>();
            let wrong = squares(&mut actual.iter().zip(expected).map(|(a, e)| a - e));
            let error = (wrong / squares(&mut expected.iter().copied())).sqrt();
            if error.is_nan() || error > bound {
                return Err(format!(
                    "activation {at}: {name} is off by {error:.1e} of itself, and may be by {bound}"
                )
                .into());
            }
        }
    }
    Ok(())
}

/// A mean squared error of images of one channel, which a transposed convolution makes, computed in `storage` of numbers
/// that are rounded to `given`.
fn loss(
    device: &Device,
    storage: Storage,
    given: Storage,
    activation: fn(Tensor<4>) -> Tensor<4>,
) -> Result<Found, Failed> {
    let device = device.clone().autodiff();
    let drawn = |seed, shape: [usize; 4]| {
        let numbers = normal(seed, shape.iter().product(), 1.0, given);
        tensor::<4>(&numbers, shape, storage, &device).detach()
    };
    let (x, w) = (drawn(1, [3, 8, 8, 8]).require_grad(), drawn(2, [8, 1, 4, 4]).require_grad());
    let bias = Tensor::<1>::zeros([1], &device).cast(float(storage)).detach().require_grad();
    let target = drawn(3, [3, 1, 16, 16]);
    let options = ConvTransposeOptions::new([2, 2], [1, 1], [0, 0], [1, 1], 1);
    let y = conv_transpose2d(x.clone(), w.clone(), Some(bias.clone()), options);
    let error = full_precision(activation(y)) - full_precision(target);
    // Large gradients, whatever 16 bits round.
    let loss = (error.clone() * error).mean() * 1024.0;
    let gradients = loss.backward();
    let missing = || Failed::from("a gradient is missing");
    Ok([
        values(loss.inner())?,
        values(x.grad(&gradients).ok_or_else(missing)?)?,
        values(w.grad(&gradients).ok_or_else(missing)?)?,
        values(bias.grad(&gradients).ok_or_else(missing)?)?,
    ])
}

/// Two operations, which Burn fuses, on a tensor that a program has permuted and on one that it has not.
fn permuted(device: &Device) -> Result<(), Failed> {
    let drawn = |seed, count: usize| normal(seed, count, 1.0, F32);
    for (shape, axes) in [
        ([3, 16, 16, 1], [0, 3, 1, 2]),
        ([2, 5, 8, 1], [0, 3, 1, 2]),
        ([1, 1, 24, 1], [0, 1, 3, 2]),
        ([4, 1, 12, 1], [3, 0, 1, 2]),
        // Channels behind each other, and lines of one pixel.
        ([2, 6, 1, 8], [0, 3, 1, 2]),
        ([2, 1, 6, 8], [0, 3, 2, 1]),
    ] {
        let count = shape.iter().product();
        let (x, y) = (drawn(1, count), drawn(2, count));
        let of_shape = |numbers: &[f64], shape| tensor::<4>(numbers, shape, F32, device);
        let to = axes.map(|axis| shape[axis]);
        let permuted = of_shape(&x, shape).permute(axes.map(|axis| axis as isize));
        let result = (permuted - of_shape(&y, to)) * 2.0;
        let expected = Tensor::<4>::from_data(
            TensorData::new(x.iter().map(|x| *x as f32).collect(), shape),
            &Device::flex(),
        )
        .permute(axes.map(|axis| axis as isize));
        let expected: Vec<f64> =
            values(expected)?.iter().zip(&y).map(|(x, y)| 2.0 * (x - y)).collect();
        let bounds: Vec<f64> = expected.iter().map(|result| result.abs() * 1e-6 + 1e-6).collect();
        compare(&values(result)?, &expected, &bounds)
            .map_err(|mismatch| format!("{shape:?} by {axes:?}: {mismatch}"))?;
    }
    Ok(())
}
