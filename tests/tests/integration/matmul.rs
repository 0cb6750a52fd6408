//! Matrix products: every plan that the device offers, against f64.

#[path = "matmul_epilogue.rs"]
mod epilogue;
#[path = "matmul_tune.rs"]
mod tune;

use blackburn_kernels::{
    Family, KernelError,
    buffer::Buffer,
    matmul::{
        Epilogue, F32Precision, MatmulBlueprint, MatmulProblem, TensorLayout, matmul, matmul_with,
    },
};
use blackburn_reference::{
    matmul as reference,
    matmul::{
        Element,
        Layout::{self, ColumnMajor, RowMajor},
        MatmulCase, MatmulPrecision, Sums, element, spot_check_indices,
    },
    random::normal,
    shapes,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::{on_cuda_with, on_device, on_device_with};
use cubecl::{client::Client, ir::ElemType};
use libtest_mimic::{Failed, Trial};

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let mut add = |what: &str, test: fn(&Client, Storage) -> Result<(), Failed>| {
            let name = format!("matmul::{what}_in_{storage:?}").to_lowercase();
            trials.push(Trial::ignorable_test(name, move || {
                on_device_with(dtype(storage), |client| test(client, storage))
            }));
        };
        add("ragged_shapes_are_within_bounds", ragged);
        add("batches_are_within_bounds", batched);
        add("all_layouts_are_within_bounds", layouts);
        add("few_rows_are_within_bounds", few_rows);
        add("long_sums_are_within_bounds", long);
        add("a_lost_block_of_a_long_sum_is_caught", lost_block);
        let name = format!("matmul::layers_of_language_models_are_within_bounds_in_{storage:?}");
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_cuda_with(dtype(storage), |client| layers(client, storage))
        }));
    }
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("matmul::{name}"), move || on_device(test))
    };
    trials.extend([
        trial("f16_operands_give_f32_results", wide_output),
        trial("f32_operands_can_be_multiplied_in_full", full_precision),
        trial("a_matrix_serves_all_batches", broadcast),
        trial("heads_that_were_swapped_are_multiplied_in_place", swapped_heads),
        trial("padded_rows_are_stepped_over", padded),
        trial("infinity_reaches_its_row_and_no_other", infinity),
        trial("repeated_runs_give_the_same_bits", repeats),
        trial("a_dropped_last_term_is_caught", dropped_term),
        trial("bad_arguments_are_named", bad_arguments),
    ]);
    trials.extend(epilogue::trials());
    trials.extend(tune::trials());
    trials
}

/// The plans to test a problem with: all that its device has.
fn plans(client: &Client, problem: &MatmulProblem) -> Vec<MatmulBlueprint> {
    MatmulBlueprint::candidates(problem, client)
}

/// What the plan's instructions compute in.
fn precision(plan: &MatmulBlueprint, operands: ElemType, out: Storage) -> MatmulPrecision {
    match plan.family {
        Family::Portable => MatmulPrecision::exact(out),
        _ if operands == dtype(Storage::F32) => MatmulPrecision::tf32().with_out(out),
        _ => MatmulPrecision::tensor_core(out),
    }
}

/// A product with its operands, as they lie in memory, and the exact result.
struct Product {
    case: MatmulCase,
    lhs: Vec<f64>,
    rhs: Vec<f64>,
    storage: Storage,
    expected: Vec<f64>,
    /// The product of the absolute values.
    magnitudes: Vec<f64>,
    /// The product of the squares.
    squares: Vec<f64>,
}

impl Product {
    fn new(case: MatmulCase, storage: Storage) -> Self {
        let lhs = normal(1 + case.k as u64, case.lhs_len(), 1.0, storage);
        let rhs = normal(2 + case.n as u64, case.rhs_len(), 1.0, storage);
        let expected = reference::matmul(&case, &lhs, &rhs);
        let magnitudes = reference::magnitudes(&case, &lhs, &rhs);
        let squares = reference::squares(&case, &lhs, &rhs);
        Self { case, lhs, rhs, storage, expected, magnitudes, squares }
    }

    /// Some of the elements.
    fn at(self, indices: &[usize]) -> Self {
        let elements: Vec<Element> =
            indices.iter().map(|at| element(&self.case, &self.lhs, &self.rhs, *at)).collect();
        let each = |of: fn(&Element) -> f64| elements.iter().map(of).collect();
        Self {
            expected: each(|element| element.value),
            magnitudes: each(|element| element.magnitude),
            squares: each(|element| element.squares),
            ..self
        }
    }

