//! Attention as long as training has it, where tensor cores' rings of tiles wrap and a cube takes several
//! tiles of queries. The reference computes some rows and keys alone.
//!
//! What checks the tensor cores there checks other devices at small lengths.

#[path = "attention_long_packed.rs"]
mod packed;
#[path = "attention_long_placed.rs"]
mod placed;
#[path = "attention_long_samples.rs"]
mod samples;

use super::precision;
use blackburn_kernels::attention::{AttentionProblem, Dropout, Window};
use blackburn_reference::{
    attention::{
        AttentionCase, AttentionInputs, AttentionOptions, Dropout as CaseDropout, PairShape,
        Roundings, Window as CaseWindow,
    },
    storage::Storage,
};
use blackburn_tests::buffers::dtype;
use blackburn_tests::{on_cuda_with, on_device_with};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};
use placed::{Computed, Placed};
use samples::{Expected, STRETCH, Samples};

const PLAIN: AttentionOptions = AttentionOptions::PLAIN;
const CAUSAL: AttentionOptions = AttentionOptions { causal: true, ..PLAIN };
const DROPOUT: Option<CaseDropout> = Some(CaseDropout { rate: 0.2, seed: 0x0123_4567_89ab_cdef });

pub(super) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in [Storage::Bf16, Storage::F16] {
        let mut add = |what: &str, test: Test| {
            let name = what.replace(", ", "_").replace(' ', "_");
            let name = format!("attention::long::{name}_in_{storage:?}").to_lowercase();
            trials.push(Trial::ignorable_test(name, move || {
                on_cuda_with(dtype(storage), |client| test(client, storage))
            }));
        };
        for (index, case) in long().into_iter().enumerate() {
            // Every second one with heads side by side.
            let test =
                move |client: &Client, storage| every_plan(client, case, storage, index % 2 == 0);
            add(&format!("{} is within bounds", case.name), Box::new(test));
        }
        let faults = |client: &Client, storage| faults(client, FAULTY, storage);
        add("planted faults are caught", Box::new(faults));
        let not_numbers = |client: &Client, storage| not_numbers(client, FAULTY, storage);
        add("nan reaches the rows that see it and no other", Box::new(not_numbers));
    }
    for storage in [Storage::F32, Storage::F16] {
        let name =
            format!("attention::long::samples_of_short_sequences_tell_as_much_in_{storage:?}");
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_device_with(dtype(storage), |client| short_ones(client, storage))
        }));
    }
    trials.extend(packed::trials());
    trials
}

type Test = Box<dyn Fn(&Client, Storage) -> Result<(), Failed> + Send>;

/// What checks tensor cores, at lengths that a software device computes.
fn short_ones(client: &Client, storage: Storage) -> Result<(), Failed> {
    for (index, case) in short().into_iter().enumerate() {
        every_plan(client, case, storage, index % 2 == 0)?;
    }
    let small = AttentionCase { seq_q: 150, seq_kv: 150, ..short_of(FAULTY) };
    if storage == Storage::F32 {
        faults(client, small, storage)?;
    }
    not_numbers(client, small, storage)
}

/// Heads in the order batch, of queries, of keys.
fn case(
    name: &'static str,
    [batch, heads_q, heads_kv]: [usize; 3],
    [seq_q, seq_kv, head_dim]: [usize; 3],
    options: AttentionOptions,
) -> AttentionCase {
    AttentionCase { name, batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, options }
}

