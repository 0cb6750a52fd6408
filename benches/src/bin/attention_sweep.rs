//! Times every plan of attention over the catalogue, to find out what is chosen when:
//! `attention_sweep --dtype bf16 > attention.tsv`. `benches/peers/torch_attention.py` prints the same
//! rows for PyTorch.
//!
//! A plan is compared with the portable one before it is timed; that one is held against double
//! precision by the tests, at lengths that double precision can be computed for.
//!
//! Rows of cases with `--mask` end in `mask`. Their arithmetic is that of the pairs which the mask leaves.
//!
//! Rows of packed sequences, whose shape ends in `packed`, have the same tokens in sequences of half to
//! one and a half times that length, one behind the other.

use blackburn_benches::{Rotated, device, median_ms, median_of_batches};
use blackburn_kernels::{
    Family, Pass,
    attention::{
        AttentionBlueprint, AttentionInputs, AttentionOutput, AttentionProblem, AttentionResult,
        Dropout, HeadStrides, Order, Pairs, Window, attention_backward, attention_backward_with,
        attention_forward, attention_forward_with,
    },
    buffer::Buffer,
};
use blackburn_reference::{
    attention::{AttentionCase, cases},
    storage::Storage,
};
use burn::tensor::{
    Distribution, FloatDType, Tensor, module::attention, ops::AttentionModuleOptions,
};
use clap::{Parser, ValueEnum};
use cubecl::{
    MemoryScope,
    client::Client,
    ir::{ElemType, UIntKind},
};
use std::error::Error;

