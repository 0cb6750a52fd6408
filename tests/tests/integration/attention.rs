//! Attention's kernels: every plan that the device offers, forward and backward, against f64.

#[path = "attention_batches.rs"]
mod batches;
#[path = "attention_decode.rs"]
mod decode;
#[path = "attention_keys.rs"]
mod keys;
#[path = "attention_layouts.rs"]
pub(crate) mod layouts;
#[path = "attention_long.rs"]
mod long;
#[path = "attention_mapped.rs"]
mod mapped;
#[path = "attention_masks.rs"]
pub(crate) mod masks;
#[path = "attention_packed.rs"]
mod packed;

use blackburn_kernels::{
    Family, KernelError, Pass,
    attention::{
        AttentionBlueprint, AttentionGradients, AttentionInputs as Tensors, AttentionOutput,
        AttentionProblem, AttentionResult, Dropout, MaskMaps, Order, Pairs, Window,
        attention_backward, attention_backward_with, attention_forward, attention_forward_with,
    },
    buffer::Buffer,
};
use blackburn_reference::{
    attention::{
        AttentionCase, AttentionInputs, AttentionOptions, AttentionPrecision, PairShape, cases,
    },
    matmul::MatmulPrecision,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::{buffers::lse_of, on_cuda_with, on_device, on_device_with};
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
};
use libtest_mimic::{Failed, Trial};

pub(crate) const F32: Storage = Storage::F32;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let mut add = |what: &str, cases: fn() -> Vec<AttentionCase>| {
            let name = format!("attention::{what}_in_{storage:?}").to_lowercase();
            trials.push(Trial::ignorable_test(name, move || {
                on_device_with(dtype(storage), |client| {
                    let mut cases = cases();
                    if client.name() != "cuda" && storage != F32 {
                        // Software devices compile for half a second a kernel, and a type changes
                        // nothing but loads and stores.
                        cases.retain(|case| {
                            case.name.starts_with("everything") || case.seq_kv == 63
                        });
                    }
                    cases.into_iter().try_for_each(|case| every_plan(client, case, storage))
                })
            }));
        };
        add("lengths_around_the_edges_of_tiles_are_within_bounds", cases::edges);
        add("every_option_is_within_bounds", cases::options);
        add("sequences_that_share_a_bias_are_within_bounds", || vec![cases::WINDOWS]);
    }
    for (what, cases) in [
        ("lengths_around_the_edges_of_tiles", cases::edges as fn() -> Vec<AttentionCase>),
        ("every_option", cases::options),
        ("sequences_that_share_a_bias", || vec![cases::WINDOWS]),
    ] {
        // Other devices have no tensor cores, and the same kernels as for exact products.
        let name = format!("attention::{what}_are_within_bounds_in_tf32");
        trials.push(Trial::ignorable_test(name, move || {
            on_cuda_with(dtype(F32), |client| {
                cases().into_iter().try_for_each(|case| in_tf32(client, case))
            })
        }));
    }
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("attention::{name}"), move || on_device(test))
    };
    trials.extend(batches::trials());
    trials.extend(decode::trials());
    trials.extend(keys::trials());
    trials.extend(long::trials());
    trials.extend(mapped::trials());
    trials.extend(masks::trials());
    trials.extend([
        trial("heads_side_by_side_are_read_and_written_in_place", layouts::side_by_side),
        trial("packed_sequences_attend_to_themselves_alone", packed::packed),
        trial("gradients_in_odd_rows_are_read_right_or_refused", layouts::odd_rows),
        trial("repeated_runs_give_the_same_bits", repeats),
        trial("nan_reaches_the_rows_that_see_it_and_no_other", nan),
        trial("scores_of_minus_infinity_are_as_good_as_masked", minus_infinity),
        trial("planted_faults_are_caught", faults),
        trial("bad_arguments_are_named", bad_arguments),
    ]);
    trials
}

