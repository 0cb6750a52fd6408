//! Reductions with arithmetic around them, unmodified: apart where Burn's fused kernel would leave the device idle, and
//! against f64.

use crate::reduce_cases::groups;
use blackburn_reference::{random::normal, storage::Storage, tolerance::compare};
use blackburn_tests::{
    blocks::blocks_of,
    on_burn_device,
    tensors::{tensor, values},
};
use burn::prelude::*;
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;
/// How Burn's kernels of fused reductions are named.
const FUSED: [&str; 2] = ["ReduceKernelFused", "ReduceKernelBroadcasted"];

/// Sizes, the dimension, and whether the reduction runs apart.
const SHAPES: [([usize; 3], usize, bool); 8] = [
    ([3, 5, 7], 2, false),
    ([300, 8, 100], 2, false),
    ([6, 4, 100], 1, false),
    // Few rows, few columns, and both in between.
    ([2, 3, 5000], 2, true),
    ([5000, 2, 3], 0, true),
    ([4, 900, 33], 1, true),
    ([40, 7, 999], 2, true),
    ([1, 20_000, 1], 1, true),
];

/// A program of one reduction or two, and what the textbook makes of each group of elements that it reduces.
struct Program {
    name: &'static str,
    run: fn(Tensor<3>, usize) -> Tensor<3>,
    expected: fn(&[f64]) -> Vec<f64>,
    /// What a result errs by at most, for one roundoff.
    bound: fn(&[f64]) -> f64,
    /// Whether Burn runs small ones as one kernel.
    is_fused: bool,
    /// Whether those of rows run apart whatever their sizes.
    has_rows_apart: bool,
    /// How many kernels of fused arithmetic there are apart at most.
    most_elementwise: usize,
    /// What the numbers are on average.
    center: f64,
}

fn mean(group: &[f64]) -> f64 {
    group.iter().sum::<f64>() / group.len() as f64
}

fn magnitude(group: &[f64]) -> f64 {
    group.iter().map(|x| x.abs()).sum()
}

fn variance(group: &[f64]) -> f64 {
    let mean = mean(group);
    group.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (group.len() - 1) as f64
}

/// Additions of as many terms in any order, and some operations around them.
fn operations(group: &[f64]) -> f64 {
    group.len() as f64 + 8.0
}

const PROGRAMS: [Program; 5] = [
    Program {
        name: "a sum of squares",
        run: |x, dim| (x.clone() * x).sum_dim(dim),
        expected: |group| vec![group.iter().map(|x| x * x).sum()],
        bound: |group| operations(group) * group.iter().map(|x| x * x).sum::<f64>(),
        is_fused: false,
        has_rows_apart: false,
        most_elementwise: 3,
        center: 0.0,
    },
    Program {
        name: "a maximum between arithmetic",
        run: |x, dim| (x * 2.0 + 1.0).max_dim(dim) * 3.0,
        expected: |group| {
            vec![group.iter().map(|x| x * 2.0 + 1.0).fold(f64::NEG_INFINITY, f64::max) * 3.0]
        },
        bound: |group| 32.0 * (1.0 + group.iter().map(|x| x.abs()).fold(0.0, f64::max)),
        is_fused: true,
        has_rows_apart: false,
        most_elementwise: 3,
        center: 0.0,
    },
    Program {
        name: "what is left of a mean",
        run: |x, dim| x.clone() - x.mean_dim(dim),
        expected: |group| group.iter().map(|x| x - mean(group)).collect(),
        bound: |group| {
            operations(group) * magnitude(group) / group.len() as f64
                + 4.0 * group.iter().map(|x| x.abs()).fold(0.0, f64::max)
        },
        is_fused: false,
        has_rows_apart: false,
        most_elementwise: 3,
        center: 0.0,
    },
    Program {
        name: "a variance",
        run: |x, dim| x.var(dim),
        expected: |group| vec![variance(group)],
        bound: |group| {
            // The mean's error goes into each square, whose deviations have both signs.
            let of_mean = operations(group) * magnitude(group) / group.len() as f64;
            let spread = variance(group);
            operations(group) * spread + 4.0 * of_mean * spread.sqrt()
        },
        is_fused: true,
        has_rows_apart: true,
        most_elementwise: 0,
        // Rows that are not there would show.
        center: 4.0,
    },
    Program {
        name: "the logarithm of a sum of exponentials",
        run: |x, dim| {
            let most = x.clone().max_dim(dim);
            (x - most.clone()).exp().sum_dim(dim).log() + most
        },
        expected: |group| vec![group.iter().map(|x| x.exp()).sum::<f64>().ln()],
        // Exponentials of up to ten in f32 err by some roundoffs each.
        bound: |group| operations(group) + 40.0,
        is_fused: true,
        has_rows_apart: false,
        most_elementwise: 3,
        center: 0.0,
    },
];

pub(crate) fn trials() -> Vec<Trial> {
    PROGRAMS
        .iter()
        .map(|program| {
            let name = format!("reduce::fused_{}", program.name.replace(' ', "_"));
            Trial::ignorable_test(name, move || on_burn_device(|device| check(program, &device)))
        })
        .collect()
}

/// In order, and for one shape as it lies after two dimensions have changed places.
fn check(program: &Program, device: &Device) -> Result<(), Failed> {
    let permuted = ([5000, 2, 3], 0, false);
    for (case, (shape, dim, is_apart)) in SHAPES.into_iter().chain([permuted]).enumerate() {
        let drawn = normal(7, shape.iter().product(), 1.0, F32);
        let numbers: Vec<f64> = drawn.iter().map(|x| F32.round(x + program.center)).collect();
        let x = tensor(&numbers, shape, F32, device);
        let x = match case == SHAPES.len() {
            true => {
                Tensor::from_data(x.clone().swap_dims(0, 2).into_data(), device).swap_dims(0, 2)
            }
            false => x,
        };
        let (found, blocks) = blocks_of(device, || {
            let made = (program.run)(x, dim);
            let dims = made.dims();
            Ok(groups(&dims, Some(dim), &values(made)?))
        })?;
        let named = format!("{} of {shape:?} along {dim}, case {case}", program.name);
        for (found, group) in found.iter().zip(groups(&shape, Some(dim), &numbers)) {
            let expected = (program.expected)(&group);
            let bound = (program.bound)(&group) * F32.unit_roundoff();
            compare(found, &expected, &vec![bound; expected.len()])
                .map_err(|error| format!("{named}: {error}"))?;
        }
        let kernels: Vec<_> = blocks.iter().flat_map(|block| &block.kernels).collect();
        let is_fused = kernels.iter().any(|kernel| FUSED.iter().any(|it| kernel.contains(it)));
        let is_apart = is_apart || program.has_rows_apart && dim == 2;
        let elementwise = kernels.iter().filter(|kernel| kernel.contains("ElemwiseFuse")).count();
        if is_apart && case != SHAPES.len() && elementwise > program.most_elementwise {
            return Err(format!("{named} ran on {kernels:#?}").into());
        }
        if is_fused != (program.is_fused && !is_apart) {
            return Err(format!("{named} ran on {kernels:#?}").into());
        }
    }
    Ok(())
}
