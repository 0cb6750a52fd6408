//! Unmodified linear layers and products of tensors: on the matmul kernels, and right.

#[path = "gpt_block.rs"]
mod gpt_block;
#[path = "linear_steps.rs"]
mod steps;
#[path = "transformer.rs"]
mod transformer;

use blackburn_reference::{
    activation::{Activation, FunctionErrors},
    linear::{self as reference, LinearPrecision},
    matmul::{
        self, Layout,
        Layout::{ColumnMajor, RowMajor},
        MatmulCase, MatmulPrecision,
    },
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    on_burn_device,
    tensors::{tensor, values},
    trials_in,
};
use burn::{module::Param, nn::Linear, prelude::*};
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = vec![
        trial("a_layer_at_rank_2_is_served_in_both_passes", |device| {
            layer(device, F32, [33, 24])?;
            // One row, one column: sizes that views and broadcasts mistake for each other.
            layer(device, F32, [1, 24])?;
            layer(device, F32, [33, 1])
        }),
        trial("a_layer_at_rank_3_is_served_in_both_passes", |device| {
            layer(device, F32, [3, 11, 24])
        }),
        trial("a_layer_at_rank_4_is_served_in_both_passes", |device| {
            layer(device, F32, [2, 3, 5, 24])
        }),
        trial("plans_are_right_for_other_sizes", |device| {
            // The same stream of operations each time, which Burn does not search again.
            (1..5).try_for_each(|i| layer(device, F32, [2 * i, 7 + i, 9 * i]))
        }),
        trial("transposed_operands_are_multiplied_in_place", transposed),
        trial("operands_are_broadcast", broadcast),
        trial("heads_of_attention_are_multiplied_in_place", heads),
        trial("integers_are_left_to_burn", integers),
        trial("batches_that_no_kernel_walks_are_left_to_burn", unserved_batches),
    ];
    let halves = [Storage::F16, Storage::Bf16];
    trials.extend(trials_in("linear::a_layer_is_served", &halves, |device, storage| {
        layer(device, storage, [33, 24])
    }));
    trials.extend(steps::trials());
    trials.extend(transformer::trials());
    trials.extend(gpt_block::trials());
    trials
}

fn trial(name: &str, test: fn(&Device) -> Result<(), Failed>) -> Trial {
    Trial::ignorable_test(format!("linear::{name}"), move || on_burn_device(|device| test(&device)))
}

/// What the device multiplies in.
fn product_precision(storage: Storage) -> MatmulPrecision {
    let on_cuda = std::env::var("BLACKBURN_REQUIRE_DEVICE").is_ok_and(|name| name == "cuda");
    match storage {
        _ if !on_cuda => MatmulPrecision::exact(storage),
        Storage::F32 => MatmulPrecision::tf32(),
        Storage::F16 | Storage::Bf16 => MatmulPrecision::tensor_core(storage),
    }
}

fn layer_precision(storage: Storage) -> LinearPrecision {
    LinearPrecision {
        product: product_precision(storage),
        z: F32,
        dz: storage,
        functions: FunctionErrors::PORTABLE,
    }
}

/// Whether a kernel of that name is one of Blackburn's matrix products.
fn is_ours(kernel: &str) -> bool {
    ["MatmulPortableKernel", "MatmulFewRowsKernel", "MatmulMmaKernel", "MatmulWgmmaKernel"]
        .iter()
        .any(|ours| kernel.ends_with(ours))
}

/// How many of Blackburn's products ran.
///
/// # Errors
///
/// A product of Burn's that ran.
fn products(blocks: &[Block]) -> Result<usize, Failed> {
    let kernels = || blocks.iter().flat_map(|block| &block.kernels);
    let is_product = |kernel: &str| {
        let kernel = kernel.to_ascii_lowercase();
        ["matmul", "gemm", "gemv"].iter().any(|name| kernel.contains(name))
    };
    let mut others =
        kernels().filter(|kernel| is_product(kernel) && !kernel.starts_with("blackburn_kernels::"));
    match others.next() {
        Some(other) => Err(format!("a product ran on {other}: {blocks:?}").into()),
        None => Ok(kernels().filter(|kernel| is_ours(kernel)).count()),
    }
}

fn expect_products(blocks: &[Block], least: usize) -> Result<(), Failed> {
    match products(blocks)? {
        found if found >= least => Ok(()),
        found => {
            Err(format!("{found} products ran on the kernels, not {least}: {blocks:?}").into())
        }
    }
}

/// A layer of `inputs` by `outputs`, and its numbers.
fn new_layer(
    [inputs, outputs]: [usize; 2],
    with_bias: bool,
    storage: Storage,
    device: &Device,
) -> (Linear, Vec<f64>, Option<Vec<f64>>) {
    let weight = normal(1, inputs * outputs, 0.5, storage);
    let bias = with_bias.then(|| normal(2, outputs, 1.0, storage));
    let param =
        |values: &[f64]| Param::from_tensor(tensor(values, [values.len()], storage, device));
    let layer = Linear {
        weight: Param::from_tensor(tensor(&weight, [inputs, outputs], storage, device)),
        bias: bias.as_deref().map(param),
    };
    (layer, weight, bias)
}