/// Compare and time every plan of attention.
#[derive(Parser)]
struct Arguments {
    /// Type of q, k and v: f32, f16 or bf16.
    #[arg(long, default_value = "bf16", value_parser = storage)]
    dtype: Storage,
    /// Only cases whose name contains this, such as "heads of 64, causal".
    #[arg(long, default_value = "")]
    filter: String,
    /// Only sequences of at most so many tokens.
    #[arg(long, default_value_t = 8192)]
    tokens: usize,
    /// Only plans of this family: wgmma, mma or portable.
    #[arg(long)]
    family: Option<String>,
    /// Only the plan that is picked.
    #[arg(long)]
    picked: bool,
    /// Which passes: forward, backward, and both as one, by the plans that are picked.
    #[arg(long, value_delimiter = ',', default_value = "forward,backward")]
    passes: Vec<Timed>,
    /// Time plans without comparing them, with `-` for the distance: the portable plan takes seconds for the longest
    /// sequences.
    #[arg(long)]
    unchecked: bool,
    /// Multiply numbers of f32 with all their bits, and not as TF32.
    #[arg(long)]
    full_f32: bool,
    /// Only plans that give the same bits each time.
    #[arg(long)]
    deterministic: bool,
    /// Pack the tokens of a case into sequences of different lengths instead.
    #[arg(long, conflicts_with_all = ["memory", "module"])]
    packed: bool,
    /// Mask by a tensor of bytes that all sequences and heads share: causal cases instead of causally, others to eight
    /// documents.
    #[arg(long, conflicts_with_all = ["packed", "memory", "module"])]
    mask: bool,
    /// Leave out this share of the weights.
    #[arg(long)]
    dropout: Option<f64>,
    /// Run both passes by the plans that are picked once, and tell the memory that is in use while
    /// all tensors live, and what is reserved then, instead of comparing and timing.
    #[arg(long)]
    memory: bool,
    /// Time Burn's `module::attention` at inference instead, from 16 tokens on, as a program that
    /// calls `blackburn::init` meets it. `BLACKBURN_DISABLE=BlackburnAttention` leaves it to Burn.
    #[arg(long)]
    module: bool,
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Timed {
    Forward,
    Backward,
    Both,
}

fn storage(name: &str) -> Result<Storage, String> {
    let named = |storage: &Storage| format!("{storage:?}").eq_ignore_ascii_case(name);
    Storage::ALL.into_iter().find(named).ok_or_else(|| "expected f32, f16 or bf16".into())
}

fn main() -> Result<(), String> {
    let arguments = Arguments::parse();
    let Some(device) = device() else { return Ok(()) };
    if arguments.module {
        return module(&arguments, burn::tensor::Device::new(device))
            .map_err(|error| error.to_string());
    }
    let client = device.client();
    if arguments.memory {
        println!("dtype\tname\tshape\tin_use_MiB\treserved_MiB");
    } else {
        println!(
            "dtype\tname\tshape\tpass\tpicked\tplan\tmedian_ms\tmin_ms\tmax_ms\tTFLOP/s\tdistance"
        );
    }
    let mut failures = 0;
    for case in cases::benchmark() {
        if case.seq_q <= arguments.tokens && case.name.contains(&arguments.filter) {
            if arguments.memory {
                memory(&client, &arguments, &case)?;
            } else {
                failures += sweep(&client, &arguments, &case)?;
            }
        }
    }
    if failures == 0 { Ok(()) } else { Err(format!("{failures} plans gave wrong results")) }
}

fn problem(arguments: &Arguments, case: &AttentionCase) -> AttentionProblem {
    let dtype = blackburn_benches::dtype_of(arguments.dtype);
    let shape = [case.batch, case.heads_q, case.seq_q, case.head_dim];
    let mut problem = AttentionProblem::dense(shape, case.seq_kv, dtype);
    problem.deterministic = arguments.deterministic;
    problem.full_f32 = arguments.full_f32;
    problem.dropout = arguments.dropout.map(|rate| Dropout { rate, seed: 1 });
    if arguments.mask {
        problem.mask = Some(Pairs { batch: 0, head: 0, row: case.seq_kv, column: 1 });
    } else if case.options.causal {
        problem.window = Window { left: None, right: Some(0) };
    }
    if arguments.packed {
        let tokens = case.batch * case.seq_q;
        let rows = Order::PositionsFirst.strides(case.heads_q, tokens, case.head_dim);
        let rows = HeadStrides { batch: 0, ..rows };
        let longest = lengths(case).into_iter().max().unwrap_or_default();
        (problem.q, problem.k, problem.v) = (rows, rows, rows);
        (problem.order_q, problem.order_kv) = (Order::PositionsFirst, Order::PositionsFirst);
        (problem.seq_q, problem.seq_kv) = (longest, longest);
        problem.packed = Some([tokens, tokens]);
    }
    problem
}

/// As many sequences as the case has, of as many tokens in all.
fn lengths(case: &AttentionCase) -> Vec<usize> {
    let (seq, half) = (case.seq_q, case.seq_q / 2);
    let odd_one = case.batch % 2;
    let pairs = (0..case.batch / 2).flat_map(|_| [seq + half, seq - half]);
    pairs.chain(vec![seq; odd_one]).collect()
}

/// Where packed sequences begin, of queries and then of keys.
fn starts(client: &Client, case: &AttentionCase) -> Buffer {
    let mut ends = vec![0u32];
    for length in lengths(case) {
        ends.push(ends.last().copied().unwrap_or_default() + length as u32);
    }
    let words = [&ends[..], &ends[..]].concat();
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    Buffer {
        handle: client.create_from_slice(&bytes),
        elements: words.len(),
        dtype: ElemType::UInt(UIntKind::U32),
    }
}

/// Documents of a sequence.
const DOCUMENTS: usize = 8;

/// What pairs are left out, a byte each.
fn mask(client: &Client, case: &AttentionCase) -> Buffer {
    let AttentionCase { seq_q, seq_kv, .. } = *case;
    let document = |place: usize, tokens: usize| place * DOCUMENTS / tokens;
    let is_left_out = |pair: usize| {
        let (query, key) = (pair / seq_kv, pair % seq_kv);
        match case.options.causal {
            true => key > query + seq_kv - seq_q,
            false => document(query, seq_q) != document(key, seq_kv),
        }
    };
    let bytes: Vec<u8> = (0..seq_q * seq_kv).map(|pair| u8::from(is_left_out(pair))).collect();
    Buffer {
        handle: client.create_from_slice(&bytes),
        elements: bytes.len(),
        dtype: ElemType::UInt(UIntKind::U8),
    }
}

/// Multiplications and additions of the forward pass.
fn forward_flops(arguments: &Arguments, case: &AttentionCase) -> f64 {
    if !arguments.packed {
        let is_parted = arguments.mask && !case.options.causal;
        return case.forward_flops() / if is_parted { DOCUMENTS as f64 } else { 1.0 };
    }
    let of = |length| AttentionCase { batch: 1, seq_q: length, seq_kv: length, ..*case };
    lengths(case).into_iter().map(|length| of(length).forward_flops()).sum()
}

/// Burn's own function, by the provider or without it.
fn module(arguments: &Arguments, mut device: burn::tensor::Device) -> Result<(), Box<dyn Error>> {
    blackburn::init()?;
    device.configure(match arguments.dtype {
        Storage::F32 => FloatDType::F32,
        Storage::F16 => FloatDType::F16,
        Storage::Bf16 => FloatDType::BF16,
    })?;
    println!("dtype\tshape\tmedian_ms\tmin_ms\tmax_ms\tTFLOP/s");
    let (batch, heads) = (4, 16);
    let mut tokens = 16;
    while tokens <= arguments.tokens {
        for (head_dim, is_causal) in [(64, false), (64, true), (128, false), (128, true)] {
            let draw = || {
                let shape = [batch, heads, tokens, head_dim];
                Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), &device)
            };
            let (q, k, v) = (draw(), draw(), draw());
            let options = || AttentionModuleOptions { is_causal, ..Default::default() };
            let compute = || {
                let out = attention(q.clone(), k.clone(), v.clone(), None, None, options());
                // Burn would merge iterations otherwise.
                device.flush().map(|()| out)
            };
            compute()?;
            let [median, min, max] = median_of_batches(
                || device.sync().expect("the device failed during a bench"),
                || drop(compute()),
            );
            let share = if is_causal { 0.5 } else { 1.0 };
            let flops = 4.0 * (batch * heads * tokens * tokens * head_dim) as f64 * share;
            let mark = if is_causal { " causal" } else { "" };
            println!(
                "{:?}\tB{batch}H{heads}Q{tokens}K{tokens}D{head_dim}{mark}\t{median:.4}\t{min:.4}\t\
                 {max:.4}\t{:.1}",
                arguments.dtype,
                flops / median / 1e9
            );
        }
        tokens *= 2;
    }
    Ok(())
}

