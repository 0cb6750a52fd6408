//! Gradient descent with momentum over all of GPT-2's parameters, one launch each: bytes moved a second.
//! `cargo xtask bench sgd --features cuda`

use blackburn_benches::{
    Rotated, device, dtype_of,
    gpt2::{VOCABULARY, WIDTH, parameters},
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
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use cubecl::client::Client;

const STEP: SgdStep = SgdStep {
    momentum: 0.9,
    dampening: 0.0,
    nesterov: false,
    weight_decay: 1e-4,
    rate: 0.1,
    time: 2,
};

/// Types of a step.
#[derive(Clone, Copy)]
struct Types {
    parameter: Storage,
    gradient: Storage,
}

/// All in f32, f32 masters by bf16 gradients, and all but the velocity in bf16.
const TYPES: [Types; 3] = [
    Types { parameter: Storage::F32, gradient: Storage::F32 },
    Types { parameter: Storage::F32, gradient: Storage::Bf16 },
    Types { parameter: Storage::Bf16, gradient: Storage::Bf16 },
];

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
        for unroll in [1, 2, 4] {
            for cubes_a_multiprocessor in [4, 8, 16] {
                let name = format!(
                    "vectors of {widest}, {unroll} at once, {cubes_a_multiprocessor} cubes"
                );
                all.push((name, SgdTuning { widest: *widest, unroll, cubes_a_multiprocessor }));
            }
        }
    }
    all
}

fn bytes(model: &[SgdTensors]) -> Throughput {
    let of = |tensors| SgdProblem::new(tensors).expect("the problem is valid").bytes();
    Throughput::Bytes(model.iter().map(of).sum::<usize>() as u64)
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
        // Nobody else holds these: they are updated in place, as an optimizer's are.
        let mut model: Vec<SgdTensors> =
            all.iter().map(|elements| tensors(&client, *elements, types).0).collect();
        group.throughput(bytes(&model));
        for (name, tuning) in tunings(types) {
            prove(&client, types, tuning);
            group.bench_function(name, |bencher| {
                time(bencher, &client, || {
                    let stepped = model.drain(..).map(|tensors| step(&client, tensors, tuning));
                    model = stepped.collect();
                });
            });
        }
        drop(model);
        // The two largest alone, of which launches are no part.
        let mut large: Vec<SgdTensors> =
            (0..2).map(|_| tensors(&client, VOCABULARY * WIDTH, types).0).collect();
        group.throughput(bytes(&large));
        group.bench_function("embedding and head alone", |bencher| {
            time(bencher, &client, || {
                let tuning = SgdTuning::default();
                let stepped = large.drain(..).map(|tensors| step(&client, tensors, tuning));
                large = stepped.collect();
            });
        });
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