/// Each has more tiles of 128 queries than an H200 has multiprocessors, 132. Options and heads are
/// compiled for shorter sequences as well, so that they are compiled once.
fn long() -> Vec<AttentionCase> {
    let window =
        |left, right| AttentionOptions { window: Some(CaseWindow { left, right }), ..PLAIN };
    let mask = |shape, options| AttentionOptions { mask: Some(shape), ..options };
    let everything = AttentionOptions {
        scale: Some(0.2),
        causal: true,
        window: Some(CaseWindow { left: Some(600), right: Some(3) }),
        softcap: Some(2.0),
        dropout: DROPOUT,
        mask: Some(PairShape::PerBatch),
        dead_rows: true,
        documents: false,
        bias: Some(PairShape::PerHead),
    };
    vec![
        case("a sequence of 4100", [1, 8, 8], [4100, 4100, 64], PLAIN),
        case("a sequence of 2050, causal", [1, 16, 16], [2050, 2050, 128], CAUSAL),
        case("a quarter as many queries, causal", [1, 16, 16], [1030, 4100, 64], CAUSAL),
        case("a head of 32", [2, 12, 12], [1100, 1000, 32], PLAIN),
        case("a head of 96, causal", [2, 10, 10], [1000, 1100, 96], CAUSAL),
        case("a head of 256", [1, 12, 12], [1500, 1400, 256], PLAIN),
        case("a key of two heads of 256, causal", [1, 8, 4], [1025, 1100, 256], CAUSAL),
        case("a head of 192, causal", [1, 8, 8], [1100, 1100, 192], CAUSAL),
        case(
            "documents, heads of 256",
            [2, 4, 4],
            [1100, 1100, 256],
            AttentionOptions { documents: true, ..mask(PairShape::PerBatch, PLAIN) },
        ),
        case(
            "dropout, heads of 256",
            [1, 8, 8],
            [1030, 1100, 256],
            AttentionOptions { dropout: DROPOUT, ..PLAIN },
        ),
        case("a key of four heads, causal", [2, 16, 4], [1025, 1025, 128], CAUSAL),
        case("a window to the left", [1, 16, 16], [2050, 2050, 64], window(Some(300), Some(0))),
        case("a window to both sides", [2, 8, 8], [1500, 1600, 32], window(Some(170), Some(150))),
        case(
            "a soft cap, causal",
            [2, 8, 8],
            [1100, 1100, 128],
            AttentionOptions { softcap: Some(2.0), ..CAUSAL },
        ),
        case(
            "dropout",
            [2, 8, 8],
            [1100, 1030, 64],
            AttentionOptions { dropout: DROPOUT, ..PLAIN },
        ),
        case("padding, causal", [2, 8, 8], [1100, 1100, 64], mask(PairShape::Keys, CAUSAL)),
        case(
            "a mask for each sequence",
            [2, 8, 4],
            [1025, 1100, 64],
            AttentionOptions { dead_rows: true, ..mask(PairShape::PerBatch, PLAIN) },
        ),
        case(
            "documents, a key of two heads",
            [2, 8, 4],
            [1100, 1100, 64],
            AttentionOptions { documents: true, ..mask(PairShape::PerBatch, PLAIN) },
        ),
        case(
            "documents, and rows that see nothing",
            [2, 8, 8],
            [1028, 1300, 128],
            AttentionOptions { documents: true, dead_rows: true, ..mask(PairShape::Shared, PLAIN) },
        ),
        case(
            "a bias for all heads",
            [2, 8, 8],
            [1100, 1030, 64],
            AttentionOptions { bias: Some(PairShape::Shared), ..PLAIN },
        ),
        case("everything", [2, 8, 4], [1100, 1050, 64], everything),
        case("everything, heads of 128", [2, 8, 2], [1100, 1000, 128], everything),
    ]
}

/// The same options where software computes.
fn short() -> Vec<AttentionCase> {
    let chosen = [
        "a sequence of 4100",
        "a key of four heads, causal",
        "documents, a key of two heads",
        "everything",
    ];
    let cases = long().into_iter().filter(|case| chosen.contains(&case.name));
    cases.map(short_of).collect()
}

fn short_of(case: AttentionCase) -> AttentionCase {
    let group = case.group();
    let window = case.options.window.map(|_| CaseWindow { left: Some(40), right: Some(3) });
    AttentionCase {
        batch: 1,
        heads_q: 2 * group,
        heads_kv: 2,
        seq_q: 131,
        seq_kv: 137,
        head_dim: 64,
        options: AttentionOptions { window, ..case.options },
        ..case
    }
}

/// What faults are planted in.
const FAULTY: AttentionCase = AttentionCase {
    name: "faulty",
    batch: 2,
    heads_q: 8,
    heads_kv: 8,
    seq_q: 1100,
    seq_kv: 1100,
    head_dim: 64,
    options: CAUSAL,
};

