//! AdamW over all of GPT-2's parameters, in few launches and in one each: bytes moved a second.
//! `cargo xtask bench adamw --features cuda`

use blackburn_benches::{Rotated, device, dtype_of, time, verify};
use blackburn_kernels::{
    adamw::{
        AdamwBlueprint, AdamwProblem, AdamwStep, AdamwTensors, AdamwTuning, AdamwUpdate,
        MOST_TENSORS, adamw_update_many_with, adamw_update_with,
    },
    buffer::{Buffer, Rows},
};
use blackburn_reference::{
    adamw::{Corrections, Element, Rounding, Step, bound, update},
    storage::Storage,
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use cubecl::client::Client;

const WIDTH: usize = 768;
const LAYERS: usize = 12;
const VOCABULARY: usize = 50_257;

const STEP: AdamwStep =
    AdamwStep { beta_1: 0.9, beta_2: 0.95, epsilon: 1e-8, weight_decay: 0.1, rate: 6e-4, time: 1 };

/// Elements of each parameter of GPT-2 small, whose head is not tied: 163.0 million.
fn parameters() -> Vec<usize> {
    const CONTEXT: usize = 1024;
    let linear = |outputs: usize, inputs: usize| [outputs * inputs, outputs];
    let norm = [WIDTH, WIDTH];
    let layer = [
        norm,
        linear(3 * WIDTH, WIDTH),
        linear(WIDTH, WIDTH),
        norm,
        linear(4 * WIDTH, WIDTH),
        linear(WIDTH, 4 * WIDTH),
    ]
    .concat();
    let mut all = layer.repeat(LAYERS);
    all.extend(norm);
    all.extend([VOCABULARY * WIDTH, CONTEXT * WIDTH, VOCABULARY * WIDTH]);
    all
}

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

fn step(client: &Client, tensors: AdamwTensors, tuning: AdamwTuning) -> AdamwTensors {
    let plan =
        |problem: &AdamwProblem, client: &Client| AdamwBlueprint::tuned(problem, client, tuning);
    adamw_update_with(client, &STEP, tensors, None, None, plan).expect("the problem is valid")
}

/// All parameters in their order, as many a launch as it takes.
fn step_together(
    client: &Client,
    model: Vec<AdamwTensors>,
    tuning: AdamwTuning,
) -> Vec<AdamwTensors> {
    let mut stepped = Vec::new();
    let mut all = model.into_iter().map(|tensors| AdamwUpdate { step: STEP, tensors, draw: 0 });
    loop {
        let some: Vec<_> = all.by_ref().take(MOST_TENSORS).collect();
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
    let after = step(client, before, tuning).parameter.buffer;
    verify(client, after, types.parameter, &expected, &bounds);
}

/// Types of a step.
#[derive(Clone, Copy)]
struct Types {
    parameter: Storage,
    gradient: Storage,
}

/// All in f32, f32 masters by bf16 gradients, and all but the moments in bf16.
const TYPES: [Types; 3] = [
    Types { parameter: Storage::F32, gradient: Storage::F32 },
    Types { parameter: Storage::F32, gradient: Storage::Bf16 },
    Types { parameter: Storage::Bf16, gradient: Storage::Bf16 },
];

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

fn bench(criterion: &mut Criterion) {
    let Some(device) = device() else { return };
    let client = device.client();
    for types in TYPES {
        let all = parameters();
        // Nobody else holds these: they are updated in place, as an optimizer's are.
        let mut model: Vec<AdamwTensors> =
            all.iter().map(|elements| tensors(&client, *elements, types).0).collect();
        let bytes: usize = model
            .iter()
            .map(|tensors| AdamwProblem::new(tensors).expect("the problem is valid").bytes())
            .sum();
        let count: usize = all.iter().sum();
        let Types { parameter, gradient } = types;
        let name = format!("adamw/{parameter:?} by {gradient:?}/{count}");
        let mut group = criterion.benchmark_group(name);
        group.throughput(Throughput::Bytes(bytes as u64));
        let mut rows = vec![("step".to_string(), AdamwTuning::default())];
        rows.extend(tunings(types).into_iter().map(|tuning| {
            let AdamwTuning { widest, cubes_a_multiprocessor } = tuning;
            (format!("vectors of {widest}, {cubes_a_multiprocessor} cubes"), tuning)
        }));
        for (name, tuning) in rows {
            prove(&client, types, tuning);
            group.bench_function(&name, |bencher| {
                time(bencher, &client, || {
                    model = step_together(&client, std::mem::take(&mut model), tuning);
                });
            });
            group.bench_function(format!("{name}, one launch each"), |bencher| {
                time(bencher, &client, || {
                    let stepped = model.drain(..).map(|tensors| step(&client, tensors, tuning));
                    model = stepped.collect();
                });
            });
        }
        // The two largest alone, of which launches are no part.
        let mut large: Vec<AdamwTensors> =
            (0..2).map(|_| tensors(&client, VOCABULARY * WIDTH, types).0).collect();
        let bytes = |tensors| AdamwProblem::new(tensors).expect("the problem is valid").bytes();
        group.throughput(Throughput::Bytes(large.iter().map(bytes).sum::<usize>() as u64));
        group.bench_function("embedding and head alone", |bencher| {
            time(bencher, &client, || {
                let tuning = AdamwTuning::default();
                let stepped = large.drain(..).map(|tensors| step(&client, tensors, tuning));
                large = stepped.collect();
            });
        });
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
