//! Casts of several tensors, one behind the other, as the gradients of a model have them at the end of a backward pass.

use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    blocks::blocks_of,
    tensors::{float, tensor, values},
    trials_in,
};
use burn::prelude::*;
use libtest_mimic::{Failed, Trial};

/// Of rows that CUDA's runtime pads and others, of one element, and of none.
const SHAPES: [[usize; 2]; 6] = [[3, 5], [1, 64], [17, 33], [1, 1], [128, 40], [0, 4]];
/// More than one launch takes.
const TENSORS: usize = 20;

const NARROW: [Storage; 2] = [Storage::F16, Storage::Bf16];

pub(crate) fn trials() -> Vec<Trial> {
    let exact = trials_in("casts::several_are_exact_in_few_launches", &NARROW, |device, from| {
        several(device, from, false)
    });
    let views =
        trials_in("casts::transposed_ones_are_exact_among_others", &NARROW, |device, from| {
            several(device, from, true)
        });
    exact.into_iter().chain(views).collect()
}

/// From 16 bits to f32; every third tensor as a transposed view where that is asked.
fn several(device: &Device, from: Storage, has_views: bool) -> Result<(), Failed> {
    let to = Storage::F32;
    let numbers = |place: usize| {
        let shape = SHAPES[place % SHAPES.len()];
        (shape, normal(place as u64, shape[0] * shape[1], 1.0, from))
    };
    let is_view = |place: usize| has_views && place % 3 == 2;
    let given: Vec<Tensor<2>> = (0..TENSORS)
        .map(|place| {
            let (shape, x) = numbers(place);
            tensor(&x, shape, from, device)
        })
        .collect();
    device.sync().map_err(|error| error.to_string())?;
    let cast = |(place, x): (usize, Tensor<2>)| match is_view(place) {
        true => x.transpose().cast(float(to)),
        false => x.cast(float(to)),
    };
    let (made, blocks) = blocks_of(device, || {
        let made: Vec<_> = given.into_iter().enumerate().map(cast).collect();
        device.sync().map_err(|error| error.to_string())?;
        Ok(made)
    })?;
    for (place, made) in made.into_iter().enumerate() {
        let ([rows, columns], x) = numbers(place);
        let x: Vec<f64> = x.into_iter().map(|x| to.round(x)).collect();
        let expected = match is_view(place) {
            true => (0..rows * columns).map(|i| x[i % rows * columns + i / rows]).collect(),
            false => x,
        };
        if values(made)? != expected {
            return Err(format!("tensor {place} of {rows} by {columns} has other numbers").into());
        }
    }
    let kernels: usize = blocks.iter().map(|block| block.kernels.len()).sum();
    if !has_views && kernels > TENSORS / 2 {
        return Err(format!("{kernels} kernels cast {TENSORS} tensors: {blocks:#?}").into());
    }
    Ok(())
}
