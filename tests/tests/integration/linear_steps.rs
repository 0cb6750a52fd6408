//! What follows a product: in its epilogue where it fits, computed as written where it does not.

use super::{
    F32, compare_product, expect_products, is_ours, layer_precision, new_layer, product_precision,
    trial,
};
use blackburn_reference::{
    activation::Activation,
    linear::Linear as Exact,
    matmul::{
        self,
        Layout::{ColumnMajor, RowMajor},
        MatmulCase,
    },
    random::normal,
    tolerance::compare,
};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    tensors::{tensor, values},
};
use burn::{
    prelude::*,
    tensor::activation::{gelu, relu, silu},
};
use libtest_mimic::{Failed, Trial};
use std::f64::consts::SQRT_2;

pub(super) fn trials() -> Vec<Trial> {
    vec![
        trial("an_activation_runs_in_the_layer_s_epilogue", activations),
        trial("a_residual_runs_in_the_layer_s_epilogue", residual),
        trial("a_scale_runs_in_the_product_s_epilogue", scale),
        trial("a_product_that_is_read_again_is_kept", product_is_kept),
        trial("a_layer_s_output_that_its_activation_leaves_is_kept", preactivation_is_kept),
        trial("what_only_looks_like_a_step_is_computed_as_written", lookalikes),
        trial("a_gradient_that_a_batch_shares_is_one_product", batch_sum),
        trial("sums_along_rows_and_columns_are_computed_as_written", sums_within_matrices),
        trial("rows_of_an_odd_length_are_read_right_wherever_they_lie", odd_rows),
    ]
}

const ROWS: usize = 30;
const INPUTS: usize = 24;
const OUTPUTS: usize = 20;

/// Outputs of which a row has no padding on any device.
const WIDE: usize = 256;

/// Whether a product, its operands made ready for tensor cores, is all that the block launches.
fn is_one_product(block: &Block) -> bool {
    let [pack @ .., product] = &block.kernels[..] else { return false };
    is_ours(product) && pack.iter().all(|kernel| kernel.ends_with("MatmulPackKernel"))
}

/// Whether one launch of a product covers that many operations.
fn expect_one_launch(blocks: &[Block], operations: usize) -> Result<(), Failed> {
    let is_one = |block: &Block| block.operations == operations && is_one_product(block);
    if blocks.iter().any(is_one) {
        return Ok(());
    }
    Err(format!("no product covers {operations} operations: {blocks:?}").into())
}

fn activations(device: &Device) -> Result<(), Failed> {
    /// Operations of the activation, as Burn emits them.
    type Case = (Activation, fn(Tensor<2>) -> Tensor<2>, usize);
    const CASES: [Case; 3] =
        [(Activation::Relu, relu, 2), (Activation::Gelu, gelu, 5), (Activation::Silu, silu, 9)];

    let (layer, weight, bias) = new_layer([INPUTS, OUTPUTS], true, F32, device);
    let x = normal(3, ROWS * INPUTS, 1.0, F32);
    for (activation, apply, operations) in CASES {
        let input = tensor(&x, [ROWS, INPUTS], F32, device);
        let (y, blocks) = blocks_of(device, || values(apply(layer.forward(input))))?;
        // The product, the shape of the bias, its addition.
        expect_one_launch(&blocks, 3 + operations)?;
        let exact = exact(&x, &weight, bias.as_deref(), activation);
        let forward = exact.forward();
        let bounds = exact.forward_bounds(&forward, &layer_precision(F32));
        compare(&y, &forward.y, &bounds.y).map_err(|error| format!("{activation:?}: {error}"))?;
    }
    Ok(())
}

fn exact<'a>(
    x: &'a [f64],
    weight: &'a [f64],
    bias: Option<&'a [f64]>,
    activation: Activation,
) -> Exact<'a> {
    let (rows, outputs) = (x.len() / INPUTS, weight.len() / INPUTS);
    Exact { rows, inputs: INPUTS, outputs, x, weight, bias, activation }
}

