//! Sequences of different lengths, one behind the other.

use super::{F32, Uploaded, integers, precision, problem};
use blackburn_kernels::attention::{
    AttentionInputs as Tensors, AttentionProblem, HeadStrides, Order, attention_backward,
    attention_forward,
};
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs, AttentionOptions, PackedAttention},
    random::normal,
    tolerance::compare,
};
use blackburn_tests::buffers::download;
use blackburn_tests::buffers::lse_of;
use cubecl::client::Client;
use libtest_mimic::Failed;

pub(super) fn packed(client: &Client) -> Result<(), Failed> {
    const HEADS_Q: usize = 4;
    const HEADS_KV: usize = 2;
    const HEAD_DIM: usize = 32;
    // One sequence has no queries, another fewer than keys, another more.
    let (starts_q, starts_kv) = ([0, 17, 17, 50, 83], [0, 17, 25, 60, 80]);
    let (rows_q, rows_kv) = (83, 80);
    let q = normal(1, rows_q * HEADS_Q * HEAD_DIM, 1.0, F32);
    let k = normal(2, rows_kv * HEADS_KV * HEAD_DIM, 1.0, F32);
    let v = normal(3, rows_kv * HEADS_KV * HEAD_DIM, 1.0, F32);
    let dout = normal(4, q.len(), 1.0, F32);
    let dropout = blackburn_reference::attention::Dropout { rate: 0.25, seed: 5 };
    for options in [
        AttentionOptions::PLAIN,
        AttentionOptions { causal: true, dropout: Some(dropout), ..AttentionOptions::PLAIN },
    ] {
        let exact = PackedAttention {
            heads_q: HEADS_Q,
            heads_kv: HEADS_KV,
            head_dim: HEAD_DIM,
            options,
            cu_seqlens_q: &starts_q,
            cu_seqlens_kv: &starts_kv,
            q: &q,
            k: &k,
            v: &v,
        };
        let precision = precision(client, F32);
        let (forward, bounds) = (exact.forward(), exact.forward_bounds(&precision));
        let (backward, backward_bounds) =
            (exact.backward(&dout), exact.backward_bounds(&dout, &precision));

        let case = AttentionCase {
            name: "packed",
            batch: 4,
            heads_q: HEADS_Q,
            heads_kv: HEADS_KV,
            seq_q: 33,
            seq_kv: 35,
            head_dim: HEAD_DIM,
            options,
        };
        let rows = |heads, seq| HeadStrides {
            batch: 0,
            ..Order::PositionsFirst.strides(heads, seq, HEAD_DIM)
        };
        let problem = AttentionProblem {
            q: rows(HEADS_Q, rows_q),
            k: rows(HEADS_KV, rows_kv),
            v: rows(HEADS_KV, rows_kv),
            order_q: Order::PositionsFirst,
            order_kv: Order::PositionsFirst,
            packed: Some([rows_q, rows_kv]),
            ..problem(&case, F32)
        };
        let inputs = AttentionInputs {
            q: q.clone(),
            k: k.clone(),
            v: v.clone(),
            dout: dout.clone(),
            mask: None,
            bias: None,
        };
        let uploaded = Uploaded::new(client, &inputs, F32);
        let words: Vec<u32> = starts_q.iter().chain(&starts_kv).map(|at| *at as u32).collect();
        let starts = integers(client, &words);
        let tensors = Tensors { starts: Some(&starts), ..uploaded.tensors() };
        let output = attention_forward(client, &problem, &tensors)?;
        compare(&download(client, output.out.clone(), F32)?, &forward.o, &bounds.o)?;
        let lse = lse_of(&download(client, output.lse.clone(), F32)?);
        compare(&lse, &forward.lse, &bounds.lse)?;
        let result = uploaded.result(&problem, &output);
        let gradients = attention_backward(client, &problem, &tensors, &result, false)?;
        for (actual, expected, bounds) in [
            (gradients.dq, &backward.dq, &backward_bounds.dq),
            (gradients.dk, &backward.dk, &backward_bounds.dk),
            (gradients.dv, &backward.dv, &backward_bounds.dv),
        ] {
            compare(&download(client, actual, F32)?, expected, bounds)?;
        }
    }
    Ok(())
}
