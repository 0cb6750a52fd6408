//! AdamW over all of GPT-2's parameters, in few launches and in one each: bytes moved a second.
//! `cargo xtask bench adamw --features cuda`

use blackburn_benches::{
    Rotated, device, dtype_of,
    gpt2::{TYPES, Types, VOCABULARY, WIDTH, parameters},
    time, verify,
};
use blackburn_kernels::{
    adamw::{
        AdamwStep, AdamwTensors, AdamwTuning, AdamwUpdate, MOST_TENSORS, adamw_update_many_with,
    },
    buffer::{Buffer, Rows},
};
use blackburn_reference::{
    adamw::{Corrections, Element, Rounding, Step, bound, update},
    storage::Storage,
};
use criterion::{Criterion, criterion_group, criterion_main};
use cubecl::client::Client;

const STEP: AdamwStep =
    AdamwStep { beta_1: 0.9, beta_2: 0.95, epsilon: 1e-8, weight_decay: 0.1, rate: 6e-4, time: 1 };

/// A parameter of numbers that are known here too, with moments of zero.
fn tensors(client: &Client, elements: usize, types: Types) -> (AdamwTensors, [Rotated; 2]) {
    let [parameter, gradient] = [(1, types.parameter), (2, types.gradient)]
        .map(|(seed, storage)| Rotated::new(client, seed, elements, dtype_of(storage)));
    let moment = || {
        let handle = client.create_from_slice(&vec![0; elements * Storage::F32.bytes()]);
        Rows::one(Buffer { handle, elements, dtype: dtype_of(Storage::F32) })
    };
    let tensors = AdamwTensors {
        parameter: parameter.buffer.clone().into(),
        gradient: gradient.buffer.clone().into(),
        first: moment(),
        second: moment(),
    };
    (tensors, [parameter, gradient])
}

/// All parameters in their order, so many `together`.
fn step(
    client: &Client,
    model: Vec<AdamwTensors>,
    tuning: AdamwTuning,
    together: usize,
) -> Vec<AdamwTensors> {
    let mut stepped = Vec::new();
    let mut all = model.into_iter().map(|tensors| AdamwUpdate { step: STEP, tensors, draw: 0 });
    loop {
        let some: Vec<_> = all.by_ref().take(together).collect();
        if some.is_empty() {
            return stepped;
        }
        let some = adamw_update_many_with(client, some, None, None, tuning);
        stepped.extend(some.expect("the problems are valid"));
    }
}

/// One feed-forward matrix, in memory that others hold.
fn prove(client: &Client, types: Types, tuning: AdamwTuning) {
    let elements = 4 * WIDTH * WIDTH;
    let (before, [parameter, gradient]) = tensors(client, elements, types);
    let asked = Step {
        beta_1: STEP.beta_1,
        beta_2: STEP.beta_2,
        epsilon: STEP.epsilon,
        weight_decay: STEP.weight_decay,
        rate: STEP.rate,
        taken: 1,
    };
    let old = |i| Element { parameter: parameter.at(i), ..Element::default() };
    let expected: Vec<f64> =
        (0..elements).map(|i| update(&asked, old(i), gradient.at(i)).parameter).collect();
    let bound_of = |i| {
        let (rounding, by) = (Rounding::Nearest, Corrections::Host);
        bound(&asked, old(i), gradient.at(i), types.parameter, rounding, by).parameter
    };
    let bounds: Vec<f64> = (0..elements).map(bound_of).collect();
    let after = step(client, vec![before], tuning, 1).swap_remove(0).parameter.buffer;
    verify(client, after, types.parameter, &expected, &bounds);
}

/// Moments of each parameter.
const STATES: usize = 2;

/// What is measured: the plan, and what it could be.
fn tunings(types: Types) -> Vec<AdamwTuning> {
    let widths = if types.parameter == Storage::F32 { &[4][..] } else { &[4, 8] };
    let mut all = Vec::new();
    for widest in widths {
        for cubes_a_multiprocessor in [4, 8, 16] {
            all.push(AdamwTuning { widest: *widest, cubes_a_multiprocessor });
        }
    }
    all
}

/// Parameters of so many elements each. Nobody else holds these: they are updated in place, as an
/// optimizer's are.
fn model(client: &Client, elements: &[usize], types: Types) -> Vec<AdamwTensors> {
    elements.iter().map(|elements| tensors(client, *elements, types).0).collect()
}

fn bench(criterion: &mut Criterion) {
    let Some(device) = device() else { return };
    let client = device.client();
    for types in TYPES {
        let all = parameters();
        let count: usize = all.iter().sum();
        let Types { parameter, gradient } = types;
        let name = format!("adamw/{parameter:?} by {gradient:?}/{count}");
        let mut group = criterion.benchmark_group(name);
        group.throughput(types.bytes(count, STATES));
        let mut rows = vec![("step".to_string(), AdamwTuning::default())];
        rows.extend(tunings(types).into_iter().map(|tuning| {
            let AdamwTuning { widest, cubes_a_multiprocessor } = tuning;
            (format!("vectors of {widest}, {cubes_a_multiprocessor} cubes"), tuning)
        }));
        // Made and proven by the first row that is asked for.
        let mut made = None;
        for (name, tuning) in rows {
            let mut is_proven = false;
            for (name, together) in
                [(name.clone(), MOST_TENSORS), (format!("{name}, one launch each"), 1)]
            {
                group.bench_function(name, |bencher| {
                    if !std::mem::replace(&mut is_proven, true) {
                        prove(&client, types, tuning);
                    }
                    let all = made.get_or_insert_with(|| model(&client, &all, types));
                    time(bencher, &client, || {
                        *all = step(&client, std::mem::take(all), tuning, together);
                    });
                });
            }
        }
        drop(made);
        // The two largest alone, of which launches are no part.
        let large = [VOCABULARY * WIDTH; 2];
        group.throughput(types.bytes(large.iter().sum(), STATES));
        let mut made = None;
        group.bench_function("embedding and head alone", |bencher| {
            let all = made.get_or_insert_with(|| model(&client, &large, types));
            time(bencher, &client, || {
                *all = step(&client, std::mem::take(all), AdamwTuning::default(), 1);
            });
        });
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
