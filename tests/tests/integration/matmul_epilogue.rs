//! What is done to a product before it is written, each step against f64.

use super::{Product, case, plans, precision};
use blackburn_kernels::matmul::{
    self as kernel, Epilogue, F32Precision, MatmulProblem, TensorLayout, matmul_with,
};
use blackburn_reference::{
    activation::{Activation, FunctionErrors},
    matmul::Layout::{ColumnMajor, RowMajor},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::buffers::{download, dtype, upload, upload_behind};
use blackburn_tests::{on_cuda_with, on_device, on_device_with};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

pub(super) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = format!("matmul::every_epilogue_is_within_bounds_in_{storage:?}");
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_device_with(dtype(storage), |client| every_epilogue(client, storage))
        }));
        let name = format!("matmul::rows_that_take_turns_are_those_of_matrices_in_{storage:?}");
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_device_with(dtype(storage), |client| interleaved(client, storage))
        }));
    }
    trials.extend([
        Trial::ignorable_test("matmul::nan_passes_every_activation", || on_device(nan)),
        Trial::ignorable_test("matmul::a_bias_ends_where_rows_were_widened", || {
            on_device(widened_rows)
        }),
        Trial::ignorable_test("matmul::a_missing_bias_is_caught", || on_device(missing_bias)),
        Trial::ignorable_test("matmul::a_residual_times_zero_is_not_read", || {
            on_device(unread_residual)
        }),
        Trial::ignorable_test("matmul::a_residual_added_whole_is_caught", || {
            on_device(whole_residual)
        }),
        Trial::ignorable_test("matmul::a_residual_is_added_from_wherever_it_begins", || {
            on_cuda_with(dtype(Storage::Bf16), displaced_residual)
        }),
    ]);
    trials
}

/// Which steps there are, and with what numbers.
#[derive(Clone, Copy, Debug)]
struct Steps {
    alpha: f32,
    scales: Option<[f32; 2]>,
    bias: bool,
    activation: Activation,
    kept: bool,
    residual: bool,
    /// Whether the residual is a factor.
    multiplies: bool,
    /// Elements of its memory before the residual.
    in_front: usize,
    beta: f32,
}

const NONE: Steps = Steps {
    alpha: 1.0,
    scales: None,
    bias: false,
    activation: Activation::Identity,
    kept: false,
    residual: false,
    multiplies: false,
    in_front: 0,
    beta: 1.0,
};

fn every_epilogue(client: &Client, storage: Storage) -> Result<(), Failed> {
    let mut cases = vec![
        Steps { bias: true, ..NONE },
        Steps { residual: true, ..NONE },
        Steps { residual: true, beta: 0.0, ..NONE },
        Steps { residual: true, beta: -0.5, ..NONE },
        Steps { residual: true, multiplies: true, ..NONE },
        // Of a factor beta says nothing.
        Steps { alpha: 1.1, bias: true, residual: true, multiplies: true, beta: 0.0, ..NONE },
        Steps { alpha: -0.125, ..NONE },
        Steps { alpha: 0.3, scales: Some([1.7, 0.01]), bias: true, ..NONE },
        Steps { kept: true, bias: true, ..NONE },
    ];
    for activation in Activation::ALL {
        cases.push(Steps { activation, ..NONE });
        // Everything at once, with the numbers of a layer.
        cases.push(Steps {
            alpha: 0.1,
            bias: true,
            activation,
            kept: true,
            residual: true,
            beta: -0.5,
            ..NONE
        });
    }
    let products = [
        Product::new(case(33, 72, 40, RowMajor, RowMajor), storage),
        Product::new(case(65, 31, 17, RowMajor, ColumnMajor), storage),
    ];
    for product in &products {
        cases.iter().try_for_each(|steps| check(client, product, *steps, Plans::OneOfAFamily))?;
    }
    // A batch: bias and residual repeat as they should.
    let batch = super::MatmulCase { batch: 3, ..case(17, 24, 33, RowMajor, RowMajor) };
    let steps = Steps { bias: true, residual: true, activation: Activation::Gelu, ..NONE };
    let batch = Product::new(batch, storage);
    check(client, &batch, steps, Plans::All)?;
    check(client, &batch, Steps { beta: 0.3, ..steps }, Plans::OneOfAFamily)?;
    check(client, &batch, Steps { residual: true, multiplies: true, ..NONE }, Plans::All)?;
    // Rows whose sums units share.
    let few = super::MatmulCase { batch: 2, ..case(3, 21, 40, RowMajor, RowMajor) };
    let few = Product::new(few, storage);
    cases.iter().try_for_each(|steps| check(client, &few, *steps, Plans::OneOfAFamily))?;
    // As many blocks of k as splits share.
    let long = Product::new(case(33, 72, 2048, RowMajor, RowMajor), storage);
    check(client, &long, Steps { kept: true, beta: -0.5, ..steps }, Plans::All)
}

