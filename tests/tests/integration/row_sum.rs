//! Sums and means of rows: the kernel against f64, and Burn's reductions on it.

use blackburn_kernels::{
    KernelError,
    buffer::{Buffer, Rows},
    row_sum::row_sum,
};
use blackburn_reference::{column_sum, random::normal, storage::Storage, tolerance::compare};
use blackburn_tests::{
    blocks::blocks_of,
    buffers::{download, dtype, upload},
    on_burn_device, on_device, on_device_with,
    tensors::{tensor, values},
};
use burn::prelude::*;
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;
const KERNEL: &str = "RowSumKernel";

/// Rows and columns: one element, fewer rows than a cube has, odd columns that take scalar loads, columns around
/// lanes, and few rows that cubes share.
const SHAPES: [[usize; 2]; 9] =
    [[1, 1], [3, 2], [33, 7], [5, 255], [4, 256], [2, 2056], [1000, 24], [3, 30_001], [2, 65_536]];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = format!("row_sum::every_shape_is_within_bounds_in_{storage:?}").to_lowercase();
        trials.push(Trial::ignorable_test(name, move || {
            on_device_with(dtype(storage), |client| {
                SHAPES.iter().try_for_each(|shape| check(client, storage, *shape, 0))
            })
        }));
    }
    let on_client = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("row_sum::{name}"), move || on_device(test))
    };
    let on_burn = |name: &str, test: fn(&Device) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("row_sum::{name}"), move || {
            on_burn_device(|device| test(&device))
        })
    };
    trials.extend([
        on_client("padded_rows_are_stepped_over", |client| {
            check(client, F32, [100, 60], 4)?;
            check(client, F32, [3, 5000], 3)
        }),
        on_client("repeated_runs_give_the_same_bits", repeats),
        on_client("a_missing_column_is_caught", missing_column),
        on_client("bad_arguments_are_named", bad_arguments),
        on_burn("sums_and_means_of_tensors_run_on_the_kernel_and_are_right", reductions),
        on_burn("strided_rows_and_empty_tensors_are_right", unusual),
        on_burn("pixels_of_images_with_innermost_channels_are_summed_in_place", pixels),
    ]);
    trials
}

/// Rows, with NaN between them where they lie apart.
fn drawn(
    client: &Client,
    storage: Storage,
    [rows, columns]: [usize; 2],
    gap: usize,
) -> (Vec<f64>, Rows) {
    let values = normal(7, rows * columns, 1.0, storage);
    let pitch = columns + gap;
    let mut memory = vec![f64::NAN; rows * pitch];
    for (row, of_row) in values.chunks(columns).enumerate() {
        memory[row * pitch..][..columns].copy_from_slice(of_row);
    }
    let buffer = upload(client, &memory, storage);
    (values, Rows { buffer, rows, columns, pitch })
}

/// Sums times `factor`, and how far off each may be: the sum, its product with the factor, and one rounding.
fn expected(values: &[f64], columns: usize, factor: f64, storage: Storage) -> (Vec<f64>, Vec<f64>) {
    let of_row = |row: &[f64]| {
        let sum = factor * row.iter().sum::<f64>();
        let magnitudes = factor.abs() * row.iter().map(|x| x.abs()).sum::<f64>();
        // A rounding of the factor and one of the product are two terms more.
        (sum, column_sum::bound(sum, magnitudes, columns + 2, storage))
    };
    values.chunks(columns).map(of_row).unzip()
}

fn check(client: &Client, storage: Storage, shape: [usize; 2], gap: usize) -> Result<(), Failed> {
    let (values, x) = drawn(client, storage, shape, gap);
    for factor in [1.0, 1.0 / shape[1] as f64] {
        let y = download(client, row_sum(client, &x, factor as f32)?, storage)?;
        let (expected, bounds) = expected(&values, shape[1], factor, storage);
        compare(&y, &expected, &bounds).map_err(|error| format!("{shape:?}: {error}"))?;
    }
    Ok(())
}

fn repeats(client: &Client) -> Result<(), Failed> {
    let (_, x) = drawn(client, F32, [2, 100_000], 0);
    let run =
        || -> Result<Vec<f64>, Failed> { Ok(download(client, row_sum(client, &x, 1.0)?, F32)?) };
    let first = run()?;
    for _ in 0..5 {
        if run()? != first {
            return Err("two runs differ".into());
        }
    }
    Ok(())
}

fn missing_column(client: &Client) -> Result<(), Failed> {
    let (values, x) = drawn(client, F32, [3, 300], 0);
    let y = download(client, row_sum(client, &Rows { columns: 299, ..x }, 1.0)?, F32)?;
    let (expected, bounds) = expected(&values, 300, 1.0, F32);
    match compare(&y, &expected, &bounds) {
        Err(_) => Ok(()),
        Ok(_) => Err("a sum without its last term is within bounds".into()),
    }
}

