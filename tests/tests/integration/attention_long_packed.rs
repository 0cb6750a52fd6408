//! Long sequences of different lengths, one behind the other.

use super::{
    CAUSAL, PLAIN,
    placed::Placed,
    samples::{Expected, in_stretches},
};
use crate::attention::{integers, precision, problem};
use blackburn_kernels::attention::{AttentionProblem, HeadStrides, Order, Window};
use blackburn_reference::{
    attention::{AttentionCase, AttentionOptions, PackedAttention, Roundings},
    random::normal,
    storage::Storage,
};
use blackburn_tests::buffers::{dtype, upload};
use blackburn_tests::{on_cuda_with, on_device_with};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

/// Sequences in a batch.
#[derive(Clone, Copy)]
struct Packing {
    heads_q: usize,
    heads_kv: usize,
    head_dim: usize,
    starts_q: &'static [usize],
    starts_kv: &'static [usize],
    options: AttentionOptions,
}

/// One without queries, one without keys, one of a single query, and lengths that begin and end within
/// tiles: 33 tiles of 128 queries of each of 8 heads.
const LONG: Packing = Packing {
    heads_q: 8,
    heads_kv: 8,
    head_dim: 64,
    starts_q: &[0, 1000, 1000, 1017, 3067, 3068, 4198],
    starts_kv: &[0, 1100, 1125, 1125, 3175, 3300, 4330],
    options: CAUSAL,
};

/// The same in small, of heads that share keys.
const SHORT: Packing = Packing {
    heads_q: 4,
    heads_kv: 2,
    head_dim: 32,
    starts_q: &[0, 70, 70, 87, 160, 161],
    starts_kv: &[0, 80, 85, 85, 158, 198],
    ..LONG
};

pub(super) fn trials() -> Vec<Trial> {
    let name = |what: &str, storage: Storage| {
        format!("attention::long::{what}_attend_to_themselves_in_{storage:?}").to_lowercase()
    };
    let mut trials = Vec::new();
    for storage in [Storage::Bf16, Storage::F16] {
        for (what, packing) in [
            ("packed_sequences", Packing { options: PLAIN, heads_kv: 4, ..LONG }),
            ("packed_causal_sequences", LONG),
            ("packed_sequences_of_wide_heads", Packing { head_dim: 128, heads_kv: 2, ..LONG }),
            (
                "packed_sequences_of_the_widest_heads",
                Packing { head_dim: 256, heads_kv: 2, ..LONG },
            ),
        ] {
            trials.push(Trial::ignorable_test(name(what, storage), move || {
                on_cuda_with(dtype(storage), |client| check(client, packing, storage))
            }));
        }
    }
    trials.push(Trial::ignorable_test(name("packed_short_sequences", Storage::F32), || {
        on_device_with(dtype(Storage::F32), |client| check(client, SHORT, Storage::F32))
    }));
    trials
}

fn check(client: &Client, packing: Packing, storage: Storage) -> Result<(), Failed> {
    let Packing { heads_q, heads_kv, head_dim, starts_q, starts_kv, options } = packing;
    let end = |starts: &[usize]| starts.last().copied().unwrap_or(0);
    let (rows_q, rows_kv) = (end(starts_q), end(starts_kv));
    let draw =
        |seed, rows: usize, heads: usize| normal(seed, rows * heads * head_dim, 1.0, storage);
    let (q, dout) = (draw(1, rows_q, heads_q), draw(2, rows_q, heads_q));
    let (k, v) = (draw(3, rows_kv, heads_kv), draw(4, rows_kv, heads_kv));
    let reference = PackedAttention {
        heads_q,
        heads_kv,
        head_dim,
        options,
        cu_seqlens_q: starts_q,
        cu_seqlens_kv: starts_kv,
        q: &q,
        k: &k,
        v: &v,
    };
    let longest =
        |starts: &[usize]| starts.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(0);
    let case = AttentionCase {
        name: "packed",
        batch: starts_q.len() - 1,
        heads_q,
        heads_kv,
        seq_q: longest(starts_q),
        seq_kv: longest(starts_kv),
        head_dim,
        options,
    };
    let rows = |heads, seq| HeadStrides {
        batch: 0,
        ..Order::PositionsFirst.strides(heads, seq, head_dim)
    };
    let send = |values: &[f64]| upload(client, values, storage);
    let words: Vec<u32> = starts_q.iter().chain(starts_kv).map(|at| *at as u32).collect();
    let right = AttentionProblem {
        q: rows(heads_q, rows_q),
        k: rows(heads_kv, rows_kv),
        v: rows(heads_kv, rows_kv),
        order_q: Order::PositionsFirst,
        order_kv: Order::PositionsFirst,
        packed: Some([rows_q, rows_kv]),
        ..problem(&case, storage)
    };
    let mut placed = Placed {
        problem: right,
        q: send(&q),
        k: send(&k),
        v: send(&v),
        dout: send(&dout),
        mask: None,
        bias: None,
        starts: Some(integers(client, &words)),
    };
    let precision = precision(client, storage).with_roundings(Roundings::Counted);
    let mut expected = Expected::default();
    for sequence in reference.sequences() {
        let attention = sequence.attention();
        let dout = reference.gather(&dout, heads_q, &sequence.rows_q);
        let (first_q, first_kv) = (sequence.rows_q.start, sequence.rows_kv.start);
        for head in 0..heads_q {
            for i in in_stretches(sequence.rows_q.len(), head) {
                let row = attention.sampled_row([0, head, i], &dout, &precision);
                let start = ((first_q + i) * heads_q + head) * head_dim;
                expected.out.add(start, row.o);
                expected.lse.add(head * rows_q + first_q + i, row.lse);
                expected.dq.add(start, row.dq);
            }
        }
        let keys = in_stretches(sequence.rows_kv.len(), 5);
        let sampled = attention.sampled_keys([0, heads_kv - 1], &keys, &dout, &precision);
        for (j, sample) in keys.iter().zip(sampled) {
            let start = ((first_kv + j) * heads_kv + heads_kv - 1) * head_dim;
            expected.dk.add(start, sample.dk);
            expected.dv.add(start, sample.dv);
        }
    }
    placed.run(client, storage, |computed, by| expected.judge(computed, by))?;

    // The negative control: as if a sequence saw a key of the next, and a scale that is a little off.
    let is_causal = options.causal;
    let wider = Window { right: is_causal.then_some(1), left: (!is_causal).then_some(500) };
    for (fault, problem) in [
        ("another window", AttentionProblem { window: wider, ..right }),
        ("a scale that is 2 % off", AttentionProblem { scale: right.scale * 1.02, ..right }),
    ] {
        placed.problem = problem;
        placed.run(client, storage, |computed, by| match expected.judge(computed, by) {
            Err(_) => Ok(()),
            Ok(()) => Err(format!("{fault} goes unseen {by}").into()),
        })?;
    }
    Ok(())
}
