//! Maps of masks: tiles that a mask hides are left out.

use super::{F32, Uploaded, problem};
use blackburn_kernels::{
    Pass,
    attention::{
        AttentionBlueprint, AttentionInputs as Tensors, attention_backward_with,
        attention_forward_with,
    },
    buffer::Buffer,
};
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs, AttentionOptions, PairShape},
    storage::Storage,
};
use blackburn_tests::{
    buffers::{download, dtype},
    on_device_with,
};
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
};
use libtest_mimic::{Failed, Trial};
use std::iter::repeat_n;

/// As many queries and keys as the largest tile of any family, in each of two documents.
const DOCUMENT: usize = 256;

const CASE: AttentionCase = AttentionCase {
    name: "two documents",
    batch: 1,
    heads_q: 2,
    heads_kv: 1,
    seq_q: 2 * DOCUMENT,
    seq_kv: 2 * DOCUMENT,
    head_dim: 64,
    options: AttentionOptions { mask: Some(PairShape::Shared), ..AttentionOptions::PLAIN },
};

pub(super) fn trials() -> Vec<Trial> {
    [F32, Storage::Bf16]
        .map(|storage| {
            let name = format!("attention::tiles_that_a_mask_hides_are_left_out_in_{storage:?}");
            Trial::ignorable_test(name.to_lowercase(), move || {
                on_device_with(dtype(storage), |client| left_out(client, storage))
            })
        })
        .into()
}

/// Values of one document, and gradients of its output, are NaN. Zero times NaN is NaN: a plan that computed pairs of
/// both documents, and then left them out, would have NaN in results of the other one.
fn left_out(client: &Client, storage: Storage) -> Result<(), Failed> {
    let inputs = AttentionInputs::generate(&CASE, 1, storage);
    let is_second = |place: usize| place >= DOCUMENT;
    let mask = (0..CASE.seq_q * CASE.seq_kv)
        .map(|pair| is_second(pair / CASE.seq_kv) != is_second(pair % CASE.seq_kv));
    let masks: Vec<Buffer> =
        word_sizes(client).iter().map(|bytes| integers(client, mask.clone(), *bytes)).collect();
    for spoilt in [0, DOCUMENT] {
        let mut inputs = AttentionInputs { mask: None, ..inputs.clone() };
        let rows = spoilt..spoilt + DOCUMENT;
        spoil(&mut inputs.v, 1, rows.clone());
        spoil(&mut inputs.dout, CASE.heads_q, rows.clone());
        let uploaded = Uploaded::new(client, &inputs, storage);
        for mask in &masks {
            let tensors = Tensors { mask: Some(mask), ..uploaded.tensors() };
            let whole = DOCUMENT - spoilt;
            check(client, storage, &uploaded, &tensors, whole)
                .map_err(|error| named(spoilt, mask, &error))?;
        }
    }
    Ok(())
}

fn named(spoilt: usize, mask: &Buffer, error: &Failed) -> Failed {
    let error = error.message().unwrap_or_default();
    format!("NaN from {spoilt} on, a mask of {:?}: {error}", mask.dtype).into()
}

/// All plans that map masks have numbers in the document that begins at `whole`.
fn check(
    client: &Client,
    storage: Storage,
    uploaded: &Uploaded,
    tensors: &Tensors<'_>,
    whole: usize,
) -> Result<(), Failed> {
    let problem = problem(&CASE, storage);
    let plans = |pass: Pass| {
        let plans = AttentionBlueprint::candidates(&problem, pass, client);
        plans.into_iter().filter(|plan| plan.maps_mask).collect::<Vec<_>>()
    };
    let (forward, backward) = (plans(Pass::Forward), plans(Pass::Backward));
    if forward.is_empty() || backward.is_empty() {
        return Err("no plan maps masks".into());
    }
    let mut last = None;
    for plan in forward {
        let output = attention_forward_with(client, &problem, &plan, tensors)?;
        is_whole(client, storage, "out", &plan, output.out.clone(), whole)?;
        last = Some(output);
    }
    let Some(output) = last else { return Err("no plan".into()) };
    let result = uploaded.result(&problem, &output);
    for plan in backward {
        let gradients = attention_backward_with(client, &problem, &plan, tensors, &result, false)?;
        for (name, gradient) in [("dq", gradients.dq), ("dk", gradients.dk), ("dv", gradients.dv)] {
            is_whole(client, storage, name, &plan, gradient, whole)?;
        }
    }
    Ok(())
}

fn is_whole(
    client: &Client,
    storage: Storage,
    name: &str,
    plan: &AttentionBlueprint,
    tensor: Buffer,
    whole: usize,
) -> Result<(), Failed> {
    let values = download(client, tensor, storage)?;
    let width = CASE.head_dim;
    for head in values.chunks_exact(CASE.seq_q * width) {
        if head[whole * width..][..DOCUMENT * width].iter().any(|value| value.is_nan()) {
            return Err(format!("{name} by {plan} has NaN of the other document").into());
        }
    }
    Ok(())
}

/// Makes those rows of each head NaN.
fn spoil(values: &mut [f64], heads: usize, rows: std::ops::Range<usize>) {
    for head in values.chunks_exact_mut(CASE.seq_kv * CASE.head_dim).take(heads) {
        head[rows.start * CASE.head_dim..rows.end * CASE.head_dim].fill(f64::NAN);
    }
}

/// Bytes of a mask's elements. Elsewhere than on CUDA buffers hold words.
fn word_sizes(client: &Client) -> &'static [usize] {
    if client.name() == "cuda" { &[1, 4] } else { &[4] }
}

fn integers(client: &Client, mask: impl Iterator<Item = bool>, bytes: usize) -> Buffer {
    let memory: Vec<u8> = mask
        .flat_map(|masked| [u8::from(masked)].into_iter().chain(repeat_n(0, bytes - 1)))
        .collect();
    let kind = if bytes == 1 { UIntKind::U8 } else { UIntKind::U32 };
    Buffer {
        handle: client.create_from_slice(&memory),
        elements: memory.len() / bytes,
        dtype: ElemType::UInt(kind),
    }
}
