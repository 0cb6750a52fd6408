//! Gradients of embeddings on the device, against f64.

use crate::gelu::{download, dtype, upload};
use blackburn_backend::embedding::embedding;
use blackburn_kernels::{KernelError, buffer::Buffer, embedding::embedding_backward};
use blackburn_reference::{random::normal, storage::Storage, tolerance::compare};
use blackburn_tests::{
    on_burn_device, on_device, on_device_with,
    tensors::{tensor, values},
};
use burn::prelude::*;
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind},
};
use libtest_mimic::{Failed, Trial};

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        trials.push(Trial::ignorable_test(
            format!("embedding::gradients_are_within_bounds_in_{storage:?}").to_lowercase(),
            move || on_device_with(dtype(storage), |client| gradients(client, storage)),
        ));
    }
    trials
        .push(Trial::ignorable_test("embedding::bad_arguments_are_named", || on_device(refusals)));
    trials.push(Trial::ignorable_test("embedding::training_is_that_of_burns_own", || {
        on_burn_device(as_burns)
    }));
    trials
}

/// How indices lie: every one its own, few, all the same, and some that name no row.
fn indices(kind: usize, n: usize, rows: usize) -> Vec<i32> {
    let index = |i: usize| match kind {
        0 => (i * 7919 + 3) % rows,
        1 => (i * 31) % rows.min(3),
        _ => rows / 2,
    };
    let mut all: Vec<i32> = (0..n).map(|i| index(i) as i32).collect();
    if kind == 3 && n > 2 {
        all[0] = -1;
        all[n - 1] = rows as i32;
    }
    all
}

fn integers(client: &Client, values: &[i32]) -> Buffer {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    Buffer {
        handle: client.create_from_slice(&bytes),
        elements: values.len(),
        dtype: ElemType::Int(IntKind::I32),
    }
}

fn gradients(client: &Client, storage: Storage) -> Result<(), Failed> {
    // Places, rows and columns around cubes (128 places; 32 vectors), odd ones too.
    let sizes =
        [(1, 1, 1), (3, 2, 7), (127, 50, 8), (128, 3, 260), (129, 1000, 33), (700, 40, 768)];
    for (n, rows, columns) in sizes {
        for kind in 0..4 {
            let index = indices(kind, n, rows);
            let dy = normal(kind as u64, n * columns, 1.0, storage);
            let dw = upload(client, &vec![0.25; rows * columns], storage);
            let address = dw.clone();
            let (of_index, of_dy) = (integers(client, &index), upload(client, &dy, storage));
            embedding_backward(client, &of_index, &of_dy, &dw, columns)?;

            let mut sums = vec![(0.0, 0.0, 0usize); rows * columns];
            for (i, row) in index.iter().enumerate() {
                let Some(row) = usize::try_from(*row).ok().filter(|row| *row < rows) else {
                    continue;
                };
                for c in 0..columns {
                    let value = dy[i * columns + c];
                    let (sum, magnitude, terms) = sums[row * columns + c];
                    sums[row * columns + c] = (sum + value, magnitude + value.abs(), terms + 1);
                }
            }
            // Rows that no index names stay. Each addition in f32 errs by half an epsilon of what was
            // added up until then, at most of all magnitudes; then one rounding to storage.
            let expected: Vec<f64> =
                sums.iter().map(|(sum, _, terms)| if *terms == 0 { 0.25 } else { *sum }).collect();
            let bounds: Vec<f64> = sums
                .iter()
                .map(|(sum, magnitude, terms)| {
                    let u = f64::from(f32::EPSILON) / 2.0;
                    let added = *terms as f64 * u * magnitude;
                    added + storage.unit_roundoff() * (sum.abs() + added) + storage.underflow()
                })
                .collect();
            let found = download(client, address, storage)?;
            compare(&found, &expected, &bounds)
                .map_err(|error| format!("{n} places, {rows} x {columns}, kind {kind}: {error}"))?;
        }
    }
    Ok(())
}

fn refusals(client: &Client) -> Result<(), Failed> {
    let floats = |n: usize| upload(client, &vec![1.0; n], Storage::F32);
    let index = integers(client, &[0, 1]);
    let named = |dy: &Buffer, dw: &Buffer| match embedding_backward(client, &index, dy, dw, 4) {
        Err(KernelError::InvalidProblem { argument, .. }) => Ok(argument),
        other => Err(Failed::from(format!("{other:?}"))),
    };
    assert_eq!(named(&floats(7), &floats(8))?, "dy");
    assert_eq!(named(&floats(8), &floats(9))?, "dw");
    assert_eq!(named(&floats(8), &upload(client, &[1.0; 8], Storage::F16))?, "dw");
    let other = embedding_backward(client, &floats(2), &floats(8), &floats(8), 4);
    assert!(matches!(other, Err(KernelError::Unsupported { .. })), "{other:?}");
    embedding_backward(client, &integers(client, &[]), &floats(0), &floats(8), 4)?;
    Ok(())
}

/// Rows that CUDA's runtime pads, too.
fn as_burns(device: Device) -> Result<(), Failed> {
    let device = device.autodiff();
    for (rows, columns) in [(50, 256), (9, 33)] {
        let weights = normal(1, rows * columns, 1.0, Storage::F32);
        let factors = normal(2, 24 * columns, 1.0, Storage::F32);
        let ids: Vec<i32> = (0..24).map(|i| (i * i) % rows as i32).collect();
        let run = |ours: bool| {
            let weights =
                tensor(&weights, [rows, columns], Storage::F32, &device).detach().require_grad();
            let ids = Tensor::<1, Int>::from_data(&ids[..], &device).reshape([4, 6]);
            let y = if ours {
                embedding(weights.clone(), ids)
            } else {
                burn::tensor::module::embedding(weights.clone(), ids)
            };
            let factors = tensor(&factors, [4, 6, columns], Storage::F32, &device);
            let gradients = (y.clone() * factors).sum().backward();
            let gradient = weights.grad(&gradients).ok_or("the weights have no gradient")?;
            Ok::<_, Failed>((values(y.inner())?, values(gradient)?))
        };
        let ((y, gradient), (expected_y, expected)) = (run(true)?, run(false)?);
        assert_eq!(y, expected_y);
        // At most 24 terms of some 3, added up in another order.
        let bounds = vec![24.0 * 24.0 * 3.0 * f64::from(f32::EPSILON); expected.len()];
        compare(&gradient, &expected, &bounds).map_err(|error| error.to_string())?;
    }
    Ok(())
}
