//! AdamW over all of GPT-2's parameters, one launch each: bytes moved a second.
//! `cargo xtask bench adamw --features cuda`

use blackburn_benches::{Rotated, device, dtype_of, time, verify};
use blackburn_kernels::{
    adamw::{AdamwProblem, AdamwStep, AdamwTensors, adamw_update},
    buffer::Buffer,
};
use blackburn_reference::{
    adamw::{Corrections, Element, Rounding, Step, bound, update},
    storage::Storage,
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use cubecl::client::Client;

const WIDTH: usize = 768;
const LAYERS: usize = 12;

const STEP: AdamwStep =
    AdamwStep { beta_1: 0.9, beta_2: 0.95, epsilon: 1e-8, weight_decay: 0.1, rate: 6e-4, time: 1 };

/// Elements of each parameter of GPT-2 small, whose head is not tied: 163.0 million.
fn parameters() -> Vec<usize> {
    const VOCABULARY: usize = 50_257;
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
fn tensors(client: &Client, elements: usize, storage: Storage) -> (AdamwTensors, [Rotated; 2]) {
    let [parameter, gradient] =
        [1, 2].map(|seed| Rotated::new(client, seed, elements, dtype_of(storage)));
    let moment = || {
        let handle = client.create_from_slice(&vec![0; elements * Storage::F32.bytes()]);
        Buffer { handle, elements, dtype: dtype_of(Storage::F32) }
    };
    let tensors = AdamwTensors {
        parameter: parameter.buffer.clone(),
        gradient: gradient.buffer.clone(),
        first: moment(),
        second: moment(),
    };
    (tensors, [parameter, gradient])
}

fn step(client: &Client, tensors: AdamwTensors) -> AdamwTensors {
    adamw_update(client, &STEP, tensors, None, None).expect("the problem is valid")
}

/// One feed-forward matrix, in memory that others hold.
fn prove(client: &Client, storage: Storage) {
    let elements = 4 * WIDTH * WIDTH;
    let (before, [parameter, gradient]) = tensors(client, elements, storage);
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
        bound(&asked, old(i), gradient.at(i), storage, rounding, by).parameter
    };
    let bounds: Vec<f64> = (0..elements).map(bound_of).collect();
    verify(client, step(client, before).parameter, storage, &expected, &bounds);
}

fn bench(criterion: &mut Criterion) {
    let Some(device) = device() else { return };
    let client = device.client();
    for storage in [Storage::F32, Storage::Bf16] {
        prove(&client, storage);
        let all = parameters();
        // Nobody else holds these: they are updated in place, as an optimizer's are.
        let mut model: Vec<AdamwTensors> =
            all.iter().map(|elements| tensors(&client, *elements, storage).0).collect();
        let bytes: usize = model
            .iter()
            .map(|tensors| AdamwProblem::new(tensors).expect("the problem is valid").bytes())
            .sum();
        let count: usize = all.iter().sum();
        let mut group = criterion.benchmark_group(format!("adamw/{storage:?}/{count}"));
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function("step", |bencher| {
            time(bencher, &client, || {
                model = model.drain(..).map(|tensors| step(&client, tensors)).collect();
            });
        });
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
