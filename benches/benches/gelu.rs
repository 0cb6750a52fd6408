//! GELU forward and backward: bytes moved a second, on the shapes of GPT-2's feed-forward layers.
//!
//! `cargo xtask bench gelu --features cuda`

use blackburn_benches::{device, sync};
use blackburn_kernels::{
    buffer::Buffer,
    gelu::{GeluProblem, gelu_backward, gelu_forward},
};
use blackburn_reference::{random::normal, storage::Storage};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use cubecl::ir::{ElemType, FloatKind};

/// 8192 tokens by four times GPT-2's width, and one that fits in caches.
const SHAPES: [(usize, usize); 2] = [(8192, 3072), (512, 768)];

fn gelu(criterion: &mut Criterion) {
    let Some(device) = device() else { return };
    let client = device.client();
    for (kind, storage) in [(FloatKind::F32, Storage::F32), (FloatKind::F16, Storage::F16)] {
        let dtype = ElemType::Float(kind);
        for (rows, columns) in SHAPES {
            let elements = rows * columns;
            let values = storage.encode(&normal(1, elements, 1.0, storage));
            let x = Buffer { handle: client.create_from_slice(&values), elements, dtype };
            let problem = GeluProblem { elements, dtype };
            let mut group = criterion.benchmark_group(format!("gelu/{storage:?}/{rows}x{columns}"));
            group.throughput(Throughput::Bytes(problem.forward_bytes() as u64));
            group.bench_function("forward", |bencher| {
                bencher.iter(|| {
                    gelu_forward(&client, &x).expect("the problem is valid");
                    sync(&client);
                });
            });
            group.throughput(Throughput::Bytes(problem.backward_bytes() as u64));
            group.bench_function("backward", |bencher| {
                bencher.iter(|| {
                    gelu_backward(&client, &x, &x).expect("the problem is valid");
                    sync(&client);
                });
            });
            group.finish();
        }
    }
}

criterion_group!(benches, gelu);
criterion_main!(benches);
