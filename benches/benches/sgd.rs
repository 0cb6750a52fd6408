//! Gradient descent with momentum over all of GPT-2's parameters, one launch each: bytes moved a second.
//! `cargo xtask bench sgd --features cuda`

use blackburn_benches::{
    Rotated, device, dtype_of,
    gpt2::{TYPES, Types, VOCABULARY, WIDTH, parameters},
    time, verify,
};
use blackburn_kernels::{
    buffer::{Buffer, Rows},
    sgd::{SgdBlueprint, SgdProblem, SgdStep, SgdTensors, SgdTuning, sgd_update_with},
};
use blackburn_reference::{
    adamw::Rounding,
    sgd::{Element, Step, bound, update},
    storage::Storage,
};
use criterion::{Criterion, criterion_group, criterion_main};
use cubecl::client::Client;

const STEP: SgdStep = SgdStep {
    momentum: 0.9,
    dampening: 0.0,
    nesterov: false,
    weight_decay: 1e-4,
    rate: 0.1,
    time: 2,
};

/// A velocity of each parameter.
const STATES: usize = 1;

/// A parameter of numbers that are known here too, with a velocity of zero.
fn tensors(client: &Client, elements: usize, types: Types) -> (SgdTensors, [Rotated; 2]) {
    let [parameter, gradient] = [(1, types.parameter), (2, types.gradient)]
        .map(|(seed, storage)| Rotated::new(client, seed, elements, dtype_of(storage)));
    let handle = client.create_from_slice(&vec![0; elements * Storage::F32.bytes()]);
    let velocity = Buffer { handle, elements, dtype: dtype_of(Storage::F32) };
    let tensors = SgdTensors {
        parameter: parameter.buffer.clone().into(),
        gradient: gradient.buffer.clone().into(),
        velocity: Rows::one(velocity),
    };
    (tensors, [parameter, gradient])
}

fn step(client: &Client, tensors: SgdTensors, tuning: SgdTuning) -> SgdTensors {
    let plan = |problem: &SgdProblem, client: &Client| SgdBlueprint::tuned(problem, client, tuning);
    sgd_update_with(client, &STEP, tensors, None, None, plan).expect("the problem is valid")
}

/// One feed-forward matrix, in memory that others hold.
fn prove(client: &Client, types: Types, tuning: SgdTuning) {
    let elements = 4 * WIDTH * WIDTH;
    let (before, [parameter, gradient]) = tensors(client, elements, types);
    let SgdStep { momentum, dampening, nesterov, weight_decay, rate, .. } = STEP;
    let asked = Step { momentum, dampening, nesterov, weight_decay, rate, is_first: false };
    let old = |i| Element { parameter: parameter.at(i), velocity: 0.0 };
    let expected: Vec<f64> =
        (0..elements).map(|i| update(&asked, old(i), gradient.at(i)).parameter).collect();
    let bound_of =
        |i| bound(&asked, old(i), gradient.at(i), types.parameter, Rounding::Nearest).parameter;
    let bounds: Vec<f64> = (0..elements).map(bound_of).collect();
    let after = step(client, before, tuning).parameter.buffer;
    verify(client, after, types.parameter, &expected, &bounds);
}

/// What is measured: the plan, and what it could be.
fn tunings(types: Types) -> Vec<(String, SgdTuning)> {
    let widths = if types.parameter == Storage::F32 { &[4][..] } else { &[4, 8] };
    let mut all = vec![("step".to_string(), SgdTuning::default())];
    for widest in widths {
        for cubes_a_multiprocessor in [4, 8, 16] {
            let name = format!("vectors of {widest}, {cubes_a_multiprocessor} cubes");
            all.push((name, SgdTuning { widest: *widest, cubes_a_multiprocessor }));
        }
    }
    all
}

/// Parameters of so many elements each. Nobody else holds these: they are updated in place, as an
/// optimizer's are.
fn model(client: &Client, elements: &[usize], types: Types) -> Vec<SgdTensors> {
    elements.iter().map(|elements| tensors(client, *elements, types).0).collect()
}

fn bench(criterion: &mut Criterion) {
    let Some(device) = device() else { return };
    let client = device.client();
    for types in TYPES {
        let all = parameters();
        let count: usize = all.iter().sum();
        let Types { parameter, gradient } = types;
        let name = format!("sgd/{parameter:?} by {gradient:?}/{count}");
        let mut group = criterion.benchmark_group(name);
        group.throughput(types.bytes(count, STATES));
        // Made by the first row that is asked for.
        let mut made = None;
        for (name, tuning) in tunings(types) {
            let mut is_proven = false;
            group.bench_function(name, |bencher| {
                if !std::mem::replace(&mut is_proven, true) {
                    prove(&client, types, tuning);
                }
                let all = made.get_or_insert_with(|| model(&client, &all, types));
                time(bencher, &client, || {
                    let stepped = all.drain(..).map(|tensors| step(&client, tensors, tuning));
                    *all = stepped.collect();
                });
            });
        }
        drop(made);
        // The two largest alone, of which launches are no part.
        let large = [VOCABULARY * WIDTH; 2];
        group.throughput(types.bytes(large.iter().sum(), STATES));
        let mut made = None;
        group.bench_function("embedding and head alone", |bencher| {
            let all = made.get_or_insert_with(|| model(&client, &large, types));
            time(bencher, &client, || {
                let tuning = SgdTuning::default();
                let stepped = all.drain(..).map(|tensors| step(&client, tensors, tuning));
                *all = stepped.collect();
            });
        });
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
