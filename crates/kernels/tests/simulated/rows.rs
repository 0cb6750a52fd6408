//! Kernels that go through rows: GELU, normalization, cross-entropy.

use super::{
    Case,
    tensors::{download, dtype, upload, upload_integers, whole_numbers, within},
};
use blackburn_kernels::{
    Pass,
    column_sum::{ColumnSumProblem, column_squares, column_sum_scaled},
    cross_entropy::{
        CrossEntropyBlueprint, CrossEntropyProblem, cross_entropy_backward, cross_entropy_forward,
    },
    gelu::gelu_forward,
    layer_norm::{
        LayerNormBlueprint, LayerNormInputs, LayerNormProblem, LayerNormSaved, LayerNormWanted,
        Norm, layer_norm_backward, layer_norm_forward, variants::problems,
    },
    recorder::{Gpu, Recorder},
};
use blackburn_reference::{
    column_sum,
    cross_entropy::{CrossEntropy, Steps},
    gelu,
    layer_norm::{Arithmetic, LayerNorm, Norm as ReferenceNorm},
    random::normal,
    storage::Storage,
};
use cubecl::ir::ElemType;
use libtest_mimic::Failed;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for gpu in [Gpu::SM_80, Gpu::SM_90A] {
        let quick = gpu == Gpu::SM_80;
        cases.push(Case {
            name: "column_sums_are_within_bounds",
            // As many as two clusters, or three, have cubes for each of two sums.
            gpu: Gpu { multiprocessors: 48, ..gpu },
            quick: true,
            body: |recorder| {
                Storage::ALL.into_iter().try_for_each(|storage| column_sums(recorder, storage))
            },
        });
        // With one multiprocessor a block goes on to other rows.
        let gpu = Gpu { multiprocessors: 1, ..gpu };
        let mut add = |name, quick, body| cases.push(Case { name, gpu, quick, body });
        add("gelu_in_f32_is_within_bounds", true, gelu_of_numbers);
        add("layer_norm_of_odd_rows_is_within_bounds", quick, |recorder| {
            normalization(recorder, Rows::new(Norm::Layer, 769, Storage::Bf16))
        });
        add("layer_norm_of_wide_rows_is_within_bounds", false, |recorder| {
            normalization(recorder, Rows::new(Norm::Layer, 4096, Storage::F16))
        });
        add("norms_of_signs_are_exact", false, |recorder| {
            for norm in [Norm::Layer, Norm::Rms] {
                let rows = Rows { signs: true, ..Rows::new(norm, 1024, Storage::Bf16) };
                normalization(recorder, rows)?;
            }
            Ok(())
        });
        add("rms_norm_is_within_bounds", quick, |recorder| {
            normalization(recorder, Rows::new(Norm::Rms, 4096, Storage::F32))
        });
        add("cross_entropy_of_few_classes_is_within_bounds", quick, |recorder| {
            cross_entropy(recorder, 101, 0.1, Storage::Bf16)
        });
        add("cross_entropy_of_many_classes_is_within_bounds", false, |recorder| {
            cross_entropy(recorder, 50_257, 0.0, Storage::Bf16)
        });
        add("norms_of_every_variant_are_within_bounds", false, every_norm);
        add("cross_entropy_of_every_variant_is_within_bounds", false, |recorder| {
            for storage in Storage::ALL {
                for (classes, smoothing) in
                    [(50_304, 0.0), (50_304, 0.1), (50_257, 0.0), (100, 0.1)]
                {
                    cross_entropy(recorder, classes, smoothing, storage)?;
                }
            }
            Ok(())
        });
    }
    cases
}

