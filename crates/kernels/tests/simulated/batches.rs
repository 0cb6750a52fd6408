//! Batches of matrix products of whole numbers, whose sums are exact.

use super::{
    Case,
    products::shares,
    tensors::{dtype, upload, whole_numbers, within},
};
use blackburn_kernels::{
    Family,
    matmul::{Epilogue, F32Precision, MatmulBlueprint, MatmulProblem, TensorLayout, matmul_with},
    recorder::{Gpu, Recorder},
};
use blackburn_reference::storage::Storage;
use libtest_mimic::Failed;

pub(super) fn cases() -> Vec<Case> {
    let case = |name, gpu, body| Case { name, gpu, quick: false, body };
    // With two multiprocessors a block goes on to another tile.
    let small = |gpu: Gpu| Gpu { multiprocessors: 2, ..gpu };
    let two_pairs = Gpu { multiprocessors: 4, ..Gpu::SM_100A };
    vec![
        case("matmul_tcgen05_by_pairs_of_batches_is_exact", two_pairs, shared),
        case("matmul_tcgen05_of_heads_is_exact", small(Gpu::SM_100A), |recorder| {
            heads(recorder, Family::Tcgen05)
        }),
        case("matmul_mma_of_heads_is_exact", small(Gpu::SM_120A), |recorder| {
            heads(recorder, Family::Mma)
        }),
        case("matmul_wgmma_of_heads_is_exact", small(Gpu::SM_90A), |recorder| {
            heads(recorder, Family::Wgmma)
        }),
    ]
}

/// Products of two matrices by one that both share, by every plan of pairs, with k whole and in two splits.
fn shared(recorder: &Recorder) -> Result<(), Failed> {
    const BATCHES: usize = 2;
    let storage = Storage::Bf16;
    let [m, n, k] = [147, 136, 584];
    let element = dtype(storage);
    let lhs = TensorLayout { shape: &[BATCHES, m, k], strides: &[m * k, k, 1], dtype: element };
    let rhs = TensorLayout { shape: &[BATCHES, k, n], strides: &[0, n, 1], dtype: element };
    let problem = MatmulProblem::new(lhs, rhs, element, F32Precision::Tf32)?;
    let [a, b] =
        [(1, BATCHES * m * k), (2, k * n)].map(|(seed, span)| whole_numbers(seed, span, 3));
    let mut expected = Vec::with_capacity(BATCHES * m * n);
    for row in a.chunks_exact(k) {
        for column in 0..n {
            let sum: f64 = row.iter().enumerate().map(|(at, a)| a * b[at * n + column]).sum();
            expected.push(storage.round(sum));
        }
    }
    let [lhs, rhs] = [&a, &b].map(|values| upload(recorder, values, storage));
    let mut plans = MatmulBlueprint::candidates(&problem, recorder.client());
    plans.retain(shares);
    if plans.is_empty() {
        return Err("no plan of pairs".into());
    }
    for plan in plans.into_iter().flat_map(|plan| [1, 2].map(|splits| (plan, splits))) {
        let plan = MatmulBlueprint { splits: plan.1, ..plan.0 };
        let epilogue = Epilogue::default();
        let output = matmul_with(recorder.client(), &problem, &plan, &lhs, &rhs, &epilogue)?;
        within(recorder, &output.out, storage, &expected, &vec![0.0; expected.len()])
            .map_err(|error| format!("{plan:?}: {}", error.message().unwrap_or_default()))?;
    }
    Ok(())
}

/// Heads by their weights, written beside each other as those they are of lie, by every whole plan of the family.
fn heads(recorder: &Recorder, family: Family) -> Result<(), Failed> {
    const BATCH: [usize; 2] = [2, 3];
    let storage = Storage::Bf16;
    let [outer, inner] = BATCH;
    let [m, n, k] = [147, 72, 136];
    let element = dtype(storage);
    let strides = [inner * m * k, m * k, k, 1];
    let lhs = TensorLayout { shape: &[outer, inner, m, k], strides: &strides, dtype: element };
    let strides = [inner * k * n, n, inner * n, 1];
    let rhs = TensorLayout { shape: &[outer, inner, k, n], strides: &strides, dtype: element };
    let problem = MatmulProblem::new(lhs, rhs, element, F32Precision::Tf32)?;
    let batches = outer * inner;
    let [a, b] = [(1, batches * m * k), (2, batches * k * n)]
        .map(|(seed, elements)| whole_numbers(seed, elements, 3));
    let mut expected = vec![0.0; batches * m * n];
    for matrix in 0..batches {
        let (sequence, head) = (matrix / inner, matrix % inner);
        for row in 0..m {
            for column in 0..n {
                let term = |at: usize| {
                    a[(matrix * m + row) * k + at]
                        * b[((sequence * k + at) * inner + head) * n + column]
                };
                let place = ((sequence * m + row) * inner + head) * n + column;
                expected[place] = storage.round((0..k).map(term).sum());
            }
        }
    }
    let [lhs, rhs] = [&a, &b].map(|values| upload(recorder, values, storage));
    let mut plans = MatmulBlueprint::candidates(&problem, recorder.client());
    plans.retain(|plan| plan.family == family && plan.splits == 1);
    if plans.is_empty() {
        return Err(format!("no plan by {family:?}").into());
    }
    for plan in plans {
        let epilogue = Epilogue { interleaved: true, ..Epilogue::default() };
        let output = matmul_with(recorder.client(), &problem, &plan, &lhs, &rhs, &epilogue)?;
        within(recorder, &output.out, storage, &expected, &vec![0.0; expected.len()])
            .map_err(|error| format!("{plan:?}: {}", error.message().unwrap_or_default()))?;
    }
    Ok(())
}