pub(crate) fn precision(client: &Client, storage: Storage) -> AttentionPrecision {
    match client.name() {
        // What tensor cores are allowed; f32 goes there in `in_tf32` alone.
        "cuda" if storage != F32 => AttentionPrecision::cuda(MatmulPrecision::tensor_core(storage))
            .with_exponentials(AttentionBlueprint::exponential_error(dtype(storage), client)),
        "cuda" => AttentionPrecision::cuda(MatmulPrecision::exact(storage)),
        _ => AttentionPrecision::portable(storage),
    }
}

/// As [`precision`], of programs: products of f32 may be rounded to TF32 by default.
pub(crate) fn default_precision(client: &Client, storage: Storage) -> AttentionPrecision {
    match client.name() {
        "cuda" if storage == F32 => AttentionPrecision::cuda(MatmulPrecision::tf32()),
        _ => precision(client, storage),
    }
}

pub(crate) fn problem(case: &AttentionCase, storage: Storage) -> AttentionProblem {
    let options = &case.options;
    let window = options
        .window
        .map_or_else(Window::default, |window| Window { left: window.left, right: window.right });
    let right = if options.causal { Some(0) } else { window.right };
    let pairs = |shape: PairShape| {
        let [batch, heads, rows, keys] = case.pair_dims(shape);
        let stride = |size: usize, stride| if size == 1 { 0 } else { stride };
        Pairs {
            batch: stride(batch, heads * rows * keys),
            head: stride(heads, rows * keys),
            row: stride(rows, keys),
            column: 1,
        }
    };
    let rows = |heads, seq| Order::HeadsFirst.strides(heads, seq, case.head_dim);
    AttentionProblem {
        heads_kv: case.heads_kv,
        q: rows(case.heads_q, case.seq_q),
        k: rows(case.heads_kv, case.seq_kv),
        v: rows(case.heads_kv, case.seq_kv),
        scale: case.scale() as f32,
        window: Window { left: window.left, right },
        softcap: options.softcap.map(|cap| cap as f32),
        dropout: options.dropout.map(|dropout| Dropout { rate: dropout.rate, seed: dropout.seed }),
        mask: options.mask.map(pairs),
        bias: options.bias.map(pairs),
        ..AttentionProblem::dense(
            [case.batch, case.heads_q, case.seq_q, case.head_dim],
            case.seq_kv,
            dtype(storage),
        )
    }
}

/// The inputs of a case on the device.
struct Uploaded {
    q: Buffer,
    k: Buffer,
    v: Buffer,
    dout: Buffer,
    mask: Option<Buffer>,
    bias: Option<Buffer>,
    /// Plans of both passes share them.
    maps: MaskMaps,
}

impl Uploaded {
    fn new(client: &Client, inputs: &AttentionInputs, storage: Storage) -> Self {
        let send = |values: &[f64]| upload(client, values, storage);
        Self {
            q: send(&inputs.q),
            k: send(&inputs.k),
            v: send(&inputs.v),
            dout: send(&inputs.dout),
            mask: inputs.mask.as_deref().map(|mask| {
                let words = mask.iter().map(|masked| u32::from(*masked));
                integers(client, &words.collect::<Vec<_>>())
            }),
            bias: inputs.bias.as_deref().map(send),
            maps: MaskMaps::default(),
        }
    }

    fn tensors(&self) -> Tensors<'_> {
        let plain = Tensors::of(&self.q, &self.k, &self.v);
        Tensors {
            mask: self.mask.as_ref(),
            bias: self.bias.as_ref(),
            maps: Some(&self.maps),
            ..plain
        }
    }

    fn result<'a>(
        &'a self,
        problem: &AttentionProblem,
        output: &'a AttentionOutput,
    ) -> AttentionResult<'a> {
        AttentionResult::of(output, &self.dout, problem.out())
    }
}

pub(crate) fn integers(client: &Client, words: &[u32]) -> Buffer {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    Buffer {
        handle: client.create_from_slice(&bytes),
        elements: words.len(),
        dtype: ElemType::UInt(UIntKind::U32),
    }
}