/// Sums, and squared distances, that several cubes share: on the newer device those of a cluster, of which the last one has
/// columns for a few of its units.
fn column_sums(recorder: &Recorder, storage: Storage) -> Result<(), Failed> {
    const FACTOR: f32 = 0.5;
    let [outer, rows, columns] = [2, 600, 72];
    let strides = [rows * columns, columns, 1];
    let problem = ColumnSumProblem::new(&[outer, rows, columns], &strides, 1..2, dtype(storage))?;
    let x = normal(1, outer * rows * columns, 1.0, storage);
    let means = normal(2, outer * columns, 1.0, storage);
    let client = recorder.client();
    let squares: Vec<f64> = (0..x.len())
        .map(|i| (x[i] - means[i / (rows * columns) * columns + i % columns]).powi(2))
        .collect();
    let given = upload(recorder, &x, storage);
    let sums = column_sum_scaled(client, &problem, &given, FACTOR)?;
    let given_means = upload(recorder, &means, storage);
    let distances = column_squares(client, &problem, &given, &given_means, FACTOR)?;
    for (found, terms) in [(sums, x), (distances, squares)] {
        let sizes: Vec<f64> = terms.iter().map(|term| term.abs()).collect();
        let of = |terms: &[f64]| -> Vec<f64> {
            let sums = column_sum::column_sum(terms, outer, rows, columns);
            sums.into_iter().map(|sum| sum * f64::from(FACTOR)).collect()
        };
        let (expected, sizes) = (of(&terms), of(&sizes));
        // A square is rounded twice before it is added.
        let bounds = expected.iter().zip(sizes);
        let bounds: Vec<f64> =
            bounds.map(|(sum, size)| column_sum::bound(*sum, size, rows + 2, storage)).collect();
        within(recorder, &found, storage, &expected, &bounds)?;
    }
    Ok(())
}

/// The widths and types whose machine code is checked, with fewer rows.
fn every_norm(recorder: &Recorder) -> Result<(), Failed> {
    for problem in problems() {
        let storage = |asked: ElemType| {
            let found = Storage::ALL.into_iter().find(|storage| dtype(*storage) == asked);
            found.ok_or_else(|| Failed::from(format!("rows of {asked:?}")))
        };
        let rows = Rows {
            norm: problem.norm,
            width: problem.width,
            storage: storage(problem.dtype)?,
            parameter: storage(problem.parameter)?,
            residual: problem.residual,
            signs: false,
        };
        normalization(recorder, rows)
            .map_err(|error| format!("{rows:?}: {}", error.message().unwrap_or_default()))?;
    }
    Ok(())
}

/// Rows to normalize.
#[derive(Clone, Copy, Debug)]
struct Rows {
    norm: Norm,
    width: usize,
    storage: Storage,
    parameter: Storage,
    residual: bool,
    /// Each row holds as many 1 as -1, and nothing is added to its variance: every number is exact where rows are as
    /// wide as a power of two.
    signs: bool,
}

impl Rows {
    fn new(norm: Norm, width: usize, storage: Storage) -> Self {
        Self { norm, width, storage, parameter: storage, residual: false, signs: false }
    }
}

fn gelu_of_numbers(recorder: &Recorder) -> Result<(), Failed> {
    let storage = Storage::F32;
    let x = normal(1, 1025, 2.0, storage);
    let y = gelu_forward(recorder.client(), &upload(recorder, &x, storage))?;
    let expected: Vec<_> = x.iter().map(|x| gelu::gelu(*x)).collect();
    // CUDA's erf is off by two units in the last place at most.
    let error = 2.0 * f64::from(f32::EPSILON);
    let bounds: Vec<_> = x.iter().map(|x| gelu::forward_bound(*x, storage, error)).collect();
    within(recorder, &y, storage, &expected, &bounds)
}