/// Which plans run. A family's plans share the code of their epilogues, and each plan compiles
/// every epilogue anew.
#[derive(Clone, Copy)]
enum Plans {
    All,
    OneOfAFamily,
}

fn errors(client: &Client) -> FunctionErrors {
    match client.name() {
        "cuda" => FunctionErrors::CUDA,
        _ => FunctionErrors::PORTABLE,
    }
}

fn activation(activation: Activation) -> kernel::Activation {
    match activation {
        Activation::Identity => kernel::Activation::Identity,
        Activation::Relu => kernel::Activation::Relu,
        Activation::Silu => kernel::Activation::Silu,
        Activation::Gelu => kernel::Activation::Gelu,
        Activation::GeluTanh => kernel::Activation::GeluTanh,
    }
}

/// Runs plans with `steps`, and holds output and kept pre-activation against f64.
fn check(client: &Client, product: &Product, steps: Steps, which: Plans) -> Result<(), Failed> {
    let storage = product.storage;
    let problem = product.problem(storage)?;
    let [lhs, rhs] = product.upload(client);
    let bias = normal(7, product.case.n, 1.0, storage);
    let residual = normal(8, product.case.out_len(), 1.0, storage);
    let epilogue = Epilogue {
        alpha: steps.alpha,
        scales: steps
            .scales
            .map(|pair| pair.map(|scale| upload(client, &[f64::from(scale)], Storage::F32))),
        bias: steps.bias.then(|| upload(client, &bias, storage)),
        activation: activation(steps.activation),
        keep_preactivation: steps.kept,
        residual: steps.residual.then(|| upload_behind(client, steps.in_front, &residual, storage)),
        beta: steps.beta,
        residual_multiplies: steps.multiplies,
        ..Epilogue::default()
    };
    let mut plans = plans(client, &problem);
    if let Plans::OneOfAFamily = which {
        plans.dedup_by_key(|plan| plan.family);
    }
    for plan in plans {
        let name = || format!("{} with {steps:?} by {plan:?}", product.case);
        let output = matmul_with(client, &problem, &plan, &lhs, &rhs, &epilogue)?;
        if output.preactivation.is_some() != steps.kept {
            return Err(format!("{}: preactivation {:?}", name(), output.preactivation).into());
        }
        let in_f32 = precision(&plan, lhs.dtype, Storage::F32);
        let expected = Expected::of(product, &steps, &bias, &residual, in_f32, errors(client));
        if let Some(z) = output.preactivation {
            compare(&download(client, z, storage)?, &expected.z, &expected.z_bounds)
                .map_err(|error| format!("{}, before its activation: {error}", name()))?;
        }
        compare(&download(client, output.out, storage)?, &expected.out, &expected.out_bounds)
            .map_err(|error| format!("{}: {error}", name()))?;
    }
    Ok(())
}

/// What comes out, and how far off it may be.
#[derive(Default)]
struct Expected {
    z: Vec<f64>,
    z_bounds: Vec<f64>,
    out: Vec<f64>,
    out_bounds: Vec<f64>,
}

