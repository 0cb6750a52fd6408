//! Sketches of tensors on the device.

use blackburn_backend::sketch::Sketch;
use blackburn_kernels::{
    KernelError,
    buffer::{Buffer, Rows},
    sketch::{PLACES, sketch},
};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    buffers::{download, dtype, upload},
    on_burn_device, on_device, on_device_with,
    tensors::{tensor, values},
};
use burn::prelude::*;
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

/// Elements that have places of their own, with room to spare, and twice as many as there are places.
const LENGTHS: [usize; 5] = [1, 255, 4100, 70_001, 2 * PLACES + 77];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        trials.push(Trial::ignorable_test(
            format!("sketch::squares_are_those_of_the_elements_in_{storage:?}").to_lowercase(),
            move || on_device_with(dtype(storage), |client| squares(client, storage)),
        ));
    }
    let on_client = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("sketch::{name}"), move || on_device(test))
    };
    trials.extend([
        on_client("memory_and_holders_change_nothing", layouts),
        on_client("signs_keep_sums_from_adding_up", signs),
        on_client("bad_arguments_are_named", refusals),
        Trial::ignorable_test("sketch::tensors_are_told_apart", || on_burn_device(tensors)),
    ]);
    trials
}

fn zeros(client: &Client) -> Buffer {
    upload(client, &vec![0.0; PLACES], Storage::F32)
}

fn sum_of_squares(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum()
}

fn differences(one: &[f64], other: &[f64]) -> Vec<f64> {
    one.iter().zip(other).map(|(one, other)| one - other).collect()
}

/// Of tensors, and of others that are apart from them by little.
fn squares(client: &Client, storage: Storage) -> Result<(), Failed> {
    for length in LENGTHS {
        let one = normal(1, length, 1.0, storage);
        let apart = normal(2, length, 0.05, storage);
        let other: Vec<f64> =
            one.iter().zip(&apart).map(|(x, apart)| storage.round(x + apart)).collect();
        let sums = |values: &[f64]| -> Result<Vec<f64>, Failed> {
            // In two parts, so that the second begins where the first ends.
            let (head, tail) = values.split_at(length / 3);
            let first =
                sketch(client, zeros(client), &Rows::one(upload(client, head, storage)), 0)?;
            let tail = Rows::one(upload(client, tail, storage));
            Ok(download(client, sketch(client, first, &tail, head.len())?, Storage::F32)?)
        };
        let (of_one, of_other) = (sums(&one)?, sums(&other)?);
        let pairs = [
            (of_one.clone(), one.clone()),
            (differences(&of_one, &of_other), differences(&one, &other)),
        ];
        for (sketched, exact) in pairs {
            let (found, expected) = (sum_of_squares(&sketched), sum_of_squares(&exact));
            // Elements with places of their own are there to the bit. Else six standard deviations.
            let bound = match length <= PLACES {
                true => 1e-12,
                false => 6.0 * (2.0 / PLACES as f64).sqrt(),
            };
            if (found - expected).abs() > bound * expected {
                return Err(format!("{length} elements: {found} instead of {expected}").into());
            }
        }
    }
    for bad in [f64::NAN, f64::INFINITY] {
        let mut x = normal(1, 1000, 1.0, storage);
        x[777] = bad;
        let x = Rows::one(upload(client, &x, storage));
        let sums = download(client, sketch(client, zeros(client), &x, 5)?, Storage::F32)?;
        if sums.iter().filter(|sum| !sum.is_finite()).count() != 1 || sums[5 + 777].is_finite() {
            return Err(format!("{bad} is not where it was").into());
        }
    }
    Ok(())
}

/// The same numbers by rows, and added to sums that somebody else holds.
fn layouts(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    for (rows, columns, pitch) in [(13, 21, 21), (13, 21, 32), (700, 500, 512)] {
        let values = normal(3, rows * columns, 1.0, storage);
        let first = PLACES - 100;
        let plain = Rows::one(upload(client, &values, storage));
        let expected = download(client, sketch(client, zeros(client), &plain, first)?, storage)?;
        let mut all = vec![f64::NAN; rows * pitch];
        for (row, values) in values.chunks(columns).enumerate() {
            all[row * pitch..][..columns].copy_from_slice(values);
        }
        let x = Rows { buffer: upload(client, &all, storage), rows, columns, pitch };
        let before = zeros(client);
        let held = before.clone();
        let found = download(client, sketch(client, before, &x, first)?, storage)?;
        if found != expected {
            return Err(format!("{rows} rows of {columns} at {pitch} have another sketch").into());
        }
        if download(client, held, storage)?.iter().any(|sum| *sum != 0.0) {
            return Err("sums that somebody held were written to".into());
        }
    }
    Ok(())
}