/// q, k, v and the gradient of the output.
fn tensors(client: &Client, arguments: &Arguments, case: &AttentionCase) -> [Buffer; 4] {
    let dtype = blackburn_benches::dtype_of(arguments.dtype);
    let tensor = |seed, elements| Rotated::new(client, seed, elements, dtype).buffer;
    [
        tensor(1, case.q_len()),
        tensor(2, case.kv_len()),
        tensor(3, case.kv_len()),
        tensor(4, case.q_len()),
    ]
}

/// What both passes of a case take.
fn memory(client: &Client, arguments: &Arguments, case: &AttentionCase) -> Result<(), String> {
    client.memory_cleanup().map_err(|error| error.to_string())?;
    let problem = problem(arguments, case);
    let [q, k, v, dout] = tensors(client, arguments, case);
    let inputs = AttentionInputs::of(&q, &k, &v);
    let output = attention_forward(client, &problem, &inputs).map_err(|error| error.to_string())?;
    let result = AttentionResult::of(&output, &dout, problem.out());
    let gradients = attention_backward(client, &problem, &inputs, &result, false)
        .map_err(|error| error.to_string())?;
    let usage = client.memory_report(MemoryScope::Device).usage();
    let mebibytes = |bytes: u64| bytes >> 20;
    println!(
        "{:?}\t{}\t{}\t{}\t{}",
        arguments.dtype,
        case.name,
        case.shape(),
        mebibytes(usage.bytes_in_use),
        mebibytes(usage.bytes_reserved)
    );
    drop(gradients);
    Ok(())
}