    fn problem(&self, out: Storage) -> Result<MatmulProblem, KernelError> {
        let MatmulCase { batch, m, n, k, .. } = self.case;
        let layout = |shape, strides| TensorLayout { shape, strides, dtype: dtype(self.storage) };
        MatmulProblem::new(
            layout(&[batch, m, k], &self.case.lhs_strides()),
            layout(&[batch, k, n], &self.case.rhs_strides()),
            dtype(out),
            F32Precision::Tf32,
        )
    }

    fn upload(&self, client: &Client) -> [Buffer; 2] {
        [&self.lhs, &self.rhs].map(|operand| upload(client, operand, self.storage))
    }

    /// The exact result, whose terms have random signs.
    fn sums(&self) -> Sums<'_> {
        let Self { expected, magnitudes, squares, .. } = self;
        Sums { values: expected, magnitudes, squares, k: self.case.k }
    }

    /// Runs every plan, and holds its result against the exact one.
    fn check(&self, client: &Client, out: Storage) -> Result<(), Failed> {
        self.check_by(client, out, |_| true)
    }

    /// As [`check`](Self::check), by the plans that are `taken`.
    fn check_by(
        &self,
        client: &Client,
        out: Storage,
        taken: fn(&MatmulBlueprint) -> bool,
    ) -> Result<(), Failed> {
        let problem = self.problem(out)?;
        let [lhs, rhs] = self.upload(client);
        for plan in plans(client, &problem).into_iter().filter(taken) {
            let output = matmul_with(client, &problem, &plan, &lhs, &rhs, &Epilogue::default())?;
            let actual = download(client, output.out, out)?;
            precision(&plan, lhs.dtype, out)
                .check_random(&actual, &self.sums())
                .map_err(|error| format!("{} by {plan:?}: {error}", self.case))?;
        }
        Ok(())
    }
}

fn check_all(
    client: &Client,
    storage: Storage,
    cases: impl IntoIterator<Item = MatmulCase>,
) -> Result<(), Failed> {
    cases.into_iter().try_for_each(|case| Product::new(case, storage).check(client, storage))
}

fn ragged(client: &Client, storage: Storage) -> Result<(), Failed> {
    check_all(client, storage, shapes::tiny().into_iter().chain(shapes::ragged()))
}

fn batched(client: &Client, storage: Storage) -> Result<(), Failed> {
    check_all(client, storage, shapes::batched())
}

fn layouts(client: &Client, storage: Storage) -> Result<(), Failed> {
    // Rows of whole vectors, and rows that are not.
    for (m, n, k) in [(130, 136, 72), (65, 67, 69)] {
        for lhs in [RowMajor, ColumnMajor] {
            for rhs in [RowMajor, ColumnMajor] {
                check_all(client, storage, [case(m, n, k, lhs, rhs)])?;
            }
        }
    }
    Ok(())
}

/// Up to the most rows whose sums units share, and one more; columns and terms of whole vectors and others. Plans of
/// tensor cores would take minutes to compile and have tests of their own.
fn few_rows(client: &Client, storage: Storage) -> Result<(), Failed> {
    let check = |case| {
        let ordinary = |plan: &MatmulBlueprint| plan.family == Family::Portable;
        Product::new(case, storage).check_by(client, storage, ordinary)
    };
    for (m, n, k) in
        [(1, 200, 1032), (2, 17, 67), (3, 64, 96), (5, 41, 520), (8, 136, 72), (9, 16, 40)]
    {
        for lhs in [RowMajor, ColumnMajor] {
            for rhs in [RowMajor, ColumnMajor] {
                check(case(m, n, k, lhs, rhs))?;
            }
        }
    }
    let batched = MatmulCase { batch: 3, ..case(2, 40, 72, RowMajor, ColumnMajor) };
    check(batched)?;
    check(MatmulCase { rhs: RowMajor, ..batched })
}

fn case(m: usize, n: usize, k: usize, lhs: Layout, rhs: Layout) -> MatmulCase {
    MatmulCase { name: "test", batch: 1, m, n, k, lhs, rhs }
}

