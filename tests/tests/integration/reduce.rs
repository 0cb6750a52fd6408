//! Burn's reductions of floating-point numbers, unmodified: on the routine that suits their sizes, and against f64.

use crate::reduce_cases::{Along, Whole, along, groups, numbers, of_all, served};
use blackburn_reference::{random::normal, storage::Storage, tolerance::compare};
use blackburn_tests::{
    blocks::blocks_of,
    on_burn_device,
    tensors::{tensor, values},
    trials_in,
};
use burn::prelude::*;
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;

/// Sizes, and the dimensions along which the provider takes them, by the plan on a software device.
const SHAPES: [([usize; 3], &[usize]); 11] = [
    // Planes, along each dimension and with vectors of two.
    ([40, 33, 130], &[0, 1, 2]),
    ([300, 8, 200], &[2]),
    // Cubes: few rows, and few columns in whole vectors; columns that are no vectors take planes.
    ([20, 1, 2000], &[2]),
    ([200, 1, 100], &[0]),
    ([200, 1, 99], &[0]),
    // Cubes that share a row or a column, of lengths with divisors and without.
    ([2, 1, 40_000], &[2]),
    ([1, 20_011, 1], &[1]),
    ([20_000, 2, 2], &[0]),
    // Units that share a column of a large tensor, in one batch and in several.
    ([32_768, 1, 64], &[0]),
    ([2, 8200, 130], &[1]),
    // One output of each dimension.
    ([1, 1, 5000], &[2]),
];

pub(crate) fn trials() -> Vec<Trial> {
    type Test = fn(&Device) -> Result<(), Failed>;
    let trial = |name: &str, test: Test| {
        Trial::ignorable_test(format!("reduce::{name}"), move || {
            on_burn_device(|device| test(&device))
        })
    };
    let tests: [(&str, Test); 6] = [
        ("every_order_of_memory_is_right", orders),
        ("nan_wins_and_the_first_place_of_several_counts", special),
        ("what_burn_does_as_fast_is_left_to_it", left),
        ("tensors_without_elements_are_burns", empty),
        ("arithmetic_in_front_is_no_hindrance", behind_arithmetic),
        ("a_missing_element_is_caught", missing),
    ];
    let mut trials: Vec<Trial> = tests.map(|(name, test)| trial(name, test)).into();
    let name = "reduce::dimensions_of_every_size_are_within_bounds";
    trials.extend(trials_in(name, &Storage::ALL, dimensions));
    let name = "reduce::whole_tensors_of_every_size_are_within_bounds";
    trials.extend(trials_in(name, &Storage::ALL, whole));
    trials
}

/// Compares what `case` makes of `x` along `dim` with the textbook.
fn check_along(case: &Along, x: &Tensor<3>, dim: usize, storage: Storage) -> Result<(), Failed> {
    let (dims, logical) = (x.dims(), values(x.clone())?);
    let made = (case.run)(x.clone(), dim)?;
    let of_groups = groups(&dims, Some(dim), &logical);
    let expected = (case.expected)(&of_groups);
    let bounds: Vec<f64> = match case.bound {
        Some(bound) => of_groups.iter().map(|group| bound(group, storage)).collect(),
        None => vec![0.0; expected.len()],
    };
    compare(&made, &expected, &bounds)
        .map_err(|error| format!("{} of {dims:?} along {dim}: {error}", case.name))?;
    Ok(())
}

fn check_whole(case: &Whole, x: &Tensor<3>, storage: Storage) -> Result<(), Failed> {
    let (dims, logical) = (x.dims(), values(x.clone())?);
    let made = (case.run)(x.clone())?;
    let expected = (case.expected)(&logical);
    let bound = case.bound.map_or(0.0, |bound| bound(&logical, storage));
    compare(&made, &[expected], &[bound])
        .map_err(|error| format!("{} of {dims:?}: {error}", case.name))?;
    Ok(())
}

/// Numbers near one, whose products stay in range.
fn drawn(count: usize, storage: Storage) -> Vec<f64> {
    normal(7, count, 1.0, storage).iter().map(|x| storage.round(1.0 + 0.002 * x)).collect()
}

