//! Attention of a few queries whose keys are divided among cubes, on tensor cores, over a cache that has room for more.

use super::{
    Case,
    attention::{lse_of, precision, problem},
    tensors::{upload, upload_integers, within},
};
use blackburn_kernels::{
    Family,
    attention::{
        AttentionBlueprint, AttentionInputs as Tensors, AttentionProblem, attention_decode_with,
        attention_forward_with,
    },
    recorder::{Gpu, Recorder},
};
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs, AttentionOptions, Window},
    storage::Storage,
    tolerance::compare,
};
use libtest_mimic::Failed;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (gpu, quick) in [(Gpu::SM_80, true), (Gpu::SM_90A, false)] {
        cases.push(Case {
            name: "attention_decode_mma_is_within_bounds",
            gpu,
            quick,
            body: |recorder| {
                let cases = [(GROUPED, Storage::Bf16), (SEVERAL, Storage::F16)];
                cases
                    .into_iter()
                    .try_for_each(|(cached, storage)| decode(recorder, cached, storage))
            },
        });
        cases.push(Case {
            name: "attention_decode_mma_of_wide_and_narrow_heads_is_within_bounds",
            gpu,
            quick: false,
            body: |recorder| {
                let sized = |head_dim| Cached {
                    case: AttentionCase { head_dim, ..GROUPED.case },
                    ..GROUPED
                };
                decode(recorder, sized(16), Storage::Bf16)?;
                decode(recorder, sized(80), Storage::Bf16)?;
                decode(recorder, sized(256), Storage::Bf16)
            },
        });
    }
    cases
}

/// A cache, and what is asked of it.
struct Cached {
    /// With the keys up to the last query.
    case: AttentionCase,
    capacity: usize,
    /// Keys of a split.
    split: usize,
}

/// One query of heads that share keys; more splits than have keys, and more tiles than are held at once.
const GROUPED: Cached = Cached {
    case: AttentionCase {
        name: "decoding",
        batch: 2,
        heads_q: 6,
        heads_kv: 2,
        seq_q: 1,
        seq_kv: 701,
        head_dim: 64,
        options: AttentionOptions { causal: true, ..AttentionOptions::PLAIN },
    },
    capacity: 800,
    split: 400,
};

/// More rows than a tile has, of which some see keys that others do not; with a window and a cap.
const SEVERAL: Cached = Cached {
    case: AttentionCase {
        batch: 1,
        heads_q: 4,
        heads_kv: 1,
        seq_q: 5,
        seq_kv: 150,
        head_dim: 128,
        options: AttentionOptions {
            softcap: Some(3.0),
            window: Some(Window { left: Some(120), right: None }),
            ..GROUPED.case.options
        },
        ..GROUPED.case
    },
    capacity: 160,
    split: 40,
};

/// With the length on the device, and with one that the host knows.
fn decode(recorder: &Recorder, cached: Cached, storage: Storage) -> Result<(), Failed> {
    let Cached { case, capacity, split } = cached;
    let client = recorder.client();
    let inputs = AttentionInputs::generate(&case, 1, storage);
    let attention = inputs.attention(case);
    let expected = attention.forward();
    let bounds = attention.forward_bounds(&expected, &precision(client, storage));
    // What lies behind the last key is not read.
    let padded = |rows: &[f64]| -> Vec<f64> {
        let behind = vec![f64::NAN; (capacity - case.seq_kv) * case.head_dim];
        let heads = rows.chunks_exact(case.seq_kv * case.head_dim);
        heads.flat_map(|head| [head, &behind].concat()).collect()
    };
    let q = upload(recorder, &inputs.q, storage);
    let [k, v] = [&inputs.k, &inputs.v].map(|rows| upload(recorder, &padded(rows), storage));
    let tensors = Tensors::of(&q, &k, &v);
    let placed = problem(&AttentionCase { seq_kv: capacity, ..case }, storage);
    let plan = AttentionBlueprint {
        family: Family::Mma,
        tile_q: 16,
        tile_kv: split,
        atomic: false,
        split: true,
        maps_mask: false,
    };
    let position = upload_integers(recorder, &[(case.seq_kv - case.seq_q) as i32]);
    let known = AttentionProblem { seq_kv: case.seq_kv, ..placed };
    for (how, output) in [
        ("placed", attention_decode_with(client, &placed, &plan, &tensors, &position)?),
        ("of a known length", attention_forward_with(client, &known, &plan, &tensors)?),
    ] {
        compare(&lse_of(recorder, &output)?, &expected.lse, &bounds.lse)
            .map_err(|error| format!("the logarithms of sums, {how}: {error}"))?;
        within(recorder, &output.out, storage, &expected.o, &bounds.o)?;
    }
    Ok(())
}
