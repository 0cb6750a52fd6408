//! Attention of numbers that are all exact, so that every bit of the output and of the gradients is known.

use super::{
    attention::{PLAIN, Uploaded, Wanted, lse_of, problem},
    tensors::{download, upload, whole_numbers, within},
};
use blackburn_kernels::{
    Pass,
    attention::{
        AttentionBlueprint, AttentionInputs as Tensors, AttentionResult, attention_backward_with,
        attention_forward_with,
    },
    recorder::Recorder,
};
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs, AttentionOptions},
    storage::Storage,
    tolerance::compare,
};
use libtest_mimic::Failed;
use std::f32::consts::LN_2;

/// Scores that are whole in powers of two, whose sum is a power of two, and which grow by much from the first tile of
/// keys to the second, and by little to the third: each sum is rescaled, or late, and all numbers are exact.
pub(super) fn powers_of_two(recorder: &Recorder, wanted: Wanted) -> Result<(), Failed> {
    // The kernels' factor, this times log2(e) in f32, is 1.
    let options = AttentionOptions { scale: Some(f64::from(LN_2)), ..AttentionOptions::PLAIN };
    let case = AttentionCase { name: "powers of two", seq_kv: 512, options, ..PLAIN };
    // 128 times 2^0; 2^7 to 2^16; 2^17. The sum is 2^18.
    let power = |key: usize| match key {
        0..128 => 0,
        128..138 => key as i32 - 121,
        256 => 17,
        _ => -300,
    };
    let (width, storage, client) = (case.head_dim, Storage::Bf16, recorder.client());
    // Every other query sees all keys alike.
    let sees_powers = |query: usize| query.is_multiple_of(2);
    let mut q = vec![0.0; case.heads_q * case.seq_q * width];
    let mut k = vec![0.0; case.seq_kv * width];
    for (query, row) in q.chunks_exact_mut(width).enumerate() {
        row[0] = if sees_powers(query % case.seq_q) { 1.0 } else { 0.0 };
    }
    for (key, row) in k.chunks_exact_mut(width).enumerate() {
        row[0] = f64::from(power(key));
    }
    let v = whole_numbers(1, k.len(), 1);
    let mean = |query: usize, column: usize| {
        let weight = |key| match power(key) {
            _ if !sees_powers(query) => 1.0 / 512.0,
            -300 => 0.0,
            power => 2.0_f64.powi(power - 18),
        };
        storage.round((0..case.seq_kv).map(|key| weight(key) * v[key * width + column]).sum())
    };
    let expected: Vec<_> =
        (0..q.len()).map(|at| mean(at / width % case.seq_q, at % width)).collect();
    let problem = problem(&case, storage);
    let plans = AttentionBlueprint::candidates(&problem, Pass::Forward, client);
    let [q, k, v] = [&q, &k, &v].map(|values| upload(recorder, values, storage));
    let tensors = Tensors::of(&q, &k, &v);
    let plan = wanted.of(&plans, Pass::Forward)?;
    let output = attention_forward_with(client, &problem, &plan, &tensors)?;
    within(recorder, &output.out, storage, &expected, &vec![0.0; expected.len()])?;
    let lse = lse_of(recorder, &output)?;
    let powers = |query| f64::from(if sees_powers(query) { 18 } else { 9 });
    let expected: Vec<_> =
        (0..lse.len()).map(|at| powers(at % case.seq_q) * f64::from(LN_2)).collect();
    // The logarithm, and products by ln(2), each rounded.
    let bounds: Vec<_> = expected.iter().map(|lse| lse * 3.0 * f64::from(f32::EPSILON)).collect();
    compare(&lse, &expected, &bounds).map(drop).map_err(|error| error.to_string().into())
}

/// NaN in a key, which every row sees. In every second group of 8 rows `tcgen05` makes its weight by a polynomial.
pub(super) fn nan_of_a_key(recorder: &Recorder, wanted: Wanted) -> Result<(), Failed> {
    let (storage, client) = (Storage::Bf16, recorder.client());
    let mut inputs = AttentionInputs::generate(&PLAIN, 1, storage);
    // Of key 1.
    inputs.k[PLAIN.head_dim] = f64::NAN;
    let (problem, tensors) = (problem(&PLAIN, storage), Uploaded::new(recorder, &inputs, storage));
    let plans = AttentionBlueprint::candidates(&problem, Pass::Forward, client);
    let plan = wanted.of(&plans, Pass::Forward)?;
    let output = attention_forward_with(client, &problem, &plan, &tensors.all())?;
    let values = [download(recorder, &output.out, storage)?, lse_of(recorder, &output)?].concat();
    match values.iter().filter(|value| !value.is_nan()).count() {
        0 => Ok(()),
        numbers => Err(format!("{numbers} of {} are numbers", values.len()).into()),
    }
}

/// Both passes of equal scores whose values add up to zero: weights are a power of two, out and delta are zero, and every
/// product and sum of the gradients is exact. The order of tiles of keys does not matter then, and there are several.
pub(super) fn gradients(
    recorder: &Recorder,
    wanted: Wanted,
    head_dim: usize,
    storage: Storage,
) -> Result<(), Failed> {
    let options = AttentionOptions { scale: Some(0.125), ..AttentionOptions::PLAIN };
    let name = "exact gradients";
    let case = AttentionCase { name, seq_q: 200, seq_kv: 512, head_dim, options, ..PLAIN };
    let mut inputs = AttentionInputs::generate(&case, 1, storage);
    for (seed, values) in (1..).zip([&mut inputs.q, &mut inputs.k, &mut inputs.v, &mut inputs.dout])
    {
        *values = whole_numbers(seed, values.len(), 1);
    }
    // Queries and keys have no element in common, and the values of two keys cancel.
    inputs.q.chunks_exact_mut(head_dim).for_each(|row| row[head_dim / 2..].fill(0.0));
    inputs.k.chunks_exact_mut(head_dim).for_each(|row| row[..head_dim / 2].fill(0.0));
    for pair in inputs.v.chunks_exact_mut(2 * head_dim) {
        let (first, second) = pair.split_at_mut(head_dim);
        second.iter_mut().zip(first).for_each(|(second, first)| *second = -*first);
    }
    let client = recorder.client();
    let (problem, tensors) = (problem(&case, storage), Uploaded::new(recorder, &inputs, storage));
    let plan = |pass| wanted.of(&AttentionBlueprint::candidates(&problem, pass, client), pass);
    let output = attention_forward_with(client, &problem, &plan(Pass::Forward)?, &tensors.all())?;
    let dout = upload(recorder, &inputs.dout, storage);
    let result = AttentionResult::of(&output, &dout, problem.out());
    let (plan, tensors) = (plan(Pass::Backward)?, tensors.all());
    let made = attention_backward_with(client, &problem, &plan, &tensors, &result, false)?;
    let expected = inputs.attention(case).backward(&inputs.dout);
    for (buffer, exact) in [(made.dq, expected.dq), (made.dk, expected.dk), (made.dv, expected.dv)]
    {
        let rounded: Vec<_> = exact.iter().map(|exact| storage.round(*exact)).collect();
        within(recorder, &buffer, storage, &rounded, &vec![0.0; rounded.len()])?;
    }
    Ok(())
}
