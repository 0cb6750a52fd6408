//! GELU forward and backward: bytes moved a second, on the activations of GPT-2's feed-forward
//! layers. `cargo xtask bench gelu --features cuda`

use blackburn_benches::{device, dtype_of, input, time, verify};
use blackburn_kernels::gelu::{GeluProblem, gelu_backward, gelu_forward};
use blackburn_reference::{
    gelu::{self, CUDA_ERF_ERROR},
    storage::Storage,
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

/// 8192 tokens by four times GPT-2's width: larger than caches.
const SHAPE: (usize, usize) = (8192, 3072);

fn bench(criterion: &mut Criterion) {
    let Some(device) = device() else { return };
    let client = device.client();
    let (rows, columns) = SHAPE;
    let elements = rows * columns;
    for storage in Storage::ALL {
        let (values, x) = input(&client, 1, elements, storage);
        let (grads, dy) = input(&client, 2, elements, storage);
        let expected: Vec<f64> = values.iter().map(|x| gelu::gelu(*x)).collect();
        let bounds: Vec<f64> =
            values.iter().map(|x| gelu::forward_bound(*x, storage, CUDA_ERF_ERROR)).collect();
        let y = gelu_forward(&client, &x).expect("the problem is valid");
        verify(&client, y, storage, &expected, &bounds);
        let pairs = || values.iter().zip(&grads);
        let expected: Vec<f64> = pairs().map(|(x, dy)| dy * gelu::gelu_derivative(*x)).collect();
        let bounds: Vec<f64> =
            pairs().map(|(x, dy)| gelu::backward_bound(*x, *dy, storage, CUDA_ERF_ERROR)).collect();
        let dx = gelu_backward(&client, &x, &dy).expect("the problem is valid");
        verify(&client, dx, storage, &expected, &bounds);

        let problem = GeluProblem { elements, dtype: dtype_of(storage) };
        let mut group = criterion.benchmark_group(format!("gelu/{storage:?}/{rows}x{columns}"));
        group.throughput(Throughput::Bytes(problem.forward_bytes() as u64));
        group.bench_function("forward", |bencher| {
            time(bencher, &client, || gelu_forward(&client, &x).expect("the problem is valid"));
        });
        group.throughput(Throughput::Bytes(problem.backward_bytes() as u64));
        group.bench_function("backward", |bencher| {
            time(bencher, &client, || {
                gelu_backward(&client, &x, &dy).expect("the problem is valid")
            });
        });
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