impl Expected {
    fn of(
        product: &Product,
        steps: &Steps,
        bias: &[f64],
        residual: &[f64],
        in_f32: blackburn_reference::matmul::MatmulPrecision,
        errors: FunctionErrors,
    ) -> Self {
        let storage = product.storage;
        let scales = steps.scales.unwrap_or([1.0; 2]).map(f64::from);
        let factor = f64::from(steps.alpha) * scales[0] * scales[1];
        // The bias is one more term of the sum, and each factor one more rounding of it.
        let terms = product.case.k + 4;
        let mut expected = Self::default();
        for (i, (sum, magnitude)) in product.expected.iter().zip(&product.magnitudes).enumerate() {
            let bias = if steps.bias { bias[i % product.case.n] } else { 0.0 };
            let added = if steps.residual { f64::from(steps.beta) * residual[i] } else { 0.0 };
            let z = factor * sum + bias;
            let z_bound = in_f32.bound(z, factor.abs() * magnitude + bias.abs(), terms);
            expected.z.push(z);
            expected.z_bounds.push(z_bound + rounding(z.abs() + z_bound, storage));

            let y = steps.activation.value(z);
            let y_bound = steps.activation.value_bound(z, z_bound, Storage::F32, errors);
            if steps.multiplies {
                let factor = residual[i];
                let most = (y.abs() + y_bound) * factor.abs();
                expected.out.push(y * factor);
                let roundings = rounding(most, Storage::F32) + rounding(most, storage);
                expected.out_bounds.push(y_bound * factor.abs() + roundings);
                continue;
            }
            // Multiplied and added in f32, where the multiply-add may round twice, and rounded to
            // storage.
            let most = y.abs() + y_bound + added.abs();
            let roundings = rounding(added.abs(), Storage::F32)
                + rounding(most, Storage::F32)
                + rounding(most, storage);
            expected.out.push(y + added);
            expected.out_bounds.push(y_bound + roundings);
        }
        expected
    }
}

/// By each family's plans, the elements of an interleaved output are bit for bit those of the output in order.
fn interleaved(client: &Client, storage: Storage) -> Result<(), Failed> {
    const BATCH: [usize; 2] = [2, 3];
    // Rows in whole vectors, in pairs, and of an odd length; and few of them.
    for [m, n, k] in [[130, 64, 40], [66, 33, 8], [3, 34, 64]] {
        let batches: usize = BATCH.iter().product();
        let [outer, inner] = BATCH;
        // The right operand lies as the output is to lie.
        let element = dtype(storage);
        let strides = [inner * m * k, m * k, k, 1];
        let lhs = TensorLayout { shape: &[outer, inner, m, k], strides: &strides, dtype: element };
        let strides = [inner * k * n, n, inner * n, 1];
        let rhs = TensorLayout { shape: &[outer, inner, k, n], strides: &strides, dtype: element };
        let problem = MatmulProblem::new(lhs, rhs, element, F32Precision::Full)?;
        if !problem.has_interleaved_rhs() {
            return Err(format!("{problem:?} is not known to be of rows that take turns").into());
        }
        let [lhs, rhs, bias, residual] =
            [(1, batches * m * k), (2, batches * k * n), (3, n), (4, batches * m * n)]
                .map(|(seed, elements)| normal(seed, elements, 1.0, storage));
        let taking_turns = |in_order: &[f64]| -> Vec<f64> {
            let of_element = |at: usize| {
                let (row, column) = (at / n, at % n);
                let (token, head) = (row / inner, row % inner);
                let matrix = token / m * inner + head;
                in_order[(matrix * m + token % m) * n + column]
            };
            (0..in_order.len()).map(of_element).collect()
        };
        let in_order = Epilogue {
            alpha: 0.5,
            bias: Some(upload(client, &bias, storage)),
            activation: kernel::Activation::Silu,
            keep_preactivation: true,
            residual: Some(upload(client, &residual, storage)),
            ..Epilogue::default()
        };
        let residual = Some(upload(client, &taking_turns(&residual), storage));
        let in_turns = Epilogue { residual, interleaved: true, ..in_order.clone() };
        let [lhs, rhs] = [&lhs, &rhs].map(|numbers| upload(client, numbers, storage));
        // Each is compiled twice.
        let mut plans = plans(client, &problem);
        plans.dedup_by_key(|plan| (plan.family, plan.splits > 1));
        for plan in plans {
            let name = || format!("{m} by {n} by {k} by {plan}");
            let run = |epilogue| matmul_with(client, &problem, &plan, &lhs, &rhs, epilogue);
            if plan.splits > 1 {
                if run(&in_turns).is_ok() {
                    return Err(format!("{}: rows of splits take turns", name()).into());
                }
                continue;
            }
            let (expected, found) = (run(&in_order)?, run(&in_turns)?);
            for (expected, found) in [
                (Some(expected.out), Some(found.out)),
                (expected.preactivation, found.preactivation),
            ] {
                let (Some(expected), Some(found)) = (expected, found) else {
                    return Err(format!("{}: no preactivation", name()).into());
                };
                let expected = taking_turns(&download(client, expected, storage)?);
                let exact = vec![0.0; expected.len()];
                compare(&download(client, found, storage)?, &expected, &exact)
                    .map_err(|error| format!("{}: {error}", name()))?;
            }
        }
    }
    Ok(())
}