fn residual(device: &Device) -> Result<(), Failed> {
    let (layer, weight, bias) = new_layer([INPUTS, WIDE], true, F32, device);
    let x = normal(3, ROWS * INPUTS, 1.0, F32);
    let r = normal(5, ROWS * WIDE, 1.0, F32);
    let forward = exact(&x, &weight, bias.as_deref(), Activation::Identity);
    let exact = forward.forward();
    let bounds = forward.forward_bounds(&exact, &layer_precision(F32));
    let expected: Vec<f64> = exact.y.iter().zip(&r).map(|(y, r)| y + r).collect();
    let bounds: Vec<f64> = expected
        .iter()
        .zip(&bounds.y)
        .map(|(y, bound)| bound + F32.unit_roundoff() * (y.abs() + bound))
        .collect();
    // On either side, and at rank 3 with the layer's own views around it.
    let shape = [2, ROWS / 2];
    let input = || tensor(&x, [shape[0], shape[1], INPUTS], F32, device);
    let other = || tensor(&r, [shape[0], shape[1], WIDE], F32, device);
    for swapped in [false, true] {
        let (input, other) = (input(), other());
        let (y, blocks) = blocks_of(device, || {
            let y = layer.forward(input);
            values(if swapped { other + y } else { y + other })
        })?;
        expect_products(&blocks, 1)?;
        let is_covered = |block: &Block| block.operations >= 4 && is_one_product(block);
        if !blocks.iter().any(is_covered) {
            return Err(format!("the residual is not in the epilogue: {blocks:?}").into());
        }
        compare(&y, &expected, &bounds)?;
    }
    // Strided, which no epilogue reads: right all the same.
    let strided = tensor(&transpose(&r, WIDE), [WIDE, ROWS], F32, device).transpose();
    device.sync().map_err(|error| error.to_string())?;
    let input = tensor(&x, [ROWS, INPUTS], F32, device);
    compare(&values(layer.forward(input) + strided)?, &expected, &bounds)?;
    Ok(())
}

/// The rows of a matrix of so many columns, as columns.
fn transpose(values: &[f64], columns: usize) -> Vec<f64> {
    (0..columns).flat_map(|column| values.iter().copied().skip(column).step_by(columns)).collect()
}

fn case() -> MatmulCase {
    MatmulCase {
        name: "test",
        batch: 1,
        m: ROWS,
        n: OUTPUTS,
        k: INPUTS,
        lhs: RowMajor,
        rhs: RowMajor,
    }
}

/// Two operands, their product, and how far off it may be.
struct Product {
    lhs: Vec<f64>,
    rhs: Vec<f64>,
    exact: Vec<f64>,
    bounds: Vec<f64>,
}

impl Product {
    fn new() -> Self {
        let (lhs, rhs) =
            (normal(1, ROWS * INPUTS, 1.0, F32), normal(2, INPUTS * OUTPUTS, 1.0, F32));
        let exact = matmul::matmul(&case(), &lhs, &rhs);
        let magnitudes = matmul::magnitudes(&case(), &lhs, &rhs);
        let bounds = product_precision(F32).bounds(&exact, &magnitudes, INPUTS);
        Self { lhs, rhs, exact, bounds }
    }

    fn tensors(&self, device: &Device) -> [Tensor<2>; 2] {
        [
            tensor(&self.lhs, [ROWS, INPUTS], F32, device),
            tensor(&self.rhs, [INPUTS, OUTPUTS], F32, device),
        ]
    }

    /// Compares `actual` with `map` of the product, whose slope is at most `slope` and whose own
    /// roundings add up to `error`.
    fn check(
        &self,
        actual: &[f64],
        [slope, error]: [f64; 2],
        map: impl Fn(usize, f64) -> f64,
    ) -> Result<(), Failed> {
        let expected: Vec<f64> = self.exact.iter().enumerate().map(|(i, y)| map(i, *y)).collect();
        let bounds: Vec<f64> = self
            .bounds
            .iter()
            .zip(&self.exact)
            .map(|(bound, y)| slope * bound + error * (1.0 + y.abs()))
            .collect();
        compare(actual, &expected, &bounds)?;
        Ok(())
    }
}

/// A few roundings in f32.
const ROUNDINGS: f64 = 1.0 / (1u64 << 21) as f64;

fn scale(device: &Device) -> Result<(), Failed> {
    type Case = (fn(Tensor<2>) -> Tensor<2>, f64);
    const CASES: [Case; 2] = [(|y| y * 0.3, 0.3), (|y| y / 8.0, 0.125)];

    let product = Product::new();
    for (apply, factor) in CASES {
        let [a, b] = product.tensors(device);
        let (y, blocks) = blocks_of(device, || values(apply(a.matmul(b))))?;
        expect_one_launch(&blocks, 2)?;
        product.check(&y, [factor, ROUNDINGS], |_, y| factor * y)?;
    }
    Ok(())
}

