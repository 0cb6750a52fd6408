//! Column sums: the kernel against f64, and Burn's gradients of biases on it.

use blackburn::attention::{AttentionOptions, attention};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    column_sum::{ColumnSumBlueprint, ColumnSumProblem, column_sum},
};
use blackburn_reference::{
    column_sum as reference, random::normal, storage::Storage, tolerance::compare,
};
use blackburn_tests::buffers::{dtype, upload};
use blackburn_tests::{blocks::blocks_of, on_burn_device, on_device, on_device_with};
use burn::{nn::LinearConfig, prelude::*};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

/// (outer, rows, columns): around lanes (8 rows, 32 vectors) and splits, odd columns that take
/// scalar loads, batches, GPT-2's bias at a few tokens, and what clusters sum on an H200,
/// the last of which has few columns.
const SHAPES: [(usize, usize, usize); 14] = [
    (1, 1, 2),
    (1, 7, 3),
    (1, 8, 128),
    (1, 9, 129),
    (2, 33, 64),
    (3, 257, 5),
    (5, 2, 1000),
    (1, 4096, 7),
    (1, 1000, 768),
    (4, 100, 130),
    (1, 2500, 1000),
    (1, 2500, 500),
    (2, 300, 240),
    (3, 300, 320),
];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name =
            format!("column_sum::every_shape_is_within_bounds_in_{storage:?}").to_lowercase();
        trials.push(Trial::ignorable_test(name, move || {
            on_device_with(dtype(storage), |client| {
                SHAPES.iter().try_for_each(|shape| check(client, storage, *shape, 0))
            })
        }));
    }
    trials.extend([
        Trial::ignorable_test("column_sum::padded_rows_are_stepped_over", || {
            on_device(|client| check(client, Storage::F32, (1, 100, 60), 4))
        }),
        Trial::ignorable_test("column_sum::repeated_runs_give_the_same_bits", || {
            on_device(repeats)
        }),
        Trial::ignorable_test("column_sum::a_missing_row_is_caught", || on_device(missing_row)),
        Trial::ignorable_test("column_sum::a_buffer_that_is_too_small_is_refused", || {
            on_device(too_small)
        }),
        Trial::ignorable_test("column_sum::bias_gradients_run_on_the_kernel_and_are_right", || {
            on_burn_device(|device| {
                bias_gradient(&device, |x| x)?;
                // Here Burn sums both leading dimensions at once.
                bias_gradient(&device, |x| x.reshape([3, 100, -1]))
            })
        }),
        Trial::ignorable_test("column_sum::bias_gradients_behind_heads_run_on_the_kernel", || {
            on_burn_device(|device| bias_gradients_behind_heads(&device))
        }),
    ]);
    trials
}

/// A tensor of that shape whose rows are `padding` elements apart; the padding holds NaN, which
/// would show.
fn problem(
    storage: Storage,
    (outer, rows, columns): (usize, usize, usize),
    padding: usize,
) -> Result<(ColumnSumProblem, Vec<f64>, Vec<f64>), KernelError> {
    let row_stride = columns + padding;
    let strides = [rows * row_stride, row_stride, 1];
    let problem = ColumnSumProblem::new(&[outer, rows, columns], &strides, 1..2, dtype(storage))?;
    let x = normal((rows * columns) as u64, outer * rows * columns, 1.0, storage);
    let mut padded = vec![f64::NAN; outer * rows * row_stride];
    for (i, value) in x.iter().enumerate() {
        padded[i / columns * row_stride + i % columns] = *value;
    }
    Ok((problem, x, padded))
}

fn run(
    client: &Client,
    problem: &ColumnSumProblem,
    x: &Buffer,
    storage: Storage,
) -> Result<Vec<f64>, Failed> {
    let y = column_sum(client, problem, x)?;
    let bytes = client.read_one(y.handle).map_err(|error| error.to_string())?;
    Ok(storage.decode(&bytes)[..y.elements].to_vec())
}

fn expectation(problem: &ColumnSumProblem, x: &[f64], storage: Storage) -> (Vec<f64>, Vec<f64>) {
    let (outer, rows, columns) = (problem.outer, problem.rows, problem.columns);
    let magnitudes: Vec<f64> = x.iter().map(|x| x.abs()).collect();
    let expected = reference::column_sum(x, outer, rows, columns);
    let bounds = expected
        .iter()
        .zip(reference::column_sum(&magnitudes, outer, rows, columns))
        .map(|(y, magnitude)| reference::bound(*y, magnitude, rows, storage))
        .collect();
    (expected, bounds)
}

fn check(
    client: &Client,
    storage: Storage,
    shape: (usize, usize, usize),
    padding: usize,
) -> Result<(), Failed> {
    let (problem, x, padded) = problem(storage, shape, padding)?;
    let actual = run(client, &problem, &upload(client, &padded, storage), storage)?;
    let (expected, bounds) = expectation(&problem, &x, storage);
    compare(&actual, &expected, &bounds).map_err(|error| format!("{shape:?}: {error}"))?;
    Ok(())
}