/// Sizes as they are trained with, by the plan that is chosen for them, at some elements.
fn layers(client: &Client, storage: Storage) -> Result<(), Failed> {
    const ELEMENTS: usize = 2000;

    for case in shapes::gpt2_layers(1024).into_iter().chain(shapes::llama_like_layers(512)) {
        let product = Product {
            case,
            lhs: normal(1, case.lhs_len(), 1.0, storage),
            rhs: normal(2, case.rhs_len(), 1.0, storage),
            storage,
            expected: Vec::new(),
            magnitudes: Vec::new(),
            squares: Vec::new(),
        };
        let problem = product.problem(storage)?;
        let [lhs, rhs] = product.upload(client);
        let output = matmul(client, &problem, &lhs, &rhs, &Epilogue::default())?;
        let output = download(client, output.out, storage)?;
        let indices = spot_check_indices(&case, ELEMENTS, 3);
        let product = product.at(&indices);
        let actual: Vec<f64> = indices.iter().map(|at| output[*at]).collect();
        loosest(storage)
            .check_random(&actual, &product.sums())
            .map_err(|error| format!("{case}: {error}"))?;
    }
    Ok(())
}

/// The loosest of the families: the one that is chosen is not told.
fn loosest(storage: Storage) -> MatmulPrecision {
    match storage {
        Storage::F32 => MatmulPrecision::tf32(),
        Storage::F16 | Storage::Bf16 => MatmulPrecision::tensor_core(storage),
    }
}

/// Long sums, by every plan.
fn long(client: &Client, storage: Storage) -> Result<(), Failed> {
    check_all(client, storage, [case(33, 40, LONG, RowMajor, RowMajor)])
}

/// Terms of a long sum on a software device.
const LONG: usize = 4096;

/// The negative control for long sums: 64 terms that are lost, of 14336 on tensor cores. The worst case of the
/// sum's roundings has room for them.
fn lost_block(client: &Client, storage: Storage) -> Result<(), Failed> {
    const BLOCK: usize = 64;
    let k = if client.name() == "cuda" { 14_336 } else { LONG };
    let product = Product::new(case(33, 40, k, RowMajor, RowMajor), storage);
    let problem = product.problem(storage)?;
    let [lhs, rhs] = product.upload(client);
    let short = MatmulProblem { k: k - BLOCK, ..problem };
    for plan in plans(client, &short) {
        let output = matmul_with(client, &short, &plan, &lhs, &rhs, &Epilogue::default())?;
        let actual = download(client, output.out, storage)?;
        if loosest(storage).check_random(&actual, &product.sums()).is_ok() {
            return Err(format!("{plan:?} without a block of {BLOCK} terms went unseen").into());
        }
    }
    Ok(())
}

fn wide_output(client: &Client) -> Result<(), Failed> {
    for shape in [case(65, 72, 40, RowMajor, RowMajor), case(17, 31, 127, RowMajor, ColumnMajor)] {
        Product::new(shape, Storage::F16).check(client, Storage::F32)?;
    }
    Ok(())
}

/// Every plan of the problem has f32's own error, not TF32's.
fn full_precision(client: &Client) -> Result<(), Failed> {
    let product = Product::new(case(65, 72, 200, RowMajor, RowMajor), Storage::F32);
    let problem =
        MatmulProblem { f32_precision: F32Precision::Full, ..product.problem(Storage::F32)? };
    let [lhs, rhs] = product.upload(client);
    let bounds = MatmulPrecision::exact(Storage::F32).bounds(
        &product.expected,
        &product.magnitudes,
        product.case.k,
    );
    for plan in plans(client, &problem) {
        let output = matmul_with(client, &problem, &plan, &lhs, &rhs, &Epilogue::default())?;
        compare(&download(client, output.out, Storage::F32)?, &product.expected, &bounds)
            .map_err(|error| format!("{plan:?}: {error}"))?;
    }
    Ok(())
}

/// Runs every plan of the product of those tensors, and holds each against one product a batch.
/// `matrices` says where each batch's operands begin.
fn check_views(
    client: &Client,
    single: MatmulCase,
    [lhs, rhs]: [(&[usize], &[usize], &[f64]); 2],
    matrices: &[[usize; 2]],
) -> Result<(), Failed> {
    let storage = Storage::F32;
    let layout = |(shape, strides, _)| TensorLayout { shape, strides, dtype: dtype(storage) };
    let problem = MatmulProblem::new(layout(lhs), layout(rhs), dtype(storage), F32Precision::Tf32)?;
    let (mut expected, mut magnitudes) = (Vec::new(), Vec::new());
    for [l, r] in matrices {
        // A copy of the matrix without what lies between its rows.
        let dense = |(shape, strides, data): (&[usize], &[usize], &[f64]), start: usize| {
            let rank = shape.len();
            let at = |i: usize, j: usize| start + i * strides[rank - 2] + j * strides[rank - 1];
            let [rows, columns] = [shape[rank - 2], shape[rank - 1]];
            (0..rows * columns).map(|x| data[at(x / columns, x % columns)]).collect::<Vec<_>>()
        };
        let (l, r) = (dense(lhs, *l), dense(rhs, *r));
        expected.extend(reference::matmul(&single, &l, &r));
        magnitudes.extend(reference::magnitudes(&single, &l, &r));
    }
    let [l, r] = [lhs.2, rhs.2].map(|data| upload(client, data, storage));
    for plan in plans(client, &problem) {
        let output = matmul_with(client, &problem, &plan, &l, &r, &Epilogue::default())?;
        let bounds = precision(&plan, l.dtype, storage).bounds(&expected, &magnitudes, single.k);
        compare(&download(client, output.out, storage)?, &expected, &bounds)
            .map_err(|error| format!("{plan:?}: {error}"))?;
    }
    Ok(())
}