fn product_is_kept(device: &Device) -> Result<(), Failed> {
    let product = Product::new();
    let bias = normal(4, OUTPUTS, 1.0, F32);
    let [a, b] = product.tensors(device);
    let row = tensor(&bias, [1, OUTPUTS], F32, device);
    let ((y, z), blocks) = blocks_of(device, || {
        let y = a.matmul(b);
        let z = y.clone() + row;
        Ok((values(y)?, values(z)?))
    })?;
    expect_products(&blocks, 1)?;
    product.check(&y, [1.0, 0.0], |_, y| y)?;
    product.check(&z, [1.0, ROUNDINGS * 4.0], |i, y| y + bias[i % OUTPUTS])
}

fn preactivation_is_kept(device: &Device) -> Result<(), Failed> {
    let product = Product::new();
    let [a, b] = product.tensors(device);
    let ((z, y), blocks) = blocks_of(device, || {
        let z = a.matmul(b);
        let y = relu(z.clone());
        Ok((values(z)?, values(y)?))
    })?;
    expect_products(&blocks, 1)?;
    product.check(&z, [1.0, 0.0], |_, z| z)?;
    product.check(&y, [1.0, 0.0], |_, z| z.max(0.0))
}

/// Where a rectifier may have its step: no product is so near that roundings decide its side.
const STEP: f32 = 4.47;