/// The plans that a case is run by: all of them for some cases, else one of each family, and on CUDA
/// only families that a type may make a difference to. Compiling takes most of the time.
fn plans(
    client: &Client,
    case: &AttentionCase,
    problem: &AttentionProblem,
    pass: Pass,
    storage: Storage,
) -> Vec<AttentionBlueprint> {
    let mut plans = AttentionBlueprint::candidates(problem, pass, client);
    let is_sample = ["everything", masks::CASE.name].contains(&case.name) || case.seq_kv == 63;
    if !is_sample {
        plans.retain(|plan| match storage {
            _ if client.name() != "cuda" => true,
            Storage::F32 => true,
            Storage::F16 => plan.family == Family::Wgmma,
            Storage::Bf16 => plan.family != Family::Portable,
        });
        plans.dedup_by_key(|plan| {
            let keys = plan.atomic.then_some(plan.tile_kv);
            (plan.family, plan.split, plan.maps_mask, keys)
        });
    }
    plans
}

fn every_plan(client: &Client, case: AttentionCase, storage: Storage) -> Result<(), Failed> {
    let inputs = AttentionInputs::generate(&case, 1, storage);
    let precision = precision(client, storage).with_roundings(case.roundings());
    compare_plans(client, case, [&inputs, &inputs], storage, &precision)
}

/// As [`every_plan`], with numbers of f32 that may be rounded to TF32.
fn in_tf32(client: &Client, case: AttentionCase) -> Result<(), Failed> {
    let inputs = AttentionInputs::generate(&case, 1, F32);
    let precision =
        AttentionPrecision::cuda(MatmulPrecision::tf32()).with_roundings(case.roundings());
    compare_plans(client, case, [&inputs, &inputs], F32, &precision)
}

/// Both passes by every plan on the inputs that are given, against the reference on the inputs that are
/// meant.
fn compare_plans(
    client: &Client,
    case: AttentionCase,
    [given, meant]: [&AttentionInputs; 2],
    storage: Storage,
    precision: &AttentionPrecision,
) -> Result<(), Failed> {
    let attention = meant.attention(case);
    let forward = attention.forward();
    let forward_bounds = attention.forward_bounds(&forward, precision);
    let backward = attention.backward(&meant.dout);
    let backward_bounds = attention.backward_bounds(&backward, &meant.dout, precision);
    let full_f32 = precision.product != MatmulPrecision::tf32();
    let problem = AttentionProblem { full_f32, ..problem(&case, storage) };
    let uploaded = Uploaded::new(client, given, storage);
    let check = |what: &str, actual: &[f64], expected: &[f64], bounds: &[f64]| {
        compare(actual, expected, bounds)
            .map_err(|error| Failed::from(format!("{case}, {what}: {error}")))
    };
    for plan in plans(client, &case, &problem, Pass::Forward, storage) {
        let output = attention_forward_with(client, &problem, &plan, &uploaded.tensors())?;
        let lse = lse_of(&download(client, output.lse, F32)?);
        check(&format!("lse by {plan:?}"), &lse, &forward.lse, &forward_bounds.lse)?;
        let out = download(client, output.out, storage)?;
        check(&format!("out by {plan:?}"), &out, &forward.o, &forward_bounds.o)?;
    }
    let output = attention_forward(client, &problem, &uploaded.tensors())?;
    for plan in plans(client, &case, &problem, Pass::Backward, storage) {
        let gradients = attention_backward_with(
            client,
            &problem,
            &plan,
            &uploaded.tensors(),
            &uploaded.result(&problem, &output),
            plan.gives_bias_gradient(&problem, client),
        )?;
        for (what, actual, expected, bounds) in [
            ("dq", gradients.dq, &backward.dq, &backward_bounds.dq),
            ("dk", gradients.dk, &backward.dk, &backward_bounds.dk),
            ("dv", gradients.dv, &backward.dv, &backward_bounds.dv),
        ] {
            let actual = download(client, actual, storage)?;
            check(&format!("{what} by {plan:?}"), &actual, expected, bounds)?;
        }
        if let (Some(actual), Some(expected), Some(bounds)) =
            (gradients.dbias, &backward.dbias, &backward_bounds.dbias)
        {
            let actual = summed(&case, &download(client, actual, F32)?);
            check(&format!("dbias by {plan:?}"), &actual, expected, bounds)?;
        } else if backward.dbias.is_some() && plan.gives_bias_gradient(&problem, client) {
            return Err(format!("{case}: the bias has no gradient").into());
        }
    }
    Ok(())
}

