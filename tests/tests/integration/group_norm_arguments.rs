//! What group normalization says to arguments that do not go together, and to what it does not serve.

use super::Case;
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    group_norm::{
        Affine, Form, GroupNormInputs, GroupNormOutput, GroupNormProblem, GroupNormSaved,
        group_norm_backward, group_norm_forward,
    },
};
use blackburn_reference::storage::Storage;
use blackburn_tests::{
    buffers::{upload, upload_behind},
    on_device,
};
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind},
};
use libtest_mimic::{Failed, Trial};
use std::fmt::Debug;

const F32: Storage = Storage::F32;

pub(super) fn trials() -> Vec<Trial> {
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("group_norm::{name}"), move || on_device(test))
    };
    vec![trial("bad_tensors_are_named", tensors), trial("what_is_not_served_is_declined", declined)]
}

/// Whether `result` names that argument.
fn is_named<T: Debug>(name: &str, result: Result<T, KernelError>) -> Result<(), Failed> {
    match result {
        Err(KernelError::InvalidProblem { argument, .. }) if argument == name => Ok(()),
        other => Err(format!("a wrong {name} gave {other:?}").into()),
    }
}

fn tensors(client: &Client) -> Result<(), Failed> {
    let case = Case::plain(F32);
    let (problem, numbers) = (case.problem(), case.numbers());
    let inputs = case.inputs(client, &numbers);
    let short = || upload(client, &numbers.x[1..], F32);
    let forward = |inputs: GroupNormInputs| group_norm_forward(client, &problem, &inputs);
    is_named("x", forward(GroupNormInputs { x: short(), ..inputs.clone() }))?;
    let Some(Affine { gamma, beta }) = inputs.affine.clone() else { return Ok(()) };
    let with =
        |gamma, beta| GroupNormInputs { affine: Some(Affine { gamma, beta }), ..inputs.clone() };
    is_named("gamma", forward(with(short(), beta)))?;
    is_named("beta", forward(with(gamma.clone(), short())))?;
    let GroupNormOutput { mean, rstd, .. } = forward(inputs.clone())?;
    let saved = GroupNormSaved {
        x: inputs.x.clone(),
        form: Form::Input,
        mean: Some(mean),
        rstd,
        gamma: Some(gamma),
    };
    let dy = case.send(client, &numbers.dy, 0);
    let backward = |saved: GroupNormSaved, dy: &Buffer| {
        group_norm_backward(client, &problem, &saved, dy, true)
    };
    is_named("dy", backward(saved.clone(), &short()))?;
    is_named("x", backward(GroupNormSaved { x: short(), ..saved.clone() }, &dy))?;
    is_named("mean", backward(GroupNormSaved { mean: None, ..saved.clone() }, &dy))?;
    is_named("mean", backward(GroupNormSaved { mean: Some(short()), ..saved.clone() }, &dy))?;
    is_named("rstd", backward(GroupNormSaved { rstd: short(), ..saved.clone() }, &dy))?;
    is_named("gamma", backward(GroupNormSaved { gamma: Some(short()), ..saved }, &dy))
}

fn declined(client: &Client) -> Result<(), Failed> {
    let case = Case::plain(F32);
    let numbers = case.numbers();
    let inputs = case.inputs(client, &numbers);
    let plain = case.problem();
    let integers = ElemType::Int(IntKind::I32);
    let behind = upload_behind(client, 1, &numbers.x, F32);
    for (what, problem, x) in [
        ("no samples", GroupNormProblem { samples: 0, ..plain }, inputs.x.clone()),
        ("integers", GroupNormProblem { dtype: integers, ..plain }, inputs.x.clone()),
        ("a tensor that begins late", plain, behind),
    ] {
        let inputs = GroupNormInputs { x, ..inputs.clone() };
        match group_norm_forward(client, &problem, &inputs) {
            Err(KernelError::Unsupported { .. }) => {}
            other => return Err(format!("{what} gave {other:?}").into()),
        }
    }
    Ok(())
}
