//! Attention of sequences that follow each other in one tensor.

use super::{
    attention::{GROUPED, Wanted, precision, problem},
    tensors::{upload, upload_integers, within},
};
use blackburn_kernels::{
    Pass,
    attention::{
        AttentionBlueprint, AttentionInputs as Tensors, AttentionProblem, AttentionResult,
        HeadStrides, Order, attention_backward_with, attention_forward_with,
    },
    recorder::Recorder,
};
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs},
    storage::Storage,
};
use libtest_mimic::Failed;

/// Causal sequences that follow each other, one of them empty, by heads that share keys.
pub(super) fn packed(recorder: &Recorder, wanted: Wanted) -> Result<(), Failed> {
    let (storage, client) = (Storage::Bf16, recorder.client());
    let precision = precision(client, storage);
    let lengths = [[70, 75], [0, 0], [131, 131], [3, 140]];
    let cases = lengths.map(|[seq_q, seq_kv]| AttentionCase { batch: 1, seq_q, seq_kv, ..GROUPED });
    // An empty sequence has nothing to draw and nothing to compare.
    let cases: Vec<_> = cases.into_iter().filter(|case| case.seq_q > 0).collect();
    let inputs: Vec<_> = (1..)
        .zip(&cases)
        .map(|(seed, case)| AttentionInputs::generate(case, seed, storage))
        .collect();
    let of_q = |values: Vec<&Vec<f64>>| joined(&values, GROUPED.heads_q, GROUPED.head_dim);
    let of_kv = |values: Vec<&Vec<f64>>| joined(&values, GROUPED.heads_kv, GROUPED.head_dim);
    let [q, dout] = [
        of_q(inputs.iter().map(|inputs| &inputs.q).collect()),
        of_q(inputs.iter().map(|inputs| &inputs.dout).collect()),
    ]
    .map(|values| upload(recorder, &values, storage));
    let [k, v] = [
        of_kv(inputs.iter().map(|inputs| &inputs.k).collect()),
        of_kv(inputs.iter().map(|inputs| &inputs.v).collect()),
    ]
    .map(|values| upload(recorder, &values, storage));
    let mut starts = Vec::new();
    for side in 0..2 {
        let mut start = 0;
        starts.push(start);
        for sizes in lengths {
            start += sizes[side] as i32;
            starts.push(start);
        }
    }
    let starts = upload_integers(recorder, &starts);
    let rows = [0, 1].map(|side| lengths.iter().map(|sizes| sizes[side]).sum::<usize>());
    let longest = [131, 140];
    let strides = |heads, rows| HeadStrides {
        batch: 0,
        ..Order::HeadsFirst.strides(heads, rows, GROUPED.head_dim)
    };
    let kv = strides(GROUPED.heads_kv, rows[1]);
    let whole = AttentionCase { seq_q: longest[0], seq_kv: longest[1], ..GROUPED };
    let problem = AttentionProblem {
        batch: lengths.len(),
        q: strides(GROUPED.heads_q, rows[0]),
        k: kv,
        v: kv,
        packed: Some(rows),
        ..problem(&whole, storage)
    };
    let tensors = Tensors { starts: Some(&starts), ..Tensors::of(&q, &k, &v) };
    let plan = |pass| {
        let plans = AttentionBlueprint::candidates(&problem, pass, client);
        wanted.of(&plans, pass)
    };
    let output = attention_forward_with(client, &problem, &plan(Pass::Forward)?, &tensors)?;
    let result = AttentionResult::of(&output, &dout, problem.out());
    let plan = plan(Pass::Backward)?;
    let made = attention_backward_with(client, &problem, &plan, &tensors, &result, false)?;
    let expected: Vec<_> = cases
        .iter()
        .zip(&inputs)
        .map(|(case, inputs)| {
            let attention = inputs.attention(*case);
            let gradients = attention.backward(&inputs.dout);
            let bounds = attention.backward_bounds(&gradients, &inputs.dout, &precision);
            (gradients, bounds)
        })
        .collect();
    within(
        recorder,
        &made.dq,
        storage,
        &of_q(expected.iter().map(|(gradients, _)| &gradients.dq).collect()),
        &of_q(expected.iter().map(|(_, bounds)| &bounds.dq).collect()),
    )?;
    within(
        recorder,
        &made.dk,
        storage,
        &of_kv(expected.iter().map(|(gradients, _)| &gradients.dk).collect()),
        &of_kv(expected.iter().map(|(_, bounds)| &bounds.dk).collect()),
    )?;
    within(
        recorder,
        &made.dv,
        storage,
        &of_kv(expected.iter().map(|(gradients, _)| &gradients.dv).collect()),
        &of_kv(expected.iter().map(|(_, bounds)| &bounds.dv).collect()),
    )
}

/// Tensors of single sequences as one of packed sequences, heads first.
fn joined(sequences: &[&Vec<f64>], heads: usize, head_dim: usize) -> Vec<f64> {
    (0..heads)
        .flat_map(|head| {
            sequences.iter().flat_map(move |values| {
                let rows = values.len() / heads / head_dim;
                values[head * rows * head_dim..][..rows * head_dim].iter().copied()
            })
        })
        .collect()
}