fn every_plan(
    client: &Client,
    case: AttentionCase,
    storage: Storage,
    joined: bool,
) -> Result<(), Failed> {
    let inputs = AttentionInputs::generate(&case, 11, storage);
    let placed = Placed::new(client, &case, &inputs, storage, joined);
    let precision = precision(client, storage).with_roundings(Roundings::Counted);
    let expected = Expected::of(&case, &inputs, &placed.problem, &precision);
    let judged = placed.run(client, storage, |computed, by| expected.judge(computed, by));
    judged.map_err(|error| format!("{case}: {}", error.message().unwrap_or("")).into())
}

/// The negative control: what a kernel with a fault computes must not pass, in either pass.
fn faults(client: &Client, case: AttentionCase, storage: Storage) -> Result<(), Failed> {
    let plain = AttentionCase { options: PLAIN, ..case };
    for case in [plain, case] {
        let inputs = AttentionInputs::generate(&case, 12, storage);
        let precision = precision(client, storage).with_roundings(Roundings::Counted);
        let mut placed = Placed::new(client, &case, &inputs, storage, true);
        let right = placed.problem;
        let expected = Expected::of(&case, &inputs, &right, &precision);
        let wider = Window { left: None, right: Some(1) };
        let dropout = Some(Dropout { rate: 0.001, seed: 1 });
        let mut faults = vec![
            ("a scale that is 2 % off", AttentionProblem { scale: right.scale * 1.02, ..right }),
            ("a weight in a thousand left out", AttentionProblem { dropout, ..right }),
        ];
        if case.options.causal {
            faults.push(("a key too many", AttentionProblem { window: wider, ..right }));
        } else {
            let fewer = AttentionProblem { seq_kv: case.seq_kv - STRETCH, ..right };
            faults.push(("a last tile that is skipped", fewer));
        }
        for (fault, problem) in faults {
            placed.problem = problem;
            placed.run(client, storage, |computed, by| {
                // Gradients of fewer keys lie elsewhere.
                let is_elsewhere =
                    problem.seq_kv != right.seq_kv && matches!(computed, Computed::Backward { .. });
                if !is_elsewhere && expected.judge(computed, by).is_ok() {
                    return Err(format!("{case}: {fault} goes unseen {by}").into());
                }
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// A key with NaN, and one with infinity: rows that see them are as the reference has them, and others,
/// even of the same tile, have the bits that they have without.
fn not_numbers(client: &Client, case: AttentionCase, storage: Storage) -> Result<(), Failed> {
    let key = case.seq_kv * 7 / 10;
    let inputs = AttentionInputs::generate(&case, 13, storage);
    let precision = precision(client, storage).with_roundings(Roundings::Counted);
    let outputs = |inputs: &AttentionInputs| -> Result<Vec<(String, Vec<f64>)>, Failed> {
        let mut all = Vec::new();
        let placed = Placed::new(client, &case, inputs, storage, false);
        placed.run(client, storage, |computed, by| {
            if let Computed::Forward { out, .. } = computed {
                all.push((by.to_owned(), out.clone()));
            }
            Ok(())
        })?;
        Ok(all)
    };
    let plain = outputs(&inputs)?;
    for value in [f64::NAN, f64::INFINITY] {
        let mut inputs = inputs.clone();
        inputs.k[key * case.head_dim + 3] = value;
        let attention = inputs.attention(case);
        for ((by, out), (_, plain)) in outputs(&inputs)?.iter().zip(&plain) {
            let (mut samples, rows) = (Samples::default(), out.chunks_exact(case.head_dim));
            for (at, (row, plain)) in rows.zip(plain.chunks_exact(case.head_dim)).enumerate() {
                let (head, i) = (at / case.seq_q, at % case.seq_q);
                if head == 0 && case.keys(i).contains(&key) {
                    if i % 9 == 0 || i < key + 20 {
                        let sample = attention.sampled_row([0, 0, i], &inputs.dout, &precision);
                        samples.add(at * case.head_dim, sample.o);
                    }
                } else if row != plain {
                    return Err(format!("{value} reaches row {i} of head {head} {by}").into());
                }
            }
            samples.judge(&format!("{value} {by}"), out)?;
        }
    }
    Ok(())
}
