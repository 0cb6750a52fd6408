//! Masks that are added to the scores, from -1e4 to minus infinity: every family gives what f32 makes
//! of the sum of score and mask, forward and backward.
//!
//! Elements of q and k are -1, 0 and 1 and the scale is a power of two, so that f32 holds the scores
//! whatever the order of additions. Their sums with the mask, rounded once, are what the reference is
//! given: of -1e9 nothing is left but the mask, and a row of it attends to all of its keys alike.

use super::{F32, compare_plans, precision};
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs, AttentionOptions, PairShape, Roundings},
    random::normal,
    storage::Storage,
};
use blackburn_tests::buffers::dtype;
use blackburn_tests::on_device_with;
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

/// 7 kinds of rows, more rows and keys than a tile of any family has.
pub(crate) const CASE: AttentionCase = AttentionCase {
    name: "additive masks",
    batch: 1,
    heads_q: 2,
    heads_kv: 2,
    seq_q: 70,
    seq_kv: 133,
    head_dim: 64,
    options: AttentionOptions {
        scale: Some(0.125),
        bias: Some(PairShape::Full),
        mask: Some(PairShape::Full),
        ..AttentionOptions::PLAIN
    },
};

pub(super) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = format!("attention::additive_masks_are_what_f32_makes_of_them_in_{storage:?}");
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_device_with(dtype(storage), |client| {
                values(storage).into_iter().try_for_each(|value| {
                    let checked = check(client, storage, value, value);
                    checked.map_err(|error| named(value, &error))
                })
            })
        }));
    }
    trials.push(Trial::ignorable_test("attention::another_additive_mask_is_caught", || {
        on_device_with(dtype(F32), |client| {
            // What a row is given that is told to attend to all keys alike, and attends to none.
            match check(client, F32, -1e9, f64::NEG_INFINITY) {
                Ok(()) => Err("a mask of minus infinity passes for one of -1e9".into()),
                Err(_) => Ok(()),
            }
        })
    }));
    trials
}

fn named(value: f64, error: &Failed) -> Failed {
    format!("masks of {value:e}: {}", error.message().unwrap_or("")).into()
}

/// What programs mask with, as far as the type holds it, and what is not a number.
pub(crate) fn values(storage: Storage) -> Vec<f64> {
    let finite: &[f64] = match storage {
        Storage::F32 => &[-1e4, -1e9, -1e30, -3e38, f32::MIN as f64],
        Storage::Bf16 => &[-1e4, -1e9, -1e30, -3e38, -3.389_531_389_251_535_5e38],
        Storage::F16 => &[-1e4, -65504.0],
    };
    let rounded = finite.iter().map(|value| storage.round(*value));
    rounded.chain([f64::NEG_INFINITY, f64::INFINITY, f64::NAN]).collect()
}

/// The kinds of rows, each by what is added to the score of a key.
fn added(query: usize, key: usize, value: f64) -> f64 {
    let small = (query * 5 + key * 3) % 11;
    match query % 7 {
        // A mask that hides the whole row.
        0 => value,
        // Every second key.
        1 if key.is_multiple_of(2) => value,
        // Two masks, one on the other: less is hidden less.
        2 if key.is_multiple_of(3) => 2.0 * value,
        2 => value,
        // The last keys, as padding; with a boolean mask for all that this leaves.
        3 if key >= 100 => value,
        // Without any.
        _ => small as f64 / 4.0 - 1.0,
    }
}

/// Whether the boolean mask hides the pair.
fn is_hidden(query: usize, key: usize) -> bool {
    match query % 7 {
        3 => key < 100,
        4 => true,
        5 => key % 4 == 1,
        _ => false,
    }
}

/// The inputs, with masks of that value. Those that are not masks are in one row of one head.
pub(crate) fn inputs(storage: Storage, value: f64) -> AttentionInputs {
    let signs = |seed, count| -> Vec<f64> {
        normal(seed, count, 1.0, F32).iter().map(|x| x.round().clamp(-1.0, 1.0)).collect()
    };
    let is_mask = value < 0.0;
    let rows = 0..CASE.lse_len();
    let pairs = || rows.clone().flat_map(|row| (0..CASE.seq_kv).map(move |key| (row, key)));
    let bias = pairs().map(|(row, key)| match (is_mask, row, key) {
        (true, ..) => added(row % CASE.seq_q, key, value),
        (false, 6, 77) => value,
        (false, ..) => added(6, key, 0.0),
    });
    AttentionInputs {
        q: signs(1, CASE.q_len()),
        k: signs(2, CASE.kv_len()),
        v: normal(3, CASE.kv_len(), 1.0, storage),
        bias: Some(bias.map(|bias| storage.round(bias)).collect()),
        mask: Some(pairs().map(|(row, key)| is_hidden(row % CASE.seq_q, key)).collect()),
        dout: normal(4, CASE.q_len(), 1.0, storage),
    }
}

/// The same inputs, with what f32 adds to each score.
pub(crate) fn as_added(inputs: &AttentionInputs) -> AttentionInputs {
    let mut exact = inputs.clone();
    let (rows, d) = (CASE.seq_q, CASE.head_dim);
    let bias = exact.bias.iter_mut().flatten();
    for (pair, bias) in bias.enumerate() {
        let (row, key) = (pair / CASE.seq_kv, pair % CASE.seq_kv);
        let key = row / rows * CASE.seq_kv + key;
        let (q, k) = (&inputs.q[row * d..][..d], &inputs.k[key * d..][..d]);
        let score = CASE.scale() * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
        *bias = f64::from((score + *bias) as f32) - score;
    }
    exact
}

/// Runs with masks of `given`, and compares with what masks of `expected` give.
fn check(client: &Client, storage: Storage, given: f64, expected: f64) -> Result<(), Failed> {
    let precision = precision(client, storage).with_roundings(Roundings::CountedBehindExactScores);
    let (given, meant) = (inputs(storage, given), as_added(&inputs(storage, expected)));
    compare_plans(client, CASE, [&given, &meant], storage, &precision)
}
