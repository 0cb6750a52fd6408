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
use std::{iter::repeat_n, ops::Range};

/// Two documents of so many tokens, which all tiles of the device divide: of 192 keys, of 256 queries and of less.
fn case(client: &Client) -> (AttentionCase, usize) {
    let document = if client.name() == "cuda" { 768 } else { 64 };
    let case = AttentionCase {
        name: "two documents",
        batch: 1,
        heads_q: 2,
        heads_kv: 1,
        seq_q: 2 * document,
        seq_kv: 2 * document,
        head_dim: 64,
        options: AttentionOptions { mask: Some(PairShape::Shared), ..AttentionOptions::PLAIN },
    };
    (case, document)
}

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
    let (case, document) = case(client);
    let inputs = AttentionInputs::generate(&case, 1, storage);
    let is_second = |place: usize| place >= document;
    let mask = (0..case.seq_q * case.seq_kv)
        .map(|pair| is_second(pair / case.seq_kv) != is_second(pair % case.seq_kv));
    let masks: Vec<Buffer> =
        word_sizes(client).iter().map(|bytes| integers(client, mask.clone(), *bytes)).collect();
    for spoilt in [0, document] {
        let mut inputs = AttentionInputs { mask: None, ..inputs.clone() };
        let width = case.head_dim;
        for values in [&mut inputs.v, &mut inputs.dout] {
            for head in values.chunks_exact_mut(case.seq_kv * width) {
                head[spoilt * width..][..document * width].fill(f64::NAN);
            }
        }
        let uploaded = Uploaded::new(client, &inputs, storage);
        for mask in &masks {
            let tensors = Tensors { mask: Some(mask), ..uploaded.tensors() };
            let whole = Whole { case, storage, rows: document - spoilt..2 * document - spoilt };
            check(client, &whole, &uploaded, &tensors)
                .map_err(|error| named(spoilt, mask, &error))?;
        }
    }
    Ok(())
}

fn named(spoilt: usize, mask: &Buffer, error: &Failed) -> Failed {
    let error = error.message().unwrap_or_default();
    format!("NaN from {spoilt} on, a mask of {:?}: {error}", mask.dtype).into()
}

/// Rows that have to have numbers.
struct Whole {
    case: AttentionCase,
    storage: Storage,
    rows: Range<usize>,
}

impl Whole {
    fn check(
        &self,
        client: &Client,
        name: &str,
        plan: &AttentionBlueprint,
        tensor: Buffer,
    ) -> Result<(), Failed> {
        let width = self.case.head_dim;
        let Range { start, end } = self.rows;
        for head in download(client, tensor, self.storage)?.chunks_exact(self.case.seq_q * width) {
            if head[start * width..end * width].iter().any(|value| value.is_nan()) {
                return Err(format!("{name} by {plan} has NaN of the other document").into());
            }
        }
        Ok(())
    }
}

/// All plans that map masks have numbers in the document that is whole.
fn check(
    client: &Client,
    whole: &Whole,
    uploaded: &Uploaded,
    tensors: &Tensors<'_>,
) -> Result<(), Failed> {
    let problem = problem(&whole.case, whole.storage);
    let plans = |pass: Pass| {
        let plans = AttentionBlueprint::candidates(&problem, pass, client);
        plans.into_iter().filter(|plan| plan.maps_mask).collect::<Vec<_>>()
    };
    let mut last = None;
    for plan in plans(Pass::Forward) {
        let output = attention_forward_with(client, &problem, &plan, tensors)?;
        whole.check(client, "out", &plan, output.out.clone())?;
        last = Some(output);
    }
    let output = last.ok_or("no plan maps masks")?;
    let result = uploaded.result(&problem, &output);
    let backward = plans(Pass::Backward);
    if backward.is_empty() {
        return Err("no plan of the backward pass maps masks".into());
    }
    for plan in backward {
        let made = attention_backward_with(client, &problem, &plan, tensors, &result, false)?;
        for (name, gradient) in [("dq", made.dq), ("dk", made.dk), ("dv", made.dv)] {
            whole.check(client, name, &plan, gradient)?;
        }
    }
    Ok(())
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