/// Runs `work`, in which the provider has to run at least `times`.
fn serving(times: u64, work: impl FnOnce() -> Result<(), Failed>) -> Result<(), Failed> {
    let before = served();
    work()?;
    match served() - before {
        count if count >= times => Ok(()),
        count => Err(format!("the provider ran {count} times, and not {times}").into()),
    }
}

fn dimensions(device: &Device, storage: Storage) -> Result<(), Failed> {
    for (shape, dims) in SHAPES {
        let count = shape.iter().product();
        for case in along() {
            let numbers =
                if case.is_product { drawn(count, storage) } else { signed(count, storage) };
            let x = tensor(&numbers, shape, storage, device);
            for dim in dims.iter().copied().filter(|dim| case.takes(*dim, 3)) {
                serving(1, || check_along(&case, &x, dim, storage))?;
            }
        }
    }
    Ok(())
}

fn signed(count: usize, storage: Storage) -> Vec<f64> {
    normal(3, count, 1.0, storage)
}

fn whole(device: &Device, storage: Storage) -> Result<(), Failed> {
    for shape in [[3, 5, 7], [64, 100, 33], [1, 1, 40_009], [16, 256, 256], [1, 1, 1]] {
        let count = shape.iter().product();
        for case in of_all() {
            let numbers =
                if case.is_product { drawn(count, storage) } else { signed(count, storage) };
            let x = tensor(&numbers, shape, storage, device);
            serving(1, || check_whole(&case, &x, storage))?;
        }
    }
    Ok(())
}

/// Permuted tensors, parts of larger ones, one row for all, and windows, with gaps between them and on each other.
fn orders(device: &Device) -> Result<(), Failed> {
    let shape = [20, 70, 90];
    let numbers = drawn(shape.iter().product(), F32);
    let x = tensor(&numbers, shape, F32, device);
    let row = tensor(&numbers[..90], [1, 1, 90], F32, device);
    let windows = tensor(&numbers[..20 * 70], [20, 70], F32, device);
    let laid_out = [
        x.clone().permute([2, 0, 1]),
        x.clone().permute([0, 2, 1]),
        x.clone().slice([2..19, 3..70, 5..86]),
        x.slice([2..19, 3..70, 5..86]).swap_dims(0, 2),
        row.expand([20, 70, 90]),
        windows.clone().unfold(1, 30, 35),
        windows.unfold(1, 50, 5),
    ];
    for x in laid_out {
        // Views run by themselves, so that the reduction heads a block of its own.
        device.sync().map_err(|error| error.to_string())?;
        for case in along() {
            (0..3).try_for_each(|dim| check_along(&case, &x, dim, F32))?;
        }
        for case in of_all() {
            serving(1, || check_whole(&case, &x, F32))?;
        }
    }
    Ok(())
}

/// NaN, infinities and ties: at the ends, where parts meet, and in rows that Burn reduces by itself.
fn special(device: &Device) -> Result<(), Failed> {
    for length in [12, 300, 5000, 40_000] {
        let mut numbers: Vec<f64> = signed(6 * length, F32).iter().map(|x| x.round()).collect();
        let [_, one_nan, two_nan, low, high, infinite]: [usize; 6] =
            std::array::from_fn(|row| row * length);
        numbers[one_nan + length - 1] = f64::NAN;
        for at in [length / 2 - 1, length / 2, length - 2] {
            numbers[two_nan + at] = f64::NAN;
        }
        numbers[low..low + length].fill(f64::NEG_INFINITY);
        numbers[high..high + length].fill(f64::INFINITY);
        numbers[infinite + length / 3] = f64::INFINITY;
        numbers[infinite + length / 3 + 1] = f64::NEG_INFINITY;
        let rows = tensor(&numbers, [1, 6, length], F32, device);
        // The same numbers as columns of whole vectors: the first four and two of them again.
        let columns = rows.clone().swap_dims(1, 2);
        let columns: Tensor<3> =
            Tensor::cat(vec![columns.clone(), columns.slice([0..1, 0..length, 0..2])], 2);
        device.sync().map_err(|error| error.to_string())?;
        for case in along().iter().filter(|case| case.is_exact()) {
            check_along(case, &rows, 2, F32)?;
            check_along(case, &columns, 1, F32)?;
        }
        for row in 0..6 {
            let x = rows.clone().slice([0..1, row..row + 1, 0..length]).mul_scalar(1.0);
            device.sync().map_err(|error| error.to_string())?;
            for case in of_all().iter().filter(|case| case.is_exact()) {
                check_whole(case, &x, F32)?;
            }
            let sums: [f64; 2] = [values(x.clone().sum())?[0], values(x.clone().prod())?[0]];
            let are_nan = sums.map(f64::is_nan);
            let is_expected = match row {
                1 | 2 => are_nan == [true, true],
                5 => are_nan[0],
                _ => !are_nan[0],
            };
            if !is_expected {
                return Err(format!("sum and product of row {row} of {length}: {sums:?}").into());
            }
        }
    }
    Ok(())
}