/// Forward and backward of a layer, with and without bias, on an input of that shape.
fn layer<const D: usize>(
    device: &Device,
    storage: Storage,
    shape: [usize; D],
) -> Result<(), Failed> {
    const OUTPUTS: usize = 20;

    let device = device.clone().autodiff();
    let inputs = shape[D - 1];
    let rows: usize = shape[..D - 1].iter().product();
    let mut out_shape = shape;
    out_shape[D - 1] = OUTPUTS;
    for with_bias in [true, false] {
        let (module, weight, bias) = new_layer([inputs, OUTPUTS], with_bias, storage, &device);
        let x = normal(3, rows * inputs, 1.0, storage);
        let dy = normal(4, rows * OUTPUTS, 1.0, storage);
        let input = tensor(&x, shape, storage, &device).require_grad();
        let factors = tensor(&dy, out_shape, storage, &device);

        let ((y, dx, dw, db), blocks) = blocks_of(&device, || {
            let y = module.forward(input.clone());
            // The gradient of this sum by the output is `factors`.
            let gradients = (y.clone() * factors).sum().backward();
            let dx = input.grad(&gradients).ok_or("the input has no gradient")?;
            let dw = module.weight.grad(&gradients).ok_or("the weight has no gradient")?;
            let db = module.bias.as_ref().and_then(|bias| bias.grad(&gradients));
            Ok((values(y)?, values(dx)?, values(dw)?, db.map(values).transpose()?))
        })?;

        expect_products(&blocks, 3)?;
        let (x, weight, bias) = (&x[..], &weight[..], bias.as_deref());
        let activation = Activation::Identity;
        let exact =
            reference::Linear { rows, inputs, outputs: OUTPUTS, x, weight, bias, activation };
        let precision = layer_precision(storage);
        let forward = exact.forward();
        let bounds = exact.forward_bounds(&forward, &precision);
        let named = |what: &'static str| {
            move |error| format!("{what} of {shape:?} in {storage:?}, bias {with_bias}: {error}")
        };
        compare(&y, &forward.y, &bounds.y).map_err(named("output"))?;
        let given = vec![0.0; forward.z.len()];
        let gradients = exact.backward(&forward.z, &dy);
        let bounds = exact.backward_bounds(&forward.z, &given, &dy, &gradients, &precision);
        compare(&dx, &gradients.dx, &bounds.dx).map_err(named("dx"))?;
        compare(&dw, &gradients.dw, &bounds.dw).map_err(named("dw"))?;
        if let Some(db) = db {
            compare(&db, &gradients.db, &bounds.db).map_err(named("db"))?;
        }
    }
    Ok(())
}

fn case(batch: usize, [m, k, n]: [usize; 3], lhs: Layout, rhs: Layout) -> MatmulCase {
    MatmulCase { name: "test", batch, m, n, k, lhs, rhs }
}

/// Compares a product that the device computed with the exact one.
fn compare_product(
    case: &MatmulCase,
    [lhs, rhs]: [&[f64]; 2],
    actual: &[f64],
) -> Result<(), Failed> {
    let expected = matmul::matmul(case, lhs, rhs);
    let magnitudes = matmul::magnitudes(case, lhs, rhs);
    let bounds = product_precision(F32).bounds(&expected, &magnitudes, case.k);
    compare(actual, &expected, &bounds).map_err(|error| format!("{case}: {error}"))?;
    Ok(())
}

fn transposed(device: &Device) -> Result<(), Failed> {
    let (m, k, n) = (17, 40, 23);
    for [lhs, rhs] in [[RowMajor, ColumnMajor], [ColumnMajor, RowMajor], [ColumnMajor; 2]] {
        let case = case(1, [m, k, n], lhs, rhs);
        let (l, r) = (normal(1, m * k, 1.0, F32), normal(2, k * n, 1.0, F32));
        let stored = |values: &[f64], [rows, columns]: [usize; 2], layout| match layout {
            RowMajor => tensor(values, [rows, columns], F32, device),
            ColumnMajor => tensor(values, [columns, rows], F32, device).transpose(),
        };
        let (a, b) = (stored(&l, [m, k], lhs), stored(&r, [k, n], rhs));
        let (product, blocks) = blocks_of(device, || values(a.matmul(b)))?;
        expect_products(&blocks, 1)?;
        compare_product(&case, [&l, &r], &product)?;
    }
    Ok(())
}