fn repeats(client: &Client) -> Result<(), Failed> {
    let (problem, _, padded) = problem(Storage::F32, (1, 1000, 96), 0)?;
    if ColumnSumBlueprint::plan(&problem, client).splits < 2 {
        return Err("the shape does not split, so this shows nothing".into());
    }
    let x = upload(client, &padded, Storage::F32);
    let first = run(client, &problem, &x, Storage::F32)?;
    for _ in 0..5 {
        if run(client, &problem, &x, Storage::F32)? != first {
            return Err("two runs on the same input differ".into());
        }
    }
    Ok(())
}

/// The negative control: a sum that leaves out one row must not pass.
fn missing_row(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let (full, x, padded) = problem(storage, (1, 1000, 96), 0)?;
    let short = ColumnSumProblem { rows: 999, ..full };
    let actual = run(client, &short, &upload(client, &padded, storage), storage)?;
    let (expected, bounds) = expectation(&full, &x, storage);
    match compare(&actual, &expected, &bounds) {
        Err(_) => Ok(()),
        Ok(agreement) => Err(format!("a missing row went unseen: {agreement:?}").into()),
    }
}

fn too_small(client: &Client) -> Result<(), Failed> {
    let (problem, _, _) = problem(Storage::F32, (1, 10, 10), 0)?;
    match column_sum(client, &problem, &upload(client, &[0.0; 99], Storage::F32)) {
        Err(KernelError::InvalidProblem { argument: "x", .. }) => Ok(()),
        other => Err(format!("99 elements for 100 gave {other:?}").into()),
    }
}

/// With the loss `sum(linear(x) * w)`, the gradient of the bias is the column sum of w. `view`
/// gives x and w the rank of what a network computes with.
fn bias_gradient<const D: usize>(
    device: &Device,
    view: fn(Tensor<2>) -> Tensor<D>,
) -> Result<(), Failed> {
    let (rows, columns) = (300, 24);
    let device = device.clone().autodiff();
    let layer = LinearConfig::new(5, columns).init(&device);
    let weights = normal(3, rows * columns, 1.0, Storage::F32);
    let as_f32: Vec<f32> = weights.iter().map(|w| *w as f32).collect();
    let w = Tensor::<2>::from_data(TensorData::new(as_f32, [rows, columns]), &device);
    let (x, w) = (view(Tensor::<2>::ones([rows, 5], &device)), view(w));

    let (actual, blocks) = blocks_of(&device, || {
        let gradients = (layer.forward(x) * w).sum().backward();
        let bias = layer.bias.as_ref().ok_or("LinearConfig gives a bias")?;
        let gradient = bias.grad(&gradients).ok_or("the bias has no gradient")?;
        let data = gradient.into_data();
        Ok(data.try_to_vec::<f32>().map_err(|error| format!("{error:?}"))?)
    })?;
    let mut kernels = blocks.iter().flat_map(|block| &block.kernels);
    if !kernels.any(|kernel| kernel.ends_with("ColumnSumKernel")) {
        return Err(format!("no column sum among the kernels launched: {blocks:?}").into());
    }
    let problem =
        ColumnSumProblem::new(&[rows, columns], &[columns, 1], 0..1, dtype(Storage::F32))?;
    let (expected, bounds) = expectation(&problem, &weights, Storage::F32);
    let actual: Vec<f64> = actual.into_iter().map(f64::from).collect();
    compare(&actual, &expected, &bounds)?;
    Ok(())
}

/// Attention reads what three layers make by heads, so that gradients of their biases are sums of tensors whose heads were
/// just joined again. Each is one kernel of ours.
fn bias_gradients_behind_heads(device: &Device) -> Result<(), Failed> {
    let (batch, length, width, heads) = (2, 64, 32, 4);
    let device = device.clone().autodiff();
    let layers: Vec<_> = (0..3).map(|_| LinearConfig::new(width, width).init(&device)).collect();
    let step = || {
        let x = Tensor::<3>::ones([batch, length, width], &device);
        let by_heads = layers.iter().map(|layer| {
            layer.forward(x.clone()).reshape([batch, length, heads, width / heads]).swap_dims(1, 2)
        });
        let [q, k, v] = <[Tensor<4>; 3]>::try_from(by_heads.collect::<Vec<_>>())
            .map_err(|_| "three layers make three tensors")?;
        let gradients = attention(q, k, v, AttentionOptions::default()).sum().backward();
        for layer in &layers {
            let bias = layer.bias.as_ref().ok_or("LinearConfig gives a bias")?;
            bias.grad(&gradients).ok_or("the bias has no gradient")?.into_data();
        }
        Ok(())
    };
    // Burn's fusion settles on what it makes of a program when it has seen it.
    step()?;
    let (_, blocks) = blocks_of(&device, step)?;
    let sums = blocks.iter().flat_map(|block| &block.kernels);
    let sums = sums.filter(|kernel| kernel.ends_with("ColumnSumKernel")).count();
    match sums >= layers.len() {
        true => Ok(()),
        false => {
            Err(format!("{sums} sums of {} ran on the kernel: {blocks:#?}", layers.len()).into())
        }
    }
}