fn broadcast(client: &Client) -> Result<(), Failed> {
    let single = case(33, 40, 24, RowMajor, RowMajor);
    let one = normal(1, single.lhs_len(), 1.0, Storage::F32);
    let three = normal(2, 3 * single.rhs_len(), 1.0, Storage::F32);
    let lhs: (&[usize], &[usize], &[f64]) = (&[1, 33, 24], &[792, 24, 1], &one);
    let rhs: (&[usize], &[usize], &[f64]) = (&[3, 24, 40], &[960, 40, 1], &three);
    check_views(client, single, [lhs, rhs], &[[0, 0], [0, 960], [0, 1920]])?;

    // The other way round; the rows of the left operand become one long matrix.
    let single = case(24, 24, 40, RowMajor, RowMajor);
    let one = normal(3, single.rhs_len(), 1.0, Storage::F32);
    let lhs: (&[usize], &[usize], &[f64]) = (&[3, 24, 40], &[960, 40, 1], &three);
    let rhs: (&[usize], &[usize], &[f64]) = (&[1, 40, 24], &[960, 24, 1], &one);
    check_views(client, single, [lhs, rhs], &[[0, 0], [960, 0], [1920, 0]])
}

/// Queries and keys as attention has them: [2, 17 tokens, 3 heads, 8] looked at as [2, 3, 17, 8].
fn swapped_heads(client: &Client) -> Result<(), Failed> {
    let data = normal(1, 2 * 17 * 3 * 8, 1.0, Storage::F32);
    let q: (&[usize], &[usize], &[f64]) = (&[2, 3, 17, 8], &[408, 8, 24, 1], &data);
    let k: (&[usize], &[usize], &[f64]) = (&[2, 3, 8, 17], &[408, 8, 1, 24], &data);
    let starts: Vec<[usize; 2]> =
        (0..6).map(|head| head / 3 * 408 + head % 3 * 8).map(|start| [start; 2]).collect();
    check_views(client, case(17, 17, 8, RowMajor, RowMajor), [q, k], &starts)
}

fn padded(client: &Client) -> Result<(), Failed> {
    // What lies between the rows would show.
    let rows = |seed, rows: usize, columns: usize, stride: usize| {
        let mut data = vec![f64::NAN; rows * stride];
        for (i, value) in normal(seed, rows * columns, 1.0, Storage::F32).into_iter().enumerate() {
            data[i / columns * stride + i % columns] = value;
        }
        data
    };
    for [lhs_stride, rhs_stride] in [[68, 80], [67, 73]] {
        let (l, r) = (rows(1, 40, 65, lhs_stride), rows(2, 65, 72, rhs_stride));
        let lhs: (&[usize], &[usize], &[f64]) = (&[40, 65], &[lhs_stride, 1], &l);
        let rhs: (&[usize], &[usize], &[f64]) = (&[65, 72], &[rhs_stride, 1], &r);
        check_views(client, case(40, 72, 65, RowMajor, RowMajor), [lhs, rhs], &[[0, 0]])?;
    }
    // The first 9 of 12 rows of each of three matrices, which share the right operand.
    let l = normal(3, 3 * 12 * 24, 1.0, Storage::F32);
    let r = normal(4, 24 * 40, 1.0, Storage::F32);
    let lhs: (&[usize], &[usize], &[f64]) = (&[3, 9, 24], &[12 * 24, 24, 1], &l);
    let rhs: (&[usize], &[usize], &[f64]) = (&[1, 24, 40], &[960, 40, 1], &r);
    let matrices = [[0, 0], [12 * 24, 0], [2 * 12 * 24, 0]];
    check_views(client, case(9, 40, 24, RowMajor, RowMajor), [lhs, rhs], &matrices)
}