/// A tensor of all pairs, summed to the shape of the bias.
fn summed(case: &AttentionCase, pairs: &[f64]) -> Vec<f64> {
    let Some(shape) = case.options.bias else { return Vec::new() };
    let [batch, heads, rows, keys] = case.pair_dims(shape);
    let mut sums = vec![0.0; batch * heads * rows * keys];
    for (at, value) in pairs.iter().enumerate() {
        let (row, key) = (at / case.seq_kv, at % case.seq_kv);
        let (head, row) = (row / case.seq_q, row % case.seq_q);
        let (b, head) = (head / case.heads_q, head % case.heads_q);
        let of = |at: usize, size: usize| if size == 1 { 0 } else { at };
        let index = (of(b, batch) * heads + of(head, heads)) * rows + of(row, rows);
        sums[index * keys + of(key, keys)] += value;
    }
    sums
}

const SMALL: AttentionCase = AttentionCase {
    name: "small",
    batch: 2,
    heads_q: 4,
    heads_kv: 2,
    seq_q: 35,
    seq_kv: 50,
    head_dim: 40,
    options: AttentionOptions { causal: true, ..AttentionOptions::PLAIN },
};

/// Runs both passes of a case in f32.
fn run(
    client: &Client,
    problem: &AttentionProblem,
    uploaded: &Uploaded,
) -> Result<(AttentionOutput, AttentionGradients), KernelError> {
    let output = attention_forward(client, problem, &uploaded.tensors())?;
    let result = uploaded.result(problem, &output);
    let gradients = attention_backward(client, problem, &uploaded.tensors(), &result, false)?;
    Ok((output, gradients))
}

fn repeats(client: &Client) -> Result<(), Failed> {
    let inputs = AttentionInputs::generate(&SMALL, 3, F32);
    let uploaded = Uploaded::new(client, &inputs, F32);
    let all = || -> Result<Vec<Vec<f64>>, Failed> {
        let (output, gradients) = run(client, &problem(&SMALL, F32), &uploaded)?;
        [output.out, output.lse, gradients.dq, gradients.dk, gradients.dv]
            .into_iter()
            .map(|buffer| Ok(download(client, buffer, F32)?))
            .collect()
    };
    let first = all()?;
    for _ in 0..3 {
        if all()? != first {
            return Err("the same input gave other bits".into());
        }
    }
    Ok(())
}

/// A NaN in a key reaches the queries that see it: under causality those behind it.
fn nan(client: &Client) -> Result<(), Failed> {
    const KEY: usize = 30;
    let mut inputs = AttentionInputs::generate(&SMALL, 4, F32);
    inputs.k[KEY * SMALL.head_dim] = f64::NAN;
    let uploaded = Uploaded::new(client, &inputs, F32);
    let output = attention_forward(client, &problem(&SMALL, F32), &uploaded.tensors())?;
    let out = download(client, output.out, F32)?;
    for (at, row) in out.chunks_exact(SMALL.head_dim).enumerate() {
        let (head, query) = (at / SMALL.seq_q, at % SMALL.seq_q);
        // The first key of the first head of keys, which two heads of queries share.
        let sees = head < 2 && SMALL.keys(query).contains(&KEY);
        if row.iter().any(|value| value.is_nan() != sees) {
            return Err(format!("query {query} of head {head}: {row:?}").into());
        }
    }
    Ok(())
}