/// What comes behind a product, what it is in f64, and its steepest slope.
type Behind = (&'static str, fn(Tensor<2>, &Device) -> Tensor<2>, fn(usize, f64) -> f64, f64);

const LOOKALIKES: [Behind; 5] = [
    (
        "a column added",
        |y, device| y + Tensor::<1, Int>::arange(0..ROWS as i64, device).float().reshape([ROWS, 1]),
        |i, y| y + (i / OUTPUTS) as f64,
        1.0,
    ),
    ("the product added to itself", |y, _| y.clone() + y, |_, y| 2.0 * y, 2.0),
    (
        "an activation with another constant",
        |y, _| y.clone() * (y / 1.5).erf().add_scalar(1.0) / 2.0,
        |_, y| y * (1.0 + libm::erf(y / 1.5)) / 2.0,
        1.2,
    ),
    (
        "a rectifier at another threshold",
        |y, _| y.clone().mask_fill(y.lower_equal_elem(STEP), 0.0),
        |_, y| if y <= f64::from(STEP) { 0.0 } else { y },
        1.0,
    ),
    (
        "an activation and something else that reads in its middle",
        |y, _| {
            let erf = (y.clone() / SQRT_2).erf();
            y * erf.clone().add_scalar(1.0) / 2.0 + erf
        },
        |_, y| y * (1.0 + libm::erf(y / SQRT_2)) / 2.0 + libm::erf(y / SQRT_2),
        2.0,
    ),
];

/// The portable erf's error, times a number of the product's size.
const ERF_ERROR: f64 = 1e-5;

fn lookalikes(device: &Device) -> Result<(), Failed> {
    let product = Product::new();
    // No product may lie so near the step that its side is not told.
    let is_at_step = |(y, bound): (&f64, &f64)| (y - f64::from(STEP)).abs() <= *bound;
    if product.exact.iter().zip(&product.bounds).any(is_at_step) {
        return Err("a product lies at the rectifier's step; take another".into());
    }
    for (name, apply, exact, slope) in LOOKALIKES {
        let [a, b] = product.tensors(device);
        let (y, blocks) = blocks_of(device, || values(apply(a.matmul(b), device)))?;
        expect_products(&blocks, 1)?;
        product
            .check(&y, [slope, ERF_ERROR], exact)
            .map_err(|error| format!("{name}: {}", error.message().unwrap_or("")))?;
    }
    Ok(())
}

/// The gradient of a weight that all of a batch share, as Burn computes it: a product for each of the
/// batch, and their sum. Batches that do not go on in each other are summed by what comes behind.
fn batch_sum(device: &Device) -> Result<(), Failed> {
    const BATCH: usize = 3;
    let rows = BATCH * ROWS;
    let (x, dy) = (normal(7, rows * INPUTS, 1.0, F32), normal(8, rows * OUTPUTS, 1.0, F32));
    let case = MatmulCase { m: INPUTS, n: OUTPUTS, k: rows, ..case() };
    let by_columns = transpose(&x, INPUTS);
    // The same numbers with the batch innermost, which does not go on along the sum.
    let place = |row: usize| row % BATCH * ROWS + row / BATCH;
    let swapped: Vec<f64> =
        (0..rows).flat_map(|row| dy[place(row) * OUTPUTS..][..OUTPUTS].iter().copied()).collect();
    for goes_on in [true, false] {
        let x = tensor(&x, [BATCH, ROWS, INPUTS], F32, device);
        let of_dy = match goes_on {
            true => tensor(&dy, [BATCH, ROWS, OUTPUTS], F32, device),
            false => tensor(&swapped, [ROWS, BATCH, OUTPUTS], F32, device),
        };
        device.sync().map_err(|error| error.to_string())?;
        let (dw, blocks) = blocks_of(device, || {
            let dy = if goes_on { of_dy } else { of_dy.swap_dims(0, 1) };
            values(x.swap_dims(1, 2).matmul(dy).sum_dim(0))
        })?;
        compare_product(&case, [&by_columns, &dy], &dw)?;
        if goes_on {
            expect_one_launch(&blocks, 2)?;
        }
    }
    Ok(())
}

/// Batches of products summed along a dimension that is not the batch's.
fn sums_within_matrices(device: &Device) -> Result<(), Failed> {
    const BATCH: usize = 3;
    let (x, y) =
        (normal(7, BATCH * ROWS * INPUTS, 1.0, F32), normal(8, BATCH * INPUTS * OUTPUTS, 1.0, F32));
    // Matrices that go on in each other, as those of a gradient that a batch shares.
    let case = MatmulCase { batch: BATCH, lhs: ColumnMajor, ..case() };
    let exact = matmul::matmul(&case, &x, &y);
    let bounds = product_precision(F32).bounds(&exact, &matmul::magnitudes(&case, &x, &y), INPUTS);
    for (dim, terms) in [(1, ROWS), (2, OUTPUTS)] {
        let a = tensor(&x, [BATCH, INPUTS, ROWS], F32, device);
        let b = tensor(&y, [BATCH, INPUTS, OUTPUTS], F32, device);
        device.sync().map_err(|error| error.to_string())?;
        let sums = values(a.swap_dims(1, 2).matmul(b).sum_dim(dim))?;
        let mut expected = vec![0.0; sums.len()];
        let mut allowed = vec![0.0; sums.len()];
        for (at, (element, bound)) in exact.iter().zip(&bounds).enumerate() {
            let (row, column) = (at / OUTPUTS, at % OUTPUTS);
            let place = if dim == 1 { row / ROWS * OUTPUTS + column } else { row };
            expected[place] += element;
            // Each term goes through fewer additions than there are terms.
            allowed[place] += bound + terms as f64 * F32.unit_roundoff() * (element.abs() + bound);
        }
        compare(&sums, &expected, &allowed).map_err(|error| format!("along {dim}: {error}"))?;
    }
    Ok(())
}

/// Outputs that CUDA's runtime gives padded rows, by themselves, seen in another shape and transposed.
fn odd_rows(device: &Device) -> Result<(), Failed> {
    const M: usize = 1056;
    const K: usize = 24;
    const N: usize = 1003;
    let (x, weight) = (normal(11, M * K, 1.0, F32), normal(12, K * N, 0.5, F32));
    let case = MatmulCase { m: M, n: N, k: K, ..case() };
    let product = || {
        let x = tensor(&x, [M, K], F32, device);
        x.matmul(tensor(&weight, [K, N], F32, device))
    };
    let (y, blocks) = blocks_of(device, || values(product()))?;
    expect_products(&blocks, 1)?;
    compare_product(&case, [&x, &weight], &y)?;
    compare_product(&case, [&x, &weight], &values(product().reshape([2, M / 2, N]))?)?;
    let transposed = values(product().transpose() * 1.0)?;
    compare_product(&case, [&x, &weight], &transpose(&transposed, M))?;
    let halves =
        values(product().slice([0..M, 0..N / 2]) + product().slice([0..M, N / 2..2 * (N / 2)]))?;
    let sums: Vec<f64> = (0..M * (N / 2))
        .map(|i| {
            let (row, column) = (i / (N / 2), i % (N / 2));
            y[row * N + column] + y[row * N + N / 2 + column]
        })
        .collect();
    let bounds: Vec<f64> = sums.iter().map(|sum| F32.unit_roundoff() * sum.abs() + 1e-30).collect();
    compare(&halves, &sums, &bounds)?;
    Ok(())
}
