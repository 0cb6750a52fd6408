//! More sequences than a launch has cubes along a dimension, 65535 on CUDA and on WebGPU. Windows and axes
//! of images are such batches.

use super::{Uploaded, plans, precision, problem};
use blackburn_kernels::{
    Family, Pass,
    attention::{AttentionBlueprint, attention_backward_with, attention_forward_with},
};
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs, AttentionOptions, Roundings},
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::buffers::{download, dtype};
use blackburn_tests::{buffers::lse_of, on_cuda_with, on_device_with};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

/// Tensor cores take heads of 16 and more.
const CASE: AttentionCase = AttentionCase {
    name: "many sequences",
    batch: 65_600,
    heads_q: 1,
    heads_kv: 1,
    seq_q: 1,
    seq_kv: 2,
    head_dim: 16,
    options: AttentionOptions::PLAIN,
};

/// What a software device computes in seconds: its smallest tiles, over the shortest rows.
const SMALLEST: AttentionBlueprint = AttentionBlueprint {
    family: Family::Portable,
    tile_q: 16,
    tile_kv: 16,
    atomic: false,
    split: false,
    maps_mask: false,
};

pub(super) fn trials() -> Vec<Trial> {
    let name = |storage: Storage| {
        format!("attention::a_batch_may_be_larger_than_a_launch_in_{storage:?}").to_lowercase()
    };
    vec![
        Trial::ignorable_test(name(Storage::F32), || {
            on_device_with(dtype(Storage::F32), |client| {
                let case = AttentionCase { head_dim: 4, ..CASE };
                check(client, case, Storage::F32, |_| vec![SMALLEST])
            })
        }),
        Trial::ignorable_test(name(Storage::Bf16), || {
            on_cuda_with(dtype(Storage::Bf16), |client| {
                let problem = problem(&CASE, Storage::Bf16);
                let all = |pass| plans(client, &CASE, &problem, pass, Storage::Bf16);
                check(client, CASE, Storage::Bf16, all)
            })
        }),
    ]
}

fn check(
    client: &Client,
    case: AttentionCase,
    storage: Storage,
    plans: impl Fn(Pass) -> Vec<AttentionBlueprint>,
) -> Result<(), Failed> {
    let inputs = AttentionInputs::generate(&case, 1, storage);
    let uploaded = Uploaded::new(client, &inputs, storage);
    let precision = precision(client, storage).with_roundings(Roundings::Counted);
    let attention = inputs.attention(case);
    let (forward, backward) = (attention.forward(), attention.backward(&inputs.dout));
    let bounds = attention.forward_bounds(&forward, &precision);
    let gradient_bounds = attention.backward_bounds(&backward, &inputs.dout, &precision);
    let problem = problem(&case, storage);
    // Backward there may be more plans.
    let forward_plans = plans(Pass::Forward);
    for (forward_plan, backward_plan) in forward_plans.iter().cycle().zip(plans(Pass::Backward)) {
        let tensors = uploaded.tensors();
        let output = attention_forward_with(client, &problem, forward_plan, &tensors)?;
        let lse = lse_of(&download(client, output.lse.clone(), Storage::F32)?);
        compare(&lse, &forward.lse, &bounds.lse)?;
        compare(&download(client, output.out.clone(), storage)?, &forward.o, &bounds.o)?;
        let result = uploaded.result(&problem, &output);
        let gradients =
            attention_backward_with(client, &problem, &backward_plan, &tensors, &result, false)?;
        for (actual, expected, bounds) in [
            (gradients.dq, &backward.dq, &gradient_bounds.dq),
            (gradients.dk, &backward.dk, &gradient_bounds.dk),
            (gradients.dv, &backward.dv, &gradient_bounds.dv),
        ] {
            compare(&download(client, actual, storage)?, expected, bounds)?;
        }
    }
    Ok(())
}