/// A step of training finds its overflow by the NaN that comes out: no activation may hide it.
fn nan(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let mut product = Product::new(case(33, 24, 40, RowMajor, RowMajor), storage);
    product.lhs[5 * 40 + 7] = f64::NAN;
    let problem = product.problem(storage)?;
    let [lhs, rhs] = product.upload(client);
    for function in Activation::ALL {
        let epilogue = Epilogue { activation: activation(function), ..Epilogue::default() };
        for plan in plans(client, &problem) {
            let output = matmul_with(client, &problem, &plan, &lhs, &rhs, &epilogue)?;
            let out = download(client, output.out, storage)?;
            let reached = |(i, y): (usize, &f64)| y.is_nan() == (i / 24 == 5);
            if !out.iter().enumerate().all(reached) {
                return Err(format!("{function:?} by {plan:?} moved a NaN or hid it").into());
            }
        }
    }
    Ok(())
}

/// How far off rounding a number of that magnitude to `storage` may be.
fn rounding(most: f64, storage: Storage) -> f64 {
    storage.unit_roundoff() * most + storage.underflow()
}

/// The negative control: a bias that is left out must not pass.
fn missing_bias(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F16;
    let product = Product::new(case(33, 72, 40, RowMajor, RowMajor), storage);
    let problem = product.problem(storage)?;
    let [lhs, rhs] = product.upload(client);
    let bias = normal(7, 72, 0.5, storage);
    let steps = Steps { bias: true, ..NONE };
    for plan in plans(client, &problem) {
        let output = matmul_with(client, &problem, &plan, &lhs, &rhs, &Epilogue::default())?;
        let in_f32 = precision(&plan, lhs.dtype, Storage::F32);
        let expected = Expected::of(&product, &steps, &bias, &[], in_f32, errors(client));
        let actual = download(client, output.out, storage)?;
        if let Ok(agreement) = compare(&actual, &expected.out, &expected.out_bounds) {
            return Err(format!("a missing bias went unseen by {plan:?}: {agreement:?}").into());
        }
    }
    Ok(())
}