/// As programs mask that have no other way than a bias.
fn minus_infinity(client: &Client) -> Result<(), Failed> {
    let options = AttentionOptions { bias: Some(PairShape::Full), ..AttentionOptions::PLAIN };
    let case = AttentionCase { options, ..SMALL };
    let mut inputs = AttentionInputs::generate(&case, 5, F32);
    let masked = AttentionCase {
        options: AttentionOptions { mask: Some(PairShape::Full), dead_rows: true, ..options },
        ..case
    };
    let with_mask = AttentionInputs::generate(&masked, 5, F32);
    let (Some(bias), Some(mask)) = (&mut inputs.bias, &with_mask.mask) else {
        return Err("no bias or mask was generated".into());
    };
    let exact = with_mask.attention(masked);
    for (bias, masked) in bias.iter_mut().zip(mask) {
        if *masked {
            *bias = f64::NEG_INFINITY;
        }
    }
    let precision = precision(client, F32);
    let (forward, backward) = (exact.forward(), exact.backward(&inputs.dout));
    let bounds = exact.forward_bounds(&forward, &precision);
    let backward_bounds = exact.backward_bounds(&backward, &inputs.dout, &precision);
    let (output, gradients) =
        run(client, &problem(&case, F32), &Uploaded::new(client, &inputs, F32))?;
    compare(&download(client, output.out, F32)?, &forward.o, &bounds.o)?;
    compare(&download(client, gradients.dq, F32)?, &backward.dq, &backward_bounds.dq)?;
    compare(&download(client, gradients.dv, F32)?, &backward.dv, &backward_bounds.dv)?;
    Ok(())
}

/// The negative control: what is computed of another problem must not pass for this one.
fn faults(client: &Client) -> Result<(), Failed> {
    let inputs = AttentionInputs::generate(&SMALL, 6, F32);
    let exact = inputs.attention(SMALL);
    let precision = precision(client, F32);
    let (forward, backward) = (exact.forward(), exact.backward(&inputs.dout));
    let bounds = exact.forward_bounds(&forward, &precision);
    let backward_bounds = exact.backward_bounds(&backward, &inputs.dout, &precision);
    let uploaded = Uploaded::new(client, &inputs, F32);
    let right = problem(&SMALL, F32);
    let off_by_one = Window { left: None, right: Some(1) };
    for (fault, problem) in [
        ("a scale off by a thousandth", AttentionProblem { scale: right.scale * 1.001, ..right }),
        ("a key too many", AttentionProblem { window: off_by_one, ..right }),
        ("a last key that is skipped", AttentionProblem { seq_kv: SMALL.seq_kv - 1, ..right }),
    ] {
        let (output, gradients) = run(client, &problem, &uploaded)?;
        let out = download(client, output.out, F32)?;
        if compare(&out, &forward.o, &bounds.o).is_ok() {
            return Err(format!("{fault} went unseen in the output").into());
        }
        let dq = download(client, gradients.dq, F32)?;
        if compare(&dq, &backward.dq, &backward_bounds.dq).is_ok() {
            return Err(format!("{fault} went unseen in the gradient").into());
        }
    }
    Ok(())
}

fn bad_arguments(client: &Client) -> Result<(), Failed> {
    let inputs = AttentionInputs::generate(&SMALL, 7, F32);
    let uploaded = Uploaded::new(client, &inputs, F32);
    let right = problem(&SMALL, F32);
    let short = upload(client, &[0.0; 8], F32);
    let half = upload(client, &inputs.k, Storage::F16);
    let tensors = uploaded.tensors();
    for (argument, problem, tensors) in [
        ("heads_q", AttentionProblem { heads_kv: 3, ..right }, tensors),
        ("seq_kv", AttentionProblem { seq_kv: 0, ..right }, tensors),
        ("q", right, Tensors { q: &short, ..tensors }),
        ("k", right, Tensors { k: &half, ..tensors }),
        ("mask", AttentionProblem { mask: Some(Pairs::default()), ..right }, tensors),
        ("bias", right, Tensors { bias: Some(&short), ..tensors }),
        ("starts", right, Tensors { starts: Some(&short), ..tensors }),
        ("key", right, Tensors { key: Some(&short), ..tensors }),
    ] {
        match attention_forward(client, &problem, &tensors) {
            Err(KernelError::InvalidProblem { argument: named, .. }) if named == argument => {}
            other => return Err(format!("{argument}: {other:?}").into()),
        }
    }
    Ok(())
}
