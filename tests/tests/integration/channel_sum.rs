//! Sums over all dimensions but one in the middle, as Burn's operations: on the kernels, and against f64.

use blackburn_reference::{random::normal, storage::Storage, tolerance::compare};
use blackburn_tests::{
    blocks::blocks_of,
    tensors::{tensor, values},
    trials_in,
};
use burn::prelude::*;
use libtest_mimic::{Failed, Trial};

/// Images, channels, pixels down and across: more channels than images, fewer, and odd numbers of all.
const SHAPES: [[usize; 4]; 3] = [[3, 7, 5, 9], [40, 2, 4, 4], [2, 96, 8, 16]];

pub(crate) fn trials() -> Vec<Trial> {
    let name = "channel_sum::both_orders_of_channels_run_on_the_kernels_and_are_within_bounds";
    trials_in(name, &Storage::ALL, |device, storage| {
        SHAPES.iter().try_for_each(|shape| {
            check(device, storage, *shape, |x| x)?;
            // Channels lie innermost in memory, as convolutions leave them.
            check(device, storage, *shape, |x| {
                x.permute([0, 2, 3, 1]).mul_scalar(1.0).permute([0, 3, 1, 2])
            })
        })
    })
}

fn check(
    device: &Device,
    storage: Storage,
    shape: [usize; 4],
    laid_out: impl Fn(Tensor<4>) -> Tensor<4>,
) -> Result<(), Failed> {
    let [images, channels, height, width] = shape;
    let pixels = height * width;
    let x = normal(7, images * channels * pixels, 1.0, storage);
    let input = laid_out(tensor(&x, shape, storage, device));
    device.sync().map_err(|error| error.to_string())?;
    let (sums, blocks) = blocks_of(device, || values(input.sum_dims_squeeze::<1, _>(&[0, 2, 3])))?;
    let reduces = |kernel: &&&str| kernel.contains("ReduceKernel");
    if blocks.iter().flat_map(|block| &block.kernels).any(|kernel| reduces(&kernel)) {
        return Err(format!("Burn's reduction ran: {blocks:#?}").into());
    }
    let (mut expected, mut sizes) = (vec![0.0; channels], vec![0.0; channels]);
    for (i, x) in x.iter().enumerate() {
        expected[i / pixels % channels] += x;
        sizes[i / pixels % channels] += x.abs();
    }
    // Each addition rounds in f32, and the sum once to storage.
    let additions = (images * pixels) as f64;
    let bounds: Vec<f64> = expected
        .iter()
        .zip(sizes)
        .map(|(sum, size)| {
            additions * Storage::F32.unit_roundoff() * size + storage.unit_roundoff() * sum.abs()
        })
        .collect();
    compare(&sums, &expected, &bounds).map_err(|error| format!("{shape:?}: {error}"))?;
    Ok(())
}