fn bad_arguments(client: &Client) -> Result<(), Failed> {
    let rows = |elements: usize, pitch: usize| Rows {
        buffer: upload(client, &vec![0.0; elements], F32),
        rows: 3,
        columns: 8,
        pitch,
    };
    for (name, x) in [("x", rows(23, 8)), ("pitch", rows(24, 7))] {
        match row_sum(client, &x, 1.0) {
            Err(KernelError::InvalidProblem { argument, .. }) if argument == name => {}
            other => return Err(format!("a bad {name} gave {other:?}").into()),
        }
    }
    let empty =
        Rows { buffer: Buffer::empty(client, 0, dtype(F32)), rows: 0, columns: 8, pitch: 8 };
    match row_sum(client, &empty, 1.0) {
        Err(KernelError::Unsupported { .. }) => Ok(()),
        other => Err(format!("no rows gave {other:?}").into()),
    }
}

fn reductions(device: &Device) -> Result<(), Failed> {
    // Rows that no device leaves gaps behind.
    let shape = [6, 10, 256];
    let x = normal(3, shape.iter().product(), 1.0, F32);
    type Reduce = fn(Tensor<3>) -> Tensor<3>;
    let all: [(&str, Reduce, usize, f64); 3] = [
        ("sum_dim", |x| x.sum_dim(2), 256, 1.0),
        ("mean_dim", |x| x.mean_dim(2), 256, 1.0 / 256.0),
        ("sum_dims", |x| x.sum_dims(&[1, 2]), 2560, 1.0),
    ];
    for (name, reduce, columns, factor) in all {
        let input = tensor(&x, shape, F32, device);
        let (y, blocks) = blocks_of(device, || Ok(reduce(input)))?;
        let (expected, bounds) = expected(&x, columns, factor, F32);
        compare(&values(y)?, &expected, &bounds).map_err(|error| format!("{name}: {error}"))?;
        if !blocks.iter().any(|block| block.kernels.iter().any(|kernel| kernel.ends_with(KERNEL))) {
            return Err(format!("{name} ran in {blocks:#?}").into());
        }
    }
    Ok(())
}

/// The sum over pixels that squeeze-and-excitation has for a gradient, of images as convolutions leave them.
fn pixels(device: &Device) -> Result<(), Failed> {
    let [images, pixels, channels] = [3, 35, 24];
    let x = normal(5, images * pixels * channels, 1.0, F32);
    let input = tensor(&x, [images, 5, 7, channels], F32, device).permute([0, 3, 1, 2]);
    device.sync()?;
    let (y, blocks) = blocks_of(device, || values(input.sum_dims(&[2, 3])))?;
    let of_channel = |of: usize| -> Vec<f64> {
        let (image, channel) = (of / channels, of % channels);
        (0..pixels).map(|pixel| x[(image * pixels + pixel) * channels + channel]).collect()
    };
    let in_order: Vec<f64> = (0..images * channels).flat_map(of_channel).collect();
    let (sums, bounds) = expected(&in_order, pixels, 1.0, F32);
    compare(&y, &sums, &bounds)?;
    let ours = |kernel: &&str| kernel.contains("blackburn_kernels::column_sum::");
    match blocks.iter().flat_map(|block| &block.kernels).all(ours) {
        true => Ok(()),
        false => Err(format!("the sum ran in {blocks:#?}").into()),
    }
}

/// Columns that lie apart, rows that are one, and tensors without elements.
fn unusual(device: &Device) -> Result<(), Failed> {
    let shape = [4, 40, 30];
    let x = normal(4, shape.iter().product(), 1.0, F32);
    let turned = tensor(&x, shape, F32, device).swap_dims(1, 2).sum_dim(2);
    let columns = |of: usize| -> Vec<f64> {
        let (image, column) = (of / 30, of % 30);
        (0..40).map(|row| x[(image * 40 + row) * 30 + column]).collect()
    };
    let in_order: Vec<f64> = (0..120).flat_map(columns).collect();
    let (sums, bounds) = expected(&in_order, 40, 1.0, F32);
    compare(&values(turned)?, &sums, &bounds)?;

    let one = tensor(&[2.5], [1, 1], F32, device).expand([3, 50]).sum_dim(1);
    compare(&values(one)?, &[125.0; 3], &[1e-3; 3])?;

    let nothing = values(Tensor::<2>::zeros([3, 0], device).sum_dim(1))?;
    let no_rows = values(Tensor::<2>::zeros([0, 3], device).sum_dim(1))?;
    match nothing == [0.0; 3] && no_rows.is_empty() {
        true => Ok(()),
        false => Err(format!("sums of nothing are {nothing:?}, of no rows {no_rows:?}").into()),
    }
}
