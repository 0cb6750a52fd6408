//! Where attention's tensors lie in memory.

use super::{F32, SMALL, Uploaded, problem, run};
use blackburn_kernels::{
    Family, KernelError, Pass,
    attention::{
        AttentionBlueprint, AttentionProblem, AttentionResult, HeadStrides, Order,
        attention_backward_with, attention_forward,
    },
};
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs},
    storage::Storage,
};
use blackburn_tests::buffers::{download, upload};
use cubecl::client::Client;
use libtest_mimic::Failed;

/// Batch, head, position as batch, position, head.
pub(crate) fn positions_first(values: &[f64], [heads, seq, head_dim]: [usize; 3]) -> Vec<f64> {
    let batches = values.chunks_exact(heads * seq * head_dim);
    let row = |batch: &[f64], head: usize, at: usize| {
        batch[(head * seq + at) * head_dim..][..head_dim].to_vec()
    };
    batches
        .flat_map(|batch| {
            (0..seq).flat_map(move |at| (0..heads).flat_map(move |head| row(batch, head, at)))
        })
        .collect()
}

/// The same numbers in another order give the same bits, in that order.
pub(super) fn side_by_side(client: &Client) -> Result<(), Failed> {
    let inputs = AttentionInputs::generate(&SMALL, 2, F32);
    let plain = problem(&SMALL, F32);
    let (output, gradients) = run(client, &plain, &Uploaded::new(client, &inputs, F32))?;

    let of_q = [SMALL.heads_q, SMALL.seq_q, SMALL.head_dim];
    let of_kv = [SMALL.heads_kv, SMALL.seq_kv, SMALL.head_dim];
    let swapped = AttentionInputs {
        q: positions_first(&inputs.q, of_q),
        k: positions_first(&inputs.k, of_kv),
        v: positions_first(&inputs.v, of_kv),
        dout: positions_first(&inputs.dout, of_q),
        ..inputs
    };
    let rows = |[heads, seq, head_dim]: [usize; 3]| -> HeadStrides {
        Order::PositionsFirst.strides(heads, seq, head_dim)
    };
    let problem = AttentionProblem {
        q: rows(of_q),
        k: rows(of_kv),
        v: rows(of_kv),
        order_q: Order::PositionsFirst,
        order_kv: Order::PositionsFirst,
        ..plain
    };
    let (swapped_output, swapped_gradients) =
        run(client, &problem, &Uploaded::new(client, &swapped, F32))?;
    for (what, plain, swapped, sizes) in [
        ("out", output.out, swapped_output.out, of_q),
        ("dq", gradients.dq, swapped_gradients.dq, of_q),
        ("dk", gradients.dk, swapped_gradients.dk, of_kv),
        ("dv", gradients.dv, swapped_gradients.dv, of_kv),
    ] {
        let plain = positions_first(&download(client, plain, F32)?, sizes);
        if plain != download(client, swapped, F32)? {
            return Err(format!("{what} depends on the order of its inputs").into());
        }
    }
    Ok(())
}

/// HeadStrides at odd elements cannot be fetched 16 bytes at a time, which tensor cores' plans have to say.
pub(super) fn odd_rows(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F16;
    let case = AttentionCase { head_dim: 64, ..SMALL };
    let inputs = AttentionInputs::generate(&case, 4, storage);
    let uploaded = Uploaded::new(client, &inputs, storage);
    let problem = problem(&case, storage);
    let output = attention_forward(client, &problem, &uploaded.tensors())?;
    let rows = inputs.dout.chunks(case.head_dim);
    let spread: Vec<f64> = rows.flat_map(|row| [row, &[f64::NAN]].concat()).collect();
    let mut odd = Uploaded::new(client, &inputs, storage);
    odd.dout = upload(client, &spread, storage);
    let (row, seq) = (case.head_dim + 1, case.seq_q);
    let dout_strides = HeadStrides { batch: case.heads_q * seq * row, head: seq * row, row };
    for plan in AttentionBlueprint::candidates(&problem, Pass::Backward, client) {
        let run = |of: &Uploaded, dout_strides| {
            let result = AttentionResult { dout_strides, ..of.result(&problem, &output) };
            attention_backward_with(client, &problem, &plan, &of.tensors(), &result, false)
        };
        let odd = run(&odd, dout_strides);
        if plan.family != Family::Portable {
            match odd {
                Err(KernelError::Unsupported { reason, .. }) if reason.contains("strides") => {}
                other => return Err(format!("{plan:?} gave {other:?}").into()),
            }
            continue;
        }
        let expected = run(&uploaded, problem.out())?;
        if download(client, odd?.dq, storage)? != download(client, expected.dq, storage)? {
            return Err("odd rows gave another gradient".into());
        }
    }
    Ok(())
}