/// Of equal numbers at one place, of one tensor or of several, half are taken away: their squares would come to as many
/// times more else.
fn signs(client: &Client) -> Result<(), Failed> {
    const TIMES: usize = 16;
    for tensors in [1, TIMES] {
        let length = TIMES * PLACES / tensors;
        let x = Rows::one(upload(client, &vec![1.0; length], Storage::F32));
        let sums = (0..tensors)
            .try_fold(zeros(client), |sums, tensor| sketch(client, sums, &x, tensor * length))?;
        let squares = sum_of_squares(&download(client, sums, Storage::F32)?);
        let found = squares / (TIMES * PLACES) as f64;
        // The squares of sums of 16 signs have a deviation of 1.37 times their mean.
        let bound = 6.0 * 1.37 / (PLACES as f64).sqrt();
        if (found - 1.0).abs() > bound {
            return Err(format!("{tensors} tensors: {found} times the squares").into());
        }
    }
    Ok(())
}

fn refusals(client: &Client) -> Result<(), Failed> {
    let few = upload(client, &[1.0, 2.0], Storage::F32);
    let argument = |result: Result<Buffer, KernelError>| match result {
        Err(KernelError::InvalidProblem { argument, .. }) => Ok(argument),
        other => Err(Failed::from(format!("{other:?}"))),
    };
    let one = Rows::one(few.clone());
    assert_eq!(argument(sketch(client, few, &one, 0))?, "sums");
    let too_long = Rows { rows: 2, ..one.clone() };
    let overlapping = Rows { rows: 2, columns: 2, pitch: 0, ..one.clone() };
    for bad in [too_long, overlapping] {
        assert_eq!(argument(sketch(client, zeros(client), &bad, 0))?, "x");
    }
    let empty = Rows::one(Buffer::empty(client, 0, dtype(Storage::F32)));
    let sums = download(client, sketch(client, zeros(client), &empty, 3)?, Storage::F32)?;
    assert!(sums.iter().all(|sum| *sum == 0.0), "an empty tensor adds nothing");
    Ok(())
}

/// In another order, with zeros in place of one, and strided.
fn tensors(device: Device) -> Result<(), Failed> {
    let storage = Storage::F32;
    let drawn = [1, 2].map(|seed| normal(seed, 35, 1.0, storage));
    let [a, b]: [Tensor<2>; 2] = drawn.each_ref().map(|x| tensor(x, [5, 7], storage, &device));
    let of = |all: [&Tensor<2>; 2]| {
        all.into_iter().fold(Sketch::new(&device), |sketch, x| sketch.with(x.clone()))
    };
    let squares = |one: &Sketch, other: &Sketch| -> Result<[f64; 3], Failed> {
        let all = values(Tensor::cat(one.squares(other).to_vec(), 0))?;
        Ok(all.try_into().map_err(|all| format!("three sums, not {all:?}"))?)
    };
    let [of_a, of_b] = drawn.each_ref().map(|x| sum_of_squares(x));
    let apart = 2.0 * sum_of_squares(&differences(&drawn[0], &drawn[1]));
    let both = of([&a, &b]);
    let transposed = a.clone().transpose().mul_scalar(1.0).transpose();
    let without_b = Sketch::new(&device).with(a.clone()).with_zeros(35);
    let only_b = Sketch::new(&device).with_zeros(35).with(b.clone());
    for (name, other, expected) in [
        ("the same", &of([&a, &b]), [of_a + of_b, of_a + of_b, 0.0]),
        ("strided", &of([&transposed, &b]), [of_a + of_b, of_a + of_b, 0.0]),
        ("swapped", &of([&b, &a]), [of_a + of_b, of_a + of_b, apart]),
        ("without the second", &without_b, [of_a + of_b, of_a, of_b]),
        ("without the first", &only_b, [of_a + of_b, of_b, of_a]),
    ] {
        let found = squares(&both, other)?;
        let is_close = found.iter().zip(expected).all(|(found, expected)| {
            // Rounded squares and their sum.
            (found - expected).abs() <= 100.0 * storage.unit_roundoff() * expected
        });
        if !is_close {
            return Err(format!("{name}: {found:?} instead of {expected:?}").into());
        }
    }
    Ok(())
}
