//! `SwiGLU` forward and backward: bytes moved a second, on the feed-forward layers of a Llama of 1.1 billion.
//! `cargo xtask bench swiglu --features cuda`

use blackburn_benches::{Rotated, device, dtype_of, time, verify};
use blackburn_kernels::{
    buffer::Buffer,
    elementwise::ElementwiseProblem,
    swiglu::{SwigluGradients, swiglu_backward, swiglu_forward},
};
use blackburn_reference::{storage::Storage, swiglu};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

/// 8 sequences of 2048 tokens by the width between the layers: larger than caches.
const SHAPE: (usize, usize) = (16_384, 5632);
/// Elements that are proved.
const PROVED: usize = 1 << 18;

fn bench(criterion: &mut Criterion) {
    let Some(device) = device() else { return };
    let client = device.client();
    let (rows, columns) = SHAPE;
    for storage in Storage::ALL {
        let problem = ElementwiseProblem { elements: rows * columns, dtype: dtype_of(storage) };
        let [gate, up, dy] =
            [1, 2, 3].map(|seed| Rotated::new(&client, seed, problem.elements, problem.dtype));
        let forward =
            || swiglu_forward(&client, &gate.buffer, &up.buffer).expect("the problem is valid");
        let backward = || {
            swiglu_backward(&client, &gate.buffer, &up.buffer, &dy.buffer)
                .expect("the problem is valid")
        };
        let check = |result: Buffer, expected: &dyn Fn(usize) -> (f64, f64)| {
            let (expected, bounds): (Vec<f64>, Vec<f64>) = (0..PROVED).map(expected).unzip();
            verify(&client, Buffer { elements: PROVED, ..result }, storage, &expected, &bounds);
        };
        check(forward(), &|i| {
            let (gate, up) = (gate.at(i), up.at(i));
            (swiglu::swiglu(gate, up), swiglu::forward_bound(gate, up, storage))
        });
        let SwigluGradients { dgate, dup } = backward();
        for (at, gradient) in [dgate, dup].into_iter().enumerate() {
            check(gradient, &|i| {
                let (gate, up, dy) = (gate.at(i), up.at(i), dy.at(i));
                (
                    swiglu::swiglu_gradients(gate, up, dy)[at],
                    swiglu::backward_bounds(gate, up, dy, storage)[at],
                )
            });
        }

        let mut group = criterion.benchmark_group(format!("swiglu/{storage:?}/{rows}x{columns}"));
        group.throughput(Throughput::Bytes(problem.bytes(3) as u64));
        group.bench_function("forward", |bencher| time(bencher, &client, forward));
        group.throughput(Throughput::Bytes(problem.bytes(5) as u64));
        group.bench_function("backward", |bencher| time(bencher, &client, backward));
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