/// Both passes, where a cube holds the rows.
fn normalization(recorder: &Recorder, asked: Rows) -> Result<(), Failed> {
    let Rows { norm, width, storage, parameter, residual, signs } = asked;
    let (rows, client) = (5, recorder.client());
    let bias = norm == Norm::Layer;
    let numbers = |seed, count, storage| match signs {
        true => whole_numbers(seed, count, 2),
        false => normal(seed, count, 1.0, storage),
    };
    let x = match signs {
        true => (0..rows * width)
            .map(|at| if (at * 7 + at / width) % 2 == 0 { 1.0 } else { -1.0 })
            .collect(),
        false => normal(1, rows * width, 1.0, storage),
    };
    let epsilon = if signs { 0.0 } else { 1e-5 };
    let gamma = numbers(2, width, parameter);
    let beta = numbers(3, width, parameter);
    let dy = numbers(4, rows * width, storage);
    let other = whole_numbers(5, rows * width, 2);
    let problem = LayerNormProblem {
        norm,
        rows,
        width,
        dtype: dtype(storage),
        parameter: dtype(parameter),
        bias,
        residual,
        parts: false,
        scaled: true,
        residual_bias: false,
        watched: false,
    };
    let how = |pass| {
        let additions = LayerNormBlueprint::plan(&problem, pass, client)?.additions();
        Ok::<_, Failed>(Arithmetic { rows: storage, parameters: parameter, additions })
    };
    let reference = LayerNorm {
        norm: if bias { ReferenceNorm::Layer } else { ReferenceNorm::Rms },
        gamma: &gamma,
        beta: bias.then_some(&beta),
        epsilon,
    };
    let inputs = LayerNormInputs {
        x: upload(recorder, &x, storage),
        residual: residual.then(|| upload(recorder, &other, storage)),
        residual_bias: None,
        dropout: None,
        gamma: upload(recorder, &gamma, parameter),
        beta: bias.then(|| upload(recorder, &beta, parameter)),
        watched: false,
    };
    let output = layer_norm_forward(client, norm, &inputs, epsilon)?;
    let LayerNormInputs { x: input, gamma: factors, .. } = inputs;
    // From what the device normalized: the rounding of the sum is no error of the norm.
    let input = output.sum.unwrap_or(input);
    let x = download(recorder, &input, storage)?;
    let bounds = reference.forward_bounds(&x, how(Pass::Forward)?);
    within(recorder, &output.y, storage, &reference.forward(&x), &bounds)?;
    let Ok(how) = how(Pass::Backward) else { return Ok(()) };
    let (mean, rstd) = (output.mean, output.rstd);
    let saved = LayerNormSaved { x: input, gamma: factors, mean, rstd, dropout: None };
    let gradient = upload(recorder, &dy, storage);
    let dsum = residual.then(|| upload(recorder, &other, storage));
    let wanted = LayerNormWanted { beta: bias, ..LayerNormWanted::default() };
    let gradients = layer_norm_backward(client, norm, &saved, &gradient, dsum.as_ref(), wanted)?;
    let added = residual.then_some(&other[..]);
    let expected = reference.backward(&x, &dy, added);
    let bounds = reference.backward_bounds(&x, &dy, added, how);
    within(recorder, &gradients.dx, storage, &expected.dx, &bounds.dx)?;
    within(recorder, &gradients.dgamma, parameter, &expected.dgamma, &bounds.dgamma)?;
    match gradients.dbeta {
        Some(dbeta) => within(recorder, &dbeta, parameter, &expected.dbeta, &bounds.dbeta),
        None => Ok(()),
    }
}

/// Both passes; one row is ignored.
fn cross_entropy(
    recorder: &Recorder,
    classes: usize,
    smoothing: f32,
    storage: Storage,
) -> Result<(), Failed> {
    const IGNORED: i32 = -100;
    let (rows, client) = (6, recorder.client());
    let problem = CrossEntropyProblem {
        rows,
        classes,
        row_stride: classes,
        dtype: dtype(storage),
        ignore_index: Some(IGNORED),
        smoothing,
    };
    let logits = normal(1, rows * classes, 2.0, storage);
    let grads = normal(2, rows, 1.0, Storage::F32);
    let targets: Vec<i32> = (0..rows)
        .map(|row| if row == 4 { IGNORED } else { (row * 7919 % classes) as i32 })
        .collect();
    let given = upload(recorder, &logits, storage);
    let goals = upload_integers(recorder, &targets);
    let plan = CrossEntropyBlueprint::plan(&problem, &given, client);
    let steps = Steps { additions: plan.additions(classes), rescales: plan.rescales(classes) };
    let output = cross_entropy_forward(client, &problem, &given, &goals)?;
    let (mut losses, mut loss_bounds) = (Vec::new(), Vec::new());
    let (mut expected, mut bounds) = (Vec::new(), Vec::new());
    for ((row, target), grad) in logits.chunks(classes).zip(&targets).zip(&grads) {
        let target = usize::try_from(*target).ok();
        let asked = CrossEntropy { target, smoothing: f64::from(smoothing) };
        losses.push(asked.loss(row));
        loss_bounds.push(asked.loss_bound(row, steps));
        expected.extend(asked.gradient(row, *grad));
        bounds.extend(asked.gradient_bounds(row, *grad, steps, storage));
    }
    within(recorder, &output.loss, Storage::F32, &losses, &loss_bounds)?;
    let grads = upload(recorder, &grads, Storage::F32);
    let dlogits =
        cross_entropy_backward(client, &problem, given, &goals, &output.lse, &grads, None)?;
    within(recorder, &dlogits, storage, &expected, &bounds)
}