/// Runs all plans of a case; returns how many were wrong.
fn sweep(client: &Client, arguments: &Arguments, case: &AttentionCase) -> Result<usize, String> {
    let problem = problem(arguments, case);
    let [q, k, v, dout] = tensors(client, arguments, case);
    let starts = arguments.packed.then(|| starts(client, case));
    let starts = starts.as_ref();
    let mask = arguments.mask.then(|| mask(client, case));
    let mask = mask.as_ref();
    let inputs = AttentionInputs { mask, starts, ..AttentionInputs::of(&q, &k, &v) };
    let message = |error: &dyn std::fmt::Display| error.to_string();

    let trusted = |pass: Pass| {
        let plans = AttentionBlueprint::candidates(&problem, pass, client);
        let portable = plans.into_iter().find(|plan| plan.family == Family::Portable);
        portable.ok_or_else(|| format!("{case}: no portable plan"))
    };
    let forward = |plan: &AttentionBlueprint| {
        attention_forward_with(client, &problem, plan, &inputs).map_err(|error| message(&error))
    };
    let backward = |plan: &AttentionBlueprint, output: &AttentionOutput| {
        let result = AttentionResult::of(output, &dout, problem.out());
        let gradients = attention_backward_with(client, &problem, plan, &inputs, &result, false)
            .map_err(|error| message(&error))?;
        Ok::<_, String>(vec![gradients.dq, gradients.dk, gradients.dv])
    };
    let picked_forward = AttentionBlueprint::plan(&problem, Pass::Forward, client)
        .map_err(|error| message(&error))?;
    let is_unchecked = arguments.unchecked;
    let output = forward(&if is_unchecked { picked_forward } else { trusted(Pass::Forward)? })?;
    let mut failures = 0;
    for timed in &arguments.passes {
        let pass = if *timed == Timed::Forward { Pass::Forward } else { Pass::Backward };
        let picked = AttentionBlueprint::plan(&problem, pass, client).ok();
        let mut plans = AttentionBlueprint::candidates(&problem, pass, client);
        plans.retain(|plan| !arguments.picked || Some(*plan) == picked);
        if let Some(family) = &arguments.family {
            plans.retain(|plan| format!("{:?}", plan.family).eq_ignore_ascii_case(family));
        }
        let run = |plan: &AttentionBlueprint| -> Result<Vec<Buffer>, String> {
            match timed {
                Timed::Forward => Ok(vec![forward(plan)?.out]),
                Timed::Backward => backward(plan, &output),
                Timed::Both => backward(plan, &forward(&picked_forward)?),
            }
        };
        let share = match timed {
            Timed::Forward => 1.0,
            // Five products, of which two are the forward pass's.
            Timed::Backward => 2.5,
            Timed::Both => 3.5,
        };
        let flops = share * forward_flops(arguments, case);
        let expected = match plans.is_empty() || is_unchecked {
            true => Vec::new(),
            false => run(&trusted(pass)?)?,
        };
        for plan in plans {
            let mark = if Some(plan) == picked { "*" } else { "" };
            let tensor = match (arguments.packed, arguments.mask) {
                (true, _) => " packed",
                (_, true) => " mask",
                _ => "",
            };
            let row = format!(
                "{:?}\t{}\t{}{tensor}\t{timed:?}\t{mark}\t{:?} {}x{}{}{}",
                arguments.dtype,
                case.name,
                case.shape(),
                plan.family,
                plan.tile_q,
                plan.tile_kv,
                if plan.atomic { " atomic" } else { "" },
                if plan.maps_mask { " mapped" } else { "" }
            );
            let checked =
                run(&plan).and_then(|actual| distance(client, arguments.dtype, &actual, &expected));
            match checked {
                Ok(distance) if distance < TOLERANCE => {
                    let [median, min, max] = median_ms(client, || {
                        // It ran a moment ago.
                        let _ = run(&plan);
                    });
                    let rate = flops / median / 1e9;
                    let distance = if is_unchecked { "-".into() } else { format!("{distance:.4}") };
                    println!("{row}\t{median:.4}\t{min:.4}\t{max:.4}\t{rate:.1}\t{distance}");
                }
                Ok(distance) => {
                    failures += 1;
                    println!("{row}\tWRONG: distance {distance}");
                }
                Err(reason) => {
                    failures += 1;
                    println!("{row}\tWRONG: {reason}");
                }
            }
        }
    }
    Ok(failures)
}

/// Rounding weights to 8 bits of mantissa moves a result by a few thousandths of its size.
const TOLERANCE: f64 = 0.01;

/// How far the tensors are apart, in root mean squares, of what is expected.
fn distance(
    client: &Client,
    storage: Storage,
    actual: &[Buffer],
    expected: &[Buffer],
) -> Result<f64, String> {
    let values = |buffer: &Buffer| {
        let bytes = client.read_one(buffer.handle.clone()).map_err(|error| error.to_string())?;
        Ok::<_, String>(storage.decode(&bytes))
    };
    let mut worst = 0.0f64;
    for (actual, expected) in actual.iter().zip(expected) {
        let (actual, expected) = (values(actual)?, values(expected)?);
        let pairs = || actual.iter().zip(&expected);
        let squares: f64 = pairs().map(|(a, e)| (a - e) * (a - e)).sum();
        let size: f64 = expected.iter().map(|e| e * e).sum();
        worst = worst.max((squares / size.max(f64::MIN_POSITIVE)).sqrt());
        if squares.is_nan() {
            return Ok(f64::NAN);
        }
    }
    Ok(worst)
}