/// The bias is as long as the product is wide, and rows of the output go on behind it.
fn widened_rows(client: &Client) -> Result<(), Failed> {
    const STRIDE: usize = 32;
    let storage = Storage::F32;
    // As many blocks of k as splits share, too.
    for k in [40, 2048] {
        let product = Product::new(case(33, 27, k, RowMajor, RowMajor), storage);
        let n = product.case.n;
        let mut spaced = vec![f64::NAN; k * STRIDE];
        for (i, value) in product.rhs.iter().enumerate() {
            spaced[i / n * STRIDE + i % n] = *value;
        }
        let layout = |shape, strides| TensorLayout { shape, strides, dtype: dtype(storage) };
        let problem = MatmulProblem::new(
            layout(&[33, k], &[k, 1]),
            layout(&[k, n], &[STRIDE, 1]),
            dtype(storage),
            F32Precision::Tf32,
        )?;
        let problem = problem.with_aligned_rows().ok_or("rows were not widened")?;
        let (lhs, rhs) = (upload(client, &product.lhs, storage), upload(client, &spaced, storage));
        let bias = normal(7, n, 1.0, storage);
        let epilogue =
            Epilogue { bias: Some(upload(client, &bias, storage)), ..Epilogue::default() };
        for plan in plans(client, &problem) {
            let output = matmul_with(client, &problem, &plan, &lhs, &rhs, &epilogue)?;
            let actual = download(client, output.out, storage)?;
            let kept: Vec<f64> =
                actual.chunks(problem.n).flat_map(|row| &row[..n]).copied().collect();
            let in_f32 = precision(&plan, lhs.dtype, Storage::F32);
            let steps = Steps { bias: true, ..NONE };
            let expected = Expected::of(&product, &steps, &bias, &[], in_f32, errors(client));
            compare(&kept, &expected.out, &expected.out_bounds)
                .map_err(|error| format!("{plan}: {error}"))?;
        }
    }
    Ok(())
}

/// Like C in BLAS: with beta = 0, NaN in the residual stays there.
fn unread_residual(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    for k in [72, 2048] {
        let product = Product::new(case(33, k, 40, RowMajor, RowMajor), storage);
        let problem = product.problem(storage)?;
        let [lhs, rhs] = product.upload(client);
        let nan = upload(client, &vec![f64::NAN; product.case.out_len()], storage);
        let residual = |beta| Epilogue { residual: Some(nan.clone()), beta, ..Epilogue::default() };
        for plan in plans(client, &problem) {
            let run = |epilogue| matmul_with(client, &problem, &plan, &lhs, &rhs, &epilogue);
            let without = download(client, run(Epilogue::default())?.out, storage)?;
            for beta in [0.0, -0.0] {
                if download(client, run(residual(beta))?.out, storage)? != without {
                    return Err(format!("{plan:?} read what is to be left out").into());
                }
            }
            // The control: any other factor lets it through.
            let out = download(client, run(residual(-0.5))?.out, storage)?;
            if !out.iter().all(|y| y.is_nan()) {
                return Err(format!("{plan:?} did not add the residual").into());
            }
        }
    }
    Ok(())
}

/// The negative control: a residual that is added whole must not pass for a half of it taken away.
fn whole_residual(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F16;
    let product = Product::new(case(33, 72, 40, RowMajor, RowMajor), storage);
    let problem = product.problem(storage)?;
    let [lhs, rhs] = product.upload(client);
    let residual = normal(8, product.case.out_len(), 1.0, storage);
    let epilogue =
        Epilogue { residual: Some(upload(client, &residual, storage)), ..Epilogue::default() };
    let steps = Steps { residual: true, beta: -0.5, ..NONE };
    for plan in plans(client, &problem) {
        let output = matmul_with(client, &problem, &plan, &lhs, &rhs, &epilogue)?;
        let in_f32 = precision(&plan, lhs.dtype, Storage::F32);
        let expected = Expected::of(&product, &steps, &[], &residual, in_f32, errors(client));
        let actual = download(client, output.out, storage)?;
        if let Ok(agreement) = compare(&actual, &expected.out, &expected.out_bounds) {
            return Err(format!("a whole residual passed in {plan:?}: {agreement:?}").into());
        }
    }
    Ok(())
}

/// Kernels read a residual 16 bytes at a time, which it need not begin at a multiple of.
fn displaced_residual(client: &Client) -> Result<(), Failed> {
    let product = Product::new(case(33, 72, 40, RowMajor, RowMajor), Storage::Bf16);
    [1, 2, 4, 8].into_iter().try_for_each(|in_front| {
        let steps = Steps { residual: true, in_front, beta: -0.5, ..NONE };
        check(client, &product, steps, Plans::All)
    })
}
