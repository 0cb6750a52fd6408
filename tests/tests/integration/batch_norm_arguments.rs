//! What batch normalization says to arguments that do not go together, and to what it does not serve.

use super::Case;
use blackburn_kernels::{
    KernelError,
    batch_norm::{
        BatchNormInputs, BatchNormProblem, BatchNormSaved, Statistics, batch_norm_apply,
        batch_norm_backward, batch_norm_statistics,
    },
    buffer::Buffer,
};
use blackburn_reference::storage::Storage;
use blackburn_tests::{
    buffers::{dtype, upload, upload_behind},
    on_device,
};
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind},
};
use libtest_mimic::{Failed, Trial};
use std::fmt::Debug;

pub(super) fn trials() -> Vec<Trial> {
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("batch_norm::{name}"), move || on_device(test))
    };
    vec![
        trial("bad_tensors_are_named", tensors),
        trial("bad_numbers_are_named", numbers),
        trial("what_is_not_served_is_declined", declined),
        trial("a_gradient_of_the_residual_needs_a_relu", residual_without_relu),
    ]
}

/// Whether `result` names that argument and what came.
fn is_named<T: Debug>(name: &str, result: Result<T, KernelError>) -> Result<(), Failed> {
    match result {
        Err(KernelError::InvalidProblem { argument, .. }) if argument == name => Ok(()),
        other => Err(format!("a wrong {name} gave {other:?}").into()),
    }
}

fn tensors(client: &Client) -> Result<(), Failed> {
    let case = Case { residual: true, relu: true, ..Case::plain(Storage::F32) };
    let (problem, values) = (case.problem(), case.numbers());
    let inputs = case.inputs(client, &values)?;
    let short = || upload(client, &values.x[1..], Storage::F32);
    let statistics = |mean: Buffer, variance: Buffer| Statistics { mean, variance };
    let Statistics { mean, variance } = inputs.statistics.clone();

    is_named("x", batch_norm_statistics(client, &problem, &short()))?;
    let apply = |inputs: BatchNormInputs| batch_norm_apply(client, &problem, &inputs);
    is_named("x", apply(BatchNormInputs { x: short(), ..inputs.clone() }))?;
    is_named("gamma", apply(BatchNormInputs { gamma: short(), ..inputs.clone() }))?;
    is_named("beta", apply(BatchNormInputs { beta: short(), ..inputs.clone() }))?;
    is_named("residual", apply(BatchNormInputs { residual: Some(short()), ..inputs.clone() }))?;
    let wrong = statistics(short(), variance.clone());
    is_named("mean", apply(BatchNormInputs { statistics: wrong, ..inputs.clone() }))?;
    // Mean and variance have one type.
    let wrong = statistics(mean.clone(), upload(client, &values.gamma, Storage::F16));
    is_named("variance", apply(BatchNormInputs { statistics: wrong, ..inputs.clone() }))?;

    let y = apply(inputs.clone())?;
    let BatchNormInputs { x, statistics: of, gamma, .. } = inputs;
    let saved = BatchNormSaved { x: x.clone(), statistics: of, gamma, y: Some(y) };
    let backward = |saved: BatchNormSaved, dy: &Buffer| {
        batch_norm_backward(client, &problem, &saved, dy, true)
    };
    is_named("x", backward(BatchNormSaved { x: short(), ..saved.clone() }, &x))?;
    is_named("dy", backward(saved.clone(), &short()))?;
    is_named("dy", backward(saved.clone(), &Buffer { dtype: dtype(Storage::F16), ..x.clone() }))?;
    is_named("y", backward(BatchNormSaved { y: Some(short()), ..saved.clone() }, &x))?;
    is_named("gamma", backward(BatchNormSaved { gamma: short(), ..saved.clone() }, &x))?;
    let wrong = statistics(mean, short());
    is_named("variance", backward(BatchNormSaved { statistics: wrong, ..saved }, &x))
}

fn numbers(client: &Client) -> Result<(), Failed> {
    let case = Case::plain(Storage::F32);
    let x = upload(client, &case.numbers().x, Storage::F32);
    let run = |problem| batch_norm_statistics(client, &problem, &x);
    let problem = case.problem();
    is_named("row_stride", run(BatchNormProblem { row_stride: 23, ..problem }))?;
    is_named("dy_stride", run(BatchNormProblem { dy_stride: 0, ..problem }))?;
    is_named("epsilon", run(BatchNormProblem { epsilon: -1e-5, ..problem }))?;
    // Rows further apart than x has memory for.
    is_named("x", run(BatchNormProblem { row_stride: 25, ..problem }))?;
    match run(BatchNormProblem { row_stride: 23, ..problem }).map_err(|error| error.to_string()) {
        Err(message)
            if ["batch_norm_statistics", "row_stride", "24", "23"]
                .iter()
                .all(|part| message.contains(part)) =>
        {
            Ok(())
        }
        other => Err(format!("rows that overlap gave {other:?}").into()),
    }
}

fn declined(client: &Client) -> Result<(), Failed> {
    let x = upload(client, &[1.0; 8], Storage::F32);
    let plain = BatchNormProblem::contiguous(2, 4, x.dtype, x.dtype, 1e-5);
    batch_norm_statistics(client, &plain, &x)?;
    for problem in [
        BatchNormProblem { rows: 0, ..plain },
        BatchNormProblem { channels: 0, row_stride: 0, dy_stride: 0, ..plain },
        BatchNormProblem { rows: 1 << 31, ..plain },
        BatchNormProblem { dtype: ElemType::Int(IntKind::I32), ..plain },
        BatchNormProblem { parameter: dtype(Storage::Bf16), ..plain },
    ] {
        match batch_norm_statistics(client, &problem, &x) {
            Err(KernelError::Unsupported { op: "batch_norm_statistics", .. }) => {}
            other => return Err(format!("{problem:?} gave {other:?}").into()),
        }
    }
    // Vectors cannot be loaded from there.
    let behind = upload_behind(client, 1, &[1.0; 8], Storage::F32);
    match batch_norm_statistics(client, &plain, &behind) {
        Err(KernelError::Unsupported { reason, .. }) if reason.starts_with("x begins") => Ok(()),
        other => Err(format!("an x that begins at byte 4 gave {other:?}").into()),
    }
}

fn residual_without_relu(client: &Client) -> Result<(), Failed> {
    let case = Case { residual: true, ..Case::plain(Storage::F32) };
    match case.run(client, &case.numbers())?.dresidual {
        None => Ok(()),
        Some(_) => Err("dy itself was written again".into()),
    }
}
