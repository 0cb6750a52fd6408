//! Pools and interpolation.

use crate::cases::{Cases, named};
use burn::tensor::{
    module::{
        adaptive_avg_pool1d, adaptive_avg_pool2d, avg_pool1d, avg_pool2d, interpolate, max_pool1d,
        max_pool2d,
    },
    ops::{AvgPoolOptions, InterpolateMode, InterpolateOptions, MaxPoolOptions},
};

/// Windows of three by three every other pixel, as in the stem of a residual network.
pub(crate) const KERNEL: usize = 3;
pub(crate) const STRIDE: usize = 2;
pub(crate) const PADDING: usize = 1;

pub(crate) const MODES: [(&str, InterpolateMode); 3] = [
    ("interpolate_nearest", InterpolateMode::Nearest),
    ("interpolate_bilinear", InterpolateMode::Bilinear),
    ("interpolate_bicubic", InterpolateMode::Bicubic),
];

/// A window's maximum.
pub(crate) fn max_options<const N: usize>() -> MaxPoolOptions<N> {
    MaxPoolOptions::new([KERNEL; N]).with_stride([STRIDE; N]).with_padding([PADDING; N])
}

/// A window's mean.
pub(crate) fn avg_options<const N: usize>() -> AvgPoolOptions<N> {
    AvgPoolOptions::new([KERNEL; N]).with_stride([STRIDE; N]).with_padding([PADDING; N])
}

/// To twice the height and width.
pub(crate) fn doubling(
    [_, _, height, width]: [usize; 4],
    mode: InterpolateMode,
) -> InterpolateOptions {
    InterpolateOptions::new(mode).with_output_size([2 * height, 2 * width])
}

pub(crate) fn add(cases: &mut Cases) {
    let e = cases.element;
    let images = cases.shapes.images;
    let signals @ [batch, channels, _] = cases.shapes.signals;
    let count = images.iter().product::<usize>();
    let windows = format!("kernel {KERNEL} stride {STRIDE} padding {PADDING}");

    let shape = format!("{} {windows}", named(&signals));
    let bytes = e * (count + count / STRIDE);
    cases.add("max_pool1d", shape.clone(), bytes, move |inputs| {
        let x = inputs.numbers(signals);
        move || max_pool1d(x.clone(), max_options())
    });
    cases.add("avg_pool1d", shape, bytes, move |inputs| {
        let x = inputs.numbers(signals);
        move || avg_pool1d(x.clone(), avg_options())
    });
    let shape = format!("{} to 1", named(&signals));
    cases.add("adaptive_avg_pool1d", shape, e * (count + batch * channels), move |inputs| {
        let x = inputs.numbers(signals);
        move || adaptive_avg_pool1d(x.clone(), 1)
    });

    let shape = format!("{} {windows}", named(&images));
    let bytes = e * (count + count / STRIDE.pow(2));
    cases.add("max_pool2d", shape.clone(), bytes, move |inputs| {
        let x = inputs.numbers(images);
        move || max_pool2d(x.clone(), max_options())
    });
    cases.add("avg_pool2d", shape, bytes, move |inputs| {
        let x = inputs.numbers(images);
        move || avg_pool2d(x.clone(), avg_options())
    });
    for side in [1, 7] {
        let shape = format!("{} to {side}", named(&images));
        let bytes = e * (count + images[0] * images[1] * side * side);
        cases.add("adaptive_avg_pool2d", shape, bytes, move |inputs| {
            let x = inputs.numbers(images);
            move || adaptive_avg_pool2d(x.clone(), [side, side])
        });
    }

    let halves = halves(images);
    for (op, mode) in MODES {
        let bytes = e * (count + count / 4);
        cases.add(op, format!("{} times 2", named(&halves)), bytes, move |inputs| {
            let x = inputs.numbers(halves);
            let options = doubling(halves, mode);
            move || interpolate(x.clone(), options.clone())
        });
    }
}

/// Images of half the height and width.
pub(crate) fn halves([batch, channels, height, width]: [usize; 4]) -> [usize; 4] {
    [batch, channels, height / 2, width / 2]
}
