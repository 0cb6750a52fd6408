//! Dropout by a seed that the device combines with a key.

use super::{SMALL, Uploaded, integers, problem};
use blackburn_kernels::{
    Pass,
    attention::{
        AttentionBlueprint, AttentionInputs as Tensors, AttentionProblem, Dropout,
        attention_backward_with, attention_forward, attention_forward_with,
    },
    buffer::Buffer,
};
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs, AttentionOptions, dropout::Dropout as Given},
    storage::Storage,
};
use blackburn_tests::{
    buffers::{download, dtype},
    on_device_with,
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

const SEED: u64 = 0x0123_4567_89ab_cdef;
const KEY: u64 = 0xfedc_ba98_0246_8ace;

/// Heads of a size that every family takes.
const CASE: AttentionCase = AttentionCase {
    head_dim: 64,
    options: AttentionOptions {
        causal: true,
        dropout: Some(Given { rate: 0.3, seed: SEED }),
        ..AttentionOptions::PLAIN
    },
    ..SMALL
};

pub(super) fn trials() -> Vec<Trial> {
    let trial = |storage: Storage| {
        let name = format!("attention::a_key_is_combined_with_the_seed_in_{storage:?}");
        Trial::ignorable_test(name.to_lowercase(), move || {
            on_device_with(dtype(storage), |client| combined(client, storage))
        })
    };
    Storage::ALL.map(trial).into()
}

/// A seed and a key give the bits of the seed that they make together, by one plan of each family.
fn combined(client: &Client, storage: Storage) -> Result<(), Failed> {
    let uploaded = Uploaded::new(client, &AttentionInputs::generate(&CASE, 1, storage), storage);
    let key = integers(client, &[KEY as u32, (KEY >> 32) as u32]);
    let plain = (problem(&CASE, storage), uploaded.tensors());
    let keyed_problem =
        AttentionProblem { dropout: Some(Dropout { rate: 0.3, seed: SEED ^ KEY }), ..plain.0 };
    let keyed = (keyed_problem, Tensors { key: Some(&key), ..plain.1 });
    let unkeyed = (keyed_problem, plain.1);
    let plans = |pass: Pass| {
        let mut plans = AttentionBlueprint::candidates(&plain.0, pass, client);
        plans.dedup_by_key(|plan| (plan.family, plan.atomic));
        plans
    };
    let equal = |what: String, [a, b, other]: [Vec<Buffer>; 3]| {
        let numbers = |buffers: Vec<Buffer>| {
            let one = |buffer| download(client, buffer, storage);
            buffers.into_iter().map(one).collect::<Result<Vec<_>, _>>()
        };
        let [a, b, other] = [numbers(a)?, numbers(b)?, numbers(other)?];
        match (a == b, a == other) {
            (true, false) => Ok(()),
            (false, _) => Err(Failed::from(format!("{what}: the key changed the words"))),
            (_, true) => Err(Failed::from(format!("{what}: the seed made no difference"))),
        }
    };
    for plan in plans(Pass::Forward) {
        let out = |(problem, tensors): &(AttentionProblem, Tensors<'_>)| {
            Ok::<_, Failed>(vec![attention_forward_with(client, problem, &plan, tensors)?.out])
        };
        equal(format!("out by {plan}"), [out(&plain)?, out(&keyed)?, out(&unkeyed)?])?;
    }
    let output = attention_forward(client, &plain.0, &plain.1)?;
    for plan in plans(Pass::Backward) {
        let gradients = |(problem, tensors): &(AttentionProblem, Tensors<'_>)| {
            let result = uploaded.result(problem, &output);
            let all = attention_backward_with(client, problem, &plan, tensors, &result, false)?;
            // Sums in no order have other bits each time.
            let dq = plan.is_deterministic().then_some(all.dq);
            Ok::<_, Failed>(dq.into_iter().chain([all.dk, all.dv]).collect())
        };
        equal(
            format!("gradients by {plan}"),
            [gradients(&plain)?, gradients(&keyed)?, gradients(&unkeyed)?],
        )?;
    }
    Ok(())
}