fn broadcast(device: &Device) -> Result<(), Failed> {
    let (m, k, n) = (9, 16, 7);
    let (one, three) = (normal(1, m * k, 1.0, F32), normal(2, 3 * k * n, 1.0, F32));
    let case = case(3, [m, k, n], RowMajor, RowMajor);
    let (a, b) = (tensor(&one, [1, m, k], F32, device), tensor(&three, [3, k, n], F32, device));
    let (product, blocks) = blocks_of(device, || values(a.matmul(b)))?;
    expect_products(&blocks, 1)?;
    compare_product(&case, [&one.repeat(3), &three], &product)?;

    let a = tensor(&three, [3, n, k], F32, device);
    let b = tensor(&one, [1, k, m], F32, device);
    let case = MatmulCase { m: n, n: m, ..case };
    let (product, blocks) = blocks_of(device, || values(a.matmul(b)))?;
    expect_products(&blocks, 1)?;
    compare_product(&case, [&three, &one.repeat(3)], &product)
}

/// `[batch, tokens, heads, width]` as attention looks at it, and back.
fn heads(device: &Device) -> Result<(), Failed> {
    const BATCH: usize = 2;
    const TOKENS: usize = 13;
    const HEADS: usize = 3;
    const WIDTH: usize = 8;

    let x = normal(1, BATCH * TOKENS * HEADS * WIDTH, 1.0, F32);
    let q = tensor(&x, [BATCH, TOKENS, HEADS, WIDTH], F32, device).swap_dims(1, 2);
    let (product, blocks) =
        blocks_of(device, || values(q.clone().matmul(q.swap_dims(2, 3)).swap_dims(1, 2)))?;
    expect_products(&blocks, 1)?;

    let head = |batch: usize, head: usize| -> Vec<f64> {
        let at = |token: usize| ((batch * TOKENS + token) * HEADS + head) * WIDTH;
        (0..TOKENS).flat_map(|token| x[at(token)..][..WIDTH].iter().copied()).collect()
    };
    let case = case(1, [TOKENS, WIDTH, TOKENS], RowMajor, ColumnMajor);
    for (b, h) in (0..BATCH * HEADS).map(|i| (i / HEADS, i % HEADS)) {
        let at = |token: usize| ((b * TOKENS + token) * HEADS + h) * TOKENS;
        let actual: Vec<f64> =
            (0..TOKENS).flat_map(|token| product[at(token)..][..TOKENS].to_vec()).collect();
        compare_product(&case, [&head(b, h), &head(b, h)], &actual)?;
    }
    Ok(())
}

fn integers(device: &Device) -> Result<(), Failed> {
    let a = Tensor::<2, Int>::from_data([[1, 2], [3, 4]], device);
    let (product, blocks) = blocks_of(device, || {
        let product: Vec<i32> = a
            .clone()
            .matmul(a)
            .into_data()
            .convert::<i32>()
            .try_to_vec()
            .map_err(|error| format!("{error:?}"))?;
        Ok(product)
    })?;
    match products(&blocks) {
        Err(_) if product == [7, 10, 15, 22] => Ok(()),
        Err(_) => Err(format!("the product of integers came out as {product:?}").into()),
        Ok(_) => Err(format!("nobody multiplied: {blocks:?}").into()),
    }
}

/// Three batch dimensions that do not follow each other, and a bias behind the product.
fn unserved_batches(device: &Device) -> Result<(), Failed> {
    let dims = [2, 3, 4, 5, 6];
    let x = normal(1, dims.iter().product(), 1.0, F32);
    let bias = normal(2, 5, 1.0, F32);
    // [4, 3, 2, 5, 6]
    let a = tensor(&x, dims, F32, device).swap_dims(0, 2);
    let row = tensor(&bias, [1, 1, 1, 1, 5], F32, device);
    let (y, blocks) = blocks_of(device, || values(a.clone().matmul(a.swap_dims(3, 4)) + row))?;
    if products(&blocks).is_ok() {
        return Err(format!("Burn did not multiply: {blocks:?}").into());
    }
    let case = case(1, [5, 6, 5], RowMajor, ColumnMajor);
    for (i, actual) in y.chunks_exact(25).enumerate() {
        // Out of the swapped order into the one in memory.
        let [first, second, third] = [i / 6, i / 2 % 3, i % 2];
        let matrix = &x[((third * 3 + second) * 4 + first) * 30..][..30];
        let product: Vec<f64> = actual.iter().enumerate().map(|(j, y)| y - bias[j % 5]).collect();
        // Burn's own product and addition, which bounds of one product have to cover.
        let expected = matmul::matmul(&case, matrix, matrix);
        let magnitudes: Vec<f64> =
            matmul::magnitudes(&case, matrix, matrix).iter().map(|m| m + 4.0).collect();
        let bounds = product_precision(F32).bounds(&expected, &magnitudes, case.k + 1);
        compare(&product, &expected, &bounds)?;
    }
    Ok(())
}