fn infinity(client: &Client) -> Result<(), Failed> {
    let mut product = Product::new(case(33, 24, 40, RowMajor, RowMajor), Storage::F32);
    product.lhs[5 * 40 + 39] = f64::INFINITY;
    product.expected = reference::matmul(&product.case, &product.lhs, &product.rhs);
    // Bounds of the row are infinite, and not looked at: infinity is compared as it is.
    product.check(client, Storage::F32)
}

fn repeats(client: &Client) -> Result<(), Failed> {
    let product = Product::new(case(65, 40, 1000, RowMajor, ColumnMajor), Storage::F32);
    let problem = product.problem(Storage::F32)?;
    let [lhs, rhs] = product.upload(client);
    for plan in plans(client, &problem) {
        let run = || -> Result<Vec<f64>, Failed> {
            let output = matmul_with(client, &problem, &plan, &lhs, &rhs, &Epilogue::default())?;
            Ok(download(client, output.out, Storage::F32)?)
        };
        let first = run()?;
        for _ in 0..3 {
            if run()? != first {
                return Err(format!("two runs of {plan:?} on the same input differ").into());
            }
        }
    }
    Ok(())
}

/// The negative control: a product that stops before the last k must not pass.
fn dropped_term(client: &Client) -> Result<(), Failed> {
    let product = Product::new(case(65, 40, 200, RowMajor, RowMajor), Storage::F32);
    let problem = product.problem(Storage::F32)?;
    let short = MatmulProblem { k: 199, ..problem };
    let [lhs, rhs] = product.upload(client);
    for plan in plans(client, &short) {
        let output = matmul_with(client, &short, &plan, &lhs, &rhs, &Epilogue::default())?;
        let bounds = precision(&plan, lhs.dtype, Storage::F32).bounds(
            &product.expected,
            &product.magnitudes,
            product.case.k,
        );
        let actual = download(client, output.out, Storage::F32)?;
        if let Ok(agreement) = compare(&actual, &product.expected, &bounds) {
            let message = format!("{plan:?} without its last term went unseen: {agreement:?}");
            return Err(message.into());
        }
    }
    Ok(())
}

fn bad_arguments(client: &Client) -> Result<(), Failed> {
    let product = Product::new(case(4, 6, 5, RowMajor, RowMajor), Storage::F32);
    let problem = product.problem(Storage::F32)?;
    let [lhs, rhs] = product.upload(client);
    let zeros = |elements: usize, storage| upload(client, &vec![0.0; elements], storage);
    let refused = |name: &str, lhs: &Buffer, rhs: &Buffer, epilogue: Epilogue| match matmul(
        client, &problem, lhs, rhs, &epilogue,
    ) {
        Err(KernelError::InvalidProblem { argument, .. }) if argument == name => Ok(()),
        other => Err(Failed::from(format!("a bad {name} gave {other:?}"))),
    };
    let none = Epilogue::default;
    refused("lhs", &zeros(19, Storage::F32), &rhs, none())?;
    refused("rhs", &lhs, &zeros(29, Storage::F32), none())?;
    refused("lhs", &zeros(20, Storage::F16), &rhs, none())?;
    refused("rhs", &lhs, &zeros(30, Storage::F16), none())?;
    let bias = |buffer| Epilogue { bias: Some(buffer), ..none() };
    refused("bias", &lhs, &rhs, bias(zeros(5, Storage::F32)))?;
    refused("bias", &lhs, &rhs, bias(zeros(6, Storage::F16)))?;
    let residual = |buffer| Epilogue { residual: Some(buffer), ..none() };
    refused("residual", &lhs, &rhs, residual(zeros(23, Storage::F32)))?;
    refused("residual", &lhs, &rhs, residual(zeros(24, Storage::F16)))?;
    let scales = [zeros(1, Storage::F32), zeros(1, Storage::F16)];
    refused("scales", &lhs, &rhs, Epilogue { scales: Some(scales), ..none() })?;

    // Shapes that do not multiply are refused before there are buffers.
    let layout = |shape, strides| TensorLayout { shape, strides, dtype: dtype(Storage::F32) };
    let mismatched = MatmulProblem::new(
        layout(&[4, 5], &[5, 1]),
        layout(&[6, 7], &[7, 1]),
        dtype(Storage::F32),
        F32Precision::Tf32,
    );
    match mismatched {
        Err(KernelError::InvalidProblem { argument: "rhs", .. }) => Ok(()),
        other => Err(format!("4x5 by 6x7 gave {other:?}").into()),
    }
}
