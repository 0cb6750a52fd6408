//! The largest elements along a dimension, as Burn's unmodified operations, against sorted rows.

use crate::reduce_cases::numbers;
use blackburn_kernels::{
    KernelError,
    top_k::{TopKProblem, top_k},
};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::{
    buffers::{download, download_integers, dtype, upload},
    on_burn_device, on_device,
    tensors::{tensor, values},
    trials_in,
};
use burn::prelude::*;
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;

pub(crate) fn trials() -> Vec<Trial> {
    let name = "top_k::largest_elements_and_their_places_are_exact";
    let mut trials = trials_in(name, &Storage::ALL, exact);
    trials.push(Trial::ignorable_test("top_k::gradients_go_to_the_places", || {
        on_burn_device(|device| gradients(&device))
    }));
    type Test = fn(&Client) -> Result<(), Failed>;
    let tests: [(&str, Test); 3] = [
        ("rows_of_every_length_are_sorted", lengths),
        ("nan_is_the_largest_and_zeros_have_signs", special),
        ("bad_arguments_are_named", refusals),
    ];
    let trial = |(name, test): (&str, Test)| {
        Trial::ignorable_test(format!("top_k::{name}"), move || on_device(test))
    };
    trials.extend(tests.map(trial));
    trials
}

/// The places of the largest elements of a row; of equal ones the first comes first.
fn places(row: &[f64], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
    order.truncate(k);
    order
}

fn served() -> u64 {
    blackburn_backend::profile::served().get("BlackburnTopK").copied().unwrap_or(0)
}

/// Along the last dimension, another one, and of a transposed tensor; numbers repeat.
fn exact(device: &Device, storage: Storage) -> Result<(), Failed> {
    for (shape, dim, k) in
        [([5, 200], 1, 16), ([3, 1023], 1, 7), ([300, 6], 0, 5), ([2, 2048], 1, 2048)]
    {
        let drawn = normal(3, shape[0] * shape[1], 1.0, storage);
        let all: Vec<f64> = drawn.iter().map(|x| storage.round((x * 20.0).round())).collect();
        let x = tensor(&all, shape, storage, device);
        let transposed = if dim == 1 { x.clone() } else { x.clone().transpose() };
        device.sync().map_err(|error| error.to_string())?;
        let before = served();
        let (largest, at) = x.clone().topk_with_indices(k, dim);
        let only = x.topk(k, dim);
        let as_rows = |tensor: Tensor<2>| if dim == 1 { tensor } else { tensor.transpose() };
        let at = if dim == 1 { at } else { at.transpose() };
        let made = [
            values(as_rows(largest))?,
            values(as_rows(only))?,
            values(transposed.clone().topk(k, 1))?,
        ];
        let at = numbers(at.try_into_data())?;
        let rows = values(transposed)?;
        let columns = shape[dim];
        let of_rows = rows.chunks(columns).map(|row| (row, places(row, k)));
        let (mut expected, mut expected_at) = (Vec::new(), Vec::new());
        for (row, places) in of_rows {
            expected.extend(places.iter().map(|place| row[*place]));
            expected_at.extend(places.iter().map(|place| *place as f64));
        }
        if made.iter().any(|made| *made != expected) || at != expected_at {
            return Err(format!("the largest {k} of {shape:?} along {dim} differ").into());
        }
        if served() - before < 3 {
            return Err(format!("{} of 3 were served", served() - before).into());
        }
    }
    Ok(())
}

fn gradients(device: &Device) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let (rows, columns, k) = (4, 300, 9);
    let all = normal(3, rows * columns, 1.0, F32);
    let x: Tensor<2> = tensor(&all, [rows, columns], F32, &device).require_grad();
    let gradients = x.clone().topk(k, 1).mul_scalar(3.0).sum().backward();
    let made = values(x.grad(&gradients).ok_or("no gradient")?)?;
    let mut expected = vec![0.0; all.len()];
    for (row, numbers) in all.chunks(columns).enumerate() {
        for place in places(numbers, k) {
            expected[row * columns + place] = 3.0;
        }
    }
    if made == expected { Ok(()) } else { Err("the gradient went to other places".into()) }
}

/// Compares the kernel with sorted rows, places included.
fn check(client: &Client, columns: usize, k: usize, x: &[f64]) -> Result<(), Failed> {
    let rows = x.len() / columns;
    let problem = TopKProblem { rows, columns, k, dtype: dtype(F32) };
    let made = top_k(client, &problem, &upload(client, x, F32))?;
    let at = download_integers(client, made.indices)?;
    let largest = download(client, made.values, F32)?;
    for (row, numbers) in x.chunks(columns).enumerate() {
        for (rank, place) in places(numbers, k).into_iter().enumerate() {
            let (value, index) = (largest[row * k + rank], at[row * k + rank]);
            let is_same = value.to_bits() == numbers[place].to_bits()
                || (value.is_nan() && numbers[place].is_nan());
            if index != place as i32 || !is_same {
                let expected = numbers[place];
                return Err(format!(
                    "rank {rank} of row {row} of {columns} is {value} at {index}, and not \
                     {expected} at {place}"
                )
                .into());
            }
        }
    }
    Ok(())
}

fn lengths(client: &Client) -> Result<(), Failed> {
    for columns in [1, 2, 3, 31, 64, 65, 1000, 4096] {
        let all: Vec<f64> =
            normal(5, 3 * columns, 1.0, F32).iter().map(|x| (x * 8.0).round()).collect();
        for k in [1, columns.div_ceil(2), columns] {
            check(client, columns, k, &all)?;
        }
    }
    Ok(())
}

fn special(client: &Client) -> Result<(), Failed> {
    let mut all = normal(5, 70, 1.0, F32);
    all[3] = f64::NAN;
    all[9] = f64::INFINITY;
    all[20] = f64::NEG_INFINITY;
    all[50] = f64::NAN;
    check(client, 70, 70, &all)?;
    check(client, 4, 4, &[-0.0, 0.0, -0.0, 0.0])?;
    check(client, 3, 2, &[f64::NEG_INFINITY; 3])
}

fn refusals(client: &Client) -> Result<(), Failed> {
    let of = |columns, k| TopKProblem { rows: 2, columns, k, dtype: dtype(F32) };
    let run =
        |problem, elements| top_k(client, &problem, &upload(client, &vec![1.0; elements], F32));
    let [more, other] = [run(of(4, 5), 8), run(of(4, 2), 7)];
    let [none, long] = [run(of(4, 0), 8), run(of(1 << 20, 2), 1 << 21)];
    let are_named = matches!(more, Err(KernelError::InvalidProblem { argument: "k", .. }))
        && matches!(other, Err(KernelError::InvalidProblem { argument: "x", .. }));
    let are_left =
        [none, long].iter().all(|made| matches!(made, Err(KernelError::Unsupported { .. })));
    if are_named && are_left { Ok(()) } else { Err(format!("{more:?}, {other:?}").into()) }
}