/// Dimensions of few elements, and columns that fill the device.
fn left(device: &Device) -> Result<(), Failed> {
    for (shape, dim) in [([3, 5, 7], 2), ([3, 5, 7], 0), ([2, 40, 70_000], 1), ([5000, 2, 30], 2)] {
        let x = tensor(&signed(shape.iter().product(), F32), shape, F32, device);
        let max = || values(x.clone().max_dim(dim));
        let (made, blocks) = blocks_of(device, max)?;
        let expected: Vec<f64> = groups(&shape, Some(dim), &values(x.clone())?)
            .iter()
            .map(|group| group.iter().copied().fold(f64::NEG_INFINITY, f64::max))
            .collect();
        compare(&made, &expected, &vec![0.0; expected.len()])?;
        let kernels: Vec<_> = blocks.iter().flat_map(|block| &block.kernels).collect();
        if !matches!(kernels[..], [kernel] if kernel.contains("ReduceKernel")) {
            return Err(format!("{shape:?} along {dim} ran in {blocks:#?}").into());
        }
    }
    Ok(())
}

fn empty(device: &Device) -> Result<(), Failed> {
    let none = || Tensor::<2>::zeros([0, 3], device);
    let made = [
        values(none().sum())?,
        values(none().prod_dim(0))?,
        numbers(none().any().try_into_data())?,
        numbers(none().all_dim(0).try_into_data())?,
        values(none().max_dim(1))?,
    ];
    let expected: [&[f64]; 5] = [&[0.0], &[1.0; 3], &[0.0], &[1.0; 3], &[]];
    match made.iter().zip(expected).all(|(made, expected)| made == expected) {
        true => Ok(()),
        false => Err(format!("of nothing: {made:?}").into()),
    }
}

/// An operation that makes the input, and keeps it for others too, so that Burn does not fuse it.
fn behind_arithmetic(device: &Device) -> Result<(), Failed> {
    let x = tensor(&signed(20 * 2000, F32), [20, 2000], F32, device);
    device.sync().map_err(|error| error.to_string())?;
    serving(1, || {
        let doubled = x.clone().mul_scalar(2.0);
        let (max, all) = (doubled.clone().max(), values(x.clone().max())?[0]);
        compare(&values(max)?, &[2.0 * all], &[0.0])?;
        compare(&values(doubled)?[..1], &[2.0 * values(x.clone())?[0]], &[0.0])?;
        Ok(())
    })
}

/// What a routine would make that stops an element early. A mean of as many hardly tells.
fn missing(device: &Device) -> Result<(), Failed> {
    let numbers = drawn(2000, F32);
    let x = tensor(&numbers[..1999], [1, 1, 1999], F32, device);
    for case in of_all() {
        let Some(bound) = case.bound.filter(|_| case.name != "mean") else { continue };
        let (made, expected) = ((case.run)(x.clone())?, (case.expected)(&numbers));
        let bound = bound(&numbers, F32);
        if compare(&made, &[expected], &[bound]).is_ok() {
            return Err(format!("{} without its last element is within bounds", case.name).into());
        }
    }
    Ok(())
}
